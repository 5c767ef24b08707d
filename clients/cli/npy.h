// npy.h — NumPy's .npy files (format 1.0 to 3.0) as tensors of the protocol.
//
//   absl::StatusOr<client::Tensor> input = ParseNpy(content, "digit.npy");  // name is left empty
//   absl::StatusOr<std::string> content = FormatNpy(result.outputs[0]);
//
// Types    Booleans, integers and floats, little-endian; "<V2", which is how numpy.save stores the
//          bfloat16 of ml_dtypes, is BF16. No BYTES (NumPy would pickle them).
// Limits   Header ≤ 64 KiB, ≤ 32 dimensions; the data must be exactly what the header announces.
// Errors   InvalidArgument, naming the file, expected and got, and what to do in NumPy.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "clients/cpp/tensor.h"

namespace espalier::cli {

bool IsNpy(absl::string_view content);  // begins as an .npy file does
absl::StatusOr<client::Tensor> ParseNpy(absl::string_view content, absl::string_view origin);
absl::StatusOr<std::string> FormatNpy(const client::Tensor& tensor);

}  // namespace espalier::cli
