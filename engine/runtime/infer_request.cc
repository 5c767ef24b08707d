#include "engine/runtime/infer_request.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace espalier::runtime {

size_t TotalBytes(const ByteSlices& slices) {
  size_t bytes = 0;
  for (const ByteSlice& slice : slices) bytes += slice.size;
  return bytes;
}

std::string Printable(absl::string_view name) {
  constexpr size_t kMaxBytes = 128;
  return name.size() <= kMaxBytes
             ? absl::CHexEscape(name)
             : absl::StrCat(absl::CHexEscape(name.substr(0, kMaxBytes)), "...");
}

}  // namespace espalier::runtime
