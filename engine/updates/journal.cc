#include "engine/updates/journal.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/packed_segment.h"
#include "engine/updates/segment_place.h"
#include "engine/updates/weight_digest.h"

namespace espalier::updates {
namespace {

template <typename Bits, bool kNew>
void Write(void* elements, absl::Span<const JournalEntry> entries) {
  auto* to = static_cast<Bits*>(elements);
  for (const JournalEntry& entry : entries)
    to[entry.position] = static_cast<Bits>(kNew ? entry.new_bits : entry.old_bits);
}

template <bool kNew>
void WriteAny(void* elements, ElementKind kind, absl::Span<const JournalEntry> entries) {
  switch (SizeOf(kind)) {
    case 4:
      return Write<uint32_t, kNew>(elements, entries);
    case 2:
      return Write<uint16_t, kNew>(elements, entries);
    default:
      return Write<uint8_t, kNew>(elements, entries);
  }
}

uint32_t BitsAt(const void* elements, ElementKind kind, int64_t position) {
  const int size = SizeOf(kind);
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(elements) + position * size,
              static_cast<size_t>(size));
  return bits;
}

}  // namespace

int64_t Journal::entries() const {
  int64_t count = 0;
  for (const TensorJournal& tensor : tensors) count += static_cast<int64_t>(tensor.entries.size());
  return count;
}

Journal Journal::Inverse() const {
  Journal inverse = *this;
  for (TensorJournal& tensor : inverse.tensors) {
    for (JournalEntry& entry : tensor.entries) std::swap(entry.old_bits, entry.new_bits);
  }
  return inverse;
}

absl::Status JournalCollector::Begin(absl::Span<const ChangedTensor> tensors) {
  for (const auto& [tensor, entries] : tensors) {
    journal.tensors.push_back({tensor, {}});
    journal.tensors.back().entries.reserve(entries);
  }
  return absl::OkStatus();
}

absl::Status JournalCollector::Append(size_t tensor, absl::Span<const JournalEntry> entries) {
  auto at =
      std::lower_bound(journal.tensors.begin(), journal.tensors.end(), tensor,
                       [](const TensorJournal& item, size_t index) { return item.tensor < index; });
  at->entries.insert(at->entries.end(), entries.begin(), entries.end());
  return absl::OkStatus();
}

absl::Status CheckBase(const Manifest& manifest, const Digest& weights) {
  if (manifest.base_weights == HalfOf(weights)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the delta is made for weights with the digest ", ShortHex(manifest.base_weights),
      "… (version ", manifest.base_version, "), these have ", ShortHex(weights), "…",
      manifest.target_weights == weights ? ": it has been applied already" : ""));
}

absl::StatusOr<std::vector<size_t>> MatchTensors(const Manifest& manifest,
                                                 const TensorReader& base) {
  std::vector<size_t> indices;
  for (const TensorDelta& delta : manifest.tensors) {
    const int64_t index = FindTensor(base.tensors(), delta.tensor.name);
    if (index < 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the delta changes tensor ", delta.tensor.ToString(), ", which the base has not"));
    }
    const TensorInfo& found = base.tensors()[static_cast<size_t>(index)];
    if (found != delta.tensor) {
      return absl::FailedPreconditionError(absl::StrCat("the delta changes tensor ",
                                                        delta.tensor.ToString(), ", the base has ",
                                                        found.ToString()));
    }
    indices.push_back(static_cast<size_t>(index));
  }
  return indices;
}

void ApplyTo(void* elements, ElementKind kind, absl::Span<const JournalEntry> entries) {
  WriteAny<true>(elements, kind, entries);
}

void UndoIn(void* elements, ElementKind kind, absl::Span<const JournalEntry> entries) {
  WriteAny<false>(elements, kind, entries);
}

bool IsBefore(const void* elements, ElementKind kind, absl::Span<const JournalEntry> entries) {
  return std::all_of(entries.begin(), entries.end(), [&](const JournalEntry& entry) {
    return BitsAt(elements, kind, entry.position) == entry.old_bits;
  });
}

absl::StatusOr<PatchedReader> PatchedReader::Create(const DeltaFile& delta,
                                                    const TensorReader& base) {
  const auto indices = MatchTensors(delta.manifest(), base);
  if (!indices.ok()) return indices.status();
  auto records = delta.Records();
  if (!records.ok()) return records.status();
  PatchedReader reader(delta, base);
  reader.ranges_.resize(base.tensors().size());
  for (size_t i = 0; i < records->size(); ++i) {
    Range& range = reader.ranges_[(*indices)[(*records)[i].tensor]];
    if (range.end == 0) range.begin = i;
    range.end = i + 1;
  }
  reader.records_ = *std::move(records);
  return reader;
}

absl::Status PatchedReader::ReadSegment(size_t tensor, int64_t segment,
                                        std::vector<char>& elements) const {
  const TensorInfo& info = tensors()[tensor];
  const int64_t count = SegmentSize(info, segment);
  elements.resize(static_cast<size_t>(count * SizeOf(info.kind())));
  auto status = base_->Read(tensor, segment * kSegmentElements, count, elements.data());
  if (!status.ok()) return status;
  const auto begin = records_.begin() + static_cast<ptrdiff_t>(ranges_[tensor].begin);
  const auto end = records_.begin() + static_cast<ptrdiff_t>(ranges_[tensor].end);
  const auto record = std::lower_bound(
      begin, end, segment, [](const RecordRef& ref, int64_t key) { return ref.segment < key; });
  if (record == end || record->segment != segment) return absl::OkStatus();
  const auto bytes = delta_->Read(*record);
  if (!bytes.ok()) return bytes.status();
  std::vector<Edit> edits;
  EventCounts counts;
  status = DecodeSegment(info.kind(), PackedSegment(info.kind(), elements.data(), count), *bytes,
                         delta_->FormOf(record->tensor), edits, counts);
  if (!status.ok()) return InTensor(info, segment, status);
  const auto size = static_cast<size_t>(SizeOf(info.kind()));
  for (const Edit& edit : edits)
    std::memcpy(elements.data() + edit.position * size, &edit.new_bits, size);
  return absl::OkStatus();
}

absl::Status PatchedReader::Read(size_t tensor, int64_t first, int64_t count, void* to) const {
  if (ranges_[tensor].end == 0) return base_->Read(tensor, first, count, to);
  const int64_t size = SizeOf(tensors()[tensor].kind());
  std::vector<char> elements;
  auto* out = static_cast<char*>(to);
  while (count > 0) {
    const int64_t segment = first / kSegmentElements, skipped = first % kSegmentElements;
    if (auto status = ReadSegment(tensor, segment, elements); !status.ok()) return status;
    const int64_t taken = std::min(count, static_cast<int64_t>(elements.size()) / size - skipped);
    std::memcpy(out, elements.data() + skipped * size, static_cast<size_t>(taken * size));
    out += taken * size;
    first += taken;
    count -= taken;
  }
  return absl::OkStatus();
}

absl::Status CheckPromise(const Manifest& manifest, const Digest& weights) {
  if (manifest.schema_changes || weights == manifest.target_weights) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the delta leads to weights with the digest ",
                                                 ShortHex(weights), "…, its manifest promises ",
                                                 ShortHex(manifest.target_weights), "…"));
}

absl::Status CheckTarget(const DeltaFile& delta, const TensorReader& base, int threads) {
  const auto reader = PatchedReader::Create(delta, base);
  if (!reader.ok()) return reader.status();
  const auto digest = DigestOf(*reader, threads);
  return digest.ok() ? CheckPromise(delta.manifest(), *digest) : digest.status();
}

}  // namespace espalier::updates
