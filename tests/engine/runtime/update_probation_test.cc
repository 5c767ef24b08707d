// Versions that have to prove themselves: golden requests, canary, probation.
#include "engine/runtime/update_probation.h"

#include <cmath>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "tests/engine/runtime/update_fixture.h"

namespace espalier::runtime {
namespace {

using absl::StatusCode;
using espalier::testing::Eventually;
using espalier::testing::LinearWeights;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using updates::UpdateState;

TEST(BreachTest, AVersionIsJudgedByWhatItDidBesideTheOneBefore) {
  const ProbationOptions terms{.max_error_rate = 0.1, .max_latency_ratio = 2};
  const Conduct old{.answered = 100, .failed = 0, .compute_nanos = 100'000};
  EXPECT_THAT(Breach(terms, old, {.answered = 90, .failed = 10, .compute_nanos = 1}, false),
              IsEmpty());
  EXPECT_THAT(Breach(terms, old, {.answered = 89, .failed = 11}, false), HasSubstr("11 of 100"));
  // Too few to say; at the end they have to do.
  EXPECT_THAT(Breach(terms, old, {.answered = 1, .failed = 1}, false), IsEmpty());
  EXPECT_THAT(Breach(terms, old, {.answered = 1, .failed = 1}, true), Not(IsEmpty()));
  EXPECT_THAT(Breach(terms, old, {.answered = 20, .compute_nanos = 39'999}, false), IsEmpty());
  EXPECT_THAT(Breach(terms, old, {.answered = 20, .compute_nanos = 40'020}, false),
              HasSubstr("at most 2 times"));
  EXPECT_THAT(Breach({}, old, {.answered = 20, .failed = 900, .compute_nanos = 1 << 30}, true),
              IsEmpty());
  EXPECT_THAT(Breach({}, old, {.nonfinite_batches = 1}, false), HasSubstr("NaN"));
}

class UpdateProbationTest : public espalier::testing::UpdateFixture {
 protected:
  static std::string Npy(const std::string& descr, const std::string& shape,
                         const std::string& bytes) {
    std::string header =
        "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
    header.resize((header.size() + 10) / 64 * 64 + 64 - 10, ' ');
    header.back() = '\n';
    std::string file("\x93NUMPY\x01\x00", 8);
    file += static_cast<char>(header.size() & 255);
    file += static_cast<char>(header.size() >> 8);
    return file + header + bytes;
  }
  // What version `number` answers is what is expected.
  void AddGolden(int64_t number) {
    repository_.MakeDirectory("m/golden/one/inputs");
    repository_.MakeDirectory("m/golden/one/outputs");
    const std::vector<float> x = SomeInput(77);
    repository_.Write("m/golden/one/inputs/x.npy", Npy("<f4", "(1, 24)", Bytes(x)));
    repository_.Write("m/golden/one/outputs/y.npy",
                      Npy("<f4", "(1, 16)", Bytes(publisher_.weights(number).Answer(x))));
  }
  void ActivateTwo(const ProbationOptions& terms) {
    Stage(1, 2);
    const absl::Status status = updates_->Activate("m", 2, terms);
    ASSERT_TRUE(status.ok()) << status;
  }
  // By itself, from version 2 to version 1.
  void ExpectReverted() {
    EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kQuarantined; }));
    EXPECT_TRUE(Eventually([&] { return Versions().serving == 1; }));
    EXPECT_EQ(Ask(), 1);
    EXPECT_TRUE(Eventually([&] { return Counts().quarantined == 1u; }));
  }
  void Stage(int64_t base, int64_t number) {
    publisher_.MakeVersion(base, number);
    ASSERT_EQ(*Push(publisher_.Delta(base, number)), number);
  }
};

TEST_F(UpdateProbationTest, AVersionIsUnconfirmedUntilItIsConfirmed) {
  StartServer();
  Stage(1, 2);
  ASSERT_TRUE(
      updates_->Activate("m", 2, ProbationOptions{.duration = absl::InfiniteDuration()}).ok());
  EXPECT_TRUE(Versions().store.probation);
  EXPECT_TRUE(Counts().on_probation);
  // The next one can be received meanwhile, but not served, and the way back stays at hand.
  Stage(2, 3);
  EXPECT_EQ(Versions().shadow, 1);
  EXPECT_EQ(updates_->Activate("m", 3).code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(updates_->Confirm("m", 2).ok());
  ASSERT_TRUE(updates_->Activate("m", 3).ok());
  EXPECT_EQ(Ask(), 3);
}

TEST_F(UpdateProbationTest, AVersionIsConfirmedWhenItsTimeIsUp) {
  StartServer();
  Stage(1, 2);
  ASSERT_TRUE(
      updates_->Activate("m", 2, ProbationOptions{.duration = absl::Milliseconds(30)}).ok());
  EXPECT_TRUE(Eventually([&] { return !Versions().store.probation; }));
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateProbationTest, AVersionThatIsNotConfirmedInThreeStartsIsQuarantined) {
  StartServer();
  Stage(1, 2);
  ASSERT_TRUE(
      updates_->Activate("m", 2, ProbationOptions{.duration = absl::InfiniteDuration()}).ok());
  for (int i = 0; i < 3; ++i) {
    RestartServer();
    EXPECT_EQ(Ask(), 2);
  }
  RestartServer();
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(StateOf(2), UpdateState::kQuarantined);
}

TEST_F(UpdateProbationTest, AVersionThatFailsAGoldenRequestNeverServes) {
  StartServer();
  publisher_.MakeVersion(1, 2);
  publisher_.MakeVersion(1, 3);
  AddGolden(3);
  const ProbationOptions terms{.golden_requests = true};
  ASSERT_TRUE(Push(publisher_.Delta(1, 2)).ok());
  const absl::Status status = updates_->Activate("m", 2, terms);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("golden request 'one': output 'y'"));
  EXPECT_EQ(StateOf(2), UpdateState::kQuarantined);
  EXPECT_EQ(Ask(), 1);
  // For ever, whoever sends it.
  EXPECT_EQ(Push(publisher_.Delta(1, 2)).status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Push(publisher_.Delta(1, 3)).ok());
  ASSERT_TRUE(updates_->Activate("m", 3, terms).ok());
  EXPECT_EQ(Ask(), 3);
}

TEST_F(UpdateProbationTest, WithoutGoldenRequestsNoneCanBePassed) {
  StartServer();
  Stage(1, 2);
  EXPECT_EQ(updates_->Activate("m", 2, ProbationOptions{.golden_requests = true}).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
}

TEST_F(UpdateProbationTest, ACanaryAnswersItsShareAndThenServes) {
  StartServer();
  Stage(1, 2);
  absl::Status activated;
  std::thread activating([&] {
    activated = updates_->Activate(
        "m", 2, ProbationOptions{.canary_share = 0.25, .canary_duration = absl::Seconds(8)});
  });
  EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kCanary; }));
  EXPECT_TRUE(Eventually([&] { return Ask() == 2; }));
  int by_canary = 0;
  for (uint32_t i = 0; i < 40 && StateOf(2) == UpdateState::kCanary; ++i) by_canary += Ask(i) == 2;
  EXPECT_EQ(by_canary, 10);
  activating.join();
  ASSERT_TRUE(activated.ok()) << activated;
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ(StateOf(2), UpdateState::kLive);
}

TEST_F(UpdateProbationTest, ACanaryThatAnswersNaNIsQuarantined) {
  StartServer();
  LinearWeights bad = publisher_.weights(1);
  bad.w[3] = std::numeric_limits<float>::infinity();
  publisher_.SetVersion(2, bad);
  ASSERT_EQ(*Push(publisher_.Delta(1, 2)), 2);
  absl::Status activated;
  std::thread activating([&] {
    activated = updates_->Activate(
        "m", 2, ProbationOptions{.canary_share = 1, .canary_duration = absl::Seconds(30)});
  });
  EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kCanary; }));
  ASSERT_TRUE(Eventually([&] { return (*manager_->Find("m", ""))->version() == 2; }));
  ASSERT_TRUE(AskOf(*manager_->Find("m", "")).ok());
  activating.join();
  EXPECT_EQ(activated.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(activated.message()), HasSubstr("NaN"));
  EXPECT_EQ(StateOf(2), UpdateState::kQuarantined);
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateProbationTest, AnUnloadEndsACanaryWithoutJudgingIt) {
  StartServer();
  Stage(1, 2);
  absl::Status activated;
  std::thread activating([&] {
    activated = updates_->Activate(
        "m", 2, ProbationOptions{.canary_share = 0.5, .canary_duration = absl::Seconds(30)});
  });
  EXPECT_TRUE(Eventually([&] { return StateOf(2) == UpdateState::kCanary; }));
  ASSERT_TRUE(manager_->Unload("m").ok());
  activating.join();
  EXPECT_EQ(activated.code(), StatusCode::kAborted);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateProbationTest, AVersionThatFailsRequestsOnProbationIsRevertedByItself) {
  StartServer();
  ActivateTwo({.duration = absl::Seconds(60), .max_error_rate = 0.5});
  AskInVain(20);
  ExpectReverted();
}

TEST_F(UpdateProbationTest, AVersionThatAnswersNaNOnProbationIsRevertedWithoutACanary) {
  StartServer();
  LinearWeights bad = publisher_.weights(1);
  bad.w[3] = std::numeric_limits<float>::infinity();
  publisher_.SetVersion(2, bad);
  ASSERT_EQ(*Push(publisher_.Delta(1, 2)), 2);
  ASSERT_TRUE(updates_->Activate("m", 2, ProbationOptions{.duration = absl::Hours(1)}).ok());
  EXPECT_TRUE(AskOf(*manager_->Find("m", "")).ok());
  ExpectReverted();
}

// --- over restarts ---------------------------------------------------------------------------------

TEST_F(UpdateProbationTest, AfterARestartAVersionIsJudgedByItsOwnTerms) {
  StartServer();
  ActivateTwo({.duration = absl::Hours(1), .max_error_rate = 0.5});
  RestartServer();
  EXPECT_EQ(Ask(), 2);
  AskInVain(20);
  ExpectReverted();
}

TEST_F(UpdateProbationTest, AfterARestartItIsComparedWithWhatTheOldOneHadDone) {
  StartServer();
  for (int i = 0; i < 20; ++i) Ask();
  AskInVain(20);
  ActivateTwo({.duration = absl::Hours(1), .max_error_rate = 0.2});
  RestartServer();
  EXPECT_EQ(Versions().store.probation->old.answered, 20u);
  EXPECT_EQ(Versions().store.probation->old.failed, 20u);
  for (int i = 0; i < 20; ++i) Ask();
  AskInVain(40);  // more than the old one failed, by less than is allowed
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(StateOf(2), UpdateState::kLive);
  AskInVain(40);
  ExpectReverted();
}

TEST_F(UpdateProbationTest, AfterARestartAVersionHasWhatIsLeftOfItsTime) {
  StartServer();
  ActivateTwo({.duration = absl::Seconds(3)});
  const auto before = Versions().store.probation;
  StopServer();
  const auto durable =
      updates::ReadStoreState(updates::PosixFileSystem(), state_.path() + "/models/m/state");
  ASSERT_TRUE(durable.ok()) << durable.status();
  ASSERT_TRUE(durable->probation) << "it was stopped too late";
  EXPECT_EQ(durable->probation, before);
  StartServer();
  EXPECT_TRUE(Eventually([&] { return !Versions().store.probation; }));
  EXPECT_GE(absl::Now(), absl::FromUnixMicros(before->until_micros));
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateProbationTest, AVersionWhoseTimeEndedMeanwhileIsConfirmed) {
  StartServer();
  ActivateTwo({.duration = absl::Milliseconds(700), .max_error_rate = 0.001});
  const absl::Time until = absl::FromUnixMicros(Versions().store.probation->until_micros);
  StopServer();
  absl::SleepFor(until - absl::Now());
  StartServer();
  EXPECT_TRUE(Eventually([&] { return !Versions().store.probation; }));
  EXPECT_EQ(StateOf(2), UpdateState::kLive);
  EXPECT_EQ(updates_->Audit("m", 1)->back().action, updates::AuditAction::kConfirmed);
}

TEST_F(UpdateProbationTest, AModelThatIsLoadedAgainIsJudgedAgain) {
  StartServer();
  ActivateTwo({.duration = absl::Hours(1), .max_error_rate = 0.5});
  ASSERT_TRUE(manager_->Unload("m").ok());
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 2);
  AskInVain(20);
  ExpectReverted();
}

TEST_F(UpdateProbationTest, TermsThatMeanNothingAreRefused) {
  StartServer();
  Stage(1, 2);
  EXPECT_EQ(updates_->Activate("m", 2, ProbationOptions{.canary_share = 1.5}).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Ask(), 1);
  options_.probation.max_error_rate = -1;
  EXPECT_EQ(UpdateManager::Create(options_).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(UpdateProbationTest, AVersionThatServedBeforeServesAgainWithoutAProbationOrNot) {
  StartServer();
  Stage(1, 2);
  ASSERT_TRUE(updates_->Activate("m", 2, ProbationOptions()).ok());
  ASSERT_TRUE(updates_->Rollback("m", "as a test").ok());
  for (const ProbationOptions& terms :
       {ProbationOptions{.duration = absl::Hours(1)}, ProbationOptions{.golden_requests = true},
        ProbationOptions{.canary_share = 0.5, .canary_duration = absl::Seconds(1)}}) {
    const absl::Status status = updates_->Activate("m", 2, terms);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("version 2 served before"));
    EXPECT_EQ(Ask(), 1);
  }
  EXPECT_TRUE(updates_->Activate("m", 2, ProbationOptions()).ok());
  EXPECT_EQ(Ask(), 2);
}

}  // namespace
}  // namespace espalier::runtime
