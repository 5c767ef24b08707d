#include "engine/graph/linear_bindings.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/graph/ops/linear.h"

namespace espalier::graph {
namespace {

// GPUs compute in the type of the weight, the CPU in f32.
kernels::LinearDesc DescOf(const LinearBinding& binding, const LinearOp& linear, int64_t batch) {
  const bool is_cpu = binding.variant->arch == kernels::Arch::kCpu;
  return kernels::DescOf(binding.weight, batch * linear.tokens_per_item(),
                         is_cpu ? DType::kFloat32 : binding.weight.dtype);
}

}  // namespace

size_t LinearScratchBytes(const Program& program, const std::vector<int64_t>& buckets,
                          const BucketBindings& bindings, int threads) {
  size_t bytes = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (const LinearOp* linear : program.linears) {
      const LinearBinding& binding = bindings[b][linear->layer()];
      if (binding.variant->scratch_bytes == nullptr) continue;
      bytes = std::max(
          bytes, binding.variant->scratch_bytes(DescOf(binding, *linear, buckets[b]), threads));
    }
  }
  return bytes;
}

absl::Status CheckBindings(const Program& program, const std::vector<int64_t>& buckets,
                           const BucketBindings& bindings) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (const LinearOp* linear : program.linears) {
      const LinearBinding& binding = bindings[b][linear->layer()];
      if (binding.variant->supports(DescOf(binding, *linear, buckets[b]))) continue;
      return absl::UnimplementedError(absl::StrCat(binding.variant->name,
                                                   " does not take the changed weight of layer ",
                                                   linear->layer(), " at batch ", buckets[b]));
    }
  }
  return absl::OkStatus();
}

}  // namespace espalier::graph
