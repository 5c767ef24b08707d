#include "tests/testing/fake_cuda_ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/tensor/tensor.h"
#include "kernels/cuda/block_image.h"
#include "kernels/cuda/dense_image.h"
#include "kernels/element_patch/element_patch.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/linear/check_args.h"
#include "kernels/softmax/softmax.h"
#include "kernels/transpose/transpose.h"

namespace espalier::testing {
namespace {

using kernels::KernelCode;
using kernels::KernelStatus;
using kernels::LinearArgs;
using kernels::cuda::CudaKernel;

std::vector<float> ToFloats(const void* from, DType dtype, int64_t count) {
  std::vector<float> floats(count);
  ConvertElements(from, dtype, floats.data(), DType::kFloat32, count);
  return floats;
}

void FromFloats(const std::vector<float>& floats, void* to, DType dtype) {
  ConvertElements(floats.data(), DType::kFloat32, to, dtype, static_cast<int64_t>(floats.size()));
}

// The elements that strides over dims reach.
int64_t Span(int rank, const int64_t* dims, const int64_t* strides) {
  int64_t last = 0;
  for (int axis = 0; axis < rank; ++axis) last += (dims[axis] - 1) * strides[axis];
  return last + 1;
}

// [out, in] in the weight's type.
std::vector<char> UnpackDense(const kernels::WeightView& weight) {
  const size_t row = weight.in * SizeOf(weight.dtype);
  const size_t stride = kernels::cuda::DenseRowStride(weight.in) * SizeOf(weight.dtype);
  std::vector<char> dense(weight.out * row);
  for (int64_t r = 0; r < weight.out; ++r)
    std::memcpy(&dense[r * row], static_cast<const char*>(weight.packed) + r * stride, row);
  return dense;
}

std::vector<char> UnpackBlocks(const kernels::WeightView& weight) {
  const auto image = kernels::cuda::BlockImageOf(weight);
  const char* base = static_cast<const char*>(weight.packed);
  const int columns = image.panel_columns, mask = kernels::cuda::SwizzleMask(columns);
  std::vector<char> dense(weight.out * weight.in * 2, 0);
  for (int64_t p = 0; p < image.panels; ++p) {
    kernels::cuda::Panel panel;
    std::memcpy(&panel, base + image.panels_offset + p * sizeof(panel), sizeof(panel));
    for (int r = 0; r < weight.block_rows; ++r) {
      for (int c = 0; c < columns; ++c) {
        const int64_t row = int64_t{panel.row} * weight.block_rows + r, column = panel.column + c;
        if (row >= weight.out || column >= weight.in) continue;
        std::memcpy(&dense[(row * weight.in + column) * 2],
                    base + image.values_offset + p * image.panel_bytes +
                        kernels::cuda::Swizzled(2 * (r * columns + c), mask),
                    2);
      }
    }
  }
  return dense;
}

bool ReadsBlocks(CudaKernel kernel) {
  return (kernel >= CudaKernel::kBlockMma && kernel <= CudaKernel::kBlockTwin128) ||
         (kernel >= CudaKernel::kBlockSlab64Pairs && kernel <= CudaKernel::kBlockTwin16);
}

}  // namespace

KernelStatus FakeLinear(CudaKernel kernel, const LinearArgs& args) {
  if (kernel != CudaKernel::kDenseCublasLt && !ReadsBlocks(kernel))
    return {KernelCode::kUnsupported, "the fake device has no such kernel"};
  if (args.x_stride % 8 != 0 || args.y_stride % 8 != 0 || args.x_stride < args.weight.in ||
      args.y_stride < args.weight.out || args.weight.values != nullptr ||
      args.io_dtype != args.weight.dtype || args.residual_stride % 8 != 0 ||
      kernels::WrongResidual(args) != nullptr) {
    return {KernelCode::kInvalidArgument, "the fake device: a broken contract"};
  }
  if (args.tokens == 0) return {};
  const std::vector<char> dense =
      ReadsBlocks(kernel) ? UnpackBlocks(args.weight) : UnpackDense(args.weight);
  LinearArgs plain = args;
  plain.weight = {};
  plain.weight.dtype = args.weight.dtype;
  plain.weight.out = args.weight.out;
  plain.weight.in = args.weight.in;
  plain.weight.count = args.weight.out * args.weight.in;
  plain.weight.values = dense.data();
  std::vector<double> y(args.tokens * args.weight.out);
  kernels::ReferenceLinear(plain, y.data(), nullptr);
  const size_t element = SizeOf(args.io_dtype);
  for (int64_t t = 0; t < args.tokens; ++t) {
    ConvertElements(&y[t * args.weight.out], DType::kFloat64,
                    static_cast<char*>(args.y) + t * args.y_stride * element, args.io_dtype,
                    args.weight.out);
  }
  return {};
}

KernelStatus FakeConvert(const kernels::cuda::ConvertArgs& args) {
  if (args.x_stride < args.columns || args.y_stride < args.columns)
    return {KernelCode::kInvalidArgument, "the fake device: a stride below the width"};
  std::vector<char> rounded(args.columns * 8);
  for (int64_t r = 0; r < args.rows; ++r) {
    const char* x = static_cast<const char*>(args.x) + r * args.x_stride * SizeOf(args.from);
    char* y = static_cast<char*>(args.y) + r * args.y_stride * SizeOf(args.to);
    ConvertElements(x, args.from, rounded.data(), args.through, args.columns);
    ConvertElements(rounded.data(), args.through, y, args.to, args.columns);
  }
  return {};
}

KernelStatus FakeActivate(const kernels::ActivateArgs& args) {
  std::vector<float> values = ToFloats(args.x, args.dtype, args.count);
  const auto status =
      kernels::Activate({}, {args.activation, values.data(), values.data(), args.count});
  FromFloats(values, args.y, args.dtype);
  return status;
}

KernelStatus FakeBinary(const kernels::BinaryArgs& args) {
  const std::vector<float> a =
      ToFloats(args.a, args.a_dtype, Span(args.rank, args.dims, args.a_strides));
  const std::vector<float> b =
      ToFloats(args.b, args.b_dtype, Span(args.rank, args.dims, args.b_strides));
  int64_t count = 1;
  for (int axis = 0; axis < args.rank; ++axis) count *= args.dims[axis];
  std::vector<float> y(count);
  kernels::BinaryArgs floats = args;
  floats.a = a.data();
  floats.b = b.data();
  floats.y = y.data();
  floats.a_dtype = floats.b_dtype = floats.y_dtype = DType::kFloat32;
  const auto status = kernels::Binary({}, floats);
  FromFloats(y, args.y, args.y_dtype);
  return status;
}

KernelStatus FakeSoftmax(const kernels::SoftmaxArgs& args) {
  std::vector<float> values = ToFloats(args.x, args.dtype, args.outer * args.n * args.inner);
  kernels::SoftmaxArgs floats = args;
  floats.x = floats.y = values.data();
  floats.dtype = DType::kFloat32;
  const auto status = kernels::Softmax({}, floats);
  FromFloats(values, args.y, args.dtype);
  return status;
}

KernelStatus FakeLayerNorm(const kernels::LayerNormArgs& args) {
  std::vector<float> values = ToFloats(args.x, args.dtype, args.rows * args.n);
  kernels::LayerNormArgs floats = args;
  floats.x = floats.y = values.data();
  floats.dtype = DType::kFloat32;
  const auto status = kernels::LayerNorm({}, floats);
  FromFloats(values, args.y, args.dtype);
  return status;
}

KernelStatus FakeTranspose(const kernels::TransposeArgs& args) {
  return kernels::Transpose({}, args);
}

KernelStatus FakePatch(const kernels::PatchArgs& args) { return kernels::PatchElements({}, args); }

}  // namespace espalier::testing
