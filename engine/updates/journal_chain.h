// journal_chain.h — several journals as one, and weights with journals laid over them.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/updates/journal.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

// Changes of one tensor, `first`, then `second`: old bits of the first, new bits of the last. What ends as it began is
// left out.
std::vector<JournalEntry> Compose(const std::vector<JournalEntry>& first,
                                  const std::vector<JournalEntry>& second);

// Journals of one version after the other as one: memory is what one tensor's changes take in each of them.
class JournalChain {
 public:
  struct Step {
    JournalReader reader;
    bool forward = true;  // else its inverse
  };
  explicit JournalChain(std::vector<Step> steps) : steps_(std::move(steps)) {}

  // The next tensor that changes, ascending; none at the end, when all may be believed.
  absl::StatusOr<std::optional<TensorJournal>> Next();
  absl::StatusOr<Journal> ReadAll();

 private:
  std::vector<Step> steps_;
};

// `base` as it is after the journal, which was made for it. Thread-safe as far as `base` is.
class JournaledReader final : public TensorReader {
 public:
  JournaledReader(std::shared_ptr<const TensorReader> base, Journal journal);
  const std::vector<TensorInfo>& tensors() const override { return base_->tensors(); }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override;

 private:
  const std::shared_ptr<const TensorReader> base_;
  const Journal journal_;
  std::vector<const TensorJournal*> of_;  // for each tensor; null: not changed
};

// InvalidArgument when the journal names tensors or positions that these weights have not.
absl::Status CheckFits(const Journal& journal, const std::vector<TensorInfo>& tensors);

}  // namespace espalier::updates
