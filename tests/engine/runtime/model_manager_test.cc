#include <numeric>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/manager_fixture.h"

namespace espalier::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ModelManagerTest : public ManagerFixture {};

TEST(VersionStateTest, TheChainHasExactlyTheArrowsThatAreDrawn) {
  using enum VersionState;
  const std::set<std::pair<VersionState, VersionState>> arrows = {
      {kUnknown, kLoading},       {kUnknown, kUnavailable}, {kLoading, kReady},
      {kLoading, kUnavailable},   {kReady, kUnloading},     {kUnavailable, kLoading},
      {kUnloading, kUnavailable}, {kUnloading, kLoading},
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
  const auto loads = manager_->loads_by_code();
  EXPECT_EQ(loads[static_cast<int>(absl::StatusCode::kOk)], 1u);
  EXPECT_EQ(loads[static_cast<int>(absl::StatusCode::kInvalidArgument)], 1u) << "bad";
  EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), uint64_t{0}), 3u) << "and empty";
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
  started_.wait();
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
  const auto running = [&] {
    int loads = 0;
    for (const auto& control : controls) loads += control->loads;
    return loads;
  };
  EXPECT_TRUE(Eventually([&] { return running() == 2; }));
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(running(), 2);
  for (auto& control : controls) control->load_gate.Open();
  started_.wait();
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
  ASSERT_TRUE(Load("m").ok());
  EXPECT_TRUE(manager_->Find("m", "").ok());
}

TEST_F(ModelManagerTest, AnUnloadOvertakesTheLoad) {
  auto control = AddModel("m");
  control->load_gate.Close();
  Start();
  control->load_gate.AwaitWaiting(1);
  ASSERT_TRUE(manager_->Unload("m").ok());
  control->load_gate.Open();
  started_.wait();
  EXPECT_EQ(StateOf("m"), VersionState::kUnavailable);
  EXPECT_EQ(ReasonOf("m"), "unloaded while it was loading");
  EXPECT_TRUE(Eventually([&] { return control->alive == 0; }));
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
        if (i % 2 == 0) {
          EXPECT_TRUE(manager_->Unload(name).ok());
        } else {
          const absl::Status status = Load(name);
          EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
        }
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
  for (const char* name : {"a", "b"}) {
    EXPECT_TRUE(Load(name).ok());
    EXPECT_TRUE(manager_->Find(name, "").ok());
  }
  manager_.reset();
  for (auto& control : controls) EXPECT_EQ(control->alive, 0);
}

}  // namespace
}  // namespace espalier::runtime
