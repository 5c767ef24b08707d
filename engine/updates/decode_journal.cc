// A delta's records as a journal, in order though many threads decode them, and, in the same pass over the base, the digests of the blocks that they change.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/journal.h"
#include "engine/updates/packed_segment.h"
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

// Of all threads' segments.
constexpr int64_t kMaxSegmentBytes = int64_t{64} << 20;
// Entries that a sink is given at a time.
constexpr size_t kPieceEntries = 16 << 10;

class Decoder {
 public:
  // `blocks` null: nothing is hashed.
  Decoder(const DeltaFile& delta, const TensorReader& base, BlockDigests* blocks, JournalSink& sink)
      : delta_(delta), base_(base), blocks_(blocks), sink_(sink) {}

  absl::Status Run(const JournalLimits& limits, int threads,
                   const WorkerScope& worker_scope = nullptr);

 private:
  // The part of a block that lies in one of two segments: its elements as they will be.
  struct Part {
    std::string elements;
    bool changed = false;
  };
  // A segment that is read.
  struct Item {
    size_t tensor = 0;  // of the base
    int64_t segment = 0;
    std::optional<RecordRef> record;  // what changes in it
    std::vector<Edit> edits;
    EventCounts found;
    Part head, tail;  // of the blocks that it shares with the segments before and after
    bool done = false;
  };
  struct Scratch {
    PackedSegment segment;
    std::vector<char> block;
    BlockHasher hasher;
  };

  absl::Status Promise(const std::vector<size_t>& indices, const JournalLimits& limits);
  absl::Status ListItems(const std::vector<size_t>& indices);
  void Work();
  absl::Status Do(Item& item, Scratch& scratch) const;
  void HashBlocks(const Item& item, Scratch& scratch) const;
  // Elements of the item as they will be, and whether any of them changes.
  bool Unpack(const Item& item, const PackedSegment& segment, int64_t begin, int64_t end,
              char* to) const;
  Part PartOf(const Item& item, const PackedSegment& segment, int64_t begin, int64_t end) const;
  // What is done, in its order, unless another thread is at it.
  void HandOver(std::unique_lock<std::mutex>& lock, Scratch& scratch);
  absl::Status HandOver(Item& item, Item* before, const Item* after, Scratch& scratch);
  absl::Status HashAcross(const Item& item, const Part* tail, const Part* head, int64_t cut,
                          Scratch& scratch) const;
  absl::StatusOr<Part> ReadPart(size_t tensor, int64_t begin, int64_t end) const;
  absl::Status CheckAllCounts() const;

  const DeltaFile& delta_;
  const TensorReader& base_;
  BlockDigests* const blocks_;
  JournalSink& sink_;
  bool known_ = true;               // the blocks that nothing changes
  std::vector<Item> items_;         // ascending by tensor and segment
  std::vector<EventCounts> found_;  // of each tensor of the manifest; whoever hands over
  size_t ahead_ = 1;                // segments that may be at work or done and not handed over

  std::mutex mutex_;
  std::condition_variable handed_over_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;        // to be taken
  size_t waited_for_ ABSL_GUARDED_BY(mutex_) = 0;  // to be handed over
  bool handing_over_ ABSL_GUARDED_BY(mutex_) = false;
  size_t failed_ ABSL_GUARDED_BY(mutex_) = SIZE_MAX;  // the first item that did
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  void Fail(size_t item, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (item < failed_) failure_ = status;
    failed_ = std::min(failed_, item);
    handed_over_.notify_all();
  }
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
  std::unique_lock lock(mutex_);
  for (;;) {
    handed_over_.wait(lock, [&] {
      return failed_ != SIZE_MAX || next_ == items_.size() || next_ < waited_for_ + ahead_;
    });
    if (failed_ != SIZE_MAX || next_ == items_.size()) return;
    const size_t taken = next_++;
    lock.unlock();
    const absl::Status status = Do(items_[taken], scratch);
    lock.lock();
    items_[taken].done = status.ok();
    if (!status.ok()) Fail(taken, status);
    HandOver(lock, scratch);
  }
}

void Decoder::HandOver(std::unique_lock<std::mutex>& lock, Scratch& scratch) {
  if (std::exchange(handing_over_, true)) return;
  while (waited_for_ < std::min(failed_, items_.size()) && items_[waited_for_].done) {
    const size_t at = waited_for_;
    lock.unlock();
    const auto neighbour = [&](size_t index) {
      return index < items_.size() ? &items_[index] : nullptr;
    };
    const auto status = HandOver(items_[at], neighbour(at - 1), neighbour(at + 1), scratch);
    lock.lock();
    if (!status.ok()) Fail(at, status);
    ++waited_for_;
    handed_over_.notify_all();
  }
  handing_over_ = false;
}

absl::Status Decoder::Do(Item& item, Scratch& scratch) const {
  const TensorInfo& tensor = base_.tensors()[item.tensor];
  const int64_t first = item.segment * kSegmentElements;
  const int64_t count = SegmentSize(tensor, item.segment);
  scratch.segment.Begin(tensor.kind(), count);
  if (const void* elements = base_.InMemory(item.tensor, first); elements != nullptr) {
    scratch.segment.Append(elements, count);
  } else {
    auto status = base_.ReadWindows(
        item.tensor, first, count,
        [&](int64_t, void* window, int64_t here) { scratch.segment.Append(window, here); });
    if (!status.ok()) return status;
  }
  if (item.record) {
    const auto record = delta_.Read(*item.record);
    if (!record.ok()) return record.status();
    const auto status = DecodeSegment(tensor.kind(), scratch.segment, *record,
                                      delta_.FormOf(item.record->tensor), item.edits, item.found);
    if (!status.ok()) return InTensor(tensor, item.segment, status);
  }
  if (blocks_ == nullptr) return absl::OkStatus();
  HashBlocks(item, scratch);
  const int64_t block = BlockElements(tensor);
  if (first % block != 0)
    item.head = PartOf(item, scratch.segment, 0, std::min(block - first % block, count));
  const int64_t end = first + count, last_block = end / block * block;
  if (end < tensor.elements() && last_block != end)
    item.tail = PartOf(item, scratch.segment, last_block - first, count);
  return absl::OkStatus();
}

bool Decoder::Unpack(const Item& item, const PackedSegment& segment, int64_t begin, int64_t end,
                     char* to) const {
  const auto size = static_cast<size_t>(SizeOf(base_.tensors()[item.tensor].kind()));
  segment.Unpack(begin, end, to);
  const auto less = [](const Edit& edit, int64_t position) { return edit.position < position; };
  const auto changed = std::lower_bound(item.edits.begin(), item.edits.end(), begin, less);
  auto edit = changed;
  for (; edit != item.edits.end() && edit->position < end; ++edit)
    std::memcpy(to + static_cast<size_t>(edit->position - begin) * size, &edit->new_bits, size);
  return edit != changed;
}

Decoder::Part Decoder::PartOf(const Item& item, const PackedSegment& segment, int64_t begin,
                              int64_t end) const {
  Part part;
  part.elements.resize(
      static_cast<size_t>((end - begin) * SizeOf(base_.tensors()[item.tensor].kind())));
  part.changed = Unpack(item, segment, begin, end, part.elements.data());
  return part;
}

// Those that lie in the segment as a whole.
void Decoder::HashBlocks(const Item& item, Scratch& scratch) const {
  const TensorInfo& tensor = base_.tensors()[item.tensor];
  const int64_t first = item.segment * kSegmentElements, block = BlockElements(tensor);
  auto edit = item.edits.begin();
  for (int64_t index = (first + block - 1) / block; index * block < tensor.elements(); ++index) {
    const int64_t begin = index * block - first;
    const int64_t end = std::min(index * block + block, tensor.elements()) - first;
    if (end > scratch.segment.size()) break;
    while (edit != item.edits.end() && edit->position < begin) ++edit;
    if (known_ && (edit == item.edits.end() || edit->position >= end)) continue;
    scratch.block.resize(static_cast<size_t>((end - begin) * SizeOf(tensor.kind())));
    Unpack(item, scratch.segment, begin, end, scratch.block.data());
    blocks_->tensors[item.tensor][static_cast<size_t>(index)] =
        scratch.hasher.Hash(scratch.block.data(), end - begin, tensor.kind());
  }
}

absl::StatusOr<Decoder::Part> Decoder::ReadPart(size_t tensor, int64_t begin, int64_t end) const {
  Part part;
  part.elements.resize(static_cast<size_t>((end - begin) * SizeOf(base_.tensors()[tensor].kind())));
  auto status = base_.Read(tensor, begin, end - begin, part.elements.data());
  if (!status.ok()) return status;
  return part;
}

// The block that a cut between two segments goes through. Null: nothing changes on that side of it.
absl::Status Decoder::HashAcross(const Item& item, const Part* tail, const Part* head, int64_t cut,
                                 Scratch& scratch) const {
  const TensorInfo& info = base_.tensors()[item.tensor];
  const int64_t block = BlockElements(info), begin = cut / block * block;
  if (begin == cut) return absl::OkStatus();
  if (known_ && !(tail != nullptr && tail->changed) && !(head != nullptr && head->changed))
    return absl::OkStatus();
  const auto before = tail != nullptr ? *tail : ReadPart(item.tensor, begin, cut);
  if (!before.ok()) return before.status();
  const auto after = head != nullptr
                         ? *head
                         : ReadPart(item.tensor, cut, std::min(begin + block, info.elements()));
  if (!after.ok()) return after.status();
  scratch.block.assign(before->elements.begin(), before->elements.end());
  scratch.block.insert(scratch.block.end(), after->elements.begin(), after->elements.end());
  blocks_->tensors[item.tensor][static_cast<size_t>(begin / block)] = scratch.hasher.Hash(
      scratch.block.data(), static_cast<int64_t>(scratch.block.size()) / SizeOf(info.kind()),
      info.kind());
  return absl::OkStatus();
}

// `before` and `after`: the items beside it; `before` was handed over.
absl::Status Decoder::HandOver(Item& item, Item* before, const Item* after, Scratch& scratch) {
  const int64_t first = item.segment * kSegmentElements;
  if (blocks_ != nullptr) {
    const auto is = [&](const Item* other, int64_t segment) {
      return other != nullptr && other->tensor == item.tensor && other->segment == segment;
    };
    const int64_t end = first + SegmentSize(base_.tensors()[item.tensor], item.segment);
    absl::Status status;
    if (first > 0) {
      const Part* tail = is(before, item.segment - 1) ? &before->tail : nullptr;
      status = HashAcross(item, tail, &item.head, first, scratch);
    }
    if (status.ok() && end < base_.tensors()[item.tensor].elements() &&
        !is(after, item.segment + 1))
      status = HashAcross(item, &item.tail, nullptr, end, scratch);
    if (!status.ok()) return status;
    if (before != nullptr) before->tail = {};
    item.head = {};
  }
  if (!item.record) return absl::OkStatus();
  EventCounts& found = found_[item.record->tensor];
  found += item.found;
  const std::vector<Edit> edits = std::exchange(item.edits, {});
  // More than the manifest says is refused when all have been counted.
  if (found.total() > delta_.manifest().tensors[item.record->tensor].counts.total())
    return absl::OkStatus();
  std::vector<JournalEntry> entries;
  entries.reserve(std::min(kPieceEntries, edits.size()));
  for (size_t begin = 0; begin < edits.size(); begin += kPieceEntries) {
    entries.clear();
    const size_t end = std::min(begin + kPieceEntries, edits.size());
    for (size_t i = begin; i < end; ++i)
      entries.push_back({first + edits[i].position, edits[i].old_bits, edits[i].new_bits});
    if (auto status = sink_.Append(item.tensor, entries); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Decoder::CheckAllCounts() const {
  for (size_t i = 0; i < found_.size(); ++i) {
    if (auto status = CheckCounts(delta_.manifest().tensors[i], found_[i]); !status.ok())
      return status;
  }
  return absl::OkStatus();
}

absl::Status Decoder::Promise(const std::vector<size_t>& indices, const JournalLimits& limits) {
  const Manifest& manifest = delta_.manifest();
  const int64_t total = manifest.counts().total();
  if (total > limits.max_bytes / static_cast<int64_t>(sizeof(JournalEntry))) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a journal of ", total, " changes takes more than ", limits.max_bytes, " bytes"));
  }
  std::vector<ChangedTensor> tensors;
  for (size_t i = 0; i < indices.size(); ++i) {
    const auto entries = static_cast<uint64_t>(manifest.tensors[i].counts.total());
    if (entries > 0) tensors.push_back({indices[i], entries});
  }
  found_.resize(indices.size());
  return sink_.Begin(tensors);
}

absl::Status Decoder::Run(const JournalLimits& limits, int threads,
                          const WorkerScope& worker_scope) {
  const auto indices = MatchTensors(delta_.manifest(), base_);
  if (!indices.ok()) return indices.status();
  if (auto status = Promise(*indices, limits); !status.ok()) return status;
  if (auto status = ListItems(*indices); !status.ok()) return status;
  int64_t segment_bytes = 1;
  for (const Item& item : items_) {
    const TensorInfo& tensor = base_.tensors()[item.tensor];
    segment_bytes =
        std::max(segment_bytes, SegmentSize(tensor, item.segment) * SizeOf(tensor.kind()));
  }
  const size_t at_once = std::min({items_.size(), static_cast<size_t>(std::max(threads, 1)),
                                   static_cast<size_t>(kMaxSegmentBytes / segment_bytes)});
  ahead_ = at_once + 1;  // one done, while each thread is at work
  std::vector<std::thread> others;
  for (size_t i = 1; i < at_once; ++i) {
    others.emplace_back([&] {
      const std::shared_ptr<void> scope = worker_scope ? worker_scope() : nullptr;
      Work();
    });
  }
  Work();
  for (std::thread& other : others) other.join();
  const std::lock_guard lock(mutex_);
  return failure_.ok() ? CheckAllCounts() : failure_;
}

}  // namespace

absl::StatusOr<Journal> DecodeJournal(const DeltaFile& delta, const TensorReader& base,
                                      const JournalLimits& limits, int threads) {
  JournalCollector collector;
  auto status = Decoder(delta, base, nullptr, collector).Run(limits, threads);
  if (!status.ok()) return status;
  return std::move(collector.journal);
}

absl::Status DecodeAndDigest(const DeltaFile& delta, const TensorReader& base,
                             const JournalLimits& limits, int threads, BlockDigests& blocks,
                             JournalSink& sink, const WorkerScope& worker_scope) {
  return Decoder(delta, base, &blocks, sink).Run(limits, threads, worker_scope);
}

}  // namespace espalier::updates
