#include "engine/planner/speed_table.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/planner/choose.h"
#include "engine/planner/cost_model.h"
#include "engine/planner/cost_table.h"

namespace espalier::planner {
namespace {

using sparse::Pattern;

#include "engine/planner/speed_tables.inc"

// Half a doubling away still counts nearly as much as next to it.
constexpr double kNearby = 0.1;

Pattern PatternOf(const SpeedRow& row) { return *sparse::ParsePattern(row.pattern); }

SpeedQuery QueryOf(const SpeedRow& row) {
  return {PatternOf(row), row.dtype, row.sparsity, row.out, row.in};
}

kernels::Layout LayoutOf(const Pattern& pattern) {
  switch (pattern.kind) {
    case Pattern::Kind::kDiagonal:
      return kernels::Layout::kDiagonal;
    case Pattern::Kind::kBlock:
      return kernels::Layout::kBlockCsr;
    default:
      return kernels::Layout::kCsr;
  }
}

// The problem that a layer of the query is, in the layout that the pattern is made for.
double ModelMicros(const SpeedQuery& query, int64_t tokens, bool dense) {
  kernels::LinearDesc desc;
  desc.tokens = tokens;
  desc.out = query.out;
  desc.in = query.in;
  desc.weight_dtype = desc.io_dtype = query.dtype;
  const double size = static_cast<double>(query.out) * static_cast<double>(query.in);
  const double stored = dense ? size : (1 - query.sparsity) * size;
  if (!dense) {
    desc.layout = LayoutOf(query.pattern);
    desc.block_rows = desc.block_cols = query.pattern.block;
  }
  return EstimateLinearOnGpu(desc, static_cast<int64_t>(stored),
                             static_cast<size_t>(stored * SizeOf(query.dtype)))
      .micros;
}

double Distance2(const SpeedQuery& query, int64_t tokens, const SpeedRow& row, bool dense) {
  const auto doublings = [](double a, double b) {
    const double d = std::log2(a / b);
    return d * d;
  };
  return doublings(tokens, row.tokens) + doublings(query.in, row.in) +
         doublings(query.out, row.out) +
         (dense ? 0 : doublings(1 - query.sparsity, 1 - row.sparsity));
}

// The corrections of some rows, averaged by nearness.
class Correction {
 public:
  void Add(double distance2, double log_value) {
    const double weight = 1 / (distance2 + kNearby);
    weights_ += weight;
    sum_ += weight * log_value;
  }
  bool empty() const { return weights_ == 0; }
  double factor() const { return std::exp(sum_ / weights_); }

 private:
  double weights_ = 0, sum_ = 0;
};

struct Prediction {
  double micros = 0, dense_micros = 0;  // of the sparse form, which may be slower than dense
  double weight_bytes = 0;              // of the sparse form
  const SpeedRow* nearest = nullptr;
  double distance2 = 0;  // to it
};

// `left_out`, may be null, is not looked at.
Prediction Predict(const SpeedTable& table, const SpeedQuery& query, int64_t tokens,
                   const SpeedRow* left_out) {
  Correction sparse, dense, bytes;
  Prediction prediction;
  for (const SpeedRow& row : table.rows) {
    if (&row == left_out || row.dtype != query.dtype) continue;
    const SpeedQuery measured = QueryOf(row);
    dense.Add(Distance2(query, tokens, row, true),
              std::log(row.dense_micros / ModelMicros(measured, row.tokens, true)));
    if (!(measured.pattern == query.pattern)) continue;
    const double distance2 = Distance2(query, tokens, row, false);
    sparse.Add(distance2, std::log(row.micros / ModelMicros(measured, row.tokens, false)));
    const double values = (1 - row.sparsity) * static_cast<double>(row.out) * row.in;
    bytes.Add(distance2, std::log(static_cast<double>(row.weight_bytes) / values));
    if (prediction.nearest == nullptr || distance2 < prediction.distance2) {
      prediction.distance2 = distance2;
      prediction.nearest = &row;
    }
  }
  if (sparse.empty()) return prediction;
  prediction.micros = ModelMicros(query, tokens, false) * sparse.factor();
  prediction.dense_micros = ModelMicros(query, tokens, true) * dense.factor();
  prediction.weight_bytes =
      (1 - query.sparsity) * static_cast<double>(query.out) * query.in * bytes.factor();
  return prediction;
}

bool HasRows(const SpeedTable& table, const Pattern& pattern, DType dtype) {
  return std::any_of(table.rows.begin(), table.rows.end(), [&](const SpeedRow& row) {
    return row.dtype == dtype && PatternOf(row) == pattern;
  });
}

// The pattern whose rows answer for `pattern`.
Pattern StandIn(const SpeedTable& table, const Pattern& pattern, DType dtype) {
  if (HasRows(table, pattern, dtype)) return pattern;
  switch (pattern.kind) {
    case Pattern::Kind::kBlock:
      return {Pattern::Kind::kDiagonal, pattern.block};
    case Pattern::Kind::kDiagonal:
      return pattern.block == 1 ? pattern : Pattern{Pattern::Kind::kBlock, pattern.block};
    default:
      return Pattern{};
  }
}

std::string Measured(const SpeedTable& table, DType dtype) {
  std::set<std::string> patterns;
  for (const SpeedRow& row : table.rows) {
    if (row.dtype == dtype) patterns.insert(row.pattern);
  }
  return patterns.empty() ? "nothing" : absl::StrJoin(patterns, ", ");
}

}  // namespace

std::span<const SpeedTable> SpeedTables() { return kSpeedTables; }

const SpeedTable* FindSpeedTableOrNull(absl::string_view name) {
  for (const SpeedTable& table : SpeedTables()) {
    if (name == table.name) return &table;
  }
  return nullptr;
}

absl::StatusOr<SpeedPrediction> PredictPlan(const SpeedTable& table, const SpeedQuery& query,
                                            const std::vector<int64_t>& tokens, WeightMemory mode) {
  static const kernels::LinearVariant kDense = {.name = "dense"}, kSparse = {.name = "sparse"};
  SpeedQuery like = query;
  if (like.dtype == DType::kFloat16) like.dtype = DType::kBFloat16;
  like.pattern = StandIn(table, query.pattern, like.dtype);
  if (!HasRows(table, like.pattern, like.dtype)) {
    return absl::NotFoundError(absl::StrCat(
        "nothing like ", ToString(query.pattern), " in ", NameOf(query.dtype), " was measured on ",
        table.name, "; measured in that type: ", Measured(table, like.dtype)));
  }
  const size_t dense_bytes = query.out * query.in * SizeOf(query.dtype);
  SpeedPrediction result;
  CostTable costs;
  costs.tokens = tokens;
  costs.options = {
      {{.spec = {}, .stored = query.out * query.in}, &kDense, dense_bytes},
      {{.spec = {LayoutOf(query.pattern), query.pattern.block, query.pattern.block}, .stored = 1},
       &kSparse,
       0}};
  for (const int64_t batch : tokens) {
    const Prediction one = Predict(table, like, batch, nullptr);
    costs.costs.push_back({{.micros = one.dense_micros}, {.micros = one.micros}});
    costs.options[1].resident_bytes =
        std::max(costs.options[1].resident_bytes, static_cast<size_t>(one.weight_bytes));
    if (std::sqrt(one.distance2) >= result.doublings) {
      result.doublings = std::sqrt(one.distance2);
      result.nearest = *one.nearest;
    }
  }
  const std::vector<int> choice = ChooseOptions(costs, mode, false, dense_bytes);
  WeightPlan& plan = result.plan;
  plan.sparsity = query.sparsity;
  plan.structure = ToString(query.pattern);
  plan.buckets = DescribeChoice(costs, mode, false, tokens, choice);
  for (size_t b = 0; b < tokens.size(); ++b) plan.sparse.push_back(DescribeOption(costs, b, 1));
  plan.dense_bytes = dense_bytes;
  for (const int option : std::set<int>(choice.begin(), choice.end()))
    plan.weight_bytes += costs.options[option].resident_bytes;
  return result;
}

SpeedError SpeedTableError(const SpeedTable& table) {
  std::vector<double> factors;
  for (const SpeedRow& row : table.rows) {
    const Prediction prediction = Predict(table, QueryOf(row), row.tokens, &row);
    if (prediction.nearest == nullptr) continue;
    const double off =
        (prediction.dense_micros / prediction.micros) / (row.dense_micros / row.micros);
    factors.push_back(std::max(off, 1 / off));
  }
  if (factors.empty()) return {};
  std::sort(factors.begin(), factors.end());
  return {factors[factors.size() / 2], factors[factors.size() * 9 / 10]};
}

}  // namespace espalier::planner
