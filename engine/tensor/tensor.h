// tensor.h — Tensor owns its elements, TensorView borrows them. Row-major, contiguous, host memory.
#pragma once

#include "absl/status/statusor.h"
#include "engine/tensor/buffer.h"
#include "engine/tensor/shape.h"
#include "kernels/base/dtype.h"

namespace espalier {

struct TensorView {
  DType dtype = DType::kFloat32;
  Shape shape;
  const void* data = nullptr;

  int64_t elements()
      const;  // product of shape; shape is trusted (it was checked when the tensor was made)
  template <typename T>
  const T* As() const {
    return static_cast<const T*>(data);
  }
};

class Tensor {
 public:
  Tensor() = default;
  // Uninitialised elements. InvalidArgument for a bad shape or kBytes, ResourceExhausted without memory.
  static absl::StatusOr<Tensor> Allocate(DType dtype, absl::Span<const int64_t> shape);
  // ResourceExhausted without memory.
  absl::StatusOr<Tensor> Clone() const;

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t elements() const { return elements_; }
  size_t bytes() const { return static_cast<size_t>(elements_) * SizeOf(dtype_); }
  void* data() { return buffer_.data(); }
  const void* data() const { return buffer_.data(); }
  template <typename T>
  T* As() {
    return reinterpret_cast<T*>(buffer_.data());
  }
  template <typename T>
  const T* As() const {
    return reinterpret_cast<const T*>(buffer_.data());
  }
  TensorView view() const { return {dtype_, shape_, buffer_.data()}; }

 private:
  DType dtype_ = DType::kFloat32;
  Shape shape_;
  int64_t elements_ = 0;
  Buffer buffer_;
};

// Converts numeric elements (f16, bf16, f32, f64 and integers) with round-to-nearest-even; float to integer truncates
// towards zero and saturates (NaN gives 0). InvalidArgument for kBytes.
absl::StatusOr<Tensor> Convert(const TensorView& from, DType to);
// The same into memory of the caller, elements() · SizeOf(to) bytes. Pairs as above; both dtypes must be numeric.
void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count);

// Software conversions of single values, exact as IEEE 754 prescribes (subnormals, NaN payload top bits kept).
float Float16ToFloat(uint16_t bits);
uint16_t FloatToFloat16(float value);
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);

}  // namespace espalier
