// Loading from files where there are GPUs (which are host memory here).
#include <cstring>
#include <filesystem>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/runtime/model_loader.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::runtime {
namespace {

using espalier::testing::FakeCuda;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class GpuLoaderTest : public ::testing::Test {
 protected:
  absl::StatusOr<LoadedModel> Load(const std::string& config, int gpus = 1,
                                   const std::string& model = "mnist_diagonal16") {
    fake_ = &FakeCuda::Reset();
    fake_->devices = gpus;
    fake_->micros = espalier::testing::ProportionalMicros;
    loader_.reset();
    devices_ = *OpenDevices({.threads = 1}, FakeCuda::Module());
    loader_ = MakeFileModelLoader(devices_, "");
    LoadJob job;
    job.model = "m";
    job.directory = "tests/data/models/" + model;
    job.version = 1;
    job.measure_budget_millis = 20'000;
    EXPECT_TRUE(
        google::protobuf::TextFormat::ParseFromString("max_batch_size: 2 " + config, &job.config));
    return loader_->Load(std::move(job));
  }

  FakeCuda* fake_ = nullptr;
  Devices devices_;
  std::unique_ptr<ModelLoader> loader_;
};

TEST_F(GpuLoaderTest, AModelRunsOnTheGpuUnlessItsConfigSaysOtherwise) {
  const auto device_of = [&](const std::string& config, int gpus) {
    auto loaded = Load(config, gpus);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? loaded->model->plan().device : "";
  };
  EXPECT_THAT(device_of("", 1), StartsWith("cuda"));
  EXPECT_THAT(device_of("instance_group { kind: KIND_CPU }", 1), StartsWith("cpu"));
  EXPECT_THAT(device_of("", 0), StartsWith("cpu"));
}

TEST_F(GpuLoaderTest, BFloat16IsThereOnAGpuOnly) {
  const std::string config = R"(parameters { key: "precision" value { string_value: "bf16" } } )";
  EXPECT_TRUE(Load(config).ok());
  EXPECT_THAT(std::string(Load(config, 0).status().message()),
              HasSubstr("not available on the CPU"));
}

TEST_F(GpuLoaderTest, WhatNoGpuKernelRunsGoesToTheCpuUnlessAGpuIsDemanded) {
  // Dense layers of a GPU are not batch-invariant, so a deterministic model with one has no kernel there.
  const std::string deterministic =
      R"(parameters { key: "deterministic" value { string_value: "true" } } )";
  auto loaded = Load(deterministic, 1, "mnist_dense");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(loaded->model->plan().device, StartsWith("cpu"));
  const auto refused = Load(deterministic + "instance_group { kind: KIND_GPU }", 1, "mnist_dense");
  EXPECT_TRUE(absl::IsUnimplemented(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("batch-invariant"));
}

TEST_F(GpuLoaderTest, AnInstanceOnTheCpuIsPlannedForItsOwnThreads) {
  for (const int threads : {1, AvailableCpus()}) {
    const auto loaded = Load(
        absl::StrCat(R"(parameters { key: "threads" value { string_value: ")", threads, "\" } }"),
        0);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_THAT(loaded->model->plan().device, EndsWith(absl::StrCat(", ", threads, " threads")));
  }
  EXPECT_THAT(Load("", 0)->model->plan().device, EndsWith(", 1 threads")) << "those of the server";
  const auto refused =
      Load(R"(parameters { key: "threads" value { string_value: "0" } })", 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("config.pbtxt: parameter 'threads' is '0', expected 1 to "));
}

TEST_F(GpuLoaderTest, InstancesRunOnTheGpusThatTheConfigNames) {
  auto loaded = Load("instance_group { kind: KIND_GPU gpus: [1, 0] }", 2);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const planner::PreparedModel& model = *loaded->model;
  ASSERT_EQ(model.instances(), 2);
  std::vector<std::unique_ptr<planner::ExecutionState>> states;
  for (int i = 0; i < 2; ++i) states.push_back(*model.NewState());
  std::vector<std::vector<char>> answers;
  for (auto& state : states) {
    const auto before = fake_->launches_of;
    std::memset(state->input(0), 0x3e, 784 * sizeof(float));
    ASSERT_TRUE(model.Run(*state, 1).ok());
    const int gpu = answers.empty() ? 1 : 0;
    EXPECT_EQ(fake_->launches_of[gpu] - before.at(gpu), 1);
    const char* y = static_cast<const char*>(state->output(0));
    answers.emplace_back(y, y + 10 * sizeof(float));
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_EQ(model.dense_weight_bytes() % 2, 0u) << "a copy on each GPU";
}

}  // namespace
}  // namespace espalier::runtime
