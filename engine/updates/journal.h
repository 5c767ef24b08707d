// journal.h — a delta as what it does to each element: (tensor, position, old, new), decoded and
// checked as a whole before anything is touched.
//
//   auto journal = DecodeJournal(delta, base);    // every rule of every list was checked
//   DecodeAndDigest(delta, base, …, sink)         // the same, a piece at a time
//   ApplyTo(weights, kind, entries);              // an overwrite: done twice, it is done once
//   UndoIn(weights, kind, entries);               // the same list with the old values
//
// The inverse of a journal is the journal with old and new exchanged: rollback needs nothing else.
//
// Memory   16 bytes a changed element of a Journal, reserved after its count was compared with `max_bytes`. To decode: for
//          each thread a segment without its zeros (64 MiB of them with their zeros, at most), and 12 bytes a change of
//          two segments.
// Errors   FailedPrecondition: another base. InvalidArgument: the delta breaks a rule, or does not
//          lead to the digest that it promises. ResourceExhausted: more changes than allowed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/sparse/element_edit.h"
#include "engine/updates/delta_file.h"
#include "engine/updates/tensor_info.h"
#include "engine/updates/weight_digest.h"

namespace espalier::updates {

using JournalEntry = sparse::ElementEdit;

struct TensorJournal {
  size_t tensor;                      // in the base's tensors()
  std::vector<JournalEntry> entries;  // ascending by position

  bool operator==(const TensorJournal&) const = default;
};

struct Journal {
  std::vector<TensorJournal> tensors;  // ascending by tensor; none is empty

  int64_t entries() const;
  Journal Inverse() const;
  bool operator==(const Journal&) const = default;
};

struct ChangedTensor {
  size_t tensor = 0;     // in the base's tensors()
  uint64_t entries = 0;  // at least 1
};

// Where a journal goes while it is decoded.
class JournalSink {
 public:
  virtual ~JournalSink() = default;
  // First, once: what the delta promises, ascending.
  virtual absl::Status Begin(absl::Span<const ChangedTensor> tensors) = 0;
  // Ascending by tensor and position, in pieces of any size, never more than was promised.
  virtual absl::Status Append(size_t tensor, absl::Span<const JournalEntry> entries) = 0;
};

// Keeps it in memory.
class JournalCollector final : public JournalSink {
 public:
  absl::Status Begin(absl::Span<const ChangedTensor> tensors) override;
  absl::Status Append(size_t tensor, absl::Span<const JournalEntry> entries) override;
  Journal journal;
};

// Called by every thread beside the caller's before it works; what it returns lives until it has.
using WorkerScope = std::function<std::shared_ptr<void>()>;

struct JournalLimits {
  int64_t max_bytes = int64_t{4} << 30;
};

// FailedPrecondition unless the delta is made for weights with this digest.
absl::Status CheckBase(const Manifest& manifest, const Digest& weights);

// For each tensor of the manifest its index in `base`. FailedPrecondition for one that the base has
// not, or has with another dtype or dims.
absl::StatusOr<std::vector<size_t>> MatchTensors(const Manifest& manifest,
                                                 const TensorReader& base);

// The caller has checked signatures, freshness, body and the base's digest. The journal is exactly
// what the delta's lists say and its manifest counts.
absl::StatusOr<Journal> DecodeJournal(const DeltaFile& delta, const TensorReader& base,
                                      const JournalLimits& limits = {}, int threads = 1);
// In the same pass, the digests of the weights that it leads to. `blocks`: those of the base, so that only the blocks
// that change are hashed and only the segments that change are read; or empty, when they are not known. What `sink` got is
// to be believed when this returns OK.
absl::Status DecodeAndDigest(const DeltaFile& delta, const TensorReader& base,
                             const JournalLimits& limits, int threads, BlockDigests& blocks,
                             JournalSink& sink, const WorkerScope& worker_scope = nullptr);
// InvalidArgument unless `weights` is the digest that the delta promises.
absl::Status CheckPromise(const Manifest& manifest, const Digest& weights);

// Overwrites elements of a whole tensor that begins at `elements`.
void ApplyTo(void* elements, ElementKind kind, absl::Span<const JournalEntry> entries);
void UndoIn(void* elements, ElementKind kind, absl::Span<const JournalEntry> entries);
// Whether every entry's old bits are what is there: false for another base, or when it was applied.
bool IsBefore(const void* elements, ElementKind kind, absl::Span<const JournalEntry> entries);

// The base as it will be after the delta, a segment at a time and without a journal: for digests
// and files. Both must outlive it.
class PatchedReader final : public TensorReader {
 public:
  static absl::StatusOr<PatchedReader> Create(const DeltaFile& delta, const TensorReader& base);
  const std::vector<TensorInfo>& tensors() const override { return base_->tensors(); }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override;

 private:
  PatchedReader(const DeltaFile& delta, const TensorReader& base) : delta_(&delta), base_(&base) {}
  absl::Status ReadSegment(size_t tensor, int64_t segment, std::vector<char>& elements) const;

  const DeltaFile* delta_;
  const TensorReader* base_;
  struct Range {
    size_t begin = 0, end = 0;
  };
  std::vector<RecordRef> records_;
  std::vector<Range> ranges_;  // of records_, for each tensor of the base
};

// InvalidArgument unless the delta leads from `base` to the digest and the counts of its manifest.
absl::Status CheckTarget(const DeltaFile& delta, const TensorReader& base, int threads = 1);

}  // namespace espalier::updates
