#include "engine/updates/version_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "engine/updates/stored_file.h"
#include "engine/updates/version_graph.h"
#include "tests/engine/updates/golden_file.h"
#include "tests/engine/updates/journals.h"
#include "tests/engine/updates/simulated_file_system.h"
#include "tests/engine/updates/store_world.h"

namespace espalier::updates {
namespace {

using enum UpdateState;
using testing::ExpectWeights;
using testing::GoldenFile;
using ::testing::HasSubstr;
using testing::kNow;
using testing::Loss;
using testing::Publisher;
using testing::Push;
using testing::ReceiveWhole;
using testing::SimulatedFileSystem;
using testing::UnsignedPolicy;

constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

Probation SomeProbation() {
  return {.terms = {.duration = absl::Minutes(10),
                    .canary_share = 0.05,
                    .canary_duration = absl::Milliseconds(1500),
                    .max_error_rate = 0.25,
                    .max_latency_ratio = 1.5,
                    .golden_requests = true},
          .until_micros = 1'800'000'600'000'000,
          .old = {.answered = 1000, .failed = 3, .compute_nanos = 7'000'000'000}};
}

class VersionStoreTest : public ::testing::Test {
 protected:
  VersionStoreTest() { EXPECT_TRUE(EnsureFolder(disk_, "/s").ok()); }
  void SetUp() override { Reopen(); }

  StoreOptions Options() {
    StoreOptions options = options_;
    options.files = &disk_;
    options.now_seconds = [] { return kNow; };
    options.repository = [this](int64_t number) { return publisher_.shared(number); };
    return options;
  }
  absl::StatusOr<std::unique_ptr<VersionStore>> TryOpen(int64_t base = 1) {
    store_.reset();
    return VersionStore::Open("/s", "digits", {base, publisher_.digest(base)}, Options());
  }
  void Reopen() {
    auto store = TryOpen();
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  std::string Bytes(int64_t base, int64_t number, int64_t sequence) {
    publisher_.MakeVersion(base, number);
    return publisher_.MakeDelta(base, number, sequence).Bytes();
  }
  void Stage(int64_t base, int64_t number, int64_t sequence) {
    const auto status = Push(*store_, Bytes(base, number, sequence));
    ASSERT_TRUE(status.ok()) << status;
  }
  void Activate(int64_t base, int64_t number, int64_t sequence,
                std::optional<Probation> probation = std::nullopt) {
    Stage(base, number, sequence);
    const auto status = store_->Activate(number, probation);
    ASSERT_TRUE(status.ok()) << status;
  }
  UpdateState StateOf(int64_t number) {
    const StoreState state = store_->List();
    const VersionRecord* record = state.Find(number);
    EXPECT_NE(record, nullptr) << number;
    return record == nullptr ? kRefused : record->state;
  }
  int64_t Active() { return store_->List().active; }
  AuditRecord LastAudit() { return store_->Audit(1)->at(0); }

  SimulatedFileSystem disk_;
  StoreOptions options_;
  Publisher publisher_;
  std::unique_ptr<VersionStore> store_;
};

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

// --- the state machine -----------------------------------------------------------------------------

TEST(UpdateStateTest, TakesTheStepsOfItsDrawingAndNoOther) {
  const std::vector<std::pair<UpdateState, UpdateState>> edges = {
      {kReceiving, kVerified}, {kReceiving, kRefused},      {kVerified, kStaged},
      {kVerified, kRefused},   {kStaged, kCanary},          {kStaged, kLive},
      {kStaged, kSuperseded},  {kStaged, kRefused},         {kCanary, kStaged},
      {kCanary, kLive},        {kCanary, kSuperseded},      {kCanary, kRefused},
      {kCanary, kQuarantined}, {kLive, kSuperseded},        {kLive, kRolledBack},
      {kLive, kQuarantined},   {kSuperseded, kLive},        {kSuperseded, kQuarantined},
      {kRolledBack, kLive},    {kRolledBack, kQuarantined}, {kRefused, kVerified}};
  size_t allowed = 0;
  for (uint8_t from = 1; from <= kUpdateStates; ++from) {
    for (uint8_t to = 1; to <= kUpdateStates; ++to)
      allowed += MayBecome(UpdateState{from}, UpdateState{to}) ? 1 : 0;
  }
  EXPECT_EQ(allowed, edges.size());
  for (const auto& [from, to] : edges)
    EXPECT_TRUE(MayBecome(from, to)) << NameOf(from) << " to " << NameOf(to);
}

TEST_F(VersionStoreTest, ReceivingBecomesVerifiedStagedAndLive) {
  const std::string bytes = Bytes(1, 2, 10);
  ASSERT_TRUE(ReceiveWhole(*store_, bytes).ok());
  EXPECT_EQ(store_->List().Find(2), nullptr) << "bytes alone take no number";
  auto verified = store_->Verify(Sha256Of(bytes), UnsignedPolicy());
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(StateOf(2), kVerified);
  ASSERT_TRUE(store_->Stage(*std::move(verified)).ok());
  EXPECT_EQ(StateOf(2), kStaged);
  EXPECT_EQ(Active(), 1);
  ASSERT_TRUE(store_->Activate(2).ok());
  EXPECT_EQ(StateOf(2), kLive);
  EXPECT_EQ(StateOf(1), kSuperseded);
  EXPECT_TRUE(store_->Activate(2).ok()) << "it is active already";
  ExpectWeights(*store_, publisher_, 2);
  disk_.Restart(Loss::kUnsynced);
  Reopen();
  EXPECT_EQ(Active(), 2);
  ExpectWeights(*store_, publisher_, 2);
  ExpectWeights(*store_, publisher_, 1);
}

TEST_F(VersionStoreTest, ACanaryGoesLiveEndsOrIsRefused) {
  Stage(1, 2, 10);
  ASSERT_TRUE(store_->StartCanary(2).ok());
  EXPECT_EQ(StateOf(2), kCanary);
  EXPECT_EQ(Active(), 1);
  ASSERT_TRUE(store_->EndCanary(2).ok());
  EXPECT_EQ(StateOf(2), kStaged);
  ASSERT_TRUE(store_->StartCanary(2).ok());
  Reopen();
  EXPECT_EQ(StateOf(2), kStaged) << "a canary ends with the process";
  ASSERT_TRUE(store_->StartCanary(2).ok());
  ASSERT_TRUE(store_->Activate(2).ok());
  EXPECT_EQ(StateOf(2), kLive);
  Stage(2, 3, 11);
  ASSERT_TRUE(store_->StartCanary(3).ok());
  ASSERT_TRUE(store_->Refuse(3, "drift").ok());
  EXPECT_EQ(StateOf(3), kRefused);
  ExpectStatus(store_->Activate(3), kPrecondition, "is REFUSED");
  EXPECT_EQ(Active(), 2);
}

TEST_F(VersionStoreTest, RefusedFromEveryStateLeavesWhatServes) {
  const std::string bytes = Bytes(1, 2, 10);
  ASSERT_TRUE(ReceiveWhole(*store_, bytes).ok());
  ReceivePolicy strict = UnsignedPolicy();
  strict.trust = TrustPolicy{{PrivateKey::Generate()->Public().value()}, 1};
  ExpectStatus(store_->Verify(Sha256Of(bytes), strict).status(),
               absl::StatusCode::kPermissionDenied, "");
  EXPECT_EQ(LastAudit().action, AuditAction::kRefused);
  EXPECT_EQ(store_->List().Find(2), nullptr) << "an unsigned delta takes no number";
  ExpectStatus(store_->Verify(Sha256Of(bytes), UnsignedPolicy()).status(),
               absl::StatusCode::kNotFound, "received");
  ASSERT_TRUE(ReceiveWhole(*store_, bytes).ok());
  auto verified = store_->Verify(Sha256Of(bytes), UnsignedPolicy());
  ASSERT_TRUE(store_->Refuse(2, "no memory").ok());
  ExpectStatus(store_->Stage(*std::move(verified)), kPrecondition, "is REFUSED");
  ASSERT_TRUE(Push(*store_, bytes).ok()) << "the same bytes may be sent again";
  ASSERT_TRUE(store_->Refuse(2, "no time").ok());
  EXPECT_EQ(StateOf(2), kRefused);
  ExpectStatus(store_->Refuse(1, "live"), kPrecondition, "version 1 is LIVE");
  ExpectStatus(store_->Refuse(9, "?"), absl::StatusCode::kNotFound, "version 9");
  EXPECT_EQ(Active(), 1);
  ExpectWeights(*store_, publisher_, 1);
}

TEST_F(VersionStoreTest, ActivatingALaterVersionSupersedesTheOnesOnItsWay) {
  Stage(1, 2, 10);
  Stage(2, 3, 11);
  Stage(3, 4, 12);
  ASSERT_TRUE(store_->StartCanary(3).ok());
  ASSERT_TRUE(store_->Activate(4).ok());
  EXPECT_EQ(StateOf(2), kSuperseded);
  EXPECT_EQ(StateOf(3), kSuperseded);
  ExpectWeights(*store_, publisher_, 4);
  EXPECT_EQ(store_->Rollback("test").value(), 1) << "to what served before";
  EXPECT_EQ(store_->Rollback("test", 3).value(), 3);
  ExpectWeights(*store_, publisher_, 3);
}

TEST_F(VersionStoreTest, RollbackGoesBackStepByStepAndForwardAgain) {
  Activate(1, 2, 10);
  Activate(2, 3, 11);
  EXPECT_EQ(store_->Rollback("worse").value(), 2);
  EXPECT_EQ(StateOf(3), kRolledBack);
  EXPECT_EQ(StateOf(2), kLive);
  EXPECT_EQ(store_->Rollback("still worse").value(), 1);
  ExpectStatus(store_->Rollback("?").status(), kPrecondition, "no earlier one");
  ASSERT_TRUE(store_->Activate(3).ok()) << "forward, though its sequence is old";
  EXPECT_EQ(Active(), 3);
  EXPECT_EQ(store_->Rollback("").value(), 1) << "what it replaced this time";
  ExpectStatus(store_->Rollback("", 9).status(), kPrecondition, "");
  Reopen();
  EXPECT_EQ(Active(), 1);
  ExpectStatus(store_->Activate(9), absl::StatusCode::kNotFound, "version 9");
}

TEST_F(VersionStoreTest, ProbationEndsByConfirmationOrQuarantine) {
  Activate(1, 2, 10, Probation());
  Stage(2, 3, 11);
  ExpectStatus(store_->Activate(3), kPrecondition, "on probation");
  ExpectStatus(store_->Confirm(1), kPrecondition, "version 2 is");
  ASSERT_TRUE(store_->Confirm(2).ok());
  ASSERT_TRUE(store_->Confirm(2).ok());
  EXPECT_FALSE(store_->List().probation);
  ASSERT_TRUE(store_->Activate(3, Probation()).ok());
  ASSERT_TRUE(store_->Quarantine(3, "NaN in the output").ok());
  EXPECT_EQ(StateOf(3), kQuarantined);
  EXPECT_EQ(Active(), 2);
  EXPECT_FALSE(store_->List().probation);
  ExpectStatus(store_->Activate(3), kPrecondition, "QUARANTINED");
  const std::string again = publisher_.MakeDelta(2, 3, 20).Bytes();
  ExpectStatus(Push(*store_, again), kPrecondition, "QUARANTINED: NaN in the output");
  EXPECT_EQ(LastAudit().reason.substr(0, 27), "the delta leads to weights ");
}

TEST_F(VersionStoreTest, TheTermsOfAProbationOutliveRestartsAndEndWithIt) {
  const Probation terms = SomeProbation();
  Activate(1, 2, 10, terms);
  EXPECT_EQ(LastAudit().reason, "on probation until 2027-01-15T08:10:00Z");
  for (int start = 1; start <= 2; ++start) {
    Reopen();
    EXPECT_EQ(store_->List().probation, terms) << start;
  }
  ASSERT_TRUE(store_->Confirm(2).ok());
  Reopen();
  EXPECT_FALSE(store_->List().probation);
  Activate(2, 3, 11, Probation());
  EXPECT_EQ(LastAudit().reason, "on probation until it is confirmed");
  ASSERT_TRUE(store_->Rollback("").ok());
  Reopen();
  EXPECT_FALSE(store_->List().probation) << "of the version that was given up";
}

TEST_F(VersionStoreTest, TermsThatMeanNothingAreNotKept) {
  Stage(1, 2, 10);
  for (const ProbationOptions& terms : std::vector<ProbationOptions>{
           {.duration = absl::Seconds(-1)},
           {.canary_share = 1.5},
           {.max_error_rate = std::numeric_limits<double>::quiet_NaN()},
           {.max_latency_ratio = std::numeric_limits<double>::infinity()}})
    EXPECT_FALSE(store_->Activate(2, Probation{.terms = terms}).ok());
  Reopen();
  EXPECT_EQ(Active(), 1);
}

TEST_F(VersionStoreTest, QuarantineOfAnyThatServedAndOfACanary) {
  Activate(1, 2, 10);
  Activate(2, 3, 11);
  ASSERT_TRUE(store_->Rollback("").ok());
  ASSERT_TRUE(store_->Quarantine(3, "bad").ok());
  EXPECT_EQ(StateOf(3), kQuarantined);
  Activate(2, 4, 12);
  ASSERT_TRUE(store_->Quarantine(2, "bad").ok());
  EXPECT_EQ(StateOf(2), kQuarantined);
  EXPECT_EQ(Active(), 4);
  Stage(4, 5, 13);
  ASSERT_TRUE(store_->StartCanary(5).ok());
  ASSERT_TRUE(store_->Quarantine(5, "bad").ok());
  Stage(4, 6, 14);
  ExpectStatus(store_->Quarantine(6, "never served"), kPrecondition, "cannot become QUARANTINED");
  ExpectStatus(store_->Rollback("", 2).status(), kPrecondition, "QUARANTINED");
  ExpectStatus(Push(*store_, Bytes(3, 7, 20)), kPrecondition, "version 3, which is QUARANTINED");
}

TEST_F(VersionStoreTest, AVersionThatNeverConfirmsIsGivenUpAfterSomeStarts) {
  Activate(1, 2, 10, Probation());
  for (int start = 1; start <= 3; ++start) {
    Reopen();
    EXPECT_EQ(Active(), 2) << start;
  }
  Reopen();
  EXPECT_EQ(Active(), 1);
  EXPECT_EQ(StateOf(2), kQuarantined);
  Reopen();
  EXPECT_EQ(Active(), 1);
}

// --- numbers ---------------------------------------------------------------------------------------

TEST_F(VersionStoreTest, ANumberNamesOneSetOfBytesForEver) {
  Stage(1, 2, 10);
  ExpectStatus(Push(*store_, publisher_.MakeDelta(1, 2, 10).Bytes()),
               absl::StatusCode::kAlreadyExists, "is here already, STAGED");
  publisher_.MakeVersion(1, 99);
  testing::Draft other = publisher_.MakeDelta(1, 99, 20);
  other.manifest.target_version = 2;
  ExpectStatus(Push(*store_, other.Bytes()), kPrecondition, "names one set of bytes for ever");
  other.manifest.target_version = 1;
  ExpectStatus(Push(*store_, other.Bytes()), kPrecondition, "names one set of bytes for ever");
  other.manifest.target_version = 0;
  ExpectStatus(Push(*store_, other.Bytes()), absl::StatusCode::kInvalidArgument, "expected 1 to");
  store_.reset();
  const auto reopened =
      VersionStore::Open("/s", "digits", {1, publisher_.digest(2)}, Options()).status();
  ExpectStatus(reopened, kPrecondition, "names one set of bytes for ever");
}

TEST_F(VersionStoreTest, SequencesNeverGoBackAndAgreeWithRollback) {
  Activate(1, 2, 10);
  ExpectStatus(Push(*store_, Bytes(2, 3, 10)), kPrecondition, "10 was active already");
  ExpectStatus(Push(*store_, Bytes(2, 4, 9)), kPrecondition, "has sequence 9");
  Stage(2, 5, 15);
  ExpectStatus(Push(*store_, Bytes(2, 6, 15)), kPrecondition, "which version 5 has");
  ExpectStatus(Push(*store_, Bytes(5, 7, 14)), kPrecondition, "its base has 15");
  ASSERT_TRUE(store_->Activate(5, Probation()).ok());
  ASSERT_TRUE(store_->Quarantine(5, "breach").ok());
  EXPECT_EQ(Active(), 2);
  EXPECT_EQ(store_->List().accepted_sequence, 15) << "reverting does not open the door again";
  ExpectStatus(Push(*store_, Bytes(2, 8, 12)), kPrecondition, "15 was active already");
  Activate(2, 9, 16);
  Reopen();
  EXPECT_EQ(store_->List().accepted_sequence, 16);
}

TEST_F(VersionStoreTest, AStagedVersionThatWasOvertakenCannotBeActivated) {
  Stage(1, 2, 10);
  Activate(1, 3, 11);
  ExpectStatus(store_->Activate(2), kPrecondition, "11 was active already");
}

TEST_F(VersionStoreTest, ADeltaForWhatIsNotHereIsRefused) {
  const std::string second = Bytes(1, 2, 10), third = Bytes(2, 3, 11);
  ExpectStatus(Push(*store_, third), kPrecondition, "version 2, which is not kept here");
  ASSERT_TRUE(Push(*store_, second).ok());
  auto verified = store_->Verify(Sha256Of(third), UnsignedPolicy());
  EXPECT_TRUE(verified.ok()) << "it came too early, and was kept: " << verified.status();
  testing::Draft wrong = publisher_.MakeDelta(1, 3, 12);
  wrong.manifest.base_version = 2;
  wrong.manifest.target_version = 4;
  ExpectStatus(Push(*store_, wrong.Bytes()), kPrecondition, "is made for weights with the digest");
  testing::Draft model = publisher_.MakeDelta(1, 3, 12);
  model.manifest.model = "letters";
  ExpectStatus(Push(*store_, model.Bytes()), kPrecondition, "letters");
  ExpectStatus(Push(*store_, "no delta"), absl::StatusCode::kInvalidArgument, "is no delta");
}

TEST_F(VersionStoreTest, ANewVersionOfTheRepositoryJoinsTheSameNumbers) {
  Activate(1, 2, 10);
  publisher_.MakeVersion(1, 7);
  auto store = TryOpen(7);
  ASSERT_TRUE(store.ok()) << store.status();
  store_ = *std::move(store);
  EXPECT_EQ(Active(), 2);
  EXPECT_EQ(StateOf(7), kStaged);
  ASSERT_TRUE(store_->Activate(7).ok());
  ExpectWeights(*store_, publisher_, 7);
  ExpectWeights(*store_, publisher_, 2);
  EXPECT_EQ(store_->JournalsBetween(2, 7).status().code(), absl::StatusCode::kNotFound);
  Activate(7, 8, 11);
  ExpectWeights(*store_, publisher_, 8);
  EXPECT_EQ(store_->Rollback("").value(), 7);
  EXPECT_EQ(store_->Rollback("").value(), 2);
}

TEST_F(VersionStoreTest, NamesNeverBecomePathsUnchecked) {
  for (const std::string& name :
       {std::string(""), std::string("."), std::string(".."), std::string("a/b"),
        std::string("../plans"), std::string("a\0b", 3), std::string("a\nb"),
        std::string(256, 'x')}) {
    const auto store = VersionStore::Open("/s", name, {1, publisher_.digest(1)}, Options());
    EXPECT_EQ(store.status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  for (const int64_t number : {int64_t{0}, int64_t{-1}, kMaxVersionNumber + 1}) {
    const auto store = VersionStore::Open("/s", "m", {number, publisher_.digest(1)}, Options());
    EXPECT_EQ(store.status().code(), absl::StatusCode::kInvalidArgument) << number;
  }
  EXPECT_EQ(disk_.List("/s")->size(), 1u) << "models, and in it digits alone";
  EXPECT_EQ(disk_.List("/s/models")->size(), 1u);
}

// --- receiving -------------------------------------------------------------------------------------

TEST_F(VersionStoreTest, ReceivingIsCappedInSizeAndNumber) {
  options_.max_delta_bytes = 1000;
  options_.max_partial_deltas = 2;
  options_.piece_bytes = 1;
  Reopen();
  const auto id = [](int i) { return Sha256Of(absl::StrCat(i)); };
  EXPECT_EQ(store_->BeginReceive(id(0), 1001).status().code(),
            absl::StatusCode::kResourceExhausted);
  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(store_->BeginReceive(id(i), 10).value(), 0u);
    ASSERT_TRUE(store_->Append(id(i), 0, "abc").ok());
  }
  EXPECT_EQ(store_->Append(id(1), 3, "d").code(), absl::StatusCode::kNotFound)
      << "it waited longest";
  EXPECT_EQ(store_->BeginReceive(id(2), 10).value(), 3u);
  Reopen();
  EXPECT_EQ(store_->BeginReceive(id(3), 10).value(), 3u);
  ASSERT_TRUE(store_->AbandonReceive(id(3)).ok());
  EXPECT_EQ(store_->BeginReceive(id(3), 10).value(), 0u);
  EXPECT_FALSE(store_->FinishReceive(id(3)).ok());
  EXPECT_EQ(store_->FinishReceive(id(7)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(VersionStoreTest, VerifiedSurvivesARestartAndIsStagedAfterIt) {
  const std::string bytes = Bytes(1, 2, 10);
  ASSERT_TRUE(ReceiveWhole(*store_, bytes).ok());
  ASSERT_TRUE(store_->Verify(Sha256Of(bytes), UnsignedPolicy()).ok());
  disk_.Restart(Loss::kUnsynced);
  Reopen();
  EXPECT_EQ(StateOf(2), kVerified);
  auto verified = store_->Verify(Sha256Of(bytes), UnsignedPolicy());
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_TRUE(store_->Stage(*std::move(verified)).ok());
}

TEST_F(VersionStoreTest, WaitingVersionsAreCapped) {
  options_.max_waiting_versions = 2;
  Reopen();
  Stage(1, 2, 10);
  Stage(1, 3, 11);
  ExpectStatus(Push(*store_, Bytes(1, 4, 12)), absl::StatusCode::kResourceExhausted, "limit is 2");
}

// --- ways, compaction, audit -----------------------------------------------------------------------

TEST_F(VersionStoreTest, ALateJoinerGetsJournalsAndDeltasFromAnyVersionToAny) {
  Activate(1, 2, 10);
  Activate(2, 3, 11);
  ASSERT_TRUE(store_->Rollback("").ok());
  Activate(2, 4, 12);
  auto chain = store_->JournalsBetween(3, 4);
  ASSERT_TRUE(chain.ok()) << chain.status();
  const auto journal = testing::ReadAll(*std::move(chain));
  ASSERT_TRUE(journal.ok()) << journal.status();
  testing::MemoryWeights weights = publisher_.weights(3);
  weights.Apply(*journal);
  EXPECT_TRUE(weights == publisher_.weights(4));
  EXPECT_EQ(*testing::ReadAll(*store_->JournalsBetween(4, 4)), Journal{});
  const auto deltas = store_->DeltasBetween(1, 4);
  ASSERT_TRUE(deltas.ok()) << deltas.status();
  ASSERT_EQ(deltas->size(), 2u);
  const auto delta = DeltaFile::Open((*deltas)[1].source);
  ASSERT_TRUE(delta.ok()) << delta.status();
  EXPECT_EQ(delta->manifest().target_version, 4);
  EXPECT_TRUE(delta->CheckBody().ok());
  ExpectStatus(store_->DeltasBetween(3, 4).status(), kPrecondition, "was not made from 3");
  EXPECT_EQ(store_->JournalsBetween(1, 9).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(VersionStoreTest, LongChainsAreFoldedIntoAnchorsAndTheDiskStaysBounded) {
  options_.max_chain = options_.max_first_chain = 5;
  options_.keep_versions = 4;
  options_.max_audit_bytes = 4096;
  Reopen();
  uint64_t most = 0;
  for (int64_t number = 2; number <= 120; ++number) {
    Activate(number - 1, number, number);
    const auto status = store_->Compact();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_LE(store_->List().versions.size(), 13u);
    if (number == 40) most = disk_.bytes();
    if (number > 40) {
      ASSERT_LE(disk_.bytes(), most * 3 / 2) << number;
    }
    ExpectWeights(*store_, publisher_, number);
    if (number % 10 == 0) Reopen();
  }
  for (int back = 119; back >= 116; --back) EXPECT_EQ(store_->Rollback("").value(), back);
  ExpectWeights(*store_, publisher_, 116);
  EXPECT_FALSE(store_->JournalsBetween(1, 116).ok());
  ExpectStatus(Push(*store_, Bytes(116, 50, 500)), kPrecondition, "are used up");
  publisher_.MakeVersion(116, 200);
  disk_.Restart(Loss::kUnsynced);
  Reopen();
  Activate(116, 121, 200);
  ExpectWeights(*store_, publisher_, 121);
}

TEST_F(VersionStoreTest, AnAnchorWithLiveChildrenIsNeverDeleted) {
  options_.max_chain = options_.max_first_chain = 3;
  options_.keep_versions = 8;
  Reopen();
  for (int64_t number = 2; number <= 40; ++number) {
    Activate(number - 1, number, number);
    ASSERT_TRUE(store_->Compact().ok());
    const StoreState state = store_->List();
    for (const VersionRecord& record : state.versions)
      ExpectWeights(*store_, publisher_, record.number);
    ASSERT_LE(disk_.List("/s/models/digits/anchors")->size(), 4u);
  }
  // Roll back behind the newest anchor: what is kept still hangs together.
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(store_->Rollback("").ok());
  ASSERT_TRUE(store_->Compact().ok());
  for (const VersionRecord& record : store_->List().versions)
    ExpectWeights(*store_, publisher_, record.number);
}

TEST_F(VersionStoreTest, WithoutTheRepositorysVersionAnAnchorServes) {
  options_.max_chain = options_.max_first_chain = 2;
  Reopen();
  for (int64_t number = 2; number <= 6; ++number) Activate(number - 1, number, number);
  ASSERT_TRUE(store_->Compact().ok());
  store_.reset();
  StoreOptions options = Options();
  options.repository = nullptr;
  const auto store = VersionStore::Open("/s", "digits", {1, publisher_.digest(1)}, options);
  ASSERT_TRUE(store.ok());
  ExpectWeights(**store, publisher_, 2);
}

TEST_F(VersionStoreTest, AChainOfManyBytesGetsAnAnchorThoughItIsShort) {
  options_.max_chain_bytes = 0;
  Reopen();
  Activate(1, 2, 10);
  Activate(2, 3, 11);
  ASSERT_TRUE(store_->Compact().ok());
  EXPECT_GT(store_->List().Find(3)->anchor_bytes, 0u);
  ASSERT_TRUE(store_->Compact().ok()) << "once";
  EXPECT_EQ(disk_.List("/s/models/digits/anchors")->size(), 1u);
  ExpectWeights(*store_, publisher_, 3);
}

TEST_F(VersionStoreTest, TheFirstAnchorComesEarlyAndChainsHaveNoMoreBytesThanTheirs) {
  options_.max_first_chain = 2;
  Reopen();
  int longest = 0;
  for (int64_t number = 2; number <= 40; ++number) {
    Activate(number - 1, number, number);
    ASSERT_TRUE(store_->Compact().ok());
    const StoreState state = store_->List();
    uint64_t bytes = 0;
    int journals = 0;
    const VersionRecord* at = state.Find(number);
    for (; at->anchor_bytes == 0 && !at->repository; at = state.Find(at->parent), ++journals)
      bytes += at->journal_bytes;
    if (at->repository) {
      ASSERT_LT(journals, 2);
    } else {
      ASSERT_LE(bytes, at->anchor_bytes) << number;
    }
    longest = std::max(longest, journals);
    ExpectWeights(*store_, publisher_, number);
  }
  EXPECT_GE(longest, 1) << "an anchor for each version would cost more than it saves";
}

TEST_F(VersionStoreTest, TheBackgroundCompactsAfterActivations) {
  options_.max_chain = options_.max_first_chain = 3;
  options_.compact_in_background = true;
  Reopen();
  for (int64_t number = 2; number <= 30; ++number) Activate(number - 1, number, number);
  for (int i = 0; i < 6000 && disk_.List("/s/models/digits/anchors")->empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(disk_.List("/s/models/digits/anchors")->empty());
  ExpectWeights(*store_, publisher_, 30);
}

TEST_F(VersionStoreTest, TheAuditLogSaysWhoSignedAndWhatServedBeforeAndAfter) {
  const PrivateKey key = PrivateKey::Generate().value();
  publisher_.MakeVersion(1, 2);
  ReceivePolicy policy = UnsignedPolicy();
  policy.trust = TrustPolicy{{key.Public().value()}, 1};
  ASSERT_TRUE(Push(*store_, publisher_.MakeDelta(1, 2, 10).Bytes({key}), policy).ok());
  ASSERT_TRUE(store_->Activate(2, Probation()).ok());
  ASSERT_TRUE(store_->Confirm(2).ok());
  ASSERT_TRUE(store_->Rollback("on a hunch").ok());
  std::vector<AuditAction> actions;
  const auto records = store_->Audit(100);
  for (const AuditRecord& record : *records) actions.push_back(record.action);
  EXPECT_THAT(actions, ::testing::ElementsAre(AuditAction::kBase, AuditAction::kVerified,
                                              AuditAction::kStaged, AuditAction::kActivated,
                                              AuditAction::kConfirmed, AuditAction::kRolledBack));
  const AuditRecord& activated = (*records)[3];
  EXPECT_EQ(activated.number, 2);
  EXPECT_EQ(activated.before, publisher_.digest(1));
  EXPECT_EQ(activated.after, publisher_.digest(2));
  EXPECT_EQ(activated.signers, std::vector<KeyId>{key.Public()->id()});
  EXPECT_EQ(activated.seconds, kNow);
  EXPECT_EQ(records->back().reason, "on a hunch");
  EXPECT_EQ(records->back().after, publisher_.digest(1));
}

TEST_F(VersionStoreTest, ALogThatLostRecordsSaysSo) {
  Activate(1, 2, 10);
  store_.reset();
  disk_.Put("/s/models/digits/audit", "");
  Reopen();
  const AuditRecord first = store_->Audit(9)->at(0);
  EXPECT_EQ(first.action, AuditAction::kLost);
  EXPECT_EQ(first.reason, "records 1 to 3 were lost");
  EXPECT_EQ(LastAudit().action, AuditAction::kActivated) << "which the state still had";
}

// --- the state's file ------------------------------------------------------------------------------

TEST_F(VersionStoreTest, ADamagedMissingOrNewerFileIsToldByName) {
  Activate(1, 2, 10);
  store_.reset();
  const std::string path = "/s/models/digits/state", good = disk_.Contents(path);
  std::string newer = good;
  newer[8] = 3;
  disk_.Put(path, newer);
  ExpectStatus(TryOpen().status(), absl::StatusCode::kUnimplemented,
               "state' has format version 3, this build reads up to 2");
  for (size_t at = 0; at < good.size(); at += 3) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    disk_.Put(path, bad);
    EXPECT_FALSE(TryOpen().ok()) << at;
  }
  disk_.Put(path, good);
  ASSERT_TRUE(TryOpen().ok());
  ASSERT_TRUE(disk_.Unlink("/s/models/digits/journals/2.espj").ok());
  ExpectStatus(TryOpen().status(), absl::StatusCode::kDataLoss,
               "2.espj' is damaged: it is missing; version 2 cannot be served without it");
}

TEST_F(VersionStoreTest, AStateThatIsMissingIsNotThatOfANewStore) {
  Activate(1, 2, 10);
  store_.reset();
  ASSERT_TRUE(disk_.Unlink("/s/models/digits/state").ok());
  ExpectStatus(TryOpen().status(), absl::StatusCode::kDataLoss, "bring it back, or move");
  ExpectStatus(TryOpen().status(), absl::StatusCode::kDataLoss, "versions were kept beside it");
  const std::string folder = "/s/models/digits/";
  EXPECT_TRUE(*disk_.Exists(folder + "journals/2.espj")) << "nothing is deleted";
  for (const char* file : {"journals/2.espj", "deltas/2.espd"}) {
    ASSERT_TRUE(disk_.Unlink(folder + file).ok());
    EXPECT_TRUE(absl::IsDataLoss(TryOpen().status())) << "after " << file;
  }
  ASSERT_TRUE(disk_.Unlink(folder + "audit").ok());
  Reopen();
  EXPECT_EQ(Active(), 1);
}

TEST_F(VersionStoreTest, FilesThatTheActiveVersionDoesNotNeedMayBeLost) {
  Activate(1, 2, 10);
  ASSERT_TRUE(store_->Rollback("no good").ok());
  Activate(1, 3, 11);
  Activate(3, 4, 12);
  Stage(4, 5, 13);
  store_.reset();
  const std::string folder = "/s/models/digits/";
  ASSERT_TRUE(disk_.Unlink(folder + "deltas/3.espd").ok());
  Reopen();
  EXPECT_EQ(store_->lost_files(), "'deltas/3.espd' is damaged: it is missing");
  EXPECT_EQ(LastAudit().action, AuditAction::kLost);
  EXPECT_EQ(LastAudit().reason, store_->lost_files());
  EXPECT_NE(store_->List().Find(3), nullptr) << "its journal is there";
  EXPECT_FALSE(store_->DeltasBetween(1, 4).ok());
  Reopen();
  EXPECT_EQ(store_->lost_files(), "") << "said once";

  store_.reset();
  ASSERT_TRUE(disk_.Unlink(folder + "journals/2.espj").ok());
  disk_.Put(folder + "journals/5.espj", "short");
  Reopen();
  EXPECT_EQ(Active(), 4);
  ExpectWeights(*store_, publisher_, 4);
  ExpectWeights(*store_, publisher_, 3);
  EXPECT_EQ(store_->List().Find(2), nullptr);
  EXPECT_EQ(store_->List().Find(5), nullptr);
  EXPECT_FALSE(Push(*store_, Bytes(4, 5, 20)).ok()) << "its number is used up";
  Activate(4, 6, 21);
  ASSERT_TRUE(store_->Rollback("back").ok());

  store_.reset();
  ASSERT_TRUE(disk_.Unlink(folder + "journals/3.espj").ok());
  ExpectStatus(TryOpen().status(), absl::StatusCode::kDataLoss,
               "version 4 cannot be served without it: bring it back, or move");
}

TEST_F(VersionStoreTest, AFullDiskKeepsNothingFromServing) {
  Activate(1, 2, 10);
  store_.reset();
  disk_.LimitBytes(disk_.bytes());
  Reopen();
  EXPECT_EQ(Active(), 2);
  store_.reset();
  ASSERT_TRUE(disk_.Unlink("/s/models/digits/deltas/2.espd").ok());
  disk_.LimitBytes(0);
  Reopen();
  EXPECT_EQ(Active(), 2);
  EXPECT_NE(store_->lost_files(), "");
  disk_.LimitBytes(UINT64_MAX);
  ASSERT_TRUE(store_->Rollback("there is room again").ok());
  int64_t next = 1;
  const auto records = store_->Audit(100);
  ASSERT_TRUE(records.ok()) << records.status();
  for (const AuditRecord& record : *records) EXPECT_EQ(record.sequence, next++);
  EXPECT_GT(next, 4);
}

TEST_F(VersionStoreTest, OnAFullDiskWhatIsReceivedGivesWayToADecision) {
  Activate(1, 2, 10);
  ASSERT_TRUE(store_->BeginReceive(Sha256Of("large"), 100'000).ok());
  ASSERT_TRUE(store_->Append(Sha256Of("large"), 0, std::string(50'000, 'x')).ok());
  disk_.LimitBytes(disk_.bytes());
  EXPECT_FALSE(Push(*store_, Bytes(2, 3, 11)).ok());
  const auto back = store_->Rollback("an emergency");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(Active(), 1);
  EXPECT_TRUE(disk_.List("/s/models/digits/incoming")->empty());
  disk_.LimitBytes(UINT64_MAX);
  Reopen();
  EXPECT_EQ(Active(), 1);
}

// Of the first format: a version on probation, whose terms that did not keep.
StoreState SomeState() {
  StoreState state;
  state.model = "digits";
  state.active = 2;
  state.probation.emplace();
  state.accepted_sequence = 10;
  state.used_up = 1;
  state.activations = 5;
  state.next_audit = 9;
  VersionRecord record{.number = 2, .weights = Sha256Of("2"), .state = kLive, .parent = 1};
  record.sequence = 10;
  record.journal_bytes = 300;
  record.signers = {KeyId{7}};
  record.reason = "why";
  state.Add(record);
  state.Add({.number = 5, .weights = Sha256Of("5"), .state = kStaged, .repository = true});
  state.quarantined = {Sha256Of("q")};
  state.pending = {AuditRecord{8, 1, AuditAction::kActivated, 2}};
  return state;
}

TEST(StoreStateTest, TheFirstOneEverWrittenIsStillRead) {
  StoreState state = SomeState();
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteStoreState(disk, "/now", state).ok());
  EXPECT_EQ(ReadStoreState(disk, "/now").value(), state);
  disk.Put("/state", GoldenFile("state-1", disk.Contents("/now")));
  EXPECT_EQ(ReadStoreState(disk, "/state").value(), state);
  state.active = 5;
  EXPECT_EQ(WriteStoreState(disk, "/now", state).code(), absl::StatusCode::kInternal)
      << "the active version is LIVE, and no other";
}

TEST(StoreStateTest, TheFirstOneWithTermsIsStillRead) {
  StoreState state = SomeState();
  state.probation = SomeProbation();
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteStoreState(disk, "/now", state).ok());
  EXPECT_EQ(ReadStoreState(disk, "/now").value(), state);
  disk.Put("/state", GoldenFile("state-2", disk.Contents("/now")));
  EXPECT_EQ(ReadStoreState(disk, "/state").value(), state);
}

TEST(StoreStateTest, WhatAnOlderBuildCanSayIsWrittenAsItWroteIt) {
  StoreState state = SomeState();
  state.probation.reset();
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteStoreState(disk, "/now", state).ok());
  EXPECT_EQ(disk.Contents("/now")[8], 1);
  state.probation = SomeProbation();
  ASSERT_TRUE(WriteStoreState(disk, "/now", state).ok());
  EXPECT_EQ(disk.Contents("/now")[8], 2);
}

TEST(ProbationTest, IsReadAsItWasWrittenAndNothingElseIs) {
  for (const absl::Duration duration :
       {absl::Microseconds(1), absl::Hours(24), absl::InfiniteDuration()}) {
    Probation probation = SomeProbation();
    probation.terms.duration = duration;
    ByteWriter out;
    SerializeProbation(out, probation);
    ByteReader whole(out.bytes());
    EXPECT_EQ(ParseProbation(whole).value(), probation);
    for (size_t cut = 0; cut < out.size(); ++cut) {
      ByteReader reader(absl::string_view(out.bytes()).substr(0, cut));
      EXPECT_FALSE(ParseProbation(reader).ok()) << cut;
    }
  }
  Probation wrong = SomeProbation();
  wrong.terms.max_error_rate = 1.5;
  ByteWriter out;
  SerializeProbation(out, wrong);
  ByteReader reader(out.bytes());
  ExpectStatus(ParseProbation(reader).status(), absl::StatusCode::kInvalidArgument,
               "error rate is 1.5");
}

TEST(ProbationTest, EndsByTheClockUnlessItHasNoEnd) {
  const absl::Time now = absl::FromUnixSeconds(kNow);
  const Conduct old{.answered = 5, .failed = 1, .compute_nanos = 9, .nonfinite_batches = 2};
  EXPECT_FALSE(BeginProbation({.canary_share = 1}, old, now));
  const auto tenth = BeginProbation({.duration = absl::Milliseconds(100)}, old, now);
  EXPECT_EQ(tenth->until_micros, kNow * 1'000'000 + 100'000);
  EXPECT_EQ(tenth->old, (Conduct{.answered = 5, .failed = 1, .compute_nanos = 9}));
  EXPECT_EQ(BeginProbation({.duration = absl::InfiniteDuration()}, old, now)->until_micros, 0);
}

}  // namespace
}  // namespace espalier::updates
