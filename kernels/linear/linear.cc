#include "kernels/linear/linear.h"

#include <algorithm>
#include <cstring>

#include "kernels/block_csr_linear/block_csr_linear.h"
#include "kernels/csr_linear/csr_linear.h"
#include "kernels/dense_linear/dense_linear.h"
#include "kernels/diagonal_linear/diagonal_linear.h"
#include "kernels/linear/check_args.h"

namespace espalier::kernels {
namespace {

// A family is one struct of static functions; a line of variants.inc binds it to a weight type and
// a packing.
template <typename Family, Layout kLayout, DType kWeight>
bool Supports(const LinearDesc& desc) {
  return desc.layout == kLayout && desc.weight_dtype == kWeight &&
         desc.io_dtype == DType::kFloat32 && desc.tokens >= 0 && desc.in >= 1 && desc.out >= 1 &&
         Family::Supports(desc);
}

// A task below some 5 µs costs more to hand out than to do: 2^18 multiplications, or the 1 MiB of f32
// weights that one token reads for as many.
int ThreadsWorth(const WeightView& weight, int64_t tokens, int threads) {
  const int64_t block = int64_t{weight.block_rows} * weight.block_cols;
  const int64_t blocks =
      weight.layout == Layout::kDiagonal ? weight.count * weight.diagonal_length() : weight.count;
  return static_cast<int>(std::min<int64_t>(threads, 1 + (blocks * block * tokens >> 18)));
}

// Run may take fewer threads than it is given, and fewer can need more: 512 rows are 8 tasks of one tile
// with 8 threads, and 7 of up to two with 7.
template <typename Family>
size_t ScratchBytes(const LinearDesc& desc, int threads) {
  size_t most = 0;
  for (int fewer = 1; fewer <= std::max(1, threads); ++fewer)
    most = std::max(most, Family::ScratchBytes(desc, fewer));
  return most;
}

template <typename Family, Layout kLayout, DType kWeight, bool kPacked>
KernelStatus Run(const KernelContext& ctx, const LinearArgs& args) {
  if (const KernelStatus status = CheckLinearArgs(args, kPacked); !status.ok()) return status;
  LinearDesc desc = DescOf(args.weight, args.tokens, args.io_dtype);
  if (ctx.arch != Arch::kCpu || !Supports<Family, kLayout, kWeight>(desc)) {
    return {KernelCode::kUnsupported, "linear: this variant does not take the problem"};
  }
  if (args.tokens == 0) return {};
  KernelContext limited = ctx;
  limited.threads = ThreadsWorth(args.weight, args.tokens, ctx.threads);
  return Family::Run(limited, args);
}

constexpr LinearVariant kVariants[] = {
#define ESPALIER_LINEAR_VARIANT(name, layout, weight, batch_invariant, packing, Family) \
  {#name,                                                                               \
   Layout::layout,                                                                      \
   Arch::kCpu,                                                                          \
   batch_invariant,                                                                     \
   Supports<Family, Layout::layout, DType::weight>,                                     \
   packing,                                                                             \
   Family::PackedBytes,                                                                 \
   Family::Pack,                                                                        \
   Family::Locate,                                                                      \
   ScratchBytes<Family>,                                                                \
   Run<Family, Layout::layout, DType::weight, (packing) != nullptr>},
#include "kernels/block_csr_linear/variants.inc"
#include "kernels/csr_linear/variants.inc"
#include "kernels/dense_linear/variants.inc"
#include "kernels/diagonal_linear/variants.inc"
#undef ESPALIER_LINEAR_VARIANT
};

}  // namespace

LinearDesc DescOf(const WeightView& weight, int64_t tokens, DType io_dtype) {
  return {tokens,   weight.out,        weight.in,         weight.layout, weight.dtype,
          io_dtype, weight.block_rows, weight.block_cols, weight.count};
}

std::span<const LinearVariant> LinearVariants() { return kVariants; }

const LinearVariant* FindLinearVariantOrNull(const char* name) {
  for (const LinearVariant& variant : kVariants) {
    if (std::strcmp(variant.name, name) == 0) return &variant;
  }
  return nullptr;
}

}  // namespace espalier::kernels
