// segment_place.h — where a segment lies in its tensor, and errors that say so.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

// Its elements: kSegmentElements, or what is left of the tensor.
inline int64_t SegmentSize(const TensorInfo& tensor, int64_t segment) {
  return std::min(kSegmentElements, tensor.elements() - segment * kSegmentElements);
}

inline absl::Status InTensor(const TensorInfo& tensor, int64_t segment,
                             const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("tensor ", formats::Quoted(tensor.name),
                                                  ", segment ", segment, ": ", status.message()));
}

}  // namespace espalier::updates
