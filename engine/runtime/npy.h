// npy.h — arrays as numpy.save writes them (format versions 1 to 3): little-endian, C order, numbers or
// bool. There is no bf16 in that format.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/shape.h"
#include "kernels/base/dtype.h"

namespace espalier::runtime {

struct NpyArray {
  DType dtype = DType::kFloat32;
  Shape shape;
  std::string elements;  // row-major
};

// InvalidArgument says what is not as expected; `bytes` are the whole file.
absl::StatusOr<NpyArray> ParseNpy(absl::string_view bytes);

}  // namespace espalier::runtime
