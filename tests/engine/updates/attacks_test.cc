// What strangers, thieves of a key and broken publishers send: each refused with its own reason, and
// the weights as they were. This file: whole files, signatures, manifests; attacks_body_test.cc has the
// rest.
#include "tests/engine/updates/attacks.h"

#include "absl/strings/str_cat.h"
#include "engine/updates/bytes.h"
#include "engine/updates/zstd.h"
#include "tests/engine/updates/first_format.h"

namespace espalier::updates {
namespace {

using testing::Attack;
using testing::AttackTest;
using testing::Draft;
using testing::Good;
using ::testing::HasSubstr;
using testing::kDenied;
using testing::kInvalid;
using testing::kPrecondition;
using testing::MakeDraft;
using testing::NameOfAttack;
using testing::OpenBytes;
using testing::Policy;
using testing::Publisher;
using testing::ReceiveBytes;
using testing::Signed;
using testing::TheWorld;

TEST_P(AttackTest, IsRefusedWithItsReason) { ExpectRefused(GetParam()); }

// --- the file -------------------------------------------------------------------------------------

std::string Patched(size_t at, absl::string_view with) {
  std::string bytes = Signed(Good());
  return bytes.replace(at, with.size(), std::string(with));
}

// The size of the manifest, behind magic and version, is another.
std::string Sized(uint64_t manifest_bytes) {
  const std::string bytes = Signed(Good());
  ByteReader reader(absl::string_view(bytes).substr(10));
  (void)reader.Varint("size", UINT64_MAX);
  ByteWriter out;
  out.Raw(absl::string_view(bytes).substr(0, 10));
  out.Varint(manifest_bytes);
  out.Raw(absl::string_view(bytes).substr(10 + reader.offset()));
  return out.Take();
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
  return own.substr(0, own_head - 1) + other.substr(other_head - 73, 73) + on.body;
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
        Attack{"NewerFormat", [] { return Patched(8, std::string("\3\0", 2)); },
               absl::StatusCode::kUnimplemented, "has format version 3, this build reads 1 to 2"},
        Attack{"FormatZero", [] { return Patched(8, std::string("\0\0", 2)); }, kInvalid,
               "format version 0"},
        Attack{"ManifestAboveItsCap", [] { return Sized(0xffffffff); }, kInvalid,
               "expected at most"},
        Attack{"ManifestPastTheEnd", [] { return Sized(1 << 20); }, kInvalid,
               "ends inside the manifest"},
        Attack{"ManifestCutShort", [] { return Sized(100); }, kInvalid, "the data ends"},
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
        Attack{"BodyChangedInTransit", [] { return Turned(true); }, kDenied,
               "was damaged, or changed"},
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

// Tensors of the largest size, all grown.
void CountTooMany(Manifest& manifest) {
  const int64_t elements = kMaxTensorBytes;
  manifest.tensors.clear();
  for (int i = 0; i < 32769; ++i) {
    manifest.tensors.push_back(
        {{absl::StrCat("t", 100'000 + i), "I8", {elements}, elements}, {{0, 0, elements, 0}}});
  }
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
        Attack{"ForAnotherBase", CHANGED(m.base_weights[0] ^= 1), kPrecondition,
               "is made for weights with the digest"},
        Attack{"PromisesAnotherTarget", CHANGED(m.target_weights[0] ^= 1), kInvalid,
               "its manifest promises"},
        Attack{"ChangesTheSchema", CHANGED(m.schema_changes = true), kPrecondition,
               "not to a model that is being served"},
        Attack {
          "DropsMoreThanThereIs", CHANGED(m.base_nonzeros = 0; m.tensors[1].counts.of[1] = 900),
              kInvalid, "the events gain"
        },
        Attack{"LiesAboutChanges", CHANGED(++m.tensors[1].counts.of[0]), kInvalid,
               "tensor 'w', segment 0: change list: "},
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
        Attack{"ATensorLargerThanAnyMayBe",
               CHANGED((m.tensors[0].tensor.dims = {int64_t{1} << 45})), kInvalid,
               "which is not what its dims say"},
        Attack{"DimsWhoseProductOverflows",
               CHANGED((m.tensors[0].tensor.dims = std::vector<int64_t>(3, int64_t{1} << 40))),
               kInvalid, "which is not what its dims say"},
        Attack{"DimsWhoseBytesOverflow",
               CHANGED((m.tensors[0].tensor.dims = std::vector<int64_t>(2, int64_t{1} << 31))),
               kInvalid, "which is not what its dims say"},
        Attack{"TooManyDims", CHANGED((m.tensors[0].tensor.dims = std::vector<int64_t>(33, 1))),
               kInvalid, "rank of a tensor"},
        Attack{"MoreEventsThanElements", CHANGED(m.tensors[0].counts.of[1] = 5), kInvalid,
               "more events than its 4 elements"},
        Attack{"MoreEventsThanCanBeCounted", CHANGED(CountTooMany(m)), kInvalid,
               "more events than can be counted"},
        Attack{"ATensorWithoutEvents", CHANGED(m.tensors[0].counts = {}), kInvalid, "has no event"},
        Attack {
          "ATensorTheBodyHasNot",
              CHANGED(m.tensors.push_back(m.tensors[0]); m.tensors.back().tensor.name = "z"),
              kPrecondition, "which the base has not"
        },
        Attack{"FewerTensorsThanTheBody", CHANGED(m.tensors.pop_back()), kInvalid,
               "which the manifest has not"},
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
  return draft.Bytes(manifest, {Publisher()});
}

constexpr size_t kFlagsAt = 7;  // behind the text "digits"

INSTANTIATE_TEST_SUITE_P(
    ManifestBytes, AttackTest,
    ::testing::Values(
        Attack{"UnknownFlag", [] { return Rewritten([](std::string& m) { m[kFlagsAt] = 16; }); },
               kInvalid, "flags 16"},
        Attack{"ARestThatIsNone",
               [] {
                 return Rewritten([](std::string& m) {
                   m[kFlagsAt] |= 4;
                   m.insert(m.find("\2v\nw\n"), 2, '\0');
                 });
               },
               kInvalid, "a rest of no bytes"},
        Attack{"AnExpiryThatIsNone",
               [] {
                 return Rewritten([](std::string& m) {
                   m[kFlagsAt] |= 8;
                   m.insert(kFlagsAt + 1 + 3 + 5, 1, '\0');
                 });
               },
               kInvalid, "an expiry time of 0"},
        Attack{"ANameThatDoesNotEnd",
               [] {
                 return Rewritten([](std::string& m) {
                   m.resize(m.find("v\nw\n"));
                   m += "v\nw";
                 });
               },
               kInvalid, "the name of a tensor does not end"},
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
                   m.resize(m.find("v\nw\n"));
                   m += '\x20';  // bytes that it says it holds
                   m += bomb;
                 });
               },
               kInvalid, "damaged compressed data"}),
    NameOfAttack);

// The records of the good delta: the first is v's.
std::string FirstOf(const Draft& draft) {
  const auto delta = OpenBytes(draft.Bytes());
  const auto records = delta->Records();
  const RecordRef& first = records->front();
  return draft.body.substr(0, first.offset + first.bytes - delta->head_bytes());
}

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

// --- format 1 -------------------------------------------------------------------------------------

// Not signed; `change` is done to the manifest before it is written.
absl::StatusOr<Journal> ReceiveFirstFormat(const std::function<void(Manifest&)>& change,
                                           bool damaged = false) {
  Draft draft = Good();
  std::string body = testing::BodyInFirstFormat(draft);
  change(draft.manifest);
  const std::string manifest =
      testing::FirstFormatManifest(draft.manifest, TheWorld().digest, body);
  if (damaged) body.back() = static_cast<char>(body.back() ^ 1);
  ReceivePolicy policy = Policy();
  policy.trust.reset();
  return ReceiveBytes(testing::FirstFormatBytes(manifest, body), policy);
}

TEST(FirstFormatTest, LeadsToWhatTheNewestDoes) {
  const auto journal = ReceiveFirstFormat([](Manifest&) {});
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ(*journal, *ReceiveBytes(Signed(Good())));
}

TEST(FirstFormatTest, WhatItSaysTwiceIsChecked) {
  const auto expect_refused = [](const absl::StatusOr<Journal>& journal, const char* reason) {
    EXPECT_EQ(journal.status().code(), kInvalid) << journal.status();
    EXPECT_THAT(std::string(journal.status().message()), HasSubstr(reason));
  };
  expect_refused(ReceiveFirstFormat([](Manifest&) {}, true), "damaged or changed");
  expect_refused(ReceiveFirstFormat([](Manifest& m) { ++m.target_nonzeros; }), "the events gain");
  expect_refused(ReceiveFirstFormat([](Manifest& m) { ++m.tensors[1].counts.of[0]; }),
                 "changes, the manifest says ");
  expect_refused(ReceiveFirstFormat([](Manifest& m) { m.tensors[0].tensor.bytes = 20; }),
                 "which is not what its dims say");
  expect_refused(ReceiveFirstFormat([](Manifest& m) { std::swap(m.tensors[0], m.tensors[1]); }),
                 "expected ascending names");
  expect_refused(ReceiveFirstFormat([](Manifest& m) {
                   m.target_nonzeros -= m.tensors[1].counts.gained();
                   m.tensors.pop_back();
                 }),
                 "which the manifest has not");
  EXPECT_EQ(ReceiveFirstFormat([](Manifest& m) { m.tensors[1].tensor.name = "x"; }).status().code(),
            kPrecondition);
}

}  // namespace
}  // namespace espalier::updates
