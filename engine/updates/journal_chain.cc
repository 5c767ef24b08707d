#include "engine/updates/journal_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"

namespace espalier::updates {
std::vector<JournalEntry> Compose(const std::vector<JournalEntry>& first,
                                  const std::vector<JournalEntry>& second) {
  std::vector<JournalEntry> merged;
  merged.reserve(std::max(first.size(), second.size()));
  auto a = first.begin(), b = second.begin();
  while (a != first.end() || b != second.end()) {
    if (b == second.end() || (a != first.end() && a->position < b->position)) {
      merged.push_back(*a++);
    } else if (a == first.end() || b->position < a->position) {
      merged.push_back(*b++);
    } else {
      if (a->old_bits != b->new_bits) merged.push_back({a->position, a->old_bits, b->new_bits});
      ++a;
      ++b;
    }
  }
  return merged;
}

absl::StatusOr<std::optional<TensorJournal>> JournalChain::Next() {
  for (;;) {
    size_t tensor = SIZE_MAX;
    for (const Step& step : steps_) tensor = std::min(tensor, step.reader.next_tensor());
    if (tensor == SIZE_MAX) break;
    TensorJournal composed{tensor, {}};
    for (Step& step : steps_) {
      if (step.reader.next_tensor() != tensor) continue;
      auto next = step.reader.Next();
      if (!next.ok()) return next.status();
      if (!step.forward) {
        for (JournalEntry& entry : next->entries) std::swap(entry.old_bits, entry.new_bits);
      }
      composed.entries = composed.entries.empty() ? std::move(next->entries)
                                                  : Compose(composed.entries, next->entries);
    }
    if (!composed.entries.empty()) return composed;
  }
  for (Step& step : steps_) {
    if (auto status = step.reader.End(); !status.ok()) return status;
  }
  return std::nullopt;
}

absl::StatusOr<Journal> JournalChain::ReadAll() {
  Journal journal;
  for (;;) {
    auto tensor = Next();
    if (!tensor.ok()) return tensor.status();
    if (!*tensor) return journal;
    journal.tensors.push_back(**std::move(tensor));
  }
}

absl::Status CheckFits(const Journal& journal, const std::vector<TensorInfo>& tensors) {
  for (const TensorJournal& tensor : journal.tensors) {
    if (tensor.tensor >= tensors.size()) {
      return absl::InvalidArgumentError(absl::StrCat("the journal changes tensor ", tensor.tensor,
                                                     ", there are ", tensors.size()));
    }
    const TensorInfo& info = tensors[tensor.tensor];
    if (!tensor.entries.empty() && tensor.entries.back().position >= info.elements()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the journal changes element ", tensor.entries.back().position,
                       " of tensor ", formats::Quoted(info.name), ", which has ", info.elements()));
    }
  }
  return absl::OkStatus();
}

JournaledReader::JournaledReader(std::shared_ptr<const TensorReader> base, Journal journal)
    : base_(std::move(base)), journal_(std::move(journal)), of_(base_->tensors().size()) {
  for (const TensorJournal& tensor : journal_.tensors) of_[tensor.tensor] = &tensor;
}

absl::Status JournaledReader::Read(size_t tensor, int64_t first, int64_t count, void* to) const {
  if (auto status = base_->Read(tensor, first, count, to); !status.ok()) return status;
  if (of_[tensor] == nullptr) return absl::OkStatus();
  const auto& entries = of_[tensor]->entries;
  const auto size = static_cast<size_t>(SizeOf(tensors()[tensor].kind()));
  auto entry = std::lower_bound(
      entries.begin(), entries.end(), first,
      [](const JournalEntry& item, int64_t position) { return item.position < position; });
  for (; entry != entries.end() && entry->position < first + count; ++entry) {
    std::memcpy(static_cast<char*>(to) + static_cast<size_t>(entry->position - first) * size,
                &entry->new_bits, size);
  }
  return absl::OkStatus();
}

}  // namespace espalier::updates
