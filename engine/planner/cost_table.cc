#include "engine/planner/cost_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/planner/cost_model.h"

namespace espalier::planner {
namespace {

// A layout that stores more than this many values for every non-zero loses to csr or dense.
constexpr double kLowestFill = 0.2;
// Block and diagonal layouts worth trying, per kind: the block sizes beside the best are close
// relatives of it.
constexpr int kLayoutsPerKind = 2;
// On a GPU kernels differ more: blocks of 64 run twice as fast as the same weight in blocks of 16 (h200/linear.json).
constexpr int kLayoutsPerKindOnGpu = 4;

// What measuring an option of a GPU takes: graph replays of 20 launches, and capturing the graph. (On an H200 the five
// MNIST models, some 20 options in 27 buckets each, load in 0.3 s a model.)
constexpr double kGpuMeasuringCalls = 220;
constexpr double kGpuMeasuringMicros = 500;
constexpr double kGpuSlackMicros = 0.3;

// Which layouts get candidates. One rule a line; structure.layouts is smallest first.
std::vector<sparse::LayoutOption> PruneLayouts(const sparse::WeightStructure& structure,
                                               bool is_gpu) {
  const int layouts_per_kind = is_gpu ? kLayoutsPerKindOnGpu : kLayoutsPerKind;
  const size_t dense_bytes = structure.out * structure.in * SizeOf(structure.dtype);
  int of_kind[16] = {};
  std::vector<sparse::LayoutOption> kept;
  for (const sparse::LayoutOption& layout : structure.layouts) {
    if (layout.spec.layout == kernels::Layout::kDense) {
      kept.push_back(layout);  // dense is always a candidate
      continue;
    }
    // Reads more than dense and multiplies worse; but csr may pack into 2:4 operands of a GPU, which are smaller.
    const bool may_be_two_four = is_gpu && layout.spec.layout == kernels::Layout::kCsr &&
                                 2 * layout.count <= structure.out * structure.in;
    if (layout.bytes > dense_bytes && !may_be_two_four) continue;
    if (layout.fill < kLowestFill) continue;  // mostly stored zeros
    if (of_kind[static_cast<int>(layout.spec.layout)]++ >= layouts_per_kind)
      continue;  // a relative
    kept.push_back(layout);
  }
  return kept;
}

}  // namespace

bool SharesMemory(const LayerOption& a, const LayerOption& b) {
  if (!(a.layout.spec == b.layout.spec)) return false;
  if (a.variant->packing == nullptr || b.variant->packing == nullptr) {
    return a.variant->packing == b.variant->packing;
  }
  return std::strcmp(a.variant->packing, b.variant->packing) == 0;
}

double CostTable::DenseMicros(size_t bucket) const {
  double micros = kCannotRun;
  for (size_t i = 0; i < options.size(); ++i) {
    if (options[i].is_dense()) micros = std::min(micros, costs[bucket][i].micros);
  }
  return micros;
}

void CostTable::Calibrate() {
  double largest_error = 0;
  for (const auto& bucket : costs) {
    for (const Cost& cost : bucket) {
      if (cost.measured > 0 && cost.measured != kCannotRun)
        largest_error = std::max(largest_error, cost.measured / cost.predicted);
    }
  }
  if (largest_error == 0) largest_error = 1;  // nothing measured: the model as it is
  for (size_t i = 0; i < options.size(); ++i) {
    for (size_t b = 0; b < tokens.size(); ++b) {
      Cost& cost = costs[b][i];
      if (cost.measured > 0) {
        cost.micros = cost.measured;
        continue;
      }
      double error = largest_error, nearest = kCannotRun;
      for (size_t other = 0; other < tokens.size(); ++other) {
        if (costs[other][i].measured <= 0 || costs[other][i].measured == kCannotRun) continue;
        const double distance = std::abs(
            std::log2(static_cast<double>(tokens[other]) / static_cast<double>(tokens[b])));
        if (distance >= nearest) continue;
        nearest = distance;
        error = costs[other][i].measured / costs[other][i].predicted;
      }
      cost.micros = cost.predicted * error;
    }
  }
}

void CostTable::CalibrateLike(const CostTable& before) {
  const auto error_of = [](const Cost& cost) {
    return cost.predicted == kCannotRun ? 0 : cost.micros / cost.predicted;
  };
  double largest_error = 0;
  for (const auto& bucket : before.costs) {
    for (const Cost& cost : bucket) {
      if (cost.micros != kCannotRun) largest_error = std::max(largest_error, error_of(cost));
    }
  }
  if (largest_error == 0) largest_error = 1;
  for (size_t i = 0; i < options.size(); ++i) {
    const auto same =
        std::find_if(before.options.begin(), before.options.end(), [&](const LayerOption& option) {
          return option.variant == options[i].variant &&
                 option.layout.spec == options[i].layout.spec;
        });
    for (size_t b = 0; b < tokens.size(); ++b) {
      double error = 0;
      if (same != before.options.end())
        error = error_of(before.costs[b][same - before.options.begin()]);
      costs[b][i].micros = costs[b][i].predicted * (error == 0 ? largest_error : error);
    }
  }
}

kernels::LinearDesc DescOf(const LayerOption& option, const sparse::WeightStructure& structure,
                           int64_t tokens) {
  kernels::LinearDesc desc;
  desc.tokens = tokens;
  desc.out = structure.out;
  desc.in = structure.in;
  desc.layout = option.layout.spec.layout;
  desc.weight_dtype = structure.dtype;
  desc.block_rows = option.layout.spec.block_rows;
  desc.block_cols = option.layout.spec.block_cols;
  desc.count = option.layout.count;
  return desc;
}

DType IoTypeOf(DType dtype, const Device& device) {
  return device.AsCudaOrNull() != nullptr ? dtype : DType::kFloat32;
}

bool HasDenseKernel(DType dtype, int64_t out, int64_t in, const Device& device) {
  kernels::LinearDesc desc;
  desc.tokens = 1;
  desc.out = out;
  desc.in = in;
  desc.weight_dtype = dtype;
  desc.io_dtype = IoTypeOf(dtype, device);
  desc.count = out * in;
  const auto variants = device.linear_variants();
  return std::any_of(variants.begin(), variants.end(), [&](const kernels::LinearVariant& variant) {
    return variant.layout == kernels::Layout::kDense && device.Runs(variant) &&
           variant.supports(desc);
  });
}

CostTable ListOptions(const sparse::WeightStructure& structure, std::vector<int64_t> tokens,
                      const Device& device) {
  const bool is_gpu = device.AsCudaOrNull() != nullptr;
  CostTable table;
  if (is_gpu) {
    table.measuring_calls = kGpuMeasuringCalls;
    table.measuring_least_micros = kGpuMeasuringMicros;
    table.slack_micros = kGpuSlackMicros;
  }
  table.tokens = std::move(tokens);
  table.costs.resize(table.tokens.size());
  for (const sparse::LayoutOption& layout : PruneLayouts(structure, is_gpu)) {
    for (const kernels::LinearVariant& variant : device.linear_variants()) {
      if (variant.layout != layout.spec.layout || !device.Runs(variant)) continue;
      const LayerOption option = {layout, &variant, layout.bytes};
      std::vector<Cost> costs(table.tokens.size());
      bool runs = false;
      for (size_t b = 0; b < table.tokens.size(); ++b) {
        kernels::LinearDesc desc = DescOf(option, structure, table.tokens[b]);
        desc.io_dtype = IoTypeOf(structure.dtype, device);
        if (!variant.supports(desc)) continue;
        costs[b].predicted =
            (is_gpu ? EstimateLinearOnGpu(desc, layout.stored, layout.bytes, &variant)
                    : EstimateLinear(desc, layout.stored, layout.bytes, device.threads()))
                .micros;
        runs = true;
      }
      if (!runs) continue;
      table.options.push_back(option);
      for (size_t b = 0; b < table.tokens.size(); ++b) table.costs[b].push_back(costs[b]);
    }
  }
  table.Calibrate();
  return table;
}

}  // namespace espalier::planner
