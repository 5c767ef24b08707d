#include "service/stream_registry.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "service/infer_stream.h"

namespace espalier::service {

absl::Status StreamRegistry::Add(std::shared_ptr<InferStream> stream) {
  const std::lock_guard lock(mutex_);
  InferStream* const key = stream.get();
  streams_.emplace(key, std::move(stream));
  if (!ended_.ok()) return ended_;
  const int64_t others = static_cast<int64_t>(streams_.size()) - 1;
  if (limits_.max_streams == 0 || others < limits_.max_streams) return absl::OkStatus();
  refused_.fetch_add(1, std::memory_order_relaxed);
  // Not how many are open: those that were refused and have not ended yet are among them.
  return absl::UnavailableError(
      absl::StrCat("server is busy: as many streams are open as may be, ", limits_.max_streams));
}

void StreamRegistry::Remove(InferStream* stream) {
  std::shared_ptr<InferStream> last;  // destroyed without the mutex
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  last = std::move(found->second);
  streams_.erase(found);
}

int64_t StreamRegistry::open() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(streams_.size());
}

void StreamRegistry::EndAll(const absl::Status& status) {
  std::vector<std::shared_ptr<InferStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    ended_ = status;
    streams.reserve(streams_.size());
    for (const auto& [key, stream] : streams_) streams.push_back(stream);
  }
  for (const auto& stream : streams) stream->End(status);
}

}  // namespace espalier::service
