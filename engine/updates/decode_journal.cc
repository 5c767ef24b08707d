// A delta's records as a journal and, in the same pass over the base, the digests of the blocks that they change.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/journal.h"
#include "engine/updates/segment_place.h"

namespace espalier::updates {
namespace {

absl::Status CheckCounts(const TensorDelta& expected, const EventCounts& found) {
  if (expected.counts == found) return absl::OkStatus();
  for (int k = 0; k < kEventKinds; ++k) {
    if (expected.counts.of[k] == found.of[k]) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", formats::Quoted(expected.tensor.name), " has ", found.of[k], " ",
        NameOf(static_cast<EventKind>(k)), "s, the manifest says ", expected.counts.of[k]));
  }
  return absl::OkStatus();
}

class Decoder {
 public:
  // `blocks` null: nothing is hashed.
  Decoder(const DeltaFile& delta, const TensorReader& base, BlockDigests* blocks)
      : delta_(delta), base_(base), blocks_(blocks) {}

  absl::StatusOr<Journal> Run(const JournalLimits& limits, int threads,
                              const WorkerScope& worker_scope = nullptr);

 private:
  // A segment that is read.
  struct Item {
    size_t tensor = 0;  // of the base
    int64_t segment = 0;
    std::optional<RecordRef> record;  // what changes in it
    std::vector<Edit> edits;
    EventCounts found;
  };
  struct Scratch {
    std::vector<char> segment, block;
    BlockHasher hasher;
  };

  absl::Status ListItems(const std::vector<size_t>& indices);
  void Work();
  absl::Status Do(Item& item, Scratch& scratch) const;
  void HashBlocks(const Item& item, const void* elements, int64_t count, Scratch& scratch) const;
  absl::Status HashAcross(size_t tensor, absl::Span<const JournalEntry> entries,
                          Scratch& scratch) const;
  absl::StatusOr<Journal> Join();

  const DeltaFile& delta_;
  const TensorReader& base_;
  BlockDigests* const blocks_;
  bool known_ = true;        // the blocks that nothing changes
  std::vector<Item> items_;  // ascending by tensor and segment
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  size_t failed_ = SIZE_MAX;  // the first item that did
  absl::Status failure_;
};

absl::Status Decoder::ListItems(const std::vector<size_t>& indices) {
  const auto records = delta_.Records();
  if (!records.ok()) return records.status();
  for (const RecordRef& record : *records) {
    items_.push_back(
        {.tensor = indices[record.tensor], .segment = record.segment, .record = record});
  }
  const auto place = [](const Item& item) { return std::pair(item.tensor, item.segment); };
  const auto before = [&](const Item& a, const Item& b) { return place(a) < place(b); };
  std::sort(items_.begin(), items_.end(), before);
  if (blocks_ == nullptr) return absl::OkStatus();
  const auto& tensors = base_.tensors();
  known_ = blocks_->tensors.size() == tensors.size();
  if (known_) return absl::OkStatus();
  blocks_->tensors.assign(tensors.size(), {});
  std::vector<Item> rest;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const int64_t block = BlockElements(tensors[tensor]), elements = tensors[tensor].elements();
    blocks_->tensors[tensor].resize(static_cast<size_t>((elements + block - 1) / block));
    for (int64_t segment = 0; segment * kSegmentElements < elements; ++segment) {
      Item item{.tensor = tensor, .segment = segment};
      if (!std::binary_search(items_.begin(), items_.end(), item, before))
        rest.push_back(std::move(item));
    }
  }
  const auto middle =
      items_.insert(items_.end(), std::move_iterator(rest.begin()), std::move_iterator(rest.end()));
  std::inplace_merge(items_.begin(), middle, items_.end(), before);
  return absl::OkStatus();
}

void Decoder::Work() {
  Scratch scratch;
  for (size_t i; (i = next_.fetch_add(1)) < items_.size();) {
    const absl::Status status = Do(items_[i], scratch);
    if (status.ok()) continue;
    const std::lock_guard lock(mutex_);
    if (i < failed_) failure_ = status;
    failed_ = std::min(failed_, i);
    next_ = items_.size();
  }
}

absl::Status Decoder::Do(Item& item, Scratch& scratch) const {
  const TensorInfo& tensor = base_.tensors()[item.tensor];
  const int64_t first = item.segment * kSegmentElements;
  const int64_t count = SegmentSize(tensor, item.segment);
  const void* elements = base_.InMemory(item.tensor, first);
  if (elements == nullptr) {
    const auto bytes = static_cast<size_t>(count * SizeOf(tensor.kind()));
    if (scratch.segment.size() < bytes) scratch.segment.resize(bytes);
    auto status = base_.Read(item.tensor, first, count, scratch.segment.data());
    if (!status.ok()) return status;
    elements = scratch.segment.data();
  }
  if (item.record) {
    const auto record = delta_.Read(*item.record);
    if (!record.ok()) return record.status();
    const auto status =
        DecodeSegment(tensor.kind(), elements, count, *record, item.edits, item.found);
    if (!status.ok()) return InTensor(tensor, item.segment, status);
  }
  if (blocks_ != nullptr) HashBlocks(item, elements, count, scratch);
  return absl::OkStatus();
}

// Those that lie in the segment as a whole.
void Decoder::HashBlocks(const Item& item, const void* elements, int64_t count,
                         Scratch& scratch) const {
  const TensorInfo& tensor = base_.tensors()[item.tensor];
  const auto size = static_cast<size_t>(SizeOf(tensor.kind()));
  const int64_t first = item.segment * kSegmentElements, block = BlockElements(tensor);
  auto edit = item.edits.begin();
  const auto skip_to = [&](int64_t position) {
    while (edit != item.edits.end() && edit->position < position) ++edit;
    return edit;
  };
  for (int64_t index = (first + block - 1) / block; index * block < tensor.elements(); ++index) {
    const int64_t begin = index * block - first;
    const int64_t end = std::min(index * block + block, tensor.elements()) - first;
    if (end > count) break;
    const auto changed = skip_to(begin), changed_end = skip_to(end);
    if (known_ && changed == changed_end) continue;
    const char* from = static_cast<const char*>(elements) + static_cast<size_t>(begin) * size;
    if (changed != changed_end) {
      scratch.block.assign(from, from + static_cast<size_t>(end - begin) * size);
      for (auto at = changed; at != changed_end; ++at) {
        std::memcpy(scratch.block.data() + static_cast<size_t>(at->position - begin) * size,
                    &at->new_bits, size);
      }
      from = scratch.block.data();
    }
    blocks_->tensors[item.tensor][static_cast<size_t>(index)] =
        scratch.hasher.Hash(from, end - begin, tensor.kind());
  }
}

// Those that lie in two segments.
absl::Status Decoder::HashAcross(size_t tensor, absl::Span<const JournalEntry> entries,
                                 Scratch& scratch) const {
  const TensorInfo& info = base_.tensors()[tensor];
  const auto size = static_cast<size_t>(SizeOf(info.kind()));
  const int64_t block = BlockElements(info);
  for (int64_t cut = kSegmentElements; cut < info.elements(); cut += kSegmentElements) {
    const int64_t begin = cut / block * block, end = std::min(begin + block, info.elements());
    if (begin == cut) continue;
    const auto less = [](const JournalEntry& entry, int64_t at) { return entry.position < at; };
    const auto changed = std::lower_bound(entries.begin(), entries.end(), begin, less);
    const auto changed_end = std::lower_bound(changed, entries.end(), end, less);
    if (known_ && changed == changed_end) continue;
    scratch.block.resize(static_cast<size_t>(end - begin) * size);
    auto status = base_.Read(tensor, begin, end - begin, scratch.block.data());
    if (!status.ok()) return status;
    for (auto at = changed; at != changed_end; ++at) {
      std::memcpy(scratch.block.data() + static_cast<size_t>(at->position - begin) * size,
                  &at->new_bits, size);
    }
    blocks_->tensors[tensor][static_cast<size_t>(begin / block)] =
        scratch.hasher.Hash(scratch.block.data(), end - begin, info.kind());
  }
  return absl::OkStatus();
}

absl::StatusOr<Journal> Decoder::Join() {
  const auto& expected = delta_.manifest().tensors;
  std::vector<EventCounts> found(expected.size());
  for (const Item& item : items_) {
    if (item.record) found[item.record->tensor] += item.found;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (auto status = CheckCounts(expected[i], found[i]); !status.ok()) return status;
  }
  Journal journal;
  Scratch scratch;
  for (auto item = items_.begin(); item != items_.end();) {
    TensorJournal tensor{item->tensor, {}};
    size_t entries = 0;
    auto end = item;
    for (; end != items_.end() && end->tensor == tensor.tensor; ++end) entries += end->edits.size();
    tensor.entries.reserve(entries);
    for (; item != end; ++item) {
      const int64_t first = item->segment * kSegmentElements;
      for (const Edit& edit : item->edits)
        tensor.entries.push_back({first + edit.position, edit.old_bits, edit.new_bits});
      item->edits = {};
    }
    if (blocks_ != nullptr) {
      auto status = HashAcross(tensor.tensor, tensor.entries, scratch);
      if (!status.ok()) return status;
    }
    if (!tensor.entries.empty()) journal.tensors.push_back(std::move(tensor));
  }
  return journal;
}

absl::StatusOr<Journal> Decoder::Run(const JournalLimits& limits, int threads,
                                     const WorkerScope& worker_scope) {
  const Manifest& manifest = delta_.manifest();
  const auto indices = MatchTensors(manifest, base_);
  if (!indices.ok()) return indices.status();
  const int64_t total = manifest.counts().total();
  if (total > limits.max_bytes / static_cast<int64_t>(sizeof(JournalEntry))) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a journal of ", total, " changes takes more than ", limits.max_bytes, " bytes"));
  }
  if (auto status = ListItems(*indices); !status.ok()) return status;
  std::vector<std::thread> others;
  for (int i = 1; i < threads && static_cast<size_t>(i) < items_.size(); ++i) {
    others.emplace_back([&] {
      const std::shared_ptr<void> scope = worker_scope ? worker_scope() : nullptr;
      Work();
    });
  }
  Work();
  for (std::thread& other : others) other.join();
  if (!failure_.ok()) return failure_;
  return Join();
}

}  // namespace

absl::StatusOr<Journal> DecodeJournal(const DeltaFile& delta, const TensorReader& base,
                                      const JournalLimits& limits, int threads) {
  return Decoder(delta, base, nullptr).Run(limits, threads);
}

absl::StatusOr<Journal> DecodeAndDigest(const DeltaFile& delta, const TensorReader& base,
                                        const JournalLimits& limits, int threads,
                                        BlockDigests& blocks, const WorkerScope& worker_scope) {
  return Decoder(delta, base, &blocks).Run(limits, threads, worker_scope);
}

}  // namespace espalier::updates
