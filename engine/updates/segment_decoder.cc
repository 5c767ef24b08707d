#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/updates/bytes.h"
#include "engine/updates/counted_model.h"
#include "engine/updates/event_list.h"
#include "engine/updates/event_models.h"
#include "engine/updates/mixed_model.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/step_model.h"
#include "engine/updates/word_coder.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

struct ListRecord {
  int64_t count = 0;
  Mode mode = Mode::kRaw;
  CountedOptions counted{};  // of kCounted, but in format 1
  absl::string_view payload;
};
using ListRecords = std::array<ListRecord, kEventKinds>;

// In steps: lists of about one length, one after the other, then fit into the same places of the heap.
void Reserve(std::vector<Edit>& edits, int64_t count) {
  constexpr size_t kStep = 4096;
  edits.reserve((static_cast<size_t>(count) + kStep - 1) / kStep * kStep);
}

absl::Status Refused(EventKind kind, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(NameOf(kind), " list: ", problem));
}

absl::Status NotKnown(EventKind kind, int mode) {
  return Refused(kind, absl::StrCat("mode ", mode, " is not known for it"));
}

absl::Status CheckMode(EventKind kind, const ListRecord& list) {
  const bool at_zeros = kind == EventKind::kGrow || kind == EventKind::kFlip;
  const bool fits = IsMixed(list.mode)              ? kind == EventKind::kChange
                    : list.mode == Mode::kThreshold ? kind == EventKind::kDrop
                                                    : !(at_zeros && list.mode == Mode::kClassRange);
  return fits ? absl::OkStatus() : NotKnown(kind, static_cast<int>(list.mode));
}

// Format 1: of every list its count, and unless it is empty its mode and its payload with its size.
absl::Status ReadLists1(FieldReader& fields, ListRecords& lists) {
  for (int k = 0; k < kEventKinds; ++k) {
    const auto kind = static_cast<EventKind>(k);
    ListRecord& list = lists[static_cast<size_t>(k)];
    list.count = fields.Count(absl::StrCat("count of the ", NameOf(kind), " list"),
                              static_cast<uint64_t>(kSegmentElements));
    if (list.count == 0) continue;
    const uint8_t mode = fields.Byte("mode");
    if (mode > static_cast<uint8_t>(Mode::kCounted)) return NotKnown(kind, mode);
    list.mode = static_cast<Mode>(mode);
    list.payload =
        fields.Raw("payload of a list", fields.Varint("payload of a list", fields.reader().left()));
  }
  return fields.status();
}

// Which lists there are, the first one's mode beside it; the last one's payload goes on to the end.
absl::Status ReadLists2(FieldReader& fields, const std::optional<EventCounts>& counts,
                        ListRecords& lists) {
  const uint8_t head = fields.Byte("head of a record");
  const int present = head % (1 << kEventKinds);
  int code = head >> kEventKinds;
  if (fields.ok() && present == 0 && code != 0)
    return absl::InvalidArgumentError("a mode, but no list");
  for (int k = 0; k < kEventKinds; ++k) {
    const auto kind = static_cast<EventKind>(k);
    if ((present >> k & 1) == 0) continue;
    ListRecord& list = lists[static_cast<size_t>(k)];
    if (present % (1 << k) != 0) code = fields.Byte("mode");
    if (!ReadCode(code, list.mode, list.counted)) return NotKnown(kind, code);
    list.count = counts ? counts->of[k]
                        : fields.Count(absl::StrCat("count of the ", NameOf(kind), " list"),
                                       static_cast<uint64_t>(kSegmentElements));
    if (fields.ok() && list.count == 0) return Refused(kind, "it is there, but empty");
    const uint64_t left = fields.reader().left();
    const bool last = present >> (k + 1) == 0;
    const uint64_t size = last ? left : fields.Varint("payload of a list", left);
    list.payload = fields.Raw("payload of a list", size);
  }
  return fields.status();
}

absl::StatusOr<ListRecords> ReadLists(absl::string_view record, const RecordForm& form) {
  ByteReader reader(record);
  FieldReader fields(reader);
  ListRecords lists;
  auto status =
      form.format_version == 1 ? ReadLists1(fields, lists) : ReadLists2(fields, form.counts, lists);
  if (!status.ok()) return status;
  fields.End("a segment's record");
  if (!fields.ok()) return fields.status();
  for (int k = 0; k < kEventKinds; ++k) {
    const ListRecord& list = lists[static_cast<size_t>(k)];
    if (list.count == 0) continue;
    if (status = CheckMode(static_cast<EventKind>(k), list); !status.ok()) return status;
  }
  return lists;
}

// Decodes the lists of one segment into edits that keep every rule of their list.
template <typename Element>
class SegmentDecoder {
 public:
  using Bits = typename Element::Bits;
  SegmentDecoder(const PackedSegment& base, const RecordForm& form)
      : base_(base), form_(form), count_(base.size()), nonzeros_(base.nonzeros()) {}

  absl::Status Decode(const ListRecords& lists, std::vector<Edit>& edits, EventCounts& counts) {
    if (auto status = CheckCounts(lists); !status.ok()) return status;
    const size_t begin = edits.size();
    std::array<std::vector<Edit>, kEventKinds> found;
    if (auto status = WalkClasses(lists, found); !status.ok()) return status;
    for (int k = 0; k < kEventKinds; ++k) {
      const ListRecord& list = lists[static_cast<size_t>(k)];
      counts.of[k] += list.count;
      auto& into = found[static_cast<size_t>(k)];
      if (list.count > 0 && list.mode != Mode::kClassRange) {
        if (auto status = DecodeRanks(static_cast<EventKind>(k), list, into); !status.ok())
          return status;
      }
      const size_t middle = edits.size();
      if (middle == 0) {  // the usual case of one list: nothing is copied
        edits.swap(into);
      } else {
        edits.insert(edits.end(), into.begin(), into.end());
      }
      std::vector<Edit>().swap(into);
      const auto at = [&](size_t index) { return edits.begin() + static_cast<ptrdiff_t>(index); };
      if (middle > begin && middle < edits.size()) {
        std::inplace_merge(at(begin), at(middle), edits.end(),
                           [](const Edit& a, const Edit& b) { return a.position < b.position; });
      }
    }
    // Changes and drops both rank non-zeros, grows and flips both rank zeros.
    for (size_t i = begin + 1; i < edits.size(); ++i) {
      if (edits[i - 1].position == edits[i].position) {
        return absl::InvalidArgumentError(
            absl::StrCat("element ", edits[i].position, " has two events, expected one"));
      }
    }
    return absl::OkStatus();
  }

 private:
  Bits Old(uint32_t position) const { return base_.At<Element>(position); }
  static bool AtZeros(EventKind kind) {
    return kind == EventKind::kGrow || kind == EventKind::kFlip;
  }
  int64_t RanksOf(EventKind kind) const { return AtZeros(kind) ? count_ - nonzeros_ : nonzeros_; }

  absl::Status CheckCounts(const ListRecords& lists) const {
    for (const auto& [first, second] : {std::pair(EventKind::kChange, EventKind::kDrop),
                                        std::pair(EventKind::kGrow, EventKind::kFlip)}) {
      const int64_t events =
          lists[static_cast<size_t>(first)].count + lists[static_cast<size_t>(second)].count;
      if (events > RanksOf(first)) {
        return Refused(
            first, absl::StrCat("with the ", NameOf(second), "s ", events, " events, the base has ",
                                RanksOf(first), AtZeros(first) ? " zeros" : " non-zeros"));
      }
    }
    return absl::OkStatus();
  }

  // --- what each event does, checked --------------------------------------------------------------
  absl::Status Add(EventKind kind, uint32_t position, Bits old_bits, Bits new_bits,
                   std::vector<Edit>& edits) const {
    edits.push_back({position, old_bits, new_bits});
    if (new_bits != old_bits && Element::IsZero(new_bits) == MakesZero(kind))
      return absl::OkStatus();
    return Refused(
        kind, absl::StrCat("element ", position, " would go from 0x", absl::Hex(old_bits), " to 0x",
                           absl::Hex(new_bits), ", which is no ", NameOf(kind)));
  }
  static bool MakesZero(EventKind kind) {
    return kind == EventKind::kDrop || kind == EventKind::kFlip;
  }
  absl::Status AddOrder(uint32_t position, Bits old_bits, int64_t order,
                        std::vector<Edit>& edits) const {
    if (!Element::IsOrder(order)) {
      return Refused(EventKind::kChange, absl::StrCat("element ", position,
                                                      " would leave the range of its type or "
                                                      "become zero"));
    }
    return Add(EventKind::kChange, position, old_bits, Element::FromOrder(order), edits);
  }
  static Bits Flipped(Bits old_bits) { return Element::Zero(!Element::IsNegative(old_bits)); }

  // --- modes in which events are ranked among all non-zeros, or zeros ------------------------------
  absl::Status DecodeRanks(EventKind kind, const ListRecord& list, std::vector<Edit>& edits) {
    if (IsMixed(list.mode)) return DecodeMixed(list, edits);
    if (list.mode == Mode::kThreshold) return DecodeThreshold(list, edits);
    return AtZeros(kind) ? DecodeRanksAt<false>(kind, list, edits)
                         : DecodeRanksAt<true>(kind, list, edits);
  }

  template <bool kSet>
  absl::Status DecodeRanksAt(EventKind kind, const ListRecord& list, std::vector<Edit>& edits) {
    RankWalker<kSet> walker(base_);
    switch (list.mode) {
      case Mode::kRaw:
        return DecodeRaw(kind, list, walker, edits);
      case Mode::kZstd:
        return DecodeZstd(kind, list, walker, edits);
      default:
        return DecodeRange(kind, list, walker, edits);
    }
  }

  absl::Status CheckRank(EventKind kind, int64_t event, int64_t rank, int64_t least) const {
    if (rank >= RanksOf(kind)) {
      return Refused(kind, absl::StrCat("event ", event, " has rank ", rank, ", the base has ",
                                        RanksOf(kind), AtZeros(kind) ? " zeros" : " non-zeros"));
    }
    if (rank < least) {
      return Refused(kind, absl::StrCat("event ", event, " has rank ", rank, " after ", least - 1,
                                        ", expected ascending ranks"));
    }
    return absl::OkStatus();
  }

  template <typename Walker>
  absl::Status DecodeRaw(EventKind kind, const ListRecord& list, Walker& walker,
                         std::vector<Edit>& edits) {
    const bool value = kind == EventKind::kChange || kind == EventKind::kGrow;
    const uint64_t event_bytes = 4 + (value ? sizeof(Bits) : kind == EventKind::kDrop ? 1 : 0);
    if (list.payload.size() != event_bytes * static_cast<uint64_t>(list.count)) {
      return Refused(kind, absl::StrCat(list.payload.size(), " bytes, expected ",
                                        event_bytes * static_cast<uint64_t>(list.count), " for ",
                                        list.count, " events"));
    }
    Reserve(edits, list.count);
    ByteReader reader(list.payload);
    int64_t least = 0;
    for (int64_t i = 0; i < list.count; ++i) {
      const auto rank = static_cast<int64_t>(*reader.LittleEndian("rank", 4));
      if (auto status = CheckRank(kind, i, rank, least); !status.ok()) return status;
      least = rank + 1;
      const auto position = static_cast<uint32_t>(walker.PositionOf(rank));
      const Bits old_bits = Old(position);
      Bits new_bits = 0;
      if (value) {
        new_bits = static_cast<Bits>(*reader.LittleEndian("value", sizeof(Bits)));
      } else if (kind == EventKind::kFlip) {
        new_bits = Flipped(old_bits);
      } else {
        const uint8_t negative = *reader.Byte("sign");
        if (negative > 1)
          return Refused(kind, absl::StrCat("sign ", negative, ", expected 0 or 1"));
        new_bits = Element::Zero(negative);
      }
      if (auto status = Add(kind, position, old_bits, new_bits, edits); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<std::string> Stream(ByteReader& reader, absl::string_view what,
                                            uint64_t most) {
    const auto size = reader.Varint(what, most);
    if (!size.ok()) return size.status();
    if (*size == 0) return std::string();
    const auto frame = reader.Text(what, reader.left());
    if (!frame.ok()) return frame.status();
    return ZstdDecompress(*frame, *size);
  }

  template <typename Walker>
  absl::Status DecodeZstd(EventKind kind, const ListRecord& list, Walker& walker,
                          std::vector<Edit>& edits) {
    ByteReader reader(list.payload);
    const auto count = static_cast<uint64_t>(list.count);
    const auto gap_bytes = Stream(reader, "gaps", 4 * count);  // ranks stay below 2^22
    if (!gap_bytes.ok()) return Refused(kind, gap_bytes.status().message());
    const auto symbol_bytes = Stream(reader, "symbols", 5 * count);  // steps stay below 2^33
    if (!symbol_bytes.ok()) return Refused(kind, symbol_bytes.status().message());
    if (auto status = reader.End("a list"); !status.ok()) return Refused(kind, status.message());
    ByteReader gaps(*gap_bytes), symbols(*symbol_bytes);
    Reserve(edits, list.count);
    int64_t least = 0;
    for (int64_t i = 0; i < list.count; ++i) {
      const auto gap = gaps.Varint("gap", static_cast<uint64_t>(kSegmentElements));
      if (!gap.ok()) return Refused(kind, gap.status().message());
      const int64_t rank = least + static_cast<int64_t>(*gap);
      if (auto status = CheckRank(kind, i, rank, least); !status.ok()) return status;
      least = rank + 1;
      const auto position = static_cast<uint32_t>(walker.PositionOf(rank));
      const Bits old_bits = Old(position);
      if (auto status = ZstdSymbol(kind, position, old_bits, symbols, edits); !status.ok())
        return status;
    }
    if (auto status = gaps.End("gaps"); !status.ok()) return Refused(kind, status.message());
    if (auto status = symbols.End("symbols"); !status.ok()) return Refused(kind, status.message());
    return absl::OkStatus();
  }

  absl::Status ZstdSymbol(EventKind kind, uint32_t position, Bits old_bits, ByteReader& symbols,
                          std::vector<Edit>& edits) const {
    if (kind == EventKind::kFlip) return Add(kind, position, old_bits, Flipped(old_bits), edits);
    if (kind == EventKind::kChange) {
      const auto zigzag = symbols.Varint("step", uint64_t{1} << 34);
      if (!zigzag.ok()) return Refused(kind, zigzag.status().message());
      const int64_t step = static_cast<int64_t>(*zigzag >> 1) ^ -static_cast<int64_t>(*zigzag & 1);
      const int64_t from = Element::OrderOf(old_bits);
      return AddOrder(position, old_bits, from < 0 ? from - step : from + step, edits);
    }
    const auto value = symbols.LittleEndian("value", kind == EventKind::kDrop ? 1 : sizeof(Bits));
    if (!value.ok()) return Refused(kind, value.status().message());
    if (kind == EventKind::kGrow)
      return Add(kind, position, old_bits, static_cast<Bits>(*value), edits);
    if (*value > 1) return Refused(kind, absl::StrCat("sign ", *value, ", expected 0 or 1"));
    return Add(kind, position, old_bits, Element::Zero(*value != 0), edits);
  }

  // --- range coded ---------------------------------------------------------------------------------
  struct Symbols {
    ChangeModel<Element> change;
    DropModel drop;
    std::unique_ptr<GrowModel<Element>> grow;
  };
  absl::Status RangeSymbol(EventKind kind, uint32_t position, Bits old_bits, RangeDecoder& coder,
                           Symbols& models, std::vector<Edit>& edits) const {
    switch (kind) {
      case EventKind::kChange:
        return AddOrder(position, old_bits, models.change.Decode(coder, position, old_bits), edits);
      case EventKind::kDrop:
        return Add(kind, position, old_bits,
                   Element::Zero(models.drop.Decode(coder, Element::IsNegative(old_bits))), edits);
      case EventKind::kGrow:
        if (!models.grow) models.grow = std::make_unique<GrowModel<Element>>();
        return Add(kind, position, old_bits, static_cast<Bits>(models.grow->Decode(coder)), edits);
      case EventKind::kFlip:
        break;
    }
    return Add(kind, position, old_bits, Flipped(old_bits), edits);
  }

  static absl::Status MoreThan(EventKind kind, int64_t announced) {
    return Refused(kind, absl::StrCat("more events than the ", announced, " that it announces"));
  }
  static absl::Status Fewer(EventKind kind, size_t found, int64_t announced) {
    return Refused(kind, absl::StrCat("holds ", found, " events, announces ", announced));
  }
  template <typename Coder>
  static absl::Status CheckFinished(EventKind kind, const Coder& coder) {
    if (coder.finished()) return absl::OkStatus();
    return Refused(kind, coder.overrun() ? "the coded data ends early"
                                         : "the coded data goes on after the last event");
  }

  template <typename Walker>
  absl::Status DecodeRange(EventKind kind, const ListRecord& list, Walker& walker,
                           std::vector<Edit>& edits) {
    RangeDecoder coder(list.payload);
    GapModel gaps;
    Symbols symbols;
    Reserve(edits, list.count);
    int64_t least = 0;
    for (int64_t i = 0; i < list.count; ++i) {
      const int64_t rank = least + static_cast<int64_t>(gaps.Decode(coder));
      if (auto status = CheckRank(kind, i, rank, least); !status.ok()) return status;
      least = rank + 1;
      const auto position = static_cast<uint32_t>(walker.PositionOf(rank));
      const Bits old_bits = Old(position);
      if (auto status = RangeSymbol(kind, position, old_bits, coder, symbols, edits); !status.ok())
        return status;
      if (coder.overrun()) break;
    }
    return CheckFinished(kind, coder);
  }

  absl::Status DecodeThreshold(const ListRecord& list, std::vector<Edit>& edits) {
    constexpr EventKind kKind = EventKind::kDrop;
    constexpr uint64_t kMostMagnitude = uint64_t{1} << 32;
    ByteReader reader(list.payload);
    FieldReader fields(reader);
    const uint64_t low = fields.Varint("least magnitude that stays", kMostMagnitude);
    const uint64_t high = low + fields.Varint("magnitudes that may drop", kMostMagnitude);
    if (!fields.ok()) return Refused(kKind, fields.status().message());
    RangeDecoder coder(*reader.Raw("coded bits", reader.left()));
    ThresholdModel model(low, high);
    DropModel sign;
    const auto count = static_cast<size_t>(list.count);
    Reserve(edits, list.count);
    absl::Status failure;
    base_.VisitNonzeros<Element>(0, count_, [&](uint32_t position, Bits old_bits) {
      const uint64_t magnitude = MagnitudeOf<Element>(old_bits);
      if (magnitude >= high) return true;
      if (magnitude >= low && !coder.Bit(model.Between(magnitude))) return true;
      if (edits.size() == count || coder.overrun()) {
        failure = MoreThan(kKind, list.count);
      } else {
        failure = Add(kKind, position, old_bits,
                      Element::Zero(sign.Decode(coder, Element::IsNegative(old_bits))), edits);
      }
      return failure.ok();
    });
    if (!failure.ok()) return failure;
    if (edits.size() != count) return Fewer(kKind, edits.size(), list.count);
    return CheckFinished(kKind, coder);
  }

  // What a mixed list says before its bits.
  struct MixedForm {
    int64_t width = 0;
    CountedOptions options;
    absl::string_view coded, raw;
  };
  absl::StatusOr<MixedForm> ReadMixed(const ListRecord& list) const {
    ByteReader reader(list.payload);
    FieldReader fields(reader);
    MixedForm mixed{.width = RowWidth(form_.row_elements, count_), .options = list.counted};
    if (list.mode != Mode::kCounted) mixed.options.repeats = list.mode == Mode::kMixedRepeats;
    if (form_.format_version == 1) {
      mixed.width = fields.Count("width of a row", static_cast<uint64_t>(count_));
      if (fields.ok() && mixed.width == 0) fields.Fail("rows of no elements");
      if (list.mode == Mode::kCounted) {
        mixed.options =
            CountedOptions::FromBits(fields.Varint("options", CountedOptions::kMostBits));
      }
      mixed.coded = fields.Raw("coded bits", fields.Varint("coded bits", reader.left()));
      mixed.raw = fields.Raw("other bits", reader.left());
    } else {
      const uint64_t raw_bytes = fields.Varint("other bits", reader.left());
      // Of what is left behind that number.
      mixed.coded =
          fields.Raw("coded bits", reader.left() - std::min<uint64_t>(raw_bytes, reader.left()));
      mixed.raw = fields.Raw("other bits", raw_bytes);
    }
    if (!fields.ok()) return Refused(EventKind::kChange, fields.status().message());
    return mixed;
  }

  absl::Status DecodeMixed(const ListRecord& list, std::vector<Edit>& edits) {
    const auto mixed = ReadMixed(list);
    if (!mixed.ok()) return mixed.status();
    WordDecoder coder(mixed->coded, mixed->raw);
    const auto columns = static_cast<uint32_t>(mixed->width);
    const auto steps = std::make_unique<StepModel<Element>>(columns, mixed->options.repeats);
    if (list.mode == Mode::kCounted) {
      const auto changes = std::make_unique<CountedChanges<Element>>(columns, mixed->options);
      return DecodeRows(columns, *changes, *steps, coder, list.count, edits);
    }
    const auto changes = std::make_unique<MixedChanges<Element>>(columns);
    return DecodeRows(columns, *changes, *steps, coder, list.count, edits);
  }

  // Every non-zero of a row that changed is asked for.
  template <typename Changes>
  absl::Status DecodeRows(uint32_t width, Changes& changes, StepModel<Element>& steps,
                          WordDecoder& coder, int64_t announced, std::vector<Edit>& edits) {
    constexpr EventKind kKind = EventKind::kChange;
    const auto count = static_cast<size_t>(announced);
    Reserve(edits, announced);
    absl::Status failure;
    WordDecoder looking = coder;  // no call is told where it is, so that it stays in registers
    for (int64_t begin = 0; begin < count_; begin += width) {
      if (!changes.RowChanges(looking, false)) continue;
      const int64_t end = std::min(begin + width, count_);
      const bool all =
          base_.VisitNonzeros<Element>(begin, end, [&](uint32_t position, Bits old_bits) {
            const auto column = static_cast<uint32_t>(position - begin);
            if (!changes.Changes(looking, column, old_bits, false)) return true;
            coder = looking;
            if (edits.size() == count || coder.overrun()) {
              failure = MoreThan(kKind, announced);
              return false;
            }
            const int64_t step = steps.Step(coder, column, position, old_bits, 0);
            failure = AddOrder(position, old_bits, Element::OrderOf(old_bits) + step, edits);
            looking = coder;
            return failure.ok();
          });
      if (!all) return failure;
    }
    if (edits.size() != count) return Fewer(kKind, edits.size(), announced);
    return CheckFinished(kKind, looking);
  }

  // One list in mode kClassRange: for each class the elements left before its next event.
  struct ClassStream {
    EventKind kind;
    int64_t count;
    RangeDecoder coder;
    std::vector<Edit>* edits;
    // 0: the next element of the class is an event, or opens the class.
    std::array<uint32_t, kMaxClasses> left{};
    std::array<std::unique_ptr<GapModel>, kMaxClasses> models{};
    Symbols symbols{};

    void ReadGap(uint32_t element_class) {
      left[element_class] = static_cast<uint32_t>(std::min<uint64_t>(
          models[element_class]->Decode(coder), static_cast<uint64_t>(kSegmentElements)));
    }
  };

  // An element of a class whose `left` is 0.
  absl::Status Arrive(ClassStream& stream, uint32_t position, Bits old_bits) {
    const uint32_t element_class = Element::ClassOf(old_bits);
    if (!stream.models[element_class]) {
      stream.models[element_class] = std::make_unique<GapModel>();
      stream.ReadGap(element_class);
      if (stream.left[element_class] > 0) {
        --stream.left[element_class];
        return absl::OkStatus();
      }
    }
    if (static_cast<int64_t>(stream.edits->size()) == stream.count || stream.coder.overrun()) {
      return MoreThan(stream.kind, stream.count);
    }
    if (auto status = RangeSymbol(stream.kind, position, old_bits, stream.coder, stream.symbols,
                                  *stream.edits);
        !status.ok()) {
      return status;
    }
    stream.ReadGap(element_class);
    return absl::OkStatus();
  }

  // Every non-zero is looked at here, so that this loop is what decoding costs beside its events.
  template <size_t kStreams>
  absl::Status Walk(const std::array<ClassStream*, kStreams>& streams) {
    absl::Status failure;
    base_.VisitNonzeros<Element>(0, count_, [&](uint32_t position, Bits old_bits) {
      const uint32_t element_class = Element::ClassOf(old_bits);
      for (ClassStream* stream : streams) {
        if (stream->left[element_class] != 0) {
          --stream->left[element_class];
        } else if (failure = Arrive(*stream, position, old_bits); !failure.ok()) {
          return false;
        }
      }
      return true;
    });
    if (!failure.ok()) return failure;
    for (ClassStream* stream : streams) {
      if (auto status = CheckEnd(*stream); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  static absl::Status CheckEnd(const ClassStream& stream) {
    if (static_cast<int64_t>(stream.edits->size()) != stream.count)
      return Fewer(stream.kind, stream.edits->size(), stream.count);
    // The last gap of a class ends where the class does.
    if (std::any_of(stream.left.begin(), stream.left.end(), [](uint32_t n) { return n != 0; })) {
      return Refused(stream.kind, "an event lies past the last non-zero of its class");
    }
    return CheckFinished(stream.kind, stream.coder);
  }

  absl::Status WalkClasses(const ListRecords& lists,
                           std::array<std::vector<Edit>, kEventKinds>& found) {
    std::vector<std::unique_ptr<ClassStream>> streams;
    for (const EventKind kind : {EventKind::kChange, EventKind::kDrop}) {
      const ListRecord& list = lists[static_cast<size_t>(kind)];
      if (list.count == 0 || list.mode != Mode::kClassRange) continue;
      auto& edits = found[static_cast<size_t>(kind)];
      Reserve(edits, list.count);
      streams.push_back(std::unique_ptr<ClassStream>(
          new ClassStream{kind, list.count, RangeDecoder(list.payload), &edits}));
    }
    if (streams.size() == 1) return Walk<1>({streams[0].get()});
    if (streams.size() == 2) return Walk<2>({streams[0].get(), streams[1].get()});
    return absl::OkStatus();
  }

  const PackedSegment& base_;
  const RecordForm form_;
  const int64_t count_;
  const int64_t nonzeros_;
};

}  // namespace

const char* NameOf(EventKind kind) {
  constexpr const char* kNames[] = {"change", "drop", "grow", "flip"};
  return kNames[static_cast<size_t>(kind)];
}

EventCounts& EventCounts::operator+=(const EventCounts& other) {
  for (int k = 0; k < kEventKinds; ++k) of[k] += other.of[k];
  return *this;
}

absl::Status DecodeSegment(ElementKind kind, const PackedSegment& base, absl::string_view record,
                           const RecordForm& form, std::vector<Edit>& edits, EventCounts& counts) {
  const auto lists = ReadLists(record, form);
  if (!lists.ok()) return lists.status();
  return VisitElement(kind, [&](auto element) {
    return SegmentDecoder<decltype(element)>(base, form).Decode(*lists, edits, counts);
  });
}

absl::Status ReadModes(absl::string_view record, const RecordForm& form, int modes[kEventKinds]) {
  const auto lists = ReadLists(record, form);
  if (!lists.ok()) return lists.status();
  for (int k = 0; k < kEventKinds; ++k) {
    const ListRecord& list = (*lists)[static_cast<size_t>(k)];
    modes[k] = list.count == 0 ? -1 : static_cast<int>(list.mode);
  }
  return absl::OkStatus();
}

}  // namespace espalier::updates
