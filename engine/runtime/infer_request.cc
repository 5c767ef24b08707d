#include "engine/runtime/infer_request.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/runtime/batcher.h"

namespace espalier::runtime {

void InferRequest::Cancel() {
  // Of several callers one sees kWaiting, and only if no instance or timer was faster.
  if (state_.fetch_or(kCancelled, std::memory_order_acq_rel) == kWaiting) batcher_->TakeBack(this);
}

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
