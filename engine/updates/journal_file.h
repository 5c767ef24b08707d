// journal_file.h — a journal on disk: the way from one version to the next and, read with old and
// new exchanged, the way back.
//
// Bytes    About 3 to 5 (bf16) or 7 to 10 (f32) a changed element: positions as gaps, old bits, new
//          bits, in pieces of 65536 elements, each a zstd frame.
// Memory   Reading: 16 bytes an element, reserved after the count was compared with the limit.
// Errors   DataLoss: damaged, or between other versions; Unimplemented: newer; ResourceExhausted.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/updates/file_system.h"
#include "engine/updates/journal.h"
#include "engine/updates/stored_file.h"

namespace espalier::updates {

struct JournalEnds {
  int64_t from = 0, to = 0;  // versions
  Digest from_weights{}, to_weights{};
  bool operator==(const JournalEnds&) const = default;
};

// Durable when it returns; says how many bytes the file has.
absl::StatusOr<uint64_t> WriteJournal(FileSystem& files, const std::string& path,
                                      const JournalEnds& ends, const Journal& journal);

// A tensor at a time.
class JournalReader {
 public:
  static absl::StatusOr<JournalReader> Open(FileSystem& files, const std::string& path,
                                            const JournalEnds& ends,
                                            const JournalLimits& limits = {});
  // The tensor whose entries Next reads; SIZE_MAX after the last one.
  size_t next_tensor() const { return next_ < tensors_.size() ? tensors_[next_].first : SIZE_MAX; }
  absl::StatusOr<TensorJournal> Next();
  // After the last one: whether what was read may be believed.
  absl::Status End() { return reader_.End(); }

 private:
  explicit JournalReader(SealedReader reader) : reader_(std::move(reader)) {}

  SealedReader reader_;
  std::vector<std::pair<size_t, uint64_t>> tensors_;  // index, entries
  size_t next_ = 0;
};

absl::StatusOr<Journal> ReadJournal(FileSystem& files, const std::string& path,
                                    const JournalEnds& ends, const JournalLimits& limits = {});

}  // namespace espalier::updates
