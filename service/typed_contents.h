// typed_contents.h — the typed form of a tensor, InferTensorContents, as the raw elements that
// everything else works on.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "service/infer_decoder.h"

namespace espalier::service {

// "FP32" → kFloat32.
std::optional<DType> ParseDType(absl::string_view name);

// The `elements` elements in input.contents as raw little-endian bytes of input.datatype (BYTES:
// each with a 4-byte length in front). Integers above a narrow type's range keep their low bits, as
// in Triton. InvalidArgument for a datatype without typed form (FP16 and BF16), the wrong field,
// two fields, another number of elements, or malformed bytes.
absl::StatusOr<std::string> RawElements(const DecodedInput& input, int64_t elements);

}  // namespace espalier::service
