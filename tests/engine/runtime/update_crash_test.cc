// The disk fails, or the machine loses power, at every call that an update makes: what serves goes on
// serving, and a restart serves exactly the old or exactly the new version.
#include "tests/engine/runtime/update_fixture.h"
#include "tests/engine/updates/simulated_file_system.h"

namespace espalier::runtime {
namespace {

using updates::testing::Fault;
using updates::testing::Loss;
using updates::testing::SimulatedFileSystem;

const ProbationOptions kTerms = {.duration = absl::Hours(1), .max_error_rate = 0.25};

class UpdateCrashTest : public espalier::testing::UpdateFixture {
 protected:
  void SetUp() override {
    UpdateFixture::SetUp();
    publisher_.MakeVersion(1, 2);
    delta_ = publisher_.Delta(1, 2);
    NewDisk();
  }
  void NewDisk() {
    disk_ = std::make_unique<SimulatedFileSystem>();
    ASSERT_TRUE(disk_->MakeFolder("/s").ok());
    ASSERT_TRUE(disk_->SyncFolder("/").ok());
    options_.state_dir = "/s";
    options_.files = disk_.get();
  }
  // Receives, stages, activates, goes back and forth; whatever fails, the answers are those of a
  // version that was decided for.
  void Live() {
    (void)Push(delta_);
    EXPECT_EQ(Ask(), 1);
    const bool activated = updates_->Activate("m", 2, kTerms).ok();
    EXPECT_EQ(Ask(), activated ? 2 : 1);
    if (!activated) return;
    const bool back = updates_->Rollback("m", "a test").ok();
    EXPECT_EQ(Ask(), back ? 1 : 2);
    if (!back) return;
    const bool forth = updates_->Activate("m", 2).ok();
    EXPECT_EQ(Ask(), forth ? 2 : 1);
  }

  std::unique_ptr<SimulatedFileSystem> disk_;
  std::string delta_;
};

TEST_F(UpdateCrashTest, APowerLossAtAnyCallLeavesExactlyTheOldOrTheNewVersion) {
  bool reached = true;
  int64_t call = 1;
  for (; reached; ++call) {
    SCOPED_TRACE(call);
    NewDisk();
    StartServer();
    disk_->FailAt(call, Fault::kCrash);
    Live();
    StopServer();
    reached = disk_->reached();
    disk_->Restart(call % 2 == 0 ? Loss::kUnsynced : Loss::kTorn, static_cast<uint64_t>(call));
    StartServer();
    const int64_t serving = Ask();
    EXPECT_TRUE(serving == 1 || serving == 2);
    const updates::StoreState state = Versions().store;
    EXPECT_EQ(serving, state.active);
    // With its terms, until it was given up: to go forth to it again asks nothing of it.
    EXPECT_EQ(state.probation.has_value(), serving == 2 && state.Find(2)->activation == 2);
    EXPECT_TRUE(!state.probation || state.probation->terms == kTerms);
    // And it goes on from there.
    ASSERT_TRUE(Push(delta_).ok());
    ASSERT_TRUE(updates_->Activate("m", 2).ok());
    EXPECT_EQ(Ask(), 2);
    StopServer();
    if (HasFailure()) break;
  }
  EXPECT_GT(call, 40);  // so many calls there are
}

TEST_F(UpdateCrashTest, ADiskThatFailsOrIsFullLeavesWhatServes) {
  for (const Fault fault : {Fault::kIoError, Fault::kDiskFull, Fault::kShortWrite}) {
    for (int64_t call = 1; call <= 60; call += 2) {
      SCOPED_TRACE(absl::StrCat("fault ", static_cast<int>(fault), " at call ", call));
      NewDisk();
      StartServer();
      disk_->FailAt(call, fault);
      Live();
      disk_->Heal();
      if (Ask() != 2) {
        ASSERT_TRUE(Push(delta_).ok());
        ASSERT_TRUE(updates_->Activate("m", 2).ok());
      }
      EXPECT_EQ(Ask(), 2);
      StopServer();
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace espalier::runtime
