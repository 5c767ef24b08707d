// element_patch.cu — elements of device memory overwritten where they are what they should be: a launch that looks, one
// that writes unless something was found, one that reads back.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ops.h"
#include "kernels/element_patch/element_patch.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void BeginPatch(PatchResult* result, int64_t count) { *result = {count, count}; }

template <typename Bits>
__device__ Bits& At(const PatchArgs& args, int64_t i) {
  return *reinterpret_cast<Bits*>(static_cast<char*>(args.memory) + args.patches[i].offset);
}

__device__ void LowerTo(int64_t* least, int64_t i) {
  atomicMin(reinterpret_cast<unsigned long long*>(least), static_cast<unsigned long long>(i));
}

template <typename Bits>
__global__ void FindUnexpected(PatchArgs args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count || At<Bits>(args, i) == static_cast<Bits>(args.patches[i].old_bits)) return;
  LowerTo(&args.result->first_unexpected, i);
}

template <typename Bits>
__global__ void WritePatches(PatchArgs args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count || args.result->first_unexpected < args.count) return;
  At<Bits>(args, i) = static_cast<Bits>(args.patches[i].new_bits);
}

template <typename Bits>
__global__ void ReadBack(PatchArgs args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count || args.result->first_unexpected < args.count) return;
  if (At<Bits>(args, i) == static_cast<Bits>(args.patches[i].new_bits)) return;
  LowerTo(&args.result->first_unwritten, i);
}

template <typename Bits>
KernelStatus Patch(const KernelContext& ctx, const PatchArgs& args) {
  const auto stream = static_cast<cudaStream_t>(ctx.stream);
  BeginPatch<<<1, 1, 0, stream>>>(args.result, args.count);
  if (args.count == 0) return FromCuda(cudaGetLastError());
  const auto blocks = static_cast<unsigned>((args.count + kThreads - 1) / kThreads);
  FindUnexpected<Bits><<<blocks, kThreads, 0, stream>>>(args);
  WritePatches<Bits><<<blocks, kThreads, 0, stream>>>(args);
  ReadBack<Bits><<<blocks, kThreads, 0, stream>>>(args);
  return FromCuda(cudaGetLastError());
}

}  // namespace

KernelStatus PatchOnDevice(const KernelContext& ctx, const PatchArgs& args) {
  constexpr int64_t kMost = int64_t{kThreads} << 31;  // blocks of a launch
  if (args.count < 0 || args.count >= kMost)
    return {KernelCode::kInvalidArgument, "element patch: a negative count, or too many at once"};
  return args.width == 4 ? Patch<uint32_t>(ctx, args) : Patch<uint16_t>(ctx, args);
}

}  // namespace espalier::kernels::cuda
