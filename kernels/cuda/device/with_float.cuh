// with_float.cuh — the three float types of activations, picked at run time.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/base/kernel_status.h"
#include "kernels/cuda/device/element.cuh"

namespace espalier::kernels::cuda {

constexpr bool IsDeviceFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// fn(a value of the type); kUnsupported for another one.
template <typename Fn>
KernelStatus WithFloat(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat16:
      return fn(Float16{});
    case DType::kBFloat16:
      return fn(BFloat16{});
    default:
      return {KernelCode::kUnsupported, "needs f32, f16 or bf16"};
  }
}

}  // namespace espalier::kernels::cuda
