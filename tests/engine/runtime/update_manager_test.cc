// The way of an update: received, staged, activated, rolled back; restarts; memory.
#include "engine/runtime/update_manager.h"

#include <thread>

#include "gmock/gmock.h"
#include "tests/engine/runtime/update_fixture.h"

namespace espalier::runtime {
namespace {

using espalier::testing::Eventually;
using ::testing::HasSubstr;
using updates::UpdateState;

class UpdateManagerTest : public espalier::testing::UpdateFixture {};

TEST_F(UpdateManagerTest, AModelServesItsRepositorysVersionUntilAnotherIsActivated) {
  StartServer();
  EXPECT_EQ(Ask(), 1);
  publisher_.MakeVersion(1, 2);
  ASSERT_EQ(*Push(publisher_.Delta(1, 2)), 2);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  EXPECT_EQ(Versions().staged, 2);
  EXPECT_EQ(Ask(), 1);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(StateOf(2), UpdateState::kLive);
  EXPECT_EQ(StateOf(1), UpdateState::kSuperseded);
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ(Versions().serving, 2);
  EXPECT_EQ(Versions().shadow, 1);
}

TEST_F(UpdateManagerTest, ARequestForASupersededNumberIsToldWhatTookItsPlace) {
  StartServer();
  Publish(1, 2);
  Publish(2, 3);
  for (const char* number : {"1", "2"}) {
    const absl::Status status = manager_->Find("m", number).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("superseded by version 3"));
  }
  EXPECT_EQ(Ask(5, "3"), 3);
}

TEST_F(UpdateManagerTest, ARequestInFlightIsAnsweredByTheVersionThatItStartedWith) {
  StartServer();
  const VersionHandle old = *manager_->Find("m", "");
  Publish(1, 2);
  const std::vector<float> x = SomeInput(3);
  espalier::testing::TestRequest request;
  request.AddInput("x", "FP32", {1, static_cast<int64_t>(x.size())},
                   std::string(reinterpret_cast<const char*>(x.data()), 4 * x.size()));
  request.Submit(old);
  ASSERT_TRUE(request.status().ok());
  EXPECT_EQ(request.Floats(), publisher_.weights(1).Answer(x));
  EXPECT_EQ(Ask(3), 2);
}

TEST_F(UpdateManagerTest, RollingBackBringsTheVersionBeforeAndForthAgainTwentyTimes) {
  StartServer();
  Publish(1, 2);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(*updates_->Rollback("m", "as a test"), 1);
    EXPECT_EQ(Ask(static_cast<uint32_t>(i)), 1);
    EXPECT_EQ(Versions().store.active, 1);
    ASSERT_TRUE(updates_->Activate("m", 2).ok());
    EXPECT_EQ(Ask(static_cast<uint32_t>(i)), 2);
  }
  // All that on the two copies that there were.
  EXPECT_EQ(control_->loads, 1);
  EXPECT_EQ(control_->most, 2);
}

TEST_F(UpdateManagerTest, RollingBackReachesVersionsFurtherBack) {
  StartServer();
  for (int64_t version = 2; version <= 5; ++version) Publish(version - 1, version);
  EXPECT_EQ(*updates_->Rollback("m", "far", 2), 2);
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ(*updates_->Rollback("m", "to the start", 1), 1);
  EXPECT_EQ(Ask(), 1);
  ASSERT_TRUE(updates_->Activate("m", 5).ok());
  EXPECT_EQ(Ask(), 5);
}

TEST_F(UpdateManagerTest, AStagedVersionThatIsNotReadyAnyMoreIsActivatedAllTheSame) {
  StartServer();
  publisher_.MakeVersion(1, 2);
  publisher_.MakeVersion(2, 3);
  ASSERT_TRUE(Push(publisher_.Delta(1, 2)).ok());
  ASSERT_TRUE(Push(publisher_.Delta(2, 3)).ok());
  EXPECT_EQ(Versions().staged, 3);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(Ask(), 2);
  ASSERT_TRUE(updates_->Activate("m", 3).ok());
  EXPECT_EQ(Ask(), 3);
  EXPECT_LE(control_->most, 2);
}

TEST_F(UpdateManagerTest, TwoHundredUpdatesUnderLoadNeverMixVersions) {
  StartServer();
  constexpr int64_t kUpdates = 200;
  // Known beforehand, so that the clients read them while the updates go on.
  for (int64_t version = 2; version <= kUpdates + 1; ++version)
    publisher_.MakeVersion(version - 1, version);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> asked{0};
  std::vector<std::thread> clients;
  for (uint32_t c = 0; c < 3; ++c) {
    clients.emplace_back([&, c] {
      int64_t last = 0;
      for (uint32_t i = 0; !stop; ++i, ++asked) {
        const int64_t version = Ask(1000 * c + i);
        EXPECT_GE(version, last);
        last = version;
        // Loaders work in the background: without a pause they would get no processor.
        absl::SleepFor(absl::Microseconds(500));
      }
    });
  }
  for (int64_t version = 2; version <= kUpdates + 1; ++version) {
    auto staged = Push(publisher_.Delta(version - 1, version));
    ASSERT_TRUE(staged.ok()) << staged.status();
    ASSERT_TRUE(updates_->Activate("m", version).ok());
  }
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(asked, kUpdates);
  EXPECT_EQ(Ask(), kUpdates + 1);
  EXPECT_LE(control_->most, 2);
  EXPECT_EQ(Counts().activated, static_cast<uint64_t>(kUpdates));
}

TEST_F(UpdateManagerTest, WithoutEditsEveryUpdateIsPreparedAnewAndNeverAThirdCopy) {
  control_->edits_unimplemented = true;
  StartServer();
  for (int64_t version = 2; version <= 6; ++version) {
    Publish(version - 1, version);
    EXPECT_EQ(Ask(), version);
  }
  EXPECT_EQ(control_->loads, 6);
  EXPECT_GT(control_->clones, 0);
  EXPECT_EQ(control_->most, 2);
  EXPECT_EQ(Counts().rebuilt, 5u);
  EXPECT_EQ(Counts().edited, 0u);
}

TEST_F(UpdateManagerTest, ARestartAfterEveryStepServesExactlyTheOldOrTheNewVersion) {
  StartServer();
  publisher_.MakeVersion(1, 2);
  const std::string delta = publisher_.Delta(1, 2);
  const updates::Digest file = updates::Sha256Of(delta);
  ASSERT_TRUE(updates_->BeginReceive("m", file, delta.size()).ok());
  ASSERT_TRUE(updates_->Append("m", file, 0, absl::string_view(delta).substr(0, 100)).ok());
  RestartServer();
  EXPECT_EQ(Ask(), 1);
  ASSERT_EQ(*Push(delta), 2);
  RestartServer();
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  RestartServer();
  EXPECT_EQ(Ask(), 2);
  ASSERT_EQ(*updates_->Rollback("m", "a test"), 1);
  RestartServer();
  EXPECT_EQ(Ask(), 1);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  Publish(2, 3);
  RestartServer();
  EXPECT_EQ(Ask(), 3);
  EXPECT_EQ(manager_->Find("m", "1").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*updates_->Rollback("m", "a test", 1), 1);
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateManagerTest, ADeltaThatIsStagedIsNotSentOrCheckedAgain) {
  StartServer();
  publisher_.MakeVersion(1, 2);
  const std::string delta = publisher_.Delta(1, 2);
  ASSERT_EQ(*Push(delta), 2);
  EXPECT_EQ(*updates_->BeginReceive("m", updates::Sha256Of(delta), delta.size()), delta.size());
  EXPECT_EQ(*Push(delta), 2);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(*Push(delta), 2);
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateManagerTest, WatchersSeeEveryStepOnceAndInOrder) {
  StartServer();
  Publish(1, 2);
  ASSERT_TRUE(updates_->Rollback("m", "it was wrong").ok());
  std::vector<std::pair<int64_t, UpdateState>> seen;
  auto events = updates_->EventsAfter(0, "m", absl::InfinitePast());
  ASSERT_TRUE(events.ok());
  for (const VersionEvent& event : *events) seen.emplace_back(event.version, event.state);
  EXPECT_THAT(seen, ::testing::ElementsAre(
                        std::pair(2, UpdateState::kVerified), std::pair(2, UpdateState::kStaged),
                        std::pair(1, UpdateState::kSuperseded), std::pair(2, UpdateState::kLive),
                        std::pair(1, UpdateState::kLive), std::pair(2, UpdateState::kRolledBack)));
  EXPECT_EQ(events->back().reason, "it was wrong");
  EXPECT_TRUE(updates_->EventsAfter(events->back().serial, "", absl::InfinitePast())->empty());
}

}  // namespace
}  // namespace espalier::runtime
