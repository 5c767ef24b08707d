// Updates beside what happens to the repository: loads, unloads, new versions, deltas that lie there.
#include <thread>

#include "gmock/gmock.h"
#include "tests/engine/runtime/update_fixture.h"

namespace espalier::runtime {
namespace {

using absl::StatusCode;
using espalier::testing::Eventually;
using ::testing::HasSubstr;
using updates::UpdateState;

class UpdateRepositoryTest : public espalier::testing::UpdateFixture {
 protected:
  // As a tool does that copies whole files: hidden first.
  void DropDelta(const std::string& name, const std::string& bytes) {
    repository_.MakeDirectory("m/deltas");
    repository_.Write("m/deltas/." + name, bytes);
    std::filesystem::rename(repository_.path() + "/m/deltas/." + name,
                            repository_.path() + "/m/deltas/" + name);
  }
};

TEST_F(UpdateRepositoryTest, AModelThatIsUnloadedAndLoadedAgainServesItsActiveVersion) {
  StartServer();
  Publish(1, 2);
  ASSERT_TRUE(manager_->Unload("m").ok());
  EXPECT_EQ(manager_->Find("m", "").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(updates_->Activate("m", 1).code(), StatusCode::kNotFound);
  EXPECT_TRUE(Eventually([&] { return control_->alive == 0; }));
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 2);
  Publish(2, 3);
  EXPECT_EQ(Ask(), 3);
  // A plain load of what is served changes nothing.
  const int loads = control_->loads;
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(control_->loads, loads);
  EXPECT_EQ(Ask(), 3);
}

TEST_F(UpdateRepositoryTest, TheActiveVersionCanBeLoadedAndUnloadedByItsNumber) {
  StartServer();
  Publish(1, 2);
  ASSERT_TRUE(manager_->Unload("m", 2).ok());
  EXPECT_FALSE(manager_->Find("m", "").ok());
  EXPECT_TRUE(Eventually([&] { return control_->alive == 0; }));
  LoadRequest request;
  request.version = 2;
  ASSERT_TRUE(Load("m", request).ok());
  EXPECT_EQ(Ask(), 2);
  for (const auto& entry : manager_->Index()) EXPECT_GT(entry.version, 0);
  EXPECT_EQ(*updates_->Rollback("m", ""), 1);
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateRepositoryTest, AnUnloadWhileAVersionIsPreparedEndsThatWell) {
  StartServer();
  publisher_.MakeVersion(1, 2);
  const std::string delta = publisher_.Delta(1, 2);
  control_->prepare_gate.Close();
  absl::StatusOr<int64_t> staged = 0;
  std::thread pusher([&] { staged = Push(delta); });
  control_->prepare_gate.AwaitWaiting(1);
  ASSERT_TRUE(manager_->Unload("m").ok());
  control_->prepare_gate.Open();
  pusher.join();
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateRepositoryTest, ANewVersionOfTheRepositoryAboveTheActiveOneIsActivated) {
  StartServer();
  Publish(1, 2);
  publisher_.MakeVersion(1, 7);
  AddRepositoryVersion(7);
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 7);
  EXPECT_EQ(StateOf(7), UpdateState::kLive);
  EXPECT_EQ(StateOf(2), UpdateState::kSuperseded);
  Publish(7, 8);
  EXPECT_EQ(Ask(), 8);
  RestartServer();
  EXPECT_EQ(Ask(), 8);
  EXPECT_EQ(*updates_->Rollback("m", "", 2), 2);
  EXPECT_EQ(Ask(), 2);
  // What was given up does not come back by itself.
  RestartServer();
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateRepositoryTest, AVersionOfTheRepositoryBelowTheActiveOneIsNotServed) {
  StartServer();
  Publish(1, 5);
  publisher_.MakeVersion(1, 3);
  AddRepositoryVersion(3);
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 5);
  EXPECT_EQ(manager_->Find("m", "3").status().code(), StatusCode::kUnavailable);
}

TEST_F(UpdateRepositoryTest, ABaseWhoseFileWasSilentlyChangedIsRefused) {
  StartServer();
  Publish(1, 2);
  StopServer();
  publisher_.MakeVersion(1, 9);
  std::filesystem::copy_file(publisher_.FileOf(9), repository_.path() + "/m/1/model.onnx",
                             std::filesystem::copy_options::overwrite_existing);
  StartServer();
  const auto found = manager_->Find("m", "");
  EXPECT_FALSE(found.ok());
  std::string reasons;
  for (const auto& entry : manager_->Index()) reasons += entry.reason;
  EXPECT_THAT(reasons, HasSubstr("one set of bytes for ever"));
}

TEST_F(UpdateRepositoryTest, AChangedConfigIsTakenOverWithoutLosingTheUpdate) {
  StartServer();
  Publish(1, 2);
  repository_.Write("m/config.pbtxt", config_ + " max_batch_size: 3");
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ((*manager_->Find("m", ""))->config().max_batch_size(), 3);
  Publish(2, 3);
  EXPECT_EQ((*manager_->Find("m", ""))->config().max_batch_size(), 3);
  EXPECT_EQ(Ask(), 3);
}

TEST_F(UpdateRepositoryTest, AModelThatIsServedFromFilesOfARequestTakesNoUpdates) {
  StartServer();
  Publish(1, 2);
  auto files = std::make_shared<formats::FilesInMemory>();
  (*files)["model.onnx"] = publisher_.weights(1).Onnx();
  LoadRequest request;
  request.config_json = "{}";
  request.files[1] = files;
  ASSERT_TRUE(Load("m", request).ok());
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(updates_->Rollback("m", "").status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Load("m").ok());
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateRepositoryTest, DeltasInTheRepositoryAreTakenUpInTheirOrderAndOnce) {
  options_.poll_interval = absl::Milliseconds(10);
  for (int64_t version = 2; version <= 4; ++version) publisher_.MakeVersion(version - 1, version);
  StartServer();
  DropDelta("c.espd", publisher_.Delta(1, 2));
  DropDelta("b.espd", publisher_.Delta(2, 3));
  EXPECT_TRUE(Eventually([&] { return Ask() == 3; }));
  ASSERT_EQ(*updates_->Rollback("m", "not that one"), 2);
  DropDelta("broken.espd", "no delta");
  EXPECT_TRUE(Eventually([&] { return !Counts().refused.empty(); }));
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ(Counts().refused.front().second, 1u);
  publisher_.MakeVersion(2, 6);
  DropDelta("d.espd", publisher_.Delta(2, 6));
  EXPECT_TRUE(Eventually([&] { return Ask() == 6; }));
  RestartServer();
  EXPECT_EQ(Ask(), 6);
}

TEST_F(UpdateRepositoryTest, SeveralModelsTakeTheirOwnUpdates) {
  AddRepositoryVersion(1, "other");
  StartServer();
  publisher_.MakeVersion(1, 2);
  const std::string delta = publisher_.Delta(1, 2, {.model = "other"});
  EXPECT_EQ(Push(delta, "m").status().code(), StatusCode::kFailedPrecondition);
  ASSERT_EQ(*Push(delta, "other"), 2);
  ASSERT_TRUE(updates_->Activate("other", 2).ok());
  EXPECT_EQ(Ask(1, "", "other"), 2);
  EXPECT_EQ(Ask(1, "", "m"), 1);
  ASSERT_TRUE(manager_->Unload("other").ok());
  EXPECT_EQ(Ask(1, "", "m"), 1);
}

}  // namespace
}  // namespace espalier::runtime
