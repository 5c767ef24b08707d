#include "engine/runtime/warm_up.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/manager_fixture.h"

namespace espalier::runtime {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// A model "m" whose config has one sample for its input x, FP32 [-1, 4].
class WarmUpTest : public ManagerFixture {
 protected:
  inference::ModelWarmup& AddSample(uint32_t batch_size = 1) {
    auto& sample = *loader_view_->configs["m"].add_model_warmup();
    sample.set_name("first");
    sample.set_batch_size(batch_size);
    Input(sample).set_data_type(inference::TYPE_FP32);
    Input(sample).add_dims(4);
    Input(sample).set_zero_data(true);
    return sample;
  }
  static inference::ModelWarmup::Input& Input(inference::ModelWarmup& sample) {
    return (*sample.mutable_inputs())["x"];
  }
  void WriteFloats(const std::string& file, const std::vector<float>& values) {
    repository_.MakeDirectory("m/warmup");
    repository_.Write("m/warmup/" + file, std::string(reinterpret_cast<const char*>(values.data()),
                                                      values.size() * sizeof(float)));
  }
  // The load fails, and says this.
  void ExpectRefused(const std::string& part) {
    const absl::Status status = Load("m");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("model_warmup 'first'"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    EXPECT_FALSE(manager_->Find("m", "").ok());
  }
};

TEST_F(WarmUpTest, SamplesRunBeforeTheVersionServesAndAreNotCounted) {
  auto control = AddModel("m");
  AddSample(2).set_count(3);
  AddSample(8);
  control->run_gate.Close();
  Start();
  control->run_gate.AwaitWaiting(1);
  EXPECT_EQ(StateOf("m"), VersionState::kLoading);
  control->run_gate.Open();
  started_.wait();
  EXPECT_EQ(control->runs, 4);
  const VersionHandle version = *manager_->Find("m", "");
  const VersionStatistics& statistics = version->statistics();
  EXPECT_EQ(statistics.executions, 0u);
  EXPECT_EQ(statistics.inferences, 0u);
  EXPECT_EQ(statistics.success.count, 0u);
  for (const auto& [name, latency] : manager_->Latencies()) {
    EXPECT_EQ(latency->request.Read().count, 0u);
    for (const LatencyHistogram& phase : latency->phases) EXPECT_EQ(phase.Read().count, 0u);
  }
}

TEST_F(WarmUpTest, TheOldVersionServesMeanwhile) {
  auto control = AddModel("m");
  StartAndWait();
  repository_.MakeDirectory("m/2");
  AddSample();
  control->run_gate.Close();
  auto answer = LoadLater("m");
  control->run_gate.AwaitWaiting(1);
  EXPECT_EQ((*manager_->Find("m", ""))->version(), 1);
  control->run_gate.Open();
  EXPECT_TRUE(answer->Wait().ok());
  EXPECT_EQ((*manager_->Find("m", ""))->version(), 2);
}

TEST_F(WarmUpTest, DataComesFromZerosChanceAndFiles) {
  auto control = AddModel("m");
  AddSample(2);
  Input(AddSample(2)).set_random_data(true);
  Input(AddSample(2)).set_input_data_file("item.bin");
  Input(AddSample(2)).set_input_data_file("batch.bin");
  WriteFloats("item.bin", {1, 2, 3, 4});
  WriteFloats("batch.bin", {1, 2, 3, 4, 5, 6, 7, 8});
  std::vector<std::vector<float>> seen;
  control->on_run = [&](espalier::testing::FakeState& state, int64_t batch) {
    const float* x = state.inputs[0].As<float>();
    seen.emplace_back(x, x + 4 * batch);
  };
  StartAndWait();
  ASSERT_EQ(seen.size(), 4u);
  EXPECT_THAT(seen[0], Each(0.0f));
  EXPECT_THAT(seen[1], Each(::testing::AllOf(::testing::Ge(0.5f), ::testing::Lt(1.0f))));
  EXPECT_EQ(seen[2], (std::vector<float>{1, 2, 3, 4, 1, 2, 3, 4}));
  EXPECT_EQ(seen[3], (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST_F(WarmUpTest, SamplesThatDoNotFitAreRefused) {
  AddModel("m");
  StartAndWait();
  ASSERT_TRUE(manager_->Unload("m").ok());
  const auto refuse = [&](const std::string& part, auto&& spoil) {
    loader_view_->configs["m"].clear_model_warmup();
    spoil(AddSample());
    ExpectRefused(part);
  };
  using Sample = inference::ModelWarmup;
  refuse("expected at most 10000", [](Sample& s) { s.set_count(10001); });
  refuse("with a batch of at most 8", [](Sample& s) { s.set_batch_size(9); });
  refuse("batch_size and dims make", [](Sample& s) { Input(s).set_dims(0, 5); });
  refuse("batch_size and dims make", [](Sample& s) { Input(s).set_dims(0, -1); });
  refuse("data_type is INT8, expected FP32",
         [](Sample& s) { Input(s).set_data_type(inference::TYPE_INT8); });
  refuse("no input of this name", [](Sample& s) { (*s.mutable_inputs())["y"].add_dims(4); });
  refuse("expected 1 inputs but got 0", [](Sample& s) { s.clear_inputs(); });
  WriteFloats("short.bin", {1, 2, 3});
  refuse("has 12 bytes, expected 16", [](Sample& s) { Input(s).set_input_data_file("short.bin"); });
  refuse("without '..'", [](Sample& s) { Input(s).set_input_data_file("../secret"); });
  loader_view_->configs["m"].clear_model_warmup();
  Input(AddSample()).set_input_data_file("nowhere.bin");
  EXPECT_EQ(Load("m").code(), absl::StatusCode::kNotFound);
}

TEST_F(WarmUpTest, ALinkOutOfTheFolderIsNotFollowed) {
  AddModel("m");
  WriteFloats("item.bin", {1, 2, 3, 4});
  repository_.Write("secret", std::string(16, 's'));
  ASSERT_EQ(symlink((repository_.path() + "/secret").c_str(),
                    (repository_.path() + "/m/warmup/linked.bin").c_str()),
            0);
  Input(AddSample()).set_input_data_file("linked.bin");
  StartAndWait();
  EXPECT_EQ(StateOf("m"), VersionState::kUnavailable);
  EXPECT_THAT(ReasonOf("m"), HasSubstr("symbolic link"));
}

TEST_F(WarmUpTest, ARunThatFailsKeepsTheVersionOut) {
  auto control = AddModel("m");
  AddSample();
  control->run_status = absl::InternalError("the kernel refused");
  StartAndWait();
  EXPECT_EQ(StateOf("m"), VersionState::kUnavailable);
  EXPECT_THAT(ReasonOf("m"), HasSubstr("the kernel refused"));
  EXPECT_TRUE(Eventually([&] { return control->alive == 0; }));
}

}  // namespace
}  // namespace espalier::runtime
