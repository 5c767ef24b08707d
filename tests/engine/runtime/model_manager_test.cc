#include "engine/runtime/model_manager.h"

#include <set>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::Eventually;
using espalier::testing::FakeControl;
using espalier::testing::FakeLoader;
using espalier::testing::FakeModelOptions;
using espalier::testing::TemporaryDirectory;
using espalier::testing::TestRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ModelManagerTest : public ::testing::Test {
 protected:
  std::shared_ptr<FakeControl> AddModel(const std::string& name,
                                        const std::vector<int>& versions = {1}) {
    for (int version : versions) repository_.MakeDirectory(name + "/" + std::to_string(version));
    FakeModelOptions model;
    loader_->models[name] = model;
    return model.control;
  }

  void Start(int loader_threads = 2) {
    ModelManager::Options options;
    options.repositories = {repository_.path()};
    options.loader_threads = loader_threads;
    options.on_started = [this] { started_.Notify(); };
    manager_ = std::make_unique<ModelManager>(options, std::move(loader_));
    ASSERT_TRUE(manager_->Start().ok());
  }
  void StartAndWait() {
    Start();
    started_.WaitForNotification();
  }

  VersionState StateOf(const std::string& name, int64_t version = 1) {
    return EntryOf(name, version).state;
  }
  std::string ReasonOf(const std::string& name, int64_t version = 1) {
    return EntryOf(name, version).reason;
  }
  ModelManager::IndexEntry EntryOf(const std::string& name, int64_t version) {
    for (const auto& entry : manager_->Index()) {
      if (entry.name == name && entry.version == version) return entry;
    }
    ADD_FAILURE() << name << " version " << version << " is not in the index";
    return {};
  }
  std::string FindError(const std::string& name, const std::string& version,
                        absl::StatusCode code) {
    auto found = manager_->Find(name, version);
    EXPECT_EQ(found.status().code(), code);
    return std::string(found.status().message());
  }

  TemporaryDirectory repository_;
  std::unique_ptr<FakeLoader> loader_ = std::make_unique<FakeLoader>();
  absl::Notification started_;
  std::unique_ptr<ModelManager> manager_;
};

TEST(VersionStateTest, TheChainHasExactlyTheArrowsThatAreDrawn) {
  using enum VersionState;
  const std::set<std::pair<VersionState, VersionState>> arrows = {
      {kUnknown, kLoading},       {kUnknown, kUnavailable}, {kLoading, kReady},
      {kLoading, kUnavailable},   {kReady, kUnloading},     {kUnavailable, kLoading},
      {kUnloading, kUnavailable},
  };
  for (VersionState from : {kUnknown, kLoading, kReady, kUnloading, kUnavailable}) {
    for (VersionState to : {kUnknown, kLoading, kReady, kUnloading, kUnavailable}) {
      EXPECT_EQ(IsTransition(from, to), arrows.contains({from, to}))
          << NameOf(from) << " " << NameOf(to);
    }
  }
}

TEST_F(ModelManagerTest, LoadsEveryModelAndAnswersFromTheLatestVersion) {
  AddModel("a", {1, 2});
  AddModel("b");
  StartAndWait();
  EXPECT_TRUE(manager_->started());
  EXPECT_EQ((*manager_->Find("a", ""))->version(), 2);
  EXPECT_EQ((*manager_->Find("b", "1"))->version(), 1);
  EXPECT_EQ(StateOf("a", 1), VersionState::kUnknown);
  EXPECT_THAT(ReasonOf("a", 1), HasSubstr("version_policy"));
  EXPECT_THAT(manager_->ReadyVersions("a"), ElementsAre(2));
  EXPECT_EQ(manager_->AllReady().size(), 2u);
  EXPECT_EQ((*manager_->Find("b", ""))->config().parameters().at("layouts").string_value(),
            "diagonal(1) x1");
}

TEST_F(ModelManagerTest, ServesAllOrSpecificVersionsWhenTheConfigSaysSo) {
  AddModel("all", {1, 2});
  loader_->configs["all"].mutable_version_policy()->mutable_all();
  AddModel("one", {1, 2});
  loader_->configs["one"].mutable_version_policy()->mutable_specific()->add_versions(1);
  loader_->configs["one"].mutable_version_policy()->mutable_specific()->add_versions(7);
  StartAndWait();
  EXPECT_THAT(manager_->ReadyVersions("all"), ElementsAre(1, 2));
  EXPECT_THAT(manager_->ReadyVersions("one"), ElementsAre(1));
  EXPECT_EQ(StateOf("one", 7), VersionState::kUnavailable);
  EXPECT_THAT(ReasonOf("one", 7), HasSubstr("there is no directory"));
}

TEST_F(ModelManagerTest, AFailedLoadLeavesItsReasonAndOthersServing) {
  AddModel("good");
  AddModel("bad")->load_status =
      absl::InvalidArgumentError("model.onnx: node 'fc1': expected rank 2, got 3");
  repository_.MakeDirectory("empty");
  StartAndWait();
  EXPECT_TRUE(manager_->Find("good", "").ok());
  EXPECT_EQ(StateOf("bad"), VersionState::kUnavailable);
  EXPECT_EQ(ReasonOf("bad"), "model.onnx: node 'fc1': expected rank 2, got 3");
  EXPECT_THAT(FindError("bad", "", absl::StatusCode::kNotFound),
              HasSubstr("has no available versions"));
  EXPECT_THAT(FindError("bad", "1", absl::StatusCode::kUnavailable),
              HasSubstr("not at ready state"));
  EXPECT_EQ(StateOf("empty", 0), VersionState::kUnavailable);
  EXPECT_THAT(ReasonOf("empty", 0), HasSubstr("no version in"));
  EXPECT_EQ(manager_->failed_loads(), 1);
}

TEST_F(ModelManagerTest, ErrorsOfFindTellUnknownFromNotReady) {
  auto control = AddModel("slow");
  control->load_gate.Close();
  Start();
  control->load_gate.AwaitWaiting(1);
  EXPECT_EQ(StateOf("slow"), VersionState::kLoading);
  EXPECT_FALSE(manager_->started());
  EXPECT_THAT(FindError("slow", "", absl::StatusCode::kUnavailable),
              HasSubstr("not at ready state"));
  EXPECT_THAT(FindError("slow", "1", absl::StatusCode::kUnavailable), HasSubstr("it is LOADING"));
  EXPECT_EQ(FindError("no\n", "", absl::StatusCode::kNotFound),
            "Request for unknown model: 'no\\n' is not found");
  EXPECT_EQ(FindError("slow", "9", absl::StatusCode::kNotFound),
            "Request for unknown model: 'slow' version 9 is not found");
  for (const char* bad : {"x", "-1", "01", "1.5"}) {
    EXPECT_THAT(FindError("slow", bad, absl::StatusCode::kInvalidArgument),
                HasSubstr("version string"));
  }
  control->load_gate.Open();
  started_.WaitForNotification();
  EXPECT_TRUE(manager_->Find("slow", "").ok());
}

TEST_F(ModelManagerTest, AModelInTwoRepositoriesIsRefusedAndBothAreNamed) {
  TemporaryDirectory other;
  AddModel("twice");
  other.MakeDirectory("twice/1");
  ModelManager::Options options;
  options.repositories = {repository_.path(), other.path()};
  manager_ = std::make_unique<ModelManager>(options, std::move(loader_));
  ASSERT_TRUE(manager_->Start().ok());
  EXPECT_TRUE(Eventually([&] { return manager_->started(); }));
  EXPECT_EQ(StateOf("twice"), VersionState::kUnavailable);
  EXPECT_THAT(ReasonOf("twice"), HasSubstr(repository_.path()));
  EXPECT_THAT(ReasonOf("twice"), HasSubstr(other.path()));
}

TEST_F(ModelManagerTest, LoadsRunSideBySideUpToTheirLimit) {
  std::vector<std::shared_ptr<FakeControl>> controls;
  for (const char* name : {"a", "b", "c"}) {
    controls.push_back(AddModel(name));
    controls.back()->load_gate.Close();
  }
  Start(/*loader_threads=*/2);
  controls[0]->load_gate.AwaitWaiting(1);
  controls[1]->load_gate.AwaitWaiting(1);
  EXPECT_EQ(controls[2]->loads, 0);
  for (auto& control : controls) control->load_gate.Open();
  started_.WaitForNotification();
  EXPECT_EQ(manager_->AllReady().size(), 3u);
}

TEST_F(ModelManagerTest, AnUnloadedVersionAnswersThoseThatHoldItAndGoesWithTheLast) {
  auto control = AddModel("m");
  StartAndWait();
  control->run_gate.Close();
  TestRequest running(1), waiting(1);
  {
    VersionHandle handle = *manager_->Find("m", "");
    running.Submit(handle);
    control->run_gate.AwaitWaiting(1);
    waiting.Submit(handle);
  }
  ASSERT_TRUE(manager_->Unload("m").ok());
  EXPECT_EQ(StateOf("m"), VersionState::kUnloading);
  EXPECT_THAT(FindError("m", "1", absl::StatusCode::kUnavailable), HasSubstr("it is UNLOADING"));
  EXPECT_EQ(control->alive, 1);
  control->run_gate.Open();
  EXPECT_TRUE(running.status().ok());
  EXPECT_TRUE(waiting.status().ok());
  EXPECT_TRUE(Eventually([&] { return StateOf("m") == VersionState::kUnavailable; }));
  EXPECT_EQ(control->alive, 0);
  ASSERT_TRUE(manager_->Load("m").ok());
  EXPECT_TRUE(Eventually([&] { return manager_->Find("m", "").ok(); }));
}

TEST_F(ModelManagerTest, AnUnloadOvertakesTheLoad) {
  auto control = AddModel("m");
  control->load_gate.Close();
  Start();
  control->load_gate.AwaitWaiting(1);
  ASSERT_TRUE(manager_->Unload("m").ok());
  control->load_gate.Open();
  started_.WaitForNotification();
  EXPECT_EQ(StateOf("m"), VersionState::kUnavailable);
  EXPECT_EQ(ReasonOf("m"), "unloaded while it was loading");
  EXPECT_EQ(control->alive, 0);
}

TEST_F(ModelManagerTest, ANewVersionIsFoundByALaterLoad) {
  AddModel("m");
  StartAndWait();
  repository_.MakeDirectory("m/2");
  ASSERT_TRUE(manager_->Load("m").ok());
  EXPECT_TRUE(Eventually([&] { return manager_->ReadyVersions("m").size() == 2; }));
  EXPECT_EQ((*manager_->Find("m", ""))->version(), 2);
  EXPECT_EQ(manager_->Load("nothing").code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelManagerTest, StopsWhileLoading) {
  auto slow = AddModel("slow");
  slow->load_delay = absl::Milliseconds(30);
  auto never = AddModel("zlast");
  Start(/*loader_threads=*/1);
  manager_.reset();
  EXPECT_EQ(slow->alive, 0);
  EXPECT_EQ(never->alive, 0);
}

TEST_F(ModelManagerTest, ManyThreadsLoadAndUnloadUnderTraffic) {
  std::vector<std::shared_ptr<FakeControl>> controls = {AddModel("a"), AddModel("b")};
  AddModel("steady");
  StartAndWait();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const std::string name = (t + i) % 2 == 0 ? "a" : "b";
        EXPECT_TRUE((i % 2 == 0 ? manager_->Unload(name) : manager_->Load(name)).ok());
      }
    });
  }
  std::thread traffic([&] {
    while (!stop) {
      for (const char* name : {"a", "b", "steady"}) {
        auto found = manager_->Find(name, "");
        if (!found.ok()) {
          EXPECT_STRNE(name, "steady");
          continue;
        }
        TestRequest request(1);
        request.Submit(*found);
        EXPECT_TRUE(request.status().ok());
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  traffic.join();
  manager_.reset();
  for (auto& control : controls) EXPECT_EQ(control->alive, 0);
}

}  // namespace
}  // namespace espalier::runtime
