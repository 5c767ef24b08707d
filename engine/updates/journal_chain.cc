#include "engine/updates/journal_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/updates/segment_codec.h"

namespace espalier::updates {
namespace {

constexpr size_t kPieceEntries = 64 << 10;

}  // namespace

JournalChain::JournalChain(std::vector<Step> steps) {
  for (Step& step : steps) cursors_.push_back({std::move(step), {}});
}

// The next entries of the tensor; past its last one the piece is empty.
absl::Status JournalChain::Cursor::Refill() {
  at = 0;
  piece.clear();
  if (left == 0) return absl::OkStatus();
  if (auto status = step.reader.NextPiece(piece); !status.ok()) return status;
  left -= piece.size();
  if (step.forward) return absl::OkStatus();
  for (JournalEntry& entry : piece) std::swap(entry.old_bits, entry.new_bits);
  return absl::OkStatus();
}

// Old bits of the first journal that changes an element, new bits of the last. A piece, or what is left of the tensor.
absl::Status JournalChain::Compose() {
  entries_.clear();
  while (entries_.size() < kPieceEntries) {
    Cursor* least = nullptr;
    int64_t others = kNowhere;  // where the next of the other journals is
    for (Cursor& cursor : cursors_) {
      if (least == nullptr || cursor.Position() < least->Position()) {
        if (least != nullptr) others = std::min(others, least->Position());
        least = &cursor;
      } else {
        others = std::min(others, cursor.Position());
      }
    }
    if (least == nullptr || least->Position() == kNowhere) break;
    if (least->Position() < others) {
      do {
        const JournalEntry& entry = least->piece[least->at];
        if (entry.old_bits != entry.new_bits) entries_.push_back(entry);
        if (auto status = least->Advance(); !status.ok()) return status;
      } while (least->Position() < others && entries_.size() < kPieceEntries);
      continue;
    }
    JournalEntry composed = least->piece[least->at];
    for (Cursor& cursor : cursors_) {
      if (cursor.Position() != composed.position) continue;
      composed.new_bits = cursor.piece[cursor.at].new_bits;
      if (auto status = cursor.Advance(); !status.ok()) return status;
    }
    if (composed.old_bits != composed.new_bits) entries_.push_back(composed);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<JournalChain::Changes>> JournalChain::Next() {
  for (;;) {
    if (auto status = Compose(); !status.ok()) return status;
    if (!entries_.empty()) return Changes{tensor_, entries_};
    tensor_ = SIZE_MAX;
    for (const Cursor& cursor : cursors_)
      tensor_ = std::min(tensor_, cursor.step.reader.next_tensor());
    if (tensor_ == SIZE_MAX) break;
    for (Cursor& cursor : cursors_) {
      if (cursor.step.reader.next_tensor() != tensor_) continue;
      cursor.left = cursor.step.reader.next_entries();
      if (auto status = cursor.Refill(); !status.ok()) return status;
    }
  }
  for (Cursor& cursor : cursors_) {
    if (auto status = cursor.step.reader.End(); !status.ok()) return status;
  }
  return std::nullopt;
}

absl::StatusOr<std::shared_ptr<const JournaledReader>> JournaledReader::Create(
    std::shared_ptr<const TensorReader> base, std::vector<Step> steps) {
  for (const Step& step : steps) {
    if (auto status = step.journal->CheckFits(base->tensors()); !status.ok()) return status;
  }
  return std::shared_ptr<const JournaledReader>(
      new JournaledReader(std::move(base), std::move(steps)));
}

absl::Status JournaledReader::Read(size_t tensor, int64_t first, int64_t count, void* to) const {
  if (auto status = base_->Read(tensor, first, count, to); !status.ok()) return status;
  const auto width = static_cast<size_t>(SizeOf(tensors()[tensor].kind()));
  for (const auto& [journal, forward] : steps_) {
    auto status =
        journal->Visit(tensor, first, count, forward, [&](int64_t position, uint32_t bits) {
          std::memcpy(static_cast<char*>(to) + static_cast<size_t>(position - first) * width, &bits,
                      width);
        });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status JournaledReader::ReadWindows(size_t tensor, int64_t first, int64_t count,
                                          Visit visit) const {
  if (count > kSegmentElements) return TensorReader::ReadWindows(tensor, first, count, visit);
  struct Change {
    uint32_t at, bits;  // after `first`
  };
  struct Changes {
    std::vector<Change> all;
    size_t next = 0;
  };
  std::vector<Changes> journals(steps_.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    const auto& [journal, forward] = steps_[i];
    auto& all = journals[i].all;
    auto status =
        journal->Visit(tensor, first, count, forward, [&](int64_t position, uint32_t bits) {
          all.push_back({static_cast<uint32_t>(position - first), bits});
        });
    if (!status.ok()) return status;
  }
  const auto width = static_cast<size_t>(SizeOf(tensors()[tensor].kind()));
  return base_->ReadWindows(tensor, first, count, [&](int64_t begin, void* elements, int64_t here) {
    for (auto& [all, next] : journals) {
      for (; next < all.size() && first + all[next].at < begin + here; ++next) {
        const auto at = static_cast<size_t>(first + all[next].at - begin);
        std::memcpy(static_cast<char*>(elements) + at * width, &all[next].bits, width);
      }
    }
    visit(begin, elements, here);
  });
}

}  // namespace espalier::updates
