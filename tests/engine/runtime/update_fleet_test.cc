// One update on several servers: each serves the old version until it is decided, and then the new one.
#include <thread>

#include "gmock/gmock.h"
#include "tests/engine/runtime/update_fixture.h"

namespace espalier::runtime {
namespace {

using absl::StatusCode;
using espalier::testing::Eventually;
using updates::FleetDecision;
using updates::FleetTransaction;
using updates::UpdateState;

const ProbationOptions kTerms = {.duration = absl::Hours(1), .max_error_rate = 0.5};

class UpdateFleetTest : public espalier::testing::UpdateFixture {
 protected:
  void SetUp() override {
    UpdateFixture::SetUp();
    publisher_.MakeVersion(1, 2);
    options_.ask_participant = [this](const std::string& participant, const std::string& model,
                                      const std::string& id) -> absl::StatusOr<FleetDecision> {
      EXPECT_EQ(participant, "first:1");
      EXPECT_EQ(model, "m");
      EXPECT_EQ(id, "t1");
      ++asked_;
      const std::lock_guard lock(mutex_);
      return answer_;
    };
  }
  static FleetTransaction Terms(int64_t self, int64_t seconds = 60) {
    // In whole seconds, the last of which may be all but over.
    return {.id = "t1",
            .version = 2,
            .participants = {"first:1", "second:2"},
            .self = self,
            .expires_seconds = absl::ToUnixSeconds(absl::Now()) + seconds};
  }
  static FleetTransaction TermsWith(const ProbationOptions& probation, int64_t self = 0) {
    FleetTransaction transaction = Terms(self);
    transaction.probation = probation;
    return transaction;
  }
  // A promise whose commit was decided and not noted as done; while no server runs.
  void CommitInTheLog() {
    auto log = updates::FleetLog::Open(updates::PosixFileSystem(), state_.path() + "/fleet/m");
    ASSERT_TRUE(log.ok()) << log.status();
    const int64_t now = absl::ToUnixSeconds(absl::Now());
    ASSERT_TRUE((*log)->Prepare(TermsWith(kTerms), now).ok());
    ASSERT_TRUE((*log)->Decide("t1", FleetDecision::kCommit, now).ok());
  }
  void StageTwo() { ASSERT_EQ(*Push(publisher_.Delta(1, 2)), 2); }
  void SetAnswer(absl::StatusOr<FleetDecision> answer) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(answer);
  }

  std::atomic<int> asked_{0};
  std::mutex mutex_;
  absl::StatusOr<FleetDecision> answer_ = absl::UnavailableError("not reachable, as asked for");
};

TEST_F(UpdateFleetTest, APromiseIsKeptWhenItIsDecided) {
  StartServer();
  StageTwo();
  const FleetTransaction terms = Terms(0);
  ASSERT_TRUE(updates_->Prepare("m", terms).ok());
  EXPECT_TRUE(updates_->Prepare("m", terms).ok());
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(updates_->Transaction("m", "t1")->decision, FleetDecision::kUndecided);
  const auto decided = updates_->Decide("m", "t1", FleetDecision::kCommit);
  ASSERT_TRUE(decided.ok()) << decided.status();
  EXPECT_TRUE(decided->done);
  EXPECT_EQ(Ask(), 2);
  EXPECT_TRUE(updates_->Decide("m", "t1", FleetDecision::kCommit).ok());
  EXPECT_EQ(updates_->Decide("m", "t1", FleetDecision::kAbort).status().code(),
            StatusCode::kFailedPrecondition);
}

TEST_F(UpdateFleetTest, WhatIsPromisedKeepsEverythingElseOut) {
  StartServer();
  Publish(1, 3);
  publisher_.MakeVersion(3, 4);
  publisher_.MakeVersion(3, 5);
  ASSERT_TRUE(Push(publisher_.Delta(3, 4)).ok());
  ASSERT_TRUE(Push(publisher_.Delta(3, 5)).ok());
  FleetTransaction terms = Terms(0);
  terms.version = 4;
  ASSERT_TRUE(updates_->Prepare("m", terms).ok());
  EXPECT_EQ(updates_->Activate("m", 5).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(updates_->Rollback("m", "").status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(updates_->Refuse("m", 4, "").code(), StatusCode::kFailedPrecondition);
  FleetTransaction another = terms;
  another.id = "t2";
  EXPECT_EQ(updates_->Prepare("m", another).code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(updates_->Decide("m", "t1", FleetDecision::kAbort).ok());
  EXPECT_EQ(Ask(), 3);
  EXPECT_EQ(StateOf(4), UpdateState::kStaged);
  ASSERT_TRUE(updates_->Activate("m", 5).ok());
  EXPECT_EQ(Ask(), 5);
}

TEST_F(UpdateFleetTest, TheFirstParticipantAbortsByItselfWhenTheTimeIsUp) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Prepare("m", Terms(0, 3)).ok());
  EXPECT_TRUE(Eventually(
      [&] { return updates_->Transaction("m", "t1")->decision == FleetDecision::kAbort; }));
  EXPECT_EQ(updates_->Decide("m", "t1", FleetDecision::kCommit).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateFleetTest, AnotherParticipantAsksTheFirstAndNeverGuesses) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Prepare("m", Terms(1, 3)).ok());
  EXPECT_TRUE(Eventually([&] { return asked_ >= 2; }));
  EXPECT_EQ(Ask(), 1);
  SetAnswer(FleetDecision::kUndecided);
  EXPECT_EQ(updates_->Transaction("m", "t1")->decision, FleetDecision::kUndecided);
  SetAnswer(FleetDecision::kCommit);
  EXPECT_TRUE(Eventually([&] { return Ask() == 2; }));
  // It serves before it is noted.
  EXPECT_TRUE(Eventually([&] { return updates_->Transaction("m", "t1")->done; }));
}

TEST_F(UpdateFleetTest, AServerThatWasDownComesBackAtTheFleetsVersion) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Prepare("m", Terms(1)).ok());
  StopServer();
  SetAnswer(FleetDecision::kCommit);
  StartServer();
  EXPECT_EQ(Ask(), 2);  // the first request already
  EXPECT_TRUE(updates_->Transaction("m", "t1")->done);
}

TEST_F(UpdateFleetTest, ADecisionSurvivesARestartOfTheOneThatMadeIt) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Prepare("m", Terms(0)).ok());
  // It cannot be carried out now.
  ASSERT_TRUE(manager_->Unload("m").ok());
  EXPECT_FALSE(updates_->Decide("m", "t1", FleetDecision::kCommit).ok());
  EXPECT_EQ(updates_->Transaction("m", "t1")->decision, FleetDecision::kCommit);
  RestartServer();
  EXPECT_EQ(Ask(), 2);
  EXPECT_TRUE(updates_->Transaction("m", "t1")->done);
}

// --- on probation ----------------------------------------------------------------------------------

TEST_F(UpdateFleetTest, AProbationBeginsWithTheCommitAndEndsOnEachServerForItself) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Prepare("m", TermsWith(kTerms)).ok());
  EXPECT_FALSE(Versions().store.probation);
  RestartServer();  // it promised the terms as well
  ASSERT_TRUE(updates_->Decide("m", "t1", FleetDecision::kCommit).ok());
  ASSERT_TRUE(Versions().store.probation);
  EXPECT_EQ(Versions().store.probation->terms, kTerms);
  EXPECT_GT(Versions().store.probation->until_micros,
            absl::ToUnixMicros(absl::Now() + absl::Minutes(59)));
  RestartServer();
  AskInVain(20);
  EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kQuarantined; }));
  EXPECT_TRUE(Eventually([&] { return Versions().serving == 1; }));
  const std::string reason = updates_->Audit("m", 1)->back().reason;
  EXPECT_THAT(reason, ::testing::HasSubstr("20 of 20 requests failed"));
  EXPECT_THAT(reason, ::testing::HasSubstr("transaction t1 took it to 2 servers"));
}

TEST_F(UpdateFleetTest, AServerThatWasDownBeginsTheProbationWhenItComesBack) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Prepare("m", TermsWith(kTerms, 1)).ok());
  StopServer();
  SetAnswer(FleetDecision::kCommit);
  StartServer();
  EXPECT_EQ(Ask(), 2);
  ASSERT_TRUE(Versions().store.probation);
  EXPECT_EQ(Versions().store.probation->terms, kTerms);
  EXPECT_EQ(Versions().store.probation->old, Conduct()) << "nobody knows";
}

TEST_F(UpdateFleetTest, ACanaryComesBeforeThePromise) {
  StartServer();
  StageTwo();
  const ProbationOptions terms = {.canary_share = 0.5, .canary_duration = absl::Seconds(1)};
  const FleetTransaction transaction = TermsWith(terms);
  absl::Status prepared[2];
  std::thread first([&] { prepared[0] = updates_->Prepare("m", transaction); });
  EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kCanary; }));
  EXPECT_EQ(updates_->Transaction("m", "t1").status().code(), StatusCode::kNotFound);
  std::thread again([&] { prepared[1] = updates_->Prepare("m", transaction); });
  first.join();
  again.join();
  EXPECT_TRUE(prepared[0].ok()) << prepared[0];
  EXPECT_TRUE(prepared[1].ok()) << prepared[1];
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  EXPECT_EQ(Ask(), 1);
  ASSERT_TRUE(updates_->Decide("m", "t1", FleetDecision::kCommit).ok());
  EXPECT_EQ(Ask(), 2);
  EXPECT_FALSE(Versions().store.probation);
}

TEST_F(UpdateFleetTest, AVersionThatFailsItsCanaryIsNotPromised) {
  StartServer();
  StageTwo();
  const ProbationOptions terms = {
      .canary_share = 1, .canary_duration = absl::Seconds(30), .max_error_rate = 0.5};
  absl::Status prepared;
  std::thread preparing([&] { prepared = updates_->Prepare("m", TermsWith(terms)); });
  EXPECT_TRUE(Eventually([&] { return (*manager_->Find("m", ""))->version() == 2; }));
  AskInVain(20);
  preparing.join();
  EXPECT_EQ(prepared.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(StateOf(2), UpdateState::kQuarantined);
  EXPECT_EQ(updates_->Transaction("m", "t1").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateFleetTest, WhatWasCarriedOutAndHasFailedIsNotCarriedOutAgain) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Activate("m", 2, kTerms).ok());
  AskInVain(20);
  EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kQuarantined; }));
  StopServer();
  CommitInTheLog();  // as if it had failed before it was noted that the commit was done
  StartServer();
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(StateOf(2), UpdateState::kQuarantined);
  EXPECT_TRUE(updates_->Transaction("m", "t1")->done) << "or nothing is ever activated again";
}

TEST_F(UpdateFleetTest, WhatWasTakenBackBecauseItCouldNotServeIsCarriedOutLater) {
  StartServer();
  StageTwo();
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  ASSERT_TRUE(updates_->Rollback("m", "as when the flip fails").ok());
  StopServer();
  CommitInTheLog();
  StartServer();
  EXPECT_EQ(Ask(), 2);
  EXPECT_TRUE(updates_->Transaction("m", "t1")->done);
  EXPECT_EQ(Versions().store.probation->terms, kTerms);
}

TEST_F(UpdateFleetTest, OnlyWhatCanBeKeptIsPromised) {
  StartServer();
  EXPECT_EQ(updates_->Prepare("m", Terms(0)).code(), StatusCode::kNotFound);
  StageTwo();
  EXPECT_EQ(updates_->Prepare("m", Terms(0, -1)).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(updates_->Prepare("m", Terms(2)).code(), StatusCode::kInvalidArgument);
  FleetTransaction nameless = Terms(0);
  nameless.id = "../t";
  EXPECT_EQ(updates_->Prepare("m", nameless).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(updates_->Prepare("m", TermsWith({.max_error_rate = 2})).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(updates_->Decide("m", "t1", FleetDecision::kCommit).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(Ask(), 1);
}

}  // namespace
}  // namespace espalier::runtime
