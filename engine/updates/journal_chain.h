// journal_chain.h — several journals as one, and weights with journals laid over them.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/updates/journal.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

// Journals of one version after the other as one. Memory: a piece of each journal and one of what they come to, 1 MiB
// each.
class JournalChain {
 public:
  struct Step {
    JournalReader reader;
    bool forward = true;  // else its inverse
  };
  explicit JournalChain(std::vector<Step> steps);

  struct Changes {
    size_t tensor = 0;
    absl::Span<const JournalEntry>
        entries;  // until the next call; what ends as it began is left out
  };
  // Changes of the next tensor that changes, or more of the same one's, ascending; none at the end, when all may be
  // believed.
  absl::StatusOr<std::optional<Changes>> Next();

 private:
  static constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

  struct Cursor {
    Step step;
    std::vector<JournalEntry> piece;
    size_t at = 0;      // in the piece
    uint64_t left = 0;  // entries of the tensor that are not in a piece yet

    int64_t Position() const { return at < piece.size() ? piece[at].position : kNowhere; }
    absl::Status Advance() { return ++at < piece.size() ? absl::OkStatus() : Refill(); }
    absl::Status Refill();
  };
  absl::Status Compose();

  std::vector<Cursor> cursors_;
  size_t tensor_ = SIZE_MAX;  // that the cursors are at
  std::vector<JournalEntry> entries_;
};

// `base` as it is after the journals, which lead from it one after the other. Memory: nothing that grows with their
// length but JournalOnDisk's own. Thread-safe as far as `base` is.
class JournaledReader final : public TensorReader {
 public:
  struct Step {
    std::shared_ptr<const JournalOnDisk> journal;
    bool forward = true;  // else its inverse
  };
  // InvalidArgument when a journal names tensors or positions that these weights have not.
  static absl::StatusOr<std::shared_ptr<const JournaledReader>> Create(
      std::shared_ptr<const TensorReader> base, std::vector<Step> steps);
  const std::vector<TensorInfo>& tensors() const override { return base_->tensors(); }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override;
  // Holds the changes of the range meanwhile, 8 bytes each.
  absl::Status ReadWindows(size_t tensor, int64_t first, int64_t count, Visit visit) const override;

 private:
  JournaledReader(std::shared_ptr<const TensorReader> base, std::vector<Step> steps)
      : base_(std::move(base)), steps_(std::move(steps)) {}

  const std::shared_ptr<const TensorReader> base_;
  const std::vector<Step> steps_;
};

}  // namespace espalier::updates
