// manager_fixture.h — a ModelManager over a temporary repository of fake models.
#pragma once

#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/runtime/model_manager.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {

using espalier::testing::Eventually;
using espalier::testing::FakeControl;
using espalier::testing::FakeLoader;
using espalier::testing::FakeModelOptions;
using espalier::testing::TemporaryDirectory;
using espalier::testing::TestRequest;

// The answer to a load, when it comes.
class LaterAnswer {
 public:
  void Set(absl::Status status) {
    status_ = std::move(status);
    answered_.count_down();
  }
  const absl::Status& Wait() {
    answered_.wait();
    return status_;
  }

 private:
  absl::Status status_;
  std::latch answered_{1};
};

class ManagerFixture : public ::testing::Test {
 protected:
  std::shared_ptr<FakeControl> AddModel(const std::string& name,
                                        const std::vector<int>& versions = {1}) {
    for (int version : versions) repository_.MakeDirectory(name + "/" + std::to_string(version));
    FakeModelOptions model;
    loader_->models[name] = model;
    return model.control;
  }

  void Start(int loader_threads = 2) {
    options_.repositories = {repository_.path()};
    options_.loader_threads = loader_threads;
    options_.on_started = [this] { started_.count_down(); };
    manager_ = std::make_unique<ModelManager>(options_, std::move(loader_));
    ASSERT_TRUE(manager_->Start().ok());
  }
  void StartAndWait() {
    Start();
    started_.wait();
  }

  std::unique_ptr<LaterAnswer> LoadLater(const std::string& name, LoadRequest request = {}) {
    auto answer = std::make_unique<LaterAnswer>();
    manager_->Load(name, std::move(request),
                   [to = answer.get()](absl::Status status) { to->Set(std::move(status)); });
    return answer;
  }
  absl::Status Load(const std::string& name, LoadRequest request = {}) {
    return LoadLater(name, std::move(request))->Wait();
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
  FakeLoader* const loader_view_ = loader_.get();  // changed while no load runs
  ModelManager::Options options_;
  std::latch started_{1};
  std::unique_ptr<ModelManager> manager_;
};

}  // namespace espalier::runtime
