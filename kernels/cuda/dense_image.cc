#include "kernels/cuda/dense_image.h"

#include <cstring>
#include <limits>

namespace espalier::kernels::cuda {

bool FitsDenseImage(const LinearDesc& desc) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() / 2;
  const bool is_float = desc.weight_dtype == DType::kFloat32 ||
                        desc.weight_dtype == DType::kBFloat16 ||
                        desc.weight_dtype == DType::kFloat16;
  return desc.layout == Layout::kDense && is_float && desc.io_dtype == desc.weight_dtype &&
         desc.in >= 1 && desc.out >= 1 && desc.in <= kLimit && desc.out <= kLimit;
}

size_t DenseImageBytes(const WeightView& weight) {
  return weight.out * DenseRowStride(weight.in) * SizeOf(weight.dtype);
}

KernelStatus PackDenseImage(const WeightView& weight, void* packed) {
  const size_t row = weight.in * SizeOf(weight.dtype);
  const size_t stride = DenseRowStride(weight.in) * SizeOf(weight.dtype);
  const char* from = static_cast<const char*>(weight.values);
  char* to = static_cast<char*>(packed);
  for (int64_t r = 0; r < weight.out; ++r, from += row, to += stride) {
    std::memcpy(to, from, row);
    std::memset(to + row, 0, stride - row);
  }
  return {};
}

KernelStatus LocateInDenseImage(const WeightView& weight, std::span<const int64_t> elements,
                                int64_t* offsets) {
  const int64_t stride = DenseRowStride(weight.in);
  const auto size = static_cast<int64_t>(SizeOf(weight.dtype));
  for (const int64_t element : elements)
    *offsets++ = (element / weight.in * stride + element % weight.in) * size;
  return {};
}

size_t DenseScratchBytes(const LinearDesc& desc) {
  return (desc.out * SizeOf(desc.io_dtype) + 255) / 256 * 256 + kDenseWorkspaceBytes;
}

}  // namespace espalier::kernels::cuda
