// What strangers, thieves of a key and broken publishers send: each refused with its own reason, and
// the weights as they were.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "engine/updates/bytes.h"
#include "engine/updates/receive.h"
#include "engine/updates/weight_digest.h"
#include "engine/updates/zstd.h"
#include "tests/engine/updates/memory_weights.h"
#include "tests/engine/updates/random_weights.h"

namespace espalier::updates {
namespace {

using testing::Draft;
using ::testing::HasSubstr;
using testing::MakeDraft;
using testing::MakePair;
using testing::MemoryWeights;
using testing::OpenBytes;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kDenied = absl::StatusCode::kPermissionDenied;
constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

const PrivateKey& Publisher() {
  static const auto* const key = new PrivateKey(PrivateKey::Generate().value());
  return *key;
}

// b: 2 tensors; v F32 [4] = {1, 0, 2, −0} and w BF16 [100, 10].
struct World {
  World() {
    const auto pair = MakePair<BFloat16Element>(1000, 21);
    const std::vector<uint32_t> v = {0x3f800000, 0, 0x40000000, 0x80000000};
    base.Add("v", "F32", {4}, v);
    base.Add("w", "BF16", {100, 10}, pair.before);
    target.Add("v", "F32", {4}, std::vector<uint32_t>{0x3f800001, 0x3f000000, 0, 0});
    target.Add("w", "BF16", {100, 10}, pair.after);
    digest = *DigestOf(base);
  }
  MemoryWeights base, target;
  Digest digest;
};

const World& TheWorld() {
  static const auto* const world = new World;
  return *world;
}

ReceivePolicy Policy() {
  ReceivePolicy policy;
  policy.trust = TrustPolicy{{Publisher().Public().value()}, 1};
  policy.model = "digits";
  policy.now_seconds = 1'800'000'100;
  return policy;
}

absl::StatusOr<Journal> ReceiveBytes(std::string bytes, const ReceivePolicy& policy = Policy(),
                                     const MemoryWeights& base = TheWorld().base) {
  const auto delta = OpenBytes(std::move(bytes));
  if (!delta.ok()) return delta.status();
  return Receive(*delta, base, *DigestOf(base), policy);
}

Draft Good() { return MakeDraft(TheWorld().base, TheWorld().target); }
std::string Signed(const Draft& draft) { return draft.Bytes({Publisher()}); }

struct Attack {
  const char* name;
  std::function<std::string()> bytes;
  absl::StatusCode code;
  const char* reason;
};

void PrintTo(const Attack& attack, std::ostream* out) { *out << attack.name; }

class AttackTest : public ::testing::TestWithParam<Attack> {};

TEST_P(AttackTest, IsRefusedWithItsReason) {
  const auto journal = ReceiveBytes(GetParam().bytes());
  ASSERT_FALSE(journal.ok());
  EXPECT_EQ(journal.status().code(), GetParam().code) << journal.status();
  EXPECT_THAT(std::string(journal.status().message()), HasSubstr(GetParam().reason));
  EXPECT_LT(journal.status().message().size(), 1000u);
}

std::string NameOfAttack(const ::testing::TestParamInfo<Attack>& info) { return info.param.name; }

// --- the file -------------------------------------------------------------------------------------

std::string Patched(size_t at, absl::string_view with) {
  std::string bytes = Signed(Good());
  return bytes.replace(at, with.size(), std::string(with));
}

std::string Sized(uint32_t manifest_bytes) {
  ByteWriter size;
  size.LittleEndian(manifest_bytes, 4);
  return Patched(10, size.bytes());
}

// The body with one bit turned, after signing.
std::string Turned(bool in_body) {
  std::string bytes = Signed(Good());
  const size_t at = in_body ? bytes.size() - 3 : 22;
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  return bytes;
}

std::string WithSignaturesOf(const Draft& of, const Draft& on) {
  const std::string other = Signed(of), own = on.Bytes();
  const size_t other_head = other.size() - of.body.size(), own_head = own.size() - on.body.size();
  return own.substr(0, own_head - 1) + other.substr(other_head - 81, 81) + on.body;
}

Draft Later() {
  Draft draft = Good();
  draft.manifest.sequence = 18;
  return draft;
}

INSTANTIATE_TEST_SUITE_P(
    File, AttackTest,
    ::testing::Values(
        Attack{"Nothing", [] { return std::string(); }, kInvalid, "is no delta"},
        Attack{"SomethingElse", [] { return std::string(500, 'x'); }, kInvalid, "is no delta"},
        Attack{"LineEndsChangedInTransit", [] { return Patched(5, "\n\n\n"); }, kInvalid,
               "is no delta"},
        Attack{"NewerFormat", [] { return Patched(8, std::string("\2\0", 2)); },
               absl::StatusCode::kUnimplemented, "has format version 2, this build reads 1"},
        Attack{"FormatZero", [] { return Patched(8, std::string("\0\0", 2)); }, kInvalid,
               "format version 0"},
        Attack{"ManifestAboveItsCap", [] { return Sized(0xffffffff); }, kInvalid,
               "expected at most"},
        Attack{"ManifestPastTheEnd", [] { return Sized(1 << 20); }, kInvalid,
               "ends inside the manifest"},
        Attack{"ManifestCutShort", [] { return Sized(100); }, kInvalid, "expected"},
        Attack{"TooManySignatures",
               [] {
                 const Draft draft = Good();
                 std::string bytes = draft.Bytes();
                 bytes[bytes.size() - draft.body.size() - 1] = '\x41';
                 return bytes;
               },
               kInvalid, "65 signatures, expected at most 64"},
        Attack{"OneKeyIdTwice",
               [] {
                 return Good().Bytes({Publisher(), Publisher()});
               },
               kInvalid, "two signatures by key"},
        Attack{"BodyCutShort",
               [] {
                 std::string bytes = Signed(Good());
                 bytes.pop_back();
                 return bytes;
               },
               kInvalid, "has a body of"},
        Attack{"BytesBehindTheEnd", [] { return Signed(Good()) + "x"; }, kInvalid, "has a body of"},
        Attack{"TwoDeltasInOneFile", [] { return Signed(Good()) + Signed(Good()); }, kInvalid,
               "has a body of"},
        Attack{"BodyChangedInTransit", [] { return Turned(true); }, kInvalid, "damaged or changed"},
        Attack{"ManifestChangedInTransit", [] { return Turned(false); }, kDenied, "is wrong"}),
    NameOfAttack);

INSTANTIATE_TEST_SUITE_P(
    Signature, AttackTest,
    ::testing::Values(
        Attack{"NotSigned", [] { return Good().Bytes(); }, kDenied, "signed by 0 of the 1"},
        Attack{"SignedByAStranger", [] { return Good().Bytes({PrivateKey::Generate().value()}); },
               kDenied, "signed by 0 of the 1"},
        Attack{"SignatureOfAnotherDelta", [] { return WithSignaturesOf(Later(), Good()); }, kDenied,
               "is wrong"},
        Attack{"SignatureOfAnEarlierDeltaUnderALaterSequence",
               [] { return WithSignaturesOf(Good(), Later()); }, kDenied, "is wrong"},
        Attack{"SignatureOfZeros",
               [] {
                 std::string bytes = Signed(Good());
                 const size_t at = bytes.size() - Good().body.size() - 64;
                 return bytes.replace(at, 64, std::string(64, '\0'));
               },
               kDenied, "is wrong"}),
    NameOfAttack);

// --- the manifest, by somebody with a key ----------------------------------------------------------

template <typename Change>
std::string Changed(Change change) {
  Draft draft = Good();
  change(draft.manifest);
  return Signed(draft);
}

#define CHANGED(statement) [] { return Changed([](Manifest& m) { statement; }); }

INSTANTIATE_TEST_SUITE_P(
    Manifest, AttackTest,
    ::testing::Values(
        Attack{"Expired", CHANGED(m.expires_seconds = 1'800'000'050), kPrecondition, "expired at"},
        Attack{"MadeInTheFuture", CHANGED(m.created_seconds = 1'900'000'000), kPrecondition,
               "one of the clocks is wrong"},
        Attack{"ForAnotherModel", CHANGED(m.model = "letters"), kPrecondition,
               "is for model 'letters', this is 'digits'"},
        Attack{"ForNoModel", CHANGED(m.model = ""), kInvalid, "model"},
        Attack{"ModelNameWithControlCharacters", CHANGED(m.model = "a\nb"), kInvalid, "model"},
        Attack{"ModelNameTooLong", CHANGED(m.model = std::string(300, 'm')), kInvalid,
               "expected at most 256"},
        Attack{"ForAnotherBase", CHANGED(m.base.weights[0] ^= 1), kPrecondition,
               "is made for weights with the digest"},
        Attack{"PromisesAnotherTarget", CHANGED(m.target.weights[0] ^= 1), kInvalid,
               "its manifest promises"},
        Attack{"ChangesTheSchema", CHANGED(m.schema_changes = true), kPrecondition,
               "not to a model that is being served"},
        Attack{"LiesAboutNonzeros", CHANGED(++m.target_nonzeros), kInvalid, "the events gain"},
        Attack{"LiesAboutChanges", CHANGED(++m.tensors[1].counts.of[0]), kInvalid,
               "changes, the manifest says "},
        Attack{"TensorsNotInOrder", CHANGED(std::swap(m.tensors[0], m.tensors[1])), kInvalid,
               "expected ascending names"},
        Attack{"ATensorTwice", CHANGED(m.tensors[1] = m.tensors[0]), kInvalid,
               "expected ascending names"},
        Attack{"ATensorWithoutAName", CHANGED(m.tensors[0].tensor.name = ""), kInvalid, "tensor"},
        Attack{"ADtypeOfControlCharacters", CHANGED(m.tensors[0].tensor.dtype = "F1\x1b"), kInvalid,
               "dtype"},
        Attack{"ATensorThatTheBaseHasNot", CHANGED(m.tensors[1].tensor.name = "x"), kPrecondition,
               "which the base has not"},
        Attack{"ATensorOfAnotherDtype", CHANGED(m.tensors[1].tensor.dtype = "F16"), kPrecondition,
               "the base has w BF16"},
        Attack{"ATensorOfAnotherShape",
               CHANGED((m.tensors[1].tensor.dims = std::vector<int64_t>{10, 100})), kPrecondition,
               "the base has w BF16 [100, 10]"},
        Attack{"ATensorWhoseBytesAreNotItsDims", CHANGED(m.tensors[0].tensor.bytes = 20), kInvalid,
               "which is not what its dims say"},
        Attack{"DimsWhoseProductOverflows",
               CHANGED((m.tensors[0].tensor.dims = std::vector<int64_t>(3, int64_t{1} << 40))),
               kInvalid, "which is not what its dims say"},
        Attack{"TooManyDims", CHANGED((m.tensors[0].tensor.dims = std::vector<int64_t>(33, 1))),
               kInvalid, "rank of a tensor"},
        Attack{"MoreEventsThanElements", CHANGED(m.tensors[0].counts.of[1] = 5), kInvalid,
               "more events than its 4 elements"},
        Attack{"ATensorWithoutEvents", CHANGED(m.tensors[0].counts = {}), kInvalid, "has no event"},
        Attack {
          "ATensorTheBodyHasNot",
              CHANGED(m.tensors.push_back(m.tensors[0]); m.tensors.back().tensor.name = "z";
                      m.target_nonzeros += m.tensors[0].counts.gained()),
              kPrecondition, "which the base has not"
        },
        Attack {
          "FewerTensorsThanTheBody",
              CHANGED(m.target_nonzeros -= m.tensors[1].counts.gained(); m.tensors.pop_back()),
              kInvalid, "which the manifest has not"
        },
        Attack{"RestWithoutSize", CHANGED(m.rest_bytes = 10), kInvalid,
               "a size without a compressed size"},
        Attack {
          "RestAboveItsCap", CHANGED(m.rest_bytes = kMaxRestBytes + 1; m.rest_frame_bytes = 1),
              kInvalid, "size of the rest"
        },
        Attack {
          "RestLargerThanTheBody", CHANGED(m.rest_bytes = 10; m.rest_frame_bytes = 1 << 20),
              kInvalid, "compressed size of the rest"
        },
        Attack{"BodySmallerThanItIs", CHANGED(m.body_bytes -= 1), kInvalid, "has a body of"},
        Attack{"NegativeTimes", CHANGED(m.created_seconds = -1), kInvalid, "creation time"}),
    NameOfAttack);

// The manifest's bytes, changed before they are signed.
std::string Rewritten(const std::function<void(std::string&)>& change) {
  const Draft draft = Good();
  std::string manifest = SerializeManifest(draft.manifest).value();
  change(manifest);
  ByteWriter head;
  head.Raw(absl::string_view(Signed(draft)).substr(0, 10));
  head.LittleEndian(manifest.size(), 4);
  head.Raw(manifest);
  std::string bytes = head.Take();
  const Signature signature = Publisher().Sign(bytes).value();
  bytes.push_back(1);
  bytes.append(signature.key.begin(), signature.key.end());
  bytes.append(signature.bytes.begin(), signature.bytes.end());
  return bytes + draft.body;
}

constexpr size_t kFlagsAt = 7;  // behind the text "digits"

INSTANTIATE_TEST_SUITE_P(
    ManifestBytes, AttackTest,
    ::testing::Values(
        Attack{"UnknownFlag", [] { return Rewritten([](std::string& m) { m[kFlagsAt] |= 8; }); },
               kInvalid, "flags 8"},
        Attack{"ANumberInALongForm",
               [] {
                 return Rewritten(
                     [](std::string& m) { m.replace(kFlagsAt + 1, 1, std::string("\x83\0", 2)); });
               },
               kInvalid, "not in its shortest form"},
        Attack{"ANumberOfMoreThan64Bits",
               [] {
                 return Rewritten([](std::string& m) {
                   m.replace(kFlagsAt + 1, 1, std::string(9, '\xff') + "\x7f");
                 });
               },
               kInvalid, "more than 64 bits"},
        Attack{"BytesBehindTheTable", [] { return Rewritten([](std::string& m) { m += 'x'; }); },
               kInvalid, "table of tensors"},
        Attack{"ACompressedTableThatIsNone",
               [] { return Rewritten([](std::string& m) { m[kFlagsAt] |= 2; }); }, kInvalid,
               "table of tensors: "},
        Attack{"ATableThatIsABomb",
               [] {
                 return Rewritten([](std::string& m) {
                   const std::string bomb = ZstdCompress(std::string(100 << 20, '\0'), 3).value();
                   m[kFlagsAt] |= 2;
                   m.resize(m.find("\1v\3F32"));
                   m += bomb;
                 });
               },
               kInvalid, "damaged compressed data"}),
    NameOfAttack);

// --- the body, by somebody with a key --------------------------------------------------------------

struct List {
  int64_t count = 0;
  uint8_t mode = 0;
  std::string payload;
};

std::string RecordOf(const std::vector<List>& lists) {
  ByteWriter out;
  for (size_t k = 0; k < kEventKinds; ++k) {
    const List list = k < lists.size() ? lists[k] : List{};
    out.Varint(static_cast<uint64_t>(list.count));
    if (list.count == 0) continue;
    out.Byte(list.mode);
    out.Text(list.payload);
  }
  return out.Take();
}

// A delta of v = {1, 0, 2, −0} alone, whose only record is given, with counts to match.
std::string OnV(const std::vector<List>& lists, const std::string& record = "") {
  Draft draft = Good();
  Manifest& m = draft.manifest;
  m.tensors.resize(1);
  m.tensors[0].counts = {};
  for (size_t k = 0; k < lists.size(); ++k)
    m.tensors[0].counts.of[k] = std::min<int64_t>(lists[k].count, 1);
  if (m.tensors[0].counts.total() == 0) m.tensors[0].counts.of[0] = 1;
  m.target_nonzeros = m.base_nonzeros + m.tensors[0].counts.gained();
  draft.body = SerializeRecord(0, 0, record.empty() ? RecordOf(lists) : record);
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
               kInvalid, "count of the change list"},
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
                 return OnV({{1, 4, "x"}});
               },
               kInvalid, "mode 4 is not known"},
        Attack{"ClassesOfZeros",
               [] {
                 return OnV({kNone, kNone, {1, 3, "xxxx"}});
               },
               kInvalid, "mode 3 is not known"},
        Attack{"APayloadPastTheRecord", [] { return OnV({}, std::string("\1\0\x7f\0\0\0", 6)); },
               kInvalid, "payload of a list"},
        Attack{"BytesBehindTheLists",
               [] {
                 return OnV({}, RecordOf({{1, 0, Raw({{0, kHalf}}, 4)}}) + "x");
               },
               kInvalid, "expected the end"},
        Attack{"AnEmptyRecord", [] { return OnV({}, std::string(4, '\0')); }, kInvalid,
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

// The records of the good delta: the first is v's.
std::string FirstOf(const Draft& draft) {
  const auto delta = OpenBytes(draft.Bytes());
  const auto records = delta->Records();
  return draft.body.substr(0, (*records)[1].offset - delta->head_bytes() - 4);
}

INSTANTIATE_TEST_SUITE_P(
    Record, AttackTest,
    ::testing::Values(
        Attack{"NoRecords", [] { return WithBody([](const Draft&) { return ""; }); }, kInvalid,
               "records of 0 tensors, expected 2"},
        Attack{"ARecordTwice",
               [] { return WithBody([](const Draft& d) { return d.body + d.body; }); }, kInvalid,
               "is not in order"},
        Attack{"ATensorPastTheTable",
               [] {
                 return WithBody(
                     [](const Draft& d) { return d.body + SerializeRecord(2, 0, "x"); });
               },
               kInvalid, "which the manifest has not"},
        Attack{"ASegmentPastTheTensor",
               [] {
                 return WithBody(
                     [](const Draft& d) { return d.body + SerializeRecord(1, 1, "x"); });
               },
               kInvalid, "which the manifest has not"},
        Attack{"ATensorLeftOut",
               [] { return WithBody([](const Draft&) { return SerializeRecord(1, 0, "x"); }); },
               kInvalid, "is not in order"},
        Attack{"ARecordPastTheEnd",
               [] { return WithBody([](const Draft&) { return std::string("\0\0\x7fxx", 5); }); },
               kInvalid, "ends inside a record"},
        Attack{"ARecordAboveItsCap",
               [] {
                 return WithBody(
                     [](const Draft&) { return std::string("\0\0\xff\xff\xff\xff\x0f", 7); });
               },
               kInvalid, "size of a record"},
        Attack{"ARecordThatIsRubbish",
               [] {
                 return WithBody([](const Draft& d) {
                   return SerializeRecord(0, 0, std::string(30, '\x5a')) +
                          d.body.substr(d.body.size() - 0) + SerializeRecord(1, 0, "\x01");
                 });
               },
               kInvalid, "tensor 'v', segment 0: "}),
    NameOfAttack);

// --- every byte -----------------------------------------------------------------------------------

TEST(AttacksTest, TruncationAtEveryByteIsRefused) {
  const std::string bytes = Signed(Good());
  ASSERT_TRUE(ReceiveBytes(bytes).ok()) << ReceiveBytes(bytes).status();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto journal = ReceiveBytes(bytes.substr(0, size));
    ASSERT_FALSE(journal.ok()) << size;
    ASSERT_EQ(journal.status().code(), kInvalid) << size << ": " << journal.status();
  }
}

TEST(AttacksTest, AnyByteChangedIsRefused) {
  const std::string bytes = Signed(Good());
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ (1 << (at % 8)));
    ASSERT_FALSE(ReceiveBytes(changed).ok()) << at;
  }
}

// A thief of the key who writes any body: at worst a journal of edits that keep every rule, which the
// promised digest then refuses. A few bits at the end of range code say nothing.
TEST(AttacksTest, AnyByteOfTheBodyChangedAndSignedIsRefusedOrChangesNothing) {
  const Draft good = Good();
  const auto journal_of_good = ReceiveBytes(Signed(good));
  int harmless = 0;
  for (size_t at = 0; at < good.body.size(); ++at) {
    Draft draft = good;
    draft.body[at] = static_cast<char>(draft.body[at] ^ (1 << (at % 8)));
    draft.Seal();
    const auto journal = ReceiveBytes(Signed(draft));
    if (journal.ok()) {
      ASSERT_EQ(*journal, *journal_of_good) << at;
      ++harmless;
    } else {
      ASSERT_EQ(journal.status().code(), kInvalid) << at << ": " << journal.status();
    }
  }
  EXPECT_LE(harmless, 8);
}

TEST(AttacksTest, ReplayAfterTheUpdateIsRefused) {
  const auto journal = ReceiveBytes(Signed(Good()), Policy(), TheWorld().target);
  EXPECT_EQ(journal.status().code(), kPrecondition);
  EXPECT_THAT(std::string(journal.status().message()), HasSubstr("applied already"));
}

TEST(AttacksTest, RecordsOfTwoDeltasCannotBeMixed) {
  const Draft one = Good(), other = MakeDraft(TheWorld().target, TheWorld().base);
  Draft mixed = one;
  mixed.body = FirstOf(one) + other.body.substr(FirstOf(other).size());
  EXPECT_FALSE(
      ReceiveBytes(one.Bytes({Publisher()}).substr(0, Signed(one).size() - one.body.size()) +
                   mixed.body)
          .ok());
  mixed.Seal();
  EXPECT_FALSE(ReceiveBytes(Signed(mixed)).ok());
}

TEST(AttacksTest, OneOfTwoKeysIsBelowAThresholdOfTwo) {
  const PrivateKey second = PrivateKey::Generate().value();
  ReceivePolicy policy = Policy();
  policy.trust->keys.push_back(second.Public().value());
  policy.trust->threshold = 2;
  EXPECT_EQ(ReceiveBytes(Signed(Good()), policy).status().code(), kDenied);
  EXPECT_TRUE(ReceiveBytes(Good().Bytes({second, Publisher()}), policy).ok());
}

TEST(AttacksTest, UnsignedDeltasNeedAPolicyWithoutTrust) {
  ReceivePolicy policy = Policy();
  policy.trust.reset();
  EXPECT_TRUE(ReceiveBytes(Good().Bytes(), policy).ok());
}

TEST(AttacksTest, AJournalAboveTheLimitIsRefusedBeforeItIsReserved) {
  ReceivePolicy policy = Policy();
  policy.limits.max_bytes = 16;
  EXPECT_EQ(ReceiveBytes(Signed(Good()), policy).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace espalier::updates
