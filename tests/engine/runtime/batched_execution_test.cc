// What merged requests get: their own results, in order where that is asked for, padded where only some sizes
// may run.
#include <list>
#include <numeric>

#include "engine/runtime/answer_order.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::FakeControl;
using espalier::testing::FakeModel;
using espalier::testing::FakeModelOptions;
using espalier::testing::FakeState;
using espalier::testing::TestRequest;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BatchedExecutionTest : public ::testing::Test {
 protected:
  absl::StatusOr<VersionHandle> Serve(FakeModelOptions model = {}) {
    config_.set_max_batch_size(static_cast<int>(model.max_batch_size));
    control_ = model.control;
    auto version = ServedVersion::Create({.name = "m",
                                          .version = 1,
                                          .config = config_,
                                          .model = std::make_unique<FakeModel>(std::move(model)),
                                          .latency = std::make_shared<ModelLatency>()});
    if (!version.ok()) return version.status();
    return VersionHandle(std::move(*version));
  }
  void SetParameter(const char* key, const char* value) {
    (*config_.mutable_parameters())[key].set_string_value(value);
  }

  inference::ModelConfig config_;
  std::shared_ptr<FakeControl> control_;
};

TEST_F(BatchedExecutionTest, EveryRequestOfABatchGetsWhatItWouldGetAlone) {
  VersionHandle version = *Serve();
  control_->run_gate.Close();
  TestRequest running(1);
  running.Submit(version);
  control_->run_gate.AwaitWaiting(1);
  std::list<TestRequest> requests;
  for (int64_t batch : {1, 2, 3, 1}) {
    requests.emplace_back(batch, static_cast<float>(100 * requests.size()));
    requests.back().Submit(version);
  }
  control_->run_gate.Open();
  float first = 0;
  for (TestRequest& request : requests) {
    ASSERT_TRUE(request.status().ok());
    std::vector<float> alone(static_cast<size_t>(request.batch) * 4);
    std::iota(alone.begin(), alone.end(), first);
    for (float& value : alone) value *= 2;
    EXPECT_EQ(request.Floats(), alone);
    first += 100;
  }
  EXPECT_THAT(control_->sizes(), ElementsAre(1, 7));
}

TEST_F(BatchedExecutionTest, RequestsForDifferentOutputsShareABatch) {
  FakeModelOptions model;
  model.outputs.push_back({"z", DType::kFloat32, {kBatch, 4}});
  VersionHandle version = *Serve(model);
  control_->run_gate.Close();
  TestRequest running(1);
  running.Submit(version);
  control_->run_gate.AwaitWaiting(1);
  TestRequest one(1, 1), other(1, 5);
  one.requested_outputs = {"z"};
  other.requested_outputs = {"y"};
  one.Submit(version);
  other.Submit(version);
  control_->run_gate.Open();
  ASSERT_TRUE(one.status().ok());
  ASSERT_TRUE(other.status().ok());
  EXPECT_THAT(one.Floats(), ElementsAre(2, 4, 6, 8));
  EXPECT_THAT(other.Floats(), ElementsAre(10, 12, 14, 16));
  EXPECT_THAT(control_->sizes(), ElementsAre(1, 2));
}

TEST_F(BatchedExecutionTest, CountsOfInferencesAreThoseOfBatchesTimesTheirSizes) {
  VersionHandle version = *Serve();
  control_->run_gate.Close();
  std::list<TestRequest> requests;
  requests.emplace_back(1).Submit(version);
  control_->run_gate.AwaitWaiting(1);
  for (int i = 0; i < 9; ++i) requests.emplace_back(1 + i % 3).Submit(version);
  control_->run_gate.Open();
  for (TestRequest& request : requests) EXPECT_TRUE(request.status().ok());
  const VersionStatistics& statistics = version->statistics();
  uint64_t items = 0, executions = 0, phases = 0;
  for (size_t size = 0; size < statistics.by_batch_size().size(); ++size) {
    items += size * statistics.by_batch_size()[size].count;
    executions += statistics.by_batch_size()[size].count;
  }
  for (const DurationCounter& phase : statistics.phases) phases += phase.nanos;
  EXPECT_EQ(statistics.inferences, 19u);
  EXPECT_EQ(items, 19u);
  EXPECT_EQ(executions, statistics.executions);
  EXPECT_LT(executions, 10u);
  EXPECT_LE(phases, statistics.success.nanos);
}

TEST_F(BatchedExecutionTest, OnlyAllowedSizesAreExecutedFilledUpWithZeros) {
  config_.mutable_dynamic_batching()->add_preferred_batch_size(6);
  config_.mutable_dynamic_batching()->add_preferred_batch_size(2);
  SetParameter("allowed_batch_sizes", "preferred");
  VersionHandle version = *Serve();
  std::vector<float> padding;
  control_->on_run = [&](FakeState& state, int64_t batch) {
    const float* x = state.inputs[0].As<float>();
    if (batch == 6) padding.assign(x + 3 * 4, x + 6 * 4);
  };
  TestRequest full(6, 1);  // leaves numbers where the padding will be
  full.Submit(version);
  ASSERT_TRUE(full.status().ok());
  TestRequest three(3, 1);
  three.Submit(version);
  ASSERT_TRUE(three.status().ok());
  EXPECT_EQ(three.Floats().size(), 12u);
  EXPECT_THAT(control_->sizes(), ElementsAre(6, 6));
  EXPECT_THAT(padding, Each(0.0f));
  EXPECT_EQ(version->statistics().inferences, 9u);
  EXPECT_EQ(version->statistics().padding_items, 3u);
  TestRequest seven(7);
  seven.Submit(version);
  EXPECT_EQ(seven.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(seven.status().message()), HasSubstr("<= 6 for 'm'"));
}

TEST_F(BatchedExecutionTest, SizesThatCannotBeMeantAreRefusedAtLoad) {
  SetParameter("allowed_batch_sizes", "preferred");
  EXPECT_THAT(std::string(Serve().status().message()), HasSubstr("at least one"));
  config_.mutable_dynamic_batching()->add_preferred_batch_size(9);
  EXPECT_THAT(std::string(Serve().status().message()),
              HasSubstr("preferred_batch_size is 9, expected at most max_batch_size, 8"));
}

TEST_F(BatchedExecutionTest, WithPreservedOrderingAnswersOfSeveralInstancesKeepTheOrderOfBatches) {
  config_.add_instance_group()->set_count(2);
  config_.mutable_dynamic_batching()->set_preserve_ordering(true);
  VersionHandle version = *Serve();
  std::atomic<bool> first_may_go{false};
  control_->on_run = [&](FakeState& state, int64_t) {
    // The first request carries ones; its instance is the slow one.
    while (state.inputs[0].As<float>()[0] == 1 && !first_may_go)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  TestRequest slow(1, 1), quick(1, 5);
  slow.Submit(version);
  while (control_->runs < 1) std::this_thread::yield();
  quick.Submit(version);
  while (version->statistics().executions < 1) std::this_thread::yield();
  EXPECT_FALSE(quick.answered());
  first_may_go = true;
  ASSERT_TRUE(quick.status().ok());
  ASSERT_TRUE(slow.status().ok());
  EXPECT_LE(slow.answered_nanos(), quick.answered_nanos());
  EXPECT_THAT(quick.Floats(), ElementsAre(10, 12, 14, 16));
}

TEST_F(BatchedExecutionTest, ARequestOfAQuickModelRunsInTheThreadThatBringsIt) {
  VersionHandle version = *Serve();
  std::atomic<bool> here{false};
  const auto caller = std::this_thread::get_id();
  TestRequest first(1);
  first.Submit(version);  // how quick it is must be seen first
  ASSERT_TRUE(first.status().ok());
  control_->on_run = [&](FakeState&, int64_t) { here = std::this_thread::get_id() == caller; };
  // On a busy machine a run that was interrupted makes the model look slow until many others have followed.
  for (int i = 0; i < 20'000 && !here; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    TestRequest request(1);
    request.Submit(version);
    ASSERT_TRUE(request.status().ok());
  }
  EXPECT_TRUE(here);
}

TEST(AnswerOrderTest, WhatComesEarlyWaitsForWhatIsMissing) {
  std::vector<InferRequest*> answered;
  AnswerOrder order([&](Outcome outcome) { answered.push_back(outcome.request); });
  TestRequest a, b, c, d;
  const auto one = [](TestRequest& request) {
    return std::vector<Outcome>{{&request, absl::OkStatus()}};
  };
  order.Release(2, one(c));
  order.Release(1, one(b));
  EXPECT_TRUE(answered.empty());
  order.Release(0, one(a));
  EXPECT_THAT(answered, ElementsAre(&a, &b, &c));
  order.Release(3, {});  // all of its requests were cancelled
  order.Release(4, one(d));
  EXPECT_EQ(answered.back(), &d);
}

}  // namespace
}  // namespace espalier::runtime
