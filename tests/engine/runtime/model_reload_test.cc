// Loads beside what serves: swaps, failures, policies, overrides, orders of loads and unloads.
#include <fcntl.h>
#include <sys/stat.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/manager_fixture.h"

namespace espalier::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ModelReloadTest : public ManagerFixture {
 protected:
  void WriteModel(const std::string& text, int version = 1) {
    repository_.Write("m/" + std::to_string(version) + "/model.onnx", text);
  }
};

TEST_F(ModelReloadTest, ANewVersionReplacesTheOldOneOnceItIsReady) {
  auto control = AddModel("m");
  StartAndWait();
  repository_.MakeDirectory("m/2");
  control->load_gate.Close();
  auto answer = LoadLater("m");
  control->load_gate.AwaitWaiting(1);
  EXPECT_EQ((*manager_->Find("m", ""))->version(), 1) << "the old one serves meanwhile";
  control->load_gate.Open();
  EXPECT_TRUE(answer->Wait().ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(2));
  EXPECT_TRUE(Eventually([&] { return StateOf("m", 1) == VersionState::kUnavailable; }));
  EXPECT_EQ(control->alive, 1);
}

TEST_F(ModelReloadTest, AFailedLoadKeepsTheOldVersionAndSaysWhy) {
  auto control = AddModel("m");
  StartAndWait();
  repository_.MakeDirectory("m/2");
  control->load_status = absl::InvalidArgumentError("model.onnx: half of it is missing");
  const absl::Status status = Load("m");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "failed to load 'm': version 2: model.onnx: half of it is missing");
  EXPECT_EQ((*manager_->Find("m", ""))->version(), 1);
  EXPECT_EQ(StateOf("m", 2), VersionState::kUnavailable);
  EXPECT_EQ(ReasonOf("m", 2), "model.onnx: half of it is missing");
  control->load_status = absl::OkStatus();
  EXPECT_TRUE(Load("m").ok()) << "a later good load works";
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(2));
}

TEST_F(ModelReloadTest, OtherContentOfTheSameVersionIsASwap) {
  auto control = AddModel("m");
  WriteModel("first");
  StartAndWait();
  const ServedVersion* first = (*manager_->Find("m", "1")).get();
  WriteModel("second");
  control->load_gate.Close();
  auto answer = LoadLater("m");
  control->load_gate.AwaitWaiting(1);
  EXPECT_EQ(StateOf("m"), VersionState::kReady);
  EXPECT_EQ((*manager_->Find("m", "1")).get(), first);
  control->load_gate.Open();
  EXPECT_TRUE(answer->Wait().ok());
  EXPECT_NE((*manager_->Find("m", "1")).get(), first);
  EXPECT_TRUE(Eventually([&] { return control->alive == 1; }));
  EXPECT_EQ(StateOf("m"), VersionState::kReady) << "the end of the old one is not the version's";
}

TEST_F(ModelReloadTest, AFailedSwapKeepsTheOldContentAndSaysWhy) {
  auto control = AddModel("m");
  WriteModel("first");
  StartAndWait();
  WriteModel("second");
  control->load_status = absl::InvalidArgumentError("bad node");
  EXPECT_FALSE(Load("m").ok());
  EXPECT_EQ(StateOf("m"), VersionState::kReady);
  EXPECT_THAT(ReasonOf("m"), HasSubstr("bad node"));
  control->load_status = absl::OkStatus();
  EXPECT_TRUE(Load("m").ok());
  EXPECT_EQ(ReasonOf("m"), "");
}

TEST_F(ModelReloadTest, WhatDidNotChangeIsNotLoadedAgain) {
  auto control = AddModel("m");
  WriteModel("same");
  repository_.Write("m/config.pbtxt", "# a comment\n");
  StartAndWait();
  EXPECT_EQ(control->loads, 1);
  EXPECT_TRUE(Load("m").ok());
  const timespec now[] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
  ASSERT_EQ(utimensat(AT_FDCWD, (repository_.path() + "/m/1/model.onnx").c_str(), now, 0), 0);
  EXPECT_TRUE(Load("m").ok()) << "touched";
  WriteModel("same");
  repository_.Write("m/config.pbtxt", "# another comment\n");
  EXPECT_TRUE(Load("m").ok()) << "written anew";
  EXPECT_EQ(control->loads, 1);
  loader_view_->configs["m"].set_max_batch_size(4);
  EXPECT_TRUE(Load("m").ok()) << "another config";
  EXPECT_EQ(control->loads, 2);
}

TEST_F(ModelReloadTest, ExternalDataAndNamedFilesAreContent) {
  auto control = AddModel("m");
  WriteModel("model");
  auto& config = loader_view_->configs["m"];
  config.add_output()->set_label_filename("labels.txt");
  StartAndWait();
  int loads = 1;
  for (const char* file : {"m/1/weights.bin", "m/labels.txt"}) {
    repository_.Write(file, "new");
    EXPECT_TRUE(Load("m").ok());
    EXPECT_EQ(control->loads, ++loads) << file;
  }
  repository_.Write("m/notes.txt", "nobody reads this");
  repository_.Write("m/1/.weights.bin.part", "half a copy");
  EXPECT_TRUE(Load("m").ok());
  EXPECT_EQ(control->loads, loads);
}

TEST_F(ModelReloadTest, WhatIsWrittenToDuringALoadIsLoadedAgain) {
  auto control = AddModel("m");
  WriteModel("first");
  control->load_gate.Close();
  Start();
  control->load_gate.AwaitWaiting(1);
  absl::SleepFor(absl::Milliseconds(20));  // the file system's clock ticks every 4 ms
  WriteModel("first");  // other times, the same bytes: but what did the loader see?
  control->load_gate.Open();
  started_.wait();
  EXPECT_TRUE(Load("m").ok());
  EXPECT_EQ(control->loads, 2);
  EXPECT_TRUE(Load("m").ok());
  EXPECT_EQ(control->loads, 2);
}

TEST_F(ModelReloadTest, OneVersionCanBeLoadedAndUnloaded) {
  AddModel("m", {1, 2, 3});
  StartAndWait();
  EXPECT_TRUE(Load("m", {.version = 2}).ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(2, 3));
  EXPECT_TRUE(manager_->Unload("m", 3).ok());
  EXPECT_EQ((*manager_->Find("m", ""))->version(), 2) << "a rollback";
  EXPECT_EQ(manager_->Unload("m", 9).code(), absl::StatusCode::kNotFound);
  const absl::Status status = Load("m", {.version = 9});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("there is no directory"));
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(2));
  EXPECT_TRUE(Load("m").ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(3)) << "the policy again";
}

TEST_F(ModelReloadTest, APolicyThatSelectsLessUnloadsTheRest) {
  AddModel("m", {1, 2});
  loader_view_->configs["m"].mutable_version_policy()->mutable_all();
  StartAndWait();
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(1, 2));
  loader_view_->configs["m"].mutable_version_policy()->mutable_specific()->add_versions(1);
  EXPECT_TRUE(Load("m").ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(1));
}

TEST_F(ModelReloadTest, AModelThatWasRefusedOnceIsNoReasonAfterAGoodLoad) {
  AddModel("m", {1, 2});
  StartAndWait();
  EXPECT_FALSE(Load("m", {.config_json = R"({"max_batch_size": -3})"}).ok());
  EXPECT_THAT(ReasonOf("m", 2), HasSubstr("max_batch_size is -3"));
  EXPECT_TRUE(manager_->Unload("m").ok());
  EXPECT_FALSE(Load("m", {.config_json = R"({"max_batch_size": -3})"}).ok());
  EXPECT_THAT(ReasonOf("m", 1), HasSubstr("max_batch_size is -3"));
  EXPECT_TRUE(Load("m").ok());
  EXPECT_EQ(ReasonOf("m", 1), "not selected by the model's version_policy");
  EXPECT_EQ(ReasonOf("m", 2), "");
}

TEST_F(ModelReloadTest, AConfigThatComesWithTheRequestReplacesTheFile) {
  AddModel("m", {1, 2});
  StartAndWait();
  EXPECT_TRUE(
      Load("m", {.config_json = R"({"version_policy": {"specific": {"versions": [1]}}})"}).ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(1));
  for (const auto& [json, part] : std::map<std::string, std::string>{
           {"{", "parameter 'config'"},
           {R"({"no_such_field": 1})", "no_such_field"},
           {R"({"max_batch_size": -1})", "max_batch_size is -1"},
           {R"({"default_model_filename": "../x"})", "default_model_filename"}}) {
    const absl::Status status = Load("m", {.config_json = json});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(1));
  }
  EXPECT_TRUE(Load("m").ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(2));
}

TEST_F(ModelReloadTest, FilesThatComeWithTheRequestReplaceTheFolder) {
  auto control = AddModel("m");
  StartAndWait();
  const auto files = std::make_shared<const FilesInMemory>(FilesInMemory{{"model.onnx", "bytes"}});
  const absl::Status without = Load("m", {.files = {{7, files}}});
  EXPECT_EQ(without.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(without.message()), HasSubstr("expected the parameter 'config'"));
  EXPECT_TRUE(Load("m", {.config_json = "{}", .files = {{7, files}}}).ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(7));
  EXPECT_EQ(loader_view_->last_files, files);
  EXPECT_EQ(control->loads, 2);
  EXPECT_TRUE(Load("m", {.config_json = "{}", .files = {{7, files}}}).ok());
  EXPECT_EQ(control->loads, 2) << "the same files are no change";
  EXPECT_TRUE(Load("m").ok());
  EXPECT_THAT(manager_->ReadyVersions("m"), ElementsAre(1)) << "the folder again";
}

TEST_F(ModelReloadTest, AModelThatOnlyARequestBroughtLeavesNoTrace) {
  AddModel("m");
  FakeModelOptions guest;
  loader_view_->models["guest"] = guest;
  StartAndWait();
  const auto files = std::make_shared<const FilesInMemory>(FilesInMemory{{"model.onnx", "bytes"}});
  EXPECT_TRUE(Load("guest", {.config_json = "{}", .files = {{1, files}}}).ok());
  EXPECT_TRUE(manager_->Find("guest", "").ok());
  EXPECT_TRUE(manager_->Unload("guest").ok());
  EXPECT_TRUE(Eventually([&] { return manager_->Index().size() == 1; }));
  guest.control->load_status = absl::InvalidArgumentError("bad");
  EXPECT_FALSE(Load("guest", {.config_json = "{}", .files = {{1, files}}}).ok());
  EXPECT_EQ(Load("nobody").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(manager_->Index().size(), 1u);
  EXPECT_EQ(manager_->Latencies().size(), 1u);
}

TEST_F(ModelReloadTest, NamesThatAreNoNamesAreRefused) {
  AddModel("m");
  StartAndWait();
  for (const char* name : {"", ".", "..", "../m", "m/../m", "/etc", "m/1", "a\\b", "a\nb"}) {
    const absl::Status status = Load(name);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(status.message()), StartsWith("failed to load '"));
  }
}

TEST_F(ModelReloadTest, ALoadNeedNotWaitForTheUnloadBeforeIt) {
  auto control = AddModel("m");
  StartAndWait();
  control->run_gate.Close();
  TestRequest slow(1);
  slow.Submit(*manager_->Find("m", ""));
  control->run_gate.AwaitWaiting(1);
  EXPECT_TRUE(manager_->Unload("m").ok());
  EXPECT_EQ(StateOf("m"), VersionState::kUnloading);
  EXPECT_TRUE(Load("m").ok()) << "with a request on the old one still running";
  EXPECT_EQ(StateOf("m"), VersionState::kReady);
  EXPECT_EQ(control->alive, 2);
  control->run_gate.Open();
  EXPECT_TRUE(slow.status().ok());
  EXPECT_TRUE(Eventually([&] { return control->alive == 1; }));
  EXPECT_EQ(StateOf("m"), VersionState::kReady);
}

TEST_F(ModelReloadTest, AnUnloadOvertakesWaitingAndRunningLoads) {
  auto control = AddModel("m");
  StartAndWait();
  EXPECT_TRUE(manager_->Unload("m").ok());
  control->load_gate.Close();
  auto running = LoadLater("m");
  control->load_gate.AwaitWaiting(1);
  auto waiting = LoadLater("m");
  EXPECT_TRUE(manager_->Unload("m").ok());
  EXPECT_EQ(waiting->Wait().code(), absl::StatusCode::kAborted);
  auto after = LoadLater("m");
  control->load_gate.Open();
  EXPECT_EQ(running->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(after->Wait().ok());
  EXPECT_EQ(StateOf("m"), VersionState::kReady);
  EXPECT_TRUE(Eventually([&] { return control->alive == 1; }));
}

TEST_F(ModelReloadTest, LoadsThatWaitTogetherAreOneLoad) {
  auto control = AddModel("m");
  WriteModel("1");
  StartAndWait();
  WriteModel("22");
  control->load_gate.Close();
  std::vector<std::unique_ptr<LaterAnswer>> answers;
  answers.push_back(LoadLater("m"));
  control->load_gate.AwaitWaiting(1);
  WriteModel("333");
  for (int i = 0; i < 10; ++i) answers.push_back(LoadLater("m"));
  control->load_gate.Open();
  for (auto& answer : answers) EXPECT_TRUE(answer->Wait().ok());
  EXPECT_EQ(control->loads, 3) << "at start, the first, and one for all that waited";
}

TEST_F(ModelReloadTest, OnlyTheModelsToLoadAtStartAreLoaded) {
  AddModel("a");
  AddModel("b");
  options_.load_at_start = std::vector<std::string>{"b"};
  StartAndWait();
  EXPECT_FALSE(manager_->Find("a", "").ok());
  EXPECT_TRUE(manager_->Find("b", "").ok());
  EXPECT_EQ(StateOf("a"), VersionState::kUnknown);
  EXPECT_TRUE(Load("a").ok());
}

TEST_F(ModelReloadTest, AModelToLoadAtStartThatIsNotThereIsAnError) {
  AddModel("a");
  options_.load_at_start = std::vector<std::string>{"b"};
  options_.repositories = {repository_.path()};
  manager_ = std::make_unique<ModelManager>(options_, std::move(loader_));
  const absl::Status status = manager_->Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'b'"));
}

TEST_F(ModelReloadTest, ARepositoryThatCannotBeAskedUnloadsNothing) {
  AddModel("m");
  StartAndWait();
  const std::string away = repository_.path() + ".away";
  ASSERT_EQ(rename(repository_.path().c_str(), away.c_str()), 0);
  const absl::Status status = Load("m");
  ASSERT_EQ(rename(away.c_str(), repository_.path().c_str()), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(manager_->Find("m", "").ok());
  EXPECT_THAT(ReasonOf("m"), HasSubstr("cannot look into"));
}

TEST_F(ModelReloadTest, ManyReloadsLeaveNothingBehind) {
  auto control = AddModel("m");
  StartAndWait();
  for (int i = 0; i < 200; ++i) {
    WriteModel(std::to_string(i));
    ASSERT_TRUE(Load("m").ok());
  }
  EXPECT_TRUE(Eventually([&] { return control->alive == 1; }));
  EXPECT_EQ(manager_->Index().size(), 1u);
  EXPECT_EQ(manager_->Latencies().size(), 1u);
}

TEST_F(ModelReloadTest, StoppingAnswersLoadsThatWait) {
  auto control = AddModel("m");
  StartAndWait();
  WriteModel("new");
  control->load_gate.Close();
  auto running = LoadLater("m");
  control->load_gate.AwaitWaiting(1);
  auto waiting = LoadLater("m");
  std::thread open([&] {
    EXPECT_EQ(waiting->Wait().code(), absl::StatusCode::kUnavailable);
    control->load_gate.Open();
  });
  manager_.reset();
  open.join();
  EXPECT_FALSE(running->Wait().ok());
  EXPECT_EQ(control->alive, 0);
}

}  // namespace
}  // namespace espalier::runtime
