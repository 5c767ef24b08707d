// Conversion between element types, row by row: model inputs and outputs, Cast, and changes of the row stride.
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/ops.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Calls fn with a null pointer of the type behind `dtype`; false for bytes.
template <typename Fn>
bool WithType(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBool:
      return fn(static_cast<bool*>(nullptr)), true;
    case DType::kUint8:
      return fn(static_cast<uint8_t*>(nullptr)), true;
    case DType::kUint16:
      return fn(static_cast<uint16_t*>(nullptr)), true;
    case DType::kUint32:
      return fn(static_cast<uint32_t*>(nullptr)), true;
    case DType::kUint64:
      return fn(static_cast<uint64_t*>(nullptr)), true;
    case DType::kInt8:
      return fn(static_cast<int8_t*>(nullptr)), true;
    case DType::kInt16:
      return fn(static_cast<int16_t*>(nullptr)), true;
    case DType::kInt32:
      return fn(static_cast<int32_t*>(nullptr)), true;
    case DType::kInt64:
      return fn(static_cast<int64_t*>(nullptr)), true;
    case DType::kFloat16:
      return fn(static_cast<Float16*>(nullptr)), true;
    case DType::kFloat32:
      return fn(static_cast<float*>(nullptr)), true;
    case DType::kFloat64:
      return fn(static_cast<double*>(nullptr)), true;
    case DType::kBFloat16:
      return fn(static_cast<BFloat16*>(nullptr)), true;
    case DType::kBytes:
      break;
  }
  return false;
}

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <typename T>
__device__ auto Widen(T value) {
  if constexpr (kIsHalf<T>) {
    return ToFloat(value);
  } else {
    return value;
  }
}

template <typename To, typename From>
__device__ To Narrow(From value) {
  if constexpr (kIsHalf<To>) {
    return FromFloat<To>(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From{0};
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    if (value != value) return 0;
    // 2^digits is exact in any float type, the largest integer may not be.
    constexpr int kDigits = std::numeric_limits<To>::digits;
    const From above = static_cast<From>(uint64_t{1} << (kDigits - 1)) * 2;
    if (value >= above) return std::numeric_limits<To>::max();
    if (value <= (std::is_signed_v<To> ? -above : From{0})) return std::numeric_limits<To>::min();
    return static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

template <typename From, typename To>
__global__ void ConvertRows(const From* x, int64_t x_stride, To* y, int64_t y_stride, int64_t rows,
                            int64_t columns) {
  const int64_t count = rows * columns, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = i / columns, column = i % columns;
    y[row * y_stride + column] = Narrow<To>(Widen(x[row * x_stride + column]));
  }
}

// The rare Cast that rounds to a 2-byte float on the way and keeps another type.
template <typename From, typename To>
__global__ void ConvertRowsThrough(const From* x, int64_t x_stride, To* y, int64_t y_stride,
                                   int64_t rows, int64_t columns, bool through_bf16) {
  const int64_t count = rows * columns, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = i / columns, column = i % columns;
    const auto value = Widen(x[row * x_stride + column]);
    const float rounded =
        through_bf16 ? Widen(Narrow<BFloat16>(value)) : Widen(Narrow<Float16>(value));
    y[row * y_stride + column] = Narrow<To>(rounded);
  }
}

}  // namespace

KernelStatus ConvertOnDevice(const KernelContext& ctx, const ConvertArgs& args) {
  if (args.rows < 0 || args.columns < 0 || args.x_stride < args.columns ||
      args.y_stride < args.columns) {
    return {KernelCode::kInvalidArgument,
            "convert: a size below 0 or a row stride below the width"};
  }
  const int64_t count = args.rows * args.columns, most = 16 * MultiprocessorCount();
  if (count == 0) return {};
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  const LaunchShape shape = {dim3(static_cast<unsigned>(blocks < most ? blocks : most)), kThreads};
  KernelStatus status = {KernelCode::kUnsupported, "convert: types that it lacks"};
  WithType(args.from, [&](auto* from_tag) {
    using From = std::remove_pointer_t<decltype(from_tag)>;
    WithType(args.to, [&](auto* to_tag) {
      using To = std::remove_pointer_t<decltype(to_tag)>;
      const From* x = static_cast<const From*>(args.x);
      To* y = static_cast<To*>(args.y);
      if (args.through == args.from || args.through == args.to) {
        status = Launch(ctx, shape, ConvertRows<From, To>, x, args.x_stride, y, args.y_stride,
                        args.rows, args.columns);
      } else if constexpr (std::is_same_v<To, float> || kIsHalf<To>) {
        if (args.through != DType::kBFloat16 && args.through != DType::kFloat16) return;
        status = Launch(ctx, shape, ConvertRowsThrough<From, To>, x, args.x_stride, y,
                        args.y_stride, args.rows, args.columns, args.through == DType::kBFloat16);
      }
    });
  });
  return status;
}

}  // namespace espalier::kernels::cuda
