// dense_image.h — dense weights as cuBLASLt reads them: row-major [out, round_up(in, 64)], tail zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr int64_t DenseRowStride(int64_t in) { return (in + 63) / 64 * 64; }

bool FitsDenseImage(const LinearDesc& desc);
size_t DenseImageBytes(const WeightView& weight);
KernelStatus PackDenseImage(const WeightView& weight, void* packed);
KernelStatus LocateInDenseImage(const WeightView& weight, std::span<const int64_t> elements,
                                int64_t* offsets);

// The bias in the type of y, then cuBLASLt's workspace.
constexpr size_t kDenseWorkspaceBytes = size_t{32} << 20;
size_t DenseScratchBytes(const LinearDesc& desc);

}  // namespace espalier::kernels::cuda
