// zstd.h — bytes compressed and restored whole, with the size known and capped beforehand.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace espalier::updates {

// A frame without checksum, content size or dictionary id: the delta carries size and digest.
// `reference`, when not empty, is a prefix that decompression needs again (zstd --patch-from).
absl::StatusOr<std::string> ZstdCompress(absl::string_view bytes, int level,
                                         absl::string_view reference = {});

// Exactly `size` bytes. InvalidArgument when the frame is damaged, holds more or less, or is
// followed by something. The caller has capped `size`: no more is ever reserved, plus a window of
// at most `size` + the reference.
absl::StatusOr<std::string> ZstdDecompress(absl::string_view frame, uint64_t size,
                                           absl::string_view reference = {});

}  // namespace espalier::updates
