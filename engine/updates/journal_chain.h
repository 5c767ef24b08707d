// journal_chain.h — several journals as one, and weights with journals laid over them.
#pragma once

#include <memory>
#include <vector>

#include "engine/updates/journal.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

// `first`, then `second`: old bits of the first, new bits of the last. What ends as it began is left
// out.
Journal Compose(const Journal& first, const Journal& second);

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
