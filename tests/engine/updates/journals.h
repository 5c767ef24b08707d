// journals.h — journals as a whole, written and read in one call: what a server does a piece at a time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/updates/journal_chain.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/receive.h"

namespace espalier::updates::testing {

inline absl::StatusOr<uint64_t> WriteJournal(FileSystem& files, const std::string& path,
                                             const JournalEnds& ends, const Journal& journal) {
  JournalWriter writer(files, path, ends);
  std::vector<ChangedTensor> tensors;
  for (const TensorJournal& tensor : journal.tensors)
    tensors.push_back({tensor.tensor, tensor.entries.size()});
  if (auto status = writer.Begin(tensors); !status.ok()) return status;
  for (const TensorJournal& tensor : journal.tensors) {
    if (auto status = writer.Append(tensor.tensor, tensor.entries); !status.ok()) return status;
  }
  return writer.Commit();
}

inline absl::StatusOr<Journal> ReadAll(JournalChain chain) {
  Journal journal;
  for (;;) {
    const auto changes = chain.Next();
    if (!changes.ok()) return changes.status();
    if (!*changes) return journal;
    const auto& [tensor, entries] = **changes;
    if (journal.tensors.empty() || journal.tensors.back().tensor != tensor)
      journal.tensors.push_back({tensor, {}});
    auto& all = journal.tensors.back().entries;
    all.insert(all.end(), entries.begin(), entries.end());
  }
}

inline absl::StatusOr<Journal> ReadJournal(FileSystem& files, const std::string& path,
                                           const JournalEnds& ends,
                                           const JournalLimits& limits = {}) {
  auto reader = JournalReader::Open(files, path, ends, limits);
  if (!reader.ok()) return reader.status();
  Journal journal;
  for (std::vector<JournalEntry> piece; reader->next_tensor() != SIZE_MAX;) {
    const size_t tensor = reader->next_tensor();
    if (auto status = reader->NextPiece(piece); !status.ok()) return status;
    if (journal.tensors.empty() || journal.tensors.back().tensor != tensor)
      journal.tensors.push_back({tensor, {}});
    auto& entries = journal.tensors.back().entries;
    entries.insert(entries.end(), piece.begin(), piece.end());
  }
  if (auto status = reader->End(); !status.ok()) return status;
  return journal;
}

inline absl::StatusOr<Journal> ReceiveJournal(const DeltaFile& delta, const TensorReader& base,
                                              const ReceivePolicy& policy) {
  const auto weights = DigestOf(base);
  if (!weights.ok()) return weights.status();
  BlockDigests blocks;
  JournalCollector collector;
  const auto status = Receive(delta, base, *weights, policy, blocks, collector);
  if (!status.ok()) return status;
  return std::move(collector.journal);
}

}  // namespace espalier::updates::testing
