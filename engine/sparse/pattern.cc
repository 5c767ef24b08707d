#include "engine/sparse/pattern.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/sparse/layout_spec.h"

namespace espalier::sparse {
namespace {

constexpr int64_t kGroup = 4, kKeptOfGroup = 2;

bool IsFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

// Which unit of the pattern an element belongs to.
class Units {
 public:
  Units(const Pattern& pattern, int64_t out, int64_t in)
      : kind_(pattern.kind),
        block_(pattern.block),
        in_(in),
        rows_((out + block_ - 1) / block_),
        cols_((in + block_ - 1) / block_) {}

  int64_t count() const {
    return kind_ == Pattern::Kind::kDiagonal ? std::max(rows_, cols_) : rows_ * cols_;
  }
  int64_t Of(int64_t row, int64_t col) const {
    if (block_ == 1 && kind_ != Pattern::Kind::kDiagonal) return row * in_ + col;
    const int64_t r = row / block_, c = col / block_;
    if (kind_ != Pattern::Kind::kDiagonal) return r * cols_ + c;
    return rows_ >= cols_ ? (r - c + rows_) % rows_ : (c - r + cols_) % cols_;
  }

 private:
  const Pattern::Kind kind_;
  const int64_t block_, in_, rows_, cols_;
};

// SplitMix64's finaliser.
uint64_t Scatter(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

// Which of `scores` are among the `keep` largest. Equals (16-bit weights have many) are taken from everywhere: the first of
// them would fill the first rows.
std::vector<bool> Largest(const std::vector<float>& scores, int64_t keep) {
  std::vector<float> sorted = scores;
  std::nth_element(sorted.begin(), sorted.begin() + (keep - 1), sorted.end(), std::greater<>());
  const float least = sorted[keep - 1];
  std::vector<bool> kept(scores.size());
  std::vector<int64_t> equals;
  for (int64_t i = 0; i < static_cast<int64_t>(scores.size()); ++i) {
    kept[i] = scores[i] > least;
    keep -= kept[i] ? 1 : 0;
    if (scores[i] == least) equals.push_back(i);
  }
  std::nth_element(equals.begin(), equals.begin() + (keep - 1), equals.end(),
                   [](int64_t a, int64_t b) { return Scatter(a) < Scatter(b); });
  for (int64_t i = 0; i < keep; ++i) kept[equals[i]] = true;
  return kept;
}

void KeepTwoOfFour(std::vector<float>& values, int64_t out, int64_t in) {
  for (int64_t row = 0; row < out; ++row) {
    for (int64_t begin = 0; begin < in; begin += kGroup) {
      float* group = values.data() + row * in + begin;
      int64_t order[kGroup] = {0, 1, 2, 3};
      const int64_t size = std::min(kGroup, in - begin);
      std::stable_sort(order, order + size, [&](int64_t a, int64_t b) {
        return std::abs(group[a]) > std::abs(group[b]);
      });
      for (int64_t i = kKeptOfGroup; i < size; ++i) group[order[i]] = 0;
    }
  }
}

// NaN has no magnitude: it counts as the largest, so that pruning cannot hide it.
float Square(float value) { return std::isnan(value) ? INFINITY : value * value; }

void KeepUnits(std::vector<float>& values, int64_t out, int64_t in, const Pattern& pattern,
               double sparsity) {
  const Units units(pattern, out, in);
  std::vector<float> scores(units.count());
  for (int64_t row = 0; row < out; ++row) {
    for (int64_t col = 0; col < in; ++col)
      scores[units.Of(row, col)] += Square(values[row * in + col]);
  }
  const auto wanted = std::llround((1 - sparsity) * static_cast<double>(units.count()));
  const std::vector<bool> kept = Largest(scores, std::clamp<int64_t>(wanted, 1, units.count()));
  for (int64_t row = 0; row < out; ++row) {
    for (int64_t col = 0; col < in; ++col) {
      if (!kept[units.Of(row, col)]) values[row * in + col] = 0;
    }
  }
}

absl::Status NotAPattern(absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat(
      "pattern \"", absl::CEscape(text.substr(0, 64)),
      "\" is unknown; expected unstructured, diagonal, diagonal(B), block(B) or 2:4, with B up to ",
      kMaxBlockSide));
}

}  // namespace

std::string ToString(const Pattern& pattern) {
  switch (pattern.kind) {
    case Pattern::Kind::kUnstructured:
      return "unstructured";
    case Pattern::Kind::kTwoFour:
      return "2:4";
    case Pattern::Kind::kBlock:
      return absl::StrCat("block(", pattern.block, ")");
    case Pattern::Kind::kDiagonal:
      break;
  }
  return pattern.block == 1 ? "diagonal" : absl::StrCat("diagonal(", pattern.block, ")");
}

absl::StatusOr<Pattern> ParsePattern(absl::string_view text) {
  if (text == "unstructured") return Pattern{};
  if (text == "2:4") return Pattern{Pattern::Kind::kTwoFour, 1};
  if (text == "diagonal") return Pattern{Pattern::Kind::kDiagonal, 1};
  absl::string_view side = text;
  const bool diagonal = absl::ConsumePrefix(&side, "diagonal(");
  int32_t block = 0;
  const bool well_formed = (diagonal || absl::ConsumePrefix(&side, "block(")) &&
                           absl::ConsumeSuffix(&side, ")") && side.size() <= 4 &&
                           absl::SimpleAtoi(side, &block) && absl::StrCat(block) == side;
  if (!well_formed || block > kMaxBlockSide || block < (diagonal ? 1 : 2)) return NotAPattern(text);
  return Pattern{diagonal ? Pattern::Kind::kDiagonal : Pattern::Kind::kBlock, block};
}

absl::StatusOr<Tensor> Prune(const TensorView& weight, const Pattern& pattern, double sparsity) {
  if (weight.shape.size() != 2 || !IsFloat(weight.dtype) || weight.elements() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot prune ", NameOf(weight.dtype), " ",
                                                   espalier::ToString(weight.shape),
                                                   "; expected f32, bf16 or f16 [out, in]"));
  }
  const int64_t out = weight.shape[0], in = weight.shape[1];
  auto pruned = Tensor::Allocate(weight.dtype, weight.shape);
  if (!pruned.ok()) return pruned.status();
  try {
    std::vector<float> values(weight.elements());
    ConvertElements(weight.data, weight.dtype, values.data(), DType::kFloat32, weight.elements());
    if (pattern.kind == Pattern::Kind::kTwoFour) {
      KeepTwoOfFour(values, out, in);
    } else {
      KeepUnits(values, out, in, pattern, sparsity);
    }
    ConvertElements(values.data(), DType::kFloat32, pruned->data(), weight.dtype,
                    weight.elements());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory to prune a weight ", espalier::ToString(weight.shape)));
  }
  return pruned;
}

absl::StatusOr<Tensor> RandomWeight(DType dtype, int64_t out, int64_t in, uint64_t seed) {
  auto values = Tensor::Allocate(DType::kFloat32, {out, in});
  if (!values.ok()) return values;
  constexpr int kBits = 13;
  for (int64_t i = 0; i < values->elements(); ++i) {
    seed += 0x9e3779b97f4a7c15;
    // Odd multiples of 2^-13: normal numbers in all three types.
    const auto odd = static_cast<int64_t>(Scatter(seed) >> (64 - kBits)) * 2 + 1;
    values->As<float>()[i] = std::ldexp(static_cast<float>(odd - (int64_t{1} << kBits)), -kBits);
  }
  return dtype == DType::kFloat32 ? std::move(values) : Convert(values->view(), dtype);
}

}  // namespace espalier::sparse
