// journal_file.h — a journal on disk: the way from one version to the next and, read with old and
// new exchanged, the way back.
//
// Bytes    About 3 to 5 (bf16) or 7 to 10 (f32) a changed element: positions as gaps, old bits, new
//          bits, in pieces of 65536 elements, each a zstd frame.
// Memory   A piece, 1 MiB, whoever writes or reads; of a journal that is laid over weights 64 bytes for each piece.
// Errors   DataLoss: damaged, or between other versions; Unimplemented: newer; ResourceExhausted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
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

// Where a piece lies, of how many entries of which tensor.
struct JournalPiece {
  size_t tensor = 0;
  int64_t next = 0, last = 0;  // the position after the piece before, its own last one
  uint64_t offset = 0, bytes = 0;
  size_t entries = 0;
  Digest digest{};
};

class JournalOnDisk;

// Beside its place until it is committed, and deleted if it never is.
class JournalWriter final : public JournalSink {
 public:
  JournalWriter(FileSystem& files, std::string path, const JournalEnds& ends)
      : files_(files), path_(std::move(path)), ends_(ends) {}

  absl::Status Begin(absl::Span<const ChangedTensor> tensors) override;
  absl::Status Append(size_t tensor, absl::Span<const JournalEntry> entries) override;
  // Durable when it returns; says how many bytes the file has. At most once.
  absl::StatusOr<uint64_t> Commit();
  // Once committed: to be read, without looking through it first.
  absl::StatusOr<std::shared_ptr<const JournalOnDisk>> Reopen() const;

  const JournalEnds& ends() const { return ends_; }
  int64_t entries() const { return entries_; }

 private:
  absl::Status AppendPiece();

  FileSystem& files_;
  const std::string path_;
  const JournalEnds ends_;
  std::optional<SealedWriter> file_;
  size_t tensor_ = SIZE_MAX;
  int64_t next_ = 0;                 // the position after the last piece's
  std::vector<JournalEntry> piece_;  // of the tensor, not written yet
  int64_t entries_ = 0;
  std::vector<JournalPiece> pieces_;  // that were written
};

// A piece at a time.
class JournalReader {
 public:
  static absl::StatusOr<JournalReader> Open(FileSystem& files, const std::string& path,
                                            const JournalEnds& ends,
                                            const JournalLimits& limits = {});
  // The tensor that comes next; SIZE_MAX after the last one.
  size_t next_tensor() const { return next_ < tensors_.size() ? tensors_[next_].tensor : SIZE_MAX; }
  // Its entries that were not read yet.
  uint64_t next_entries() const { return tensors_[next_].entries - read_; }
  // Replaces `entries` by the next ones of the next tensor.
  absl::Status NextPiece(std::vector<JournalEntry>& entries);
  // After the last one: whether what was read may be believed.
  absl::Status End() { return reader_.End(); }

 private:
  friend class JournalOnDisk;
  explicit JournalReader(SealedReader reader) : reader_(std::move(reader)) {}

  SealedReader reader_;
  std::vector<ChangedTensor> tensors_;
  size_t next_ = 0;
  uint64_t read_ = 0;     // entries of the next tensor
  int64_t position_ = 0;  // after the last of them
};

// Changes that stay where they are, to be laid over weights: of a journal only where its pieces lie is kept in memory.
// Thread-safe.
class JournalOnDisk {
 public:
  // Reads all of it.
  static absl::StatusOr<std::shared_ptr<const JournalOnDisk>> Open(
      FileSystem& files, const std::string& path, const JournalEnds& ends,
      const JournalLimits& limits = {});

  // InvalidArgument when it changes tensors or positions that these weights have not.
  absl::Status CheckFits(const std::vector<TensorInfo>& tensors) const;
  bool empty() const { return pieces_.empty(); }
  const JournalEnds& ends() const { return ends_; }
  // What it changes of [first, first + count) of the tensor, ascending: the new bits, or, backwards, the old ones.
  using VisitChange = absl::FunctionRef<void(int64_t position, uint32_t bits)>;
  absl::Status Visit(size_t tensor, int64_t first, int64_t count, bool forward,
                     VisitChange visit) const;

 private:
  friend class JournalWriter;
  JournalOnDisk(SealedReader reader, const JournalEnds& ends, std::vector<JournalPiece> pieces)
      : reader_(std::move(reader)), ends_(ends), pieces_(std::move(pieces)) {}

  const SealedReader reader_;
  const JournalEnds ends_;
  const std::vector<JournalPiece> pieces_;  // ascending
};

}  // namespace espalier::updates
