// Attacks on records and lists, by somebody who has the publisher's key.
#include <algorithm>

#include "engine/updates/bytes.h"
#include "engine/updates/zstd.h"
#include "tests/engine/updates/attacks.h"

namespace espalier::updates {
namespace {

using testing::Attack;
using testing::AttackTest;
using testing::Draft;
using testing::Good;
using testing::kInvalid;
using testing::NameOfAttack;
using testing::Publisher;
using testing::Signed;

TEST_P(AttackTest, IsRefusedWithItsReason) { ExpectRefused(GetParam()); }

// --- the body, by somebody with a key --------------------------------------------------------------

struct List {
  int64_t count = 0;
  uint8_t mode = 0;  // or its code, with options
  std::string payload;
};

std::string RecordOf(const std::vector<List>& lists) {
  int head = 0;
  for (size_t k = 0; k < lists.size(); ++k) {
    if (lists[k].count == 0) continue;
    if (head == 0) head = lists[k].mode << kEventKinds;
    head |= 1 << k;
  }
  ByteWriter out;
  out.Byte(static_cast<uint8_t>(head));
  for (size_t k = 0; k < lists.size(); ++k) {
    if (lists[k].count == 0) continue;
    if (head % (1 << k) != 0) out.Byte(lists[k].mode);
    if (head % (1 << kEventKinds) >> (k + 1) != 0) out.Varint(lists[k].payload.size());
    out.Raw(lists[k].payload);
  }
  return out.Take();
}

// A delta of v = {1, 0, 2, −0} alone, whose only record is given, with the counts of its lists.
std::string OnV(const std::vector<List>& lists, const std::string& record = "") {
  Draft draft = Good();
  Manifest& m = draft.manifest;
  m.tensors.resize(1);
  m.tensors[0].counts = {};
  for (size_t k = 0; k < lists.size(); ++k) m.tensors[0].counts.of[k] = lists[k].count;
  if (m.tensors[0].counts.total() == 0) m.tensors[0].counts.of[0] = 1;
  draft.body = SerializeRecord({}, {0, 0}, record.empty() ? RecordOf(lists) : record);
  draft.Seal();
  return Signed(draft);
}

std::string Raw(std::initializer_list<std::pair<uint32_t, uint32_t>> events, int value_bytes) {
  ByteWriter out;
  for (const auto& [rank, value] : events) {
    out.LittleEndian(rank, 4);
    out.LittleEndian(value, value_bytes);
  }
  return out.Take();
}

std::string Zstd(const std::string& gaps, const std::string& symbols, uint64_t gap_bytes = 0) {
  ByteWriter out;
  out.Varint(gap_bytes == 0 ? gaps.size() : gap_bytes);
  out.Text(ZstdCompress(gaps, 3).value());
  out.Varint(symbols.size());
  if (!symbols.empty()) out.Text(ZstdCompress(symbols, 3).value());
  return out.Take();
}

// Both non-zeros of v one ULP away from zero.
std::string Payload(Mode mode) {
  const std::vector<uint32_t> before = {0x3f800000, 0, 0x40000000, 0x80000000},
                              after = {0x3f800001, 0, 0x40000001, 0x80000000};
  EventCounts counts;
  const std::string record =
      EncodeSegment(
          ElementKind::kFloat32, before.data(), after.data(), 4, counts,
          {.modes = static_cast<uint8_t>(1 << static_cast<int>(mode)), .counts_are_known = true})
          .value();
  return record.substr(1);  // behind the head
}

// A mixed one with more coded bits than a decoder reads.
std::string Longer(std::string payload) {
  return payload.insert(payload.size() - static_cast<size_t>(payload[0]), 9, 'x');
}

std::string Threshold(uint64_t low, uint64_t width, const std::string& coded) {
  ByteWriter out;
  out.Varint(low);
  out.Varint(width);
  out.Raw(coded);
  return out.Take();
}

const List kNone;
constexpr uint32_t kOne = 0x3f800000, kTwo = 0x40000000, kHalf = 0x3f000000;

INSTANTIATE_TEST_SUITE_P(
    List, AttackTest,
    ::testing::Values(
        Attack{"RanksNotAscending",
               [] {
                 return OnV({{2, 0, Raw({{1, kHalf}, {0, kHalf}}, 4)}});
               },
               kInvalid, "rank 0 after 1, expected ascending"},
        Attack{"ARankTwice",
               [] {
                 return OnV({{2, 0, Raw({{0, kHalf}, {0, kTwo}}, 4)}});
               },
               kInvalid, "rank 0 after 0"},
        Attack{"ARankPastTheNonzeros",
               [] {
                 return OnV({{1, 0, Raw({{2, kHalf}}, 4)}});
               },
               kInvalid, "rank 2, the base has 2 non-zeros"},
        Attack{"ARankPastTheZeros",
               [] {
                 return OnV({kNone, kNone, {1, 0, Raw({{2, kHalf}}, 4)}});
               },
               kInvalid, "rank 2, the base has 2 zeros"},
        Attack{"AHugeRank",
               [] {
                 return OnV({{1, 0, Raw({{0xffffffff, kHalf}}, 4)}});
               },
               kInvalid, "rank 4294967295"},
        Attack{"ACountAboveItsPayload",
               [] {
                 return OnV({{2, 0, Raw({{0, kHalf}}, 4)}});
               },
               kInvalid, "8 bytes, expected 16"},
        Attack{"ACountAboveTheSegment",
               [] {
                 return OnV({{(1 << 22) + 1, 0, ""}});
               },
               kInvalid, "more events than its 4 elements"},
        Attack{"MoreChangesThanNonzeros",
               [] {
                 return OnV({{3, 0, ""}});
               },
               kInvalid, "3 events, the base has 2 non-zeros"},
        Attack{"DropsAtZeros",
               [] {
                 return OnV({{2, 0, ""}, {1, 0, ""}});
               },
               kInvalid, "3 events, the base has 2 non-zeros"},
        Attack{"GrowsAtNonzeros",
               [] {
                 return OnV({kNone, kNone, {3, 0, ""}});
               },
               kInvalid, "3 events, the base has 2 zeros"},
        Attack{"FlipsAtNonzeros",
               [] {
                 return OnV({kNone, kNone, kNone, {3, 0, ""}});
               },
               kInvalid, "3 events, the base has 2 zeros"},
        Attack{"AChangeToZero",
               [] {
                 return OnV({{1, 0, Raw({{0, 0}}, 4)}});
               },
               kInvalid, "to 0x0, which is no change"},
        Attack{"AChangeToMinusZero",
               [] {
                 return OnV({{1, 0, Raw({{0, 0x80000000}}, 4)}});
               },
               kInvalid, "which is no change"},
        Attack{"AChangeToItself",
               [] {
                 return OnV({{1, 0, Raw({{0, kOne}}, 4)}});
               },
               kInvalid, "which is no change"},
        Attack{"AGrowToZero",
               [] {
                 return OnV({kNone, kNone, {1, 0, Raw({{0, 0x80000000}}, 4)}});
               },
               kInvalid, "which is no grow"},
        Attack{"ADropToNoZero",
               [] {
                 return OnV({kNone, {1, 0, Raw({{0, 2}}, 1)}});
               },
               kInvalid, "sign 2, expected 0 or 1"},
        Attack{"AnElementChangedAndDropped",
               [] {
                 return OnV({{1, 0, Raw({{0, kHalf}}, 4)}, {1, 0, Raw({{0, 0}}, 1)}});
               },
               kInvalid, "element 0 has two events"},
        Attack{"AnElementGrownAndFlipped",
               [] {
                 return OnV({kNone, kNone, {1, 0, Raw({{0, kHalf}}, 4)}, {1, 0, Raw({{0, 0}}, 0)}});
               },
               kInvalid, "element 1 has two events"},
        Attack{"AnUnknownMode",
               [] {
                 return OnV({{1, 15, "x"}});
               },
               kInvalid, "mode 15 is not known"},
        Attack{"DropsInAModeForChanges",
               [] {
                 return OnV({kNone, {1, 4, "x"}});
               },
               kInvalid, "mode 4 is not known"},
        Attack{"ChangesInTheModeForDrops",
               [] {
                 return OnV({{1, 14, "xx"}});
               },
               kInvalid, "mode 7 is not known"},
        Attack{"ClassesOfZeros",
               [] {
                 return OnV({kNone, kNone, {1, 3, "xxxx"}});
               },
               kInvalid, "mode 3 is not known"},
        Attack{"APayloadPastTheRecord", [] { return OnV({}, std::string("\3\x7f\0\0\0", 5)); },
               kInvalid, "payload of a list"},
        Attack{"BytesBehindTheLists",
               [] {
                 return OnV({}, RecordOf({{1, 0, Raw({{0, kHalf}}, 4)}}) + "x");
               },
               kInvalid, "9 bytes, expected 8"},
        Attack{"BytesBehindNoLists", [] { return OnV({}, std::string("\0x", 2)); }, kInvalid,
               "expected the end"},
        Attack{"AModeWithoutAList", [] { return OnV({}, "\x10"); }, kInvalid,
               "a mode, but no list"},
        Attack{"AListThatIsEmpty", [] { return OnV({}, "\2"); }, kInvalid, "there, but empty"},
        Attack{"AnEmptyRecord", [] { return OnV({}, std::string(1, '\0')); }, kInvalid,
               "the manifest says 1"},
        Attack{"GapsThatAreABomb",
               [] {
                 return OnV({{1, 1, Zstd(std::string(64 << 20, '\0'), "\2", 1)}});
               },
               kInvalid, "damaged compressed data"},
        Attack{"GapsThatAnnounceTooMuch",
               [] {
                 return OnV({{1, 1, Zstd(std::string(64 << 20, '\0'), "\2")}});
               },
               kInvalid, "expected at most 4"},
        Attack{"AFrameThatIsNone",
               [] {
                 return OnV({{1, 1, std::string("\1\3abc\1\3abc", 10)}});
               },
               kInvalid, "change list: "},
        Attack{"AGapThatOverflows",
               [] {
                 return OnV({{1, 1, Zstd("\xff\xff\xff\x7f", "\2")}});
               },
               kInvalid, "gap at byte"},
        Attack{"TwoGapsThatLeadOut",
               [] {
                 return OnV({{2, 1, Zstd(std::string("\0\1", 2), "\2\2")}});
               },
               kInvalid, "rank 2, the base has 2"},
        Attack{"MoreSymbolsThanEvents",
               [] {
                 return OnV({{1, 1, Zstd(std::string(1, '\0'), "\2\2")}});
               },
               kInvalid, "symbols"},
        Attack{"AStepOfZero",
               [] {
                 return OnV({{1, 1, Zstd(std::string(1, '\0'), std::string(1, '\0'))}});
               },
               kInvalid, "which is no change"},
        Attack{"AStepOutOfTheType",
               [] {
                 return OnV({{1, 1, Zstd(std::string(1, '\0'), "\xfe\xff\xff\xff\x0f")}});
               },
               kInvalid, "leave the range"},
        Attack{"RangeCodeThatGoesOn",
               [] {
                 return OnV({{1, 2, std::string(100, '\0')}});
               },
               kInvalid, "goes on after"},
        Attack{"MixedCodeAboveItsPayload",
               [] {
                 return OnV({{1, 4, "\x64x"}});
               },
               kInvalid, "other bits"},
        Attack{"MixedCodeWithoutItsEvents",
               [] {
                 return OnV({{1, 4, std::string("\0", 1)}});
               },
               kInvalid, "holds 0 events, announces 1"},
        Attack{"MixedCodeOfMoreEvents",
               [] {
                 return OnV({{1, 4, Payload(Mode::kMixed)}});
               },
               kInvalid, "more events than the 1"},
        Attack{"MixedCodeThatGoesOn",
               [] {
                 return OnV({{2, 4, Longer(Payload(Mode::kMixed))}});
               },
               kInvalid, "goes on after"},
        Attack{"CountedCodeAboveItsPayload",
               [] {
                 return OnV({{1, 6, "\x64x"}});
               },
               kInvalid, "other bits"},
        Attack{"CountedCodeWithoutItsEvents",
               [] {
                 return OnV({{1, 6, std::string("\0", 1)}});
               },
               kInvalid, "holds 0 events, announces 1"},
        Attack{"CountedCodeOfMoreEvents",
               [] {
                 return OnV({{1, 6, Payload(Mode::kCounted)}});
               },
               kInvalid, "more events than the 1"},
        Attack{"AThresholdAboveAnyMagnitude",
               [] {
                 return OnV({kNone, {1, 14, Threshold(uint64_t{1} << 33, 0, "")}});
               },
               kInvalid, "least magnitude that stays"},
        Attack{"AThresholdOfMoreDrops",
               [] {
                 return OnV({kNone, {1, 14, Threshold(kTwo + 1, 0, "")}});
               },
               kInvalid, "more events than the 1"},
        Attack{"AThresholdOfFewerDrops",
               [] {
                 return OnV({kNone, {1, 14, Threshold(1, 0, "")}});
               },
               kInvalid, "holds 0 events, announces 1"},
        Attack{"AThresholdThatEndsEarly",
               [] {
                 return OnV({kNone, {1, 14, std::string("\1")}});
               },
               kInvalid, "magnitudes that may drop"},
        Attack{"AThresholdThatGoesOn",
               [] {
                 return OnV({kNone, {2, 14, Threshold(kTwo + 1, 0, std::string(100, '\0'))}});
               },
               kInvalid, "goes on after"},
        Attack{"ClassCodeWithoutItsEvents",
               [] {
                 return OnV({{2, 3, std::string(40, '\xff')}});
               },
               kInvalid, "change list: "}),
    NameOfAttack);

std::string WithBody(const std::function<std::string(const Draft&)>& body) {
  Draft draft = Good();
  draft.body = body(draft);
  draft.Seal();
  return Signed(draft);
}

INSTANTIATE_TEST_SUITE_P(
    Record, AttackTest,
    ::testing::Values(
        Attack{"NoRecords", [] { return WithBody([](const Draft&) { return ""; }); }, kInvalid,
               "records of 0 tensors, expected 2"},
        Attack{"RecordsTwice",
               [] { return WithBody([](const Draft& d) { return d.body + d.body; }); }, kInvalid,
               "which the manifest has not"},
        Attack{"ATensorPastTheTable",
               [] {
                 return WithBody([](const Draft& d) {
                   return d.body + SerializeRecord(RecordPlace{1, 0}, {2, 0}, "x");
                 });
               },
               kInvalid, "which the manifest has not"},
        Attack{"ASegmentPastTheTensor",
               [] {
                 return WithBody([](const Draft& d) {
                   return d.body + SerializeRecord(RecordPlace{1, 0}, {1, 1}, "x");
                 });
               },
               kInvalid, "which the manifest has not"},
        Attack{"ATensorLeftOut",
               [] {
                 return WithBody([](const Draft&) { return SerializeRecord({}, {0, 0}, "x"); });
               },
               kInvalid, "records of 1 tensors, expected 2"},
        Attack{"AFirstRecordThatGoesOn",
               [] { return WithBody([](const Draft& d) { return "\1\1" + d.body; }); }, kInvalid,
               "the first record goes on"},
        Attack{
            "APlaceThatNeedsNoTelling",
            [] { return WithBody([](const Draft& d) { return std::string("\1\0", 2) + d.body; }); },
            kInvalid, "told by no flag"},
        Attack{"ARecordPastTheEnd",
               [] { return WithBody([](const Draft&) { return std::string("\x7exx"); }); },
               kInvalid, "ends inside a record"},
        Attack{"ARecordAboveItsCap",
               [] {
                 return WithBody([](const Draft&) { return std::string("\xff\xff\xff\xff\x0f"); });
               },
               kInvalid, "size of a record"},
        Attack{"ARecordThatIsRubbish",
               [] {
                 return WithBody([](const Draft&) {
                   return SerializeRecord({}, {0, 0}, std::string(30, '\x5a')) +
                          SerializeRecord(RecordPlace{0, 0}, {1, 0}, "\x01");
                 });
               },
               kInvalid, "tensor 'v', segment 0: "}),
    NameOfAttack);

}  // namespace
}  // namespace espalier::updates
