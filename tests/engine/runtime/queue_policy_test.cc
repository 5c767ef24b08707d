// How requests wait for a version whose instances are busy: refused, expired, cancelled, overtaken.
#include <list>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::FakeControl;
using espalier::testing::FakeModel;
using espalier::testing::FakeModelOptions;
using espalier::testing::TestRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMilli = 1'000'000;
// What a busy machine may add to the milliseconds that an answer takes.
constexpr int64_t kPrompt = 30'000 * kMilli;

// A version whose one instance stands at a gate with a request of its own until Free.
class QueuePolicyTest : public ::testing::Test {
 protected:
  inference::ModelQueuePolicy* policy() {
    return config_.mutable_dynamic_batching()->mutable_default_queue_policy();
  }
  void ServeBusily() {
    config_.set_max_batch_size(8);
    FakeModelOptions model;
    control_ = model.control;
    auto version = ServedVersion::Create({.name = "m",
                                          .version = 1,
                                          .config = config_,
                                          .model = std::make_unique<FakeModel>(std::move(model)),
                                          .latency = std::make_shared<ModelLatency>()});
    ASSERT_TRUE(version.ok()) << version.status();
    version_ = VersionHandle(std::move(*version));
    running_ = &espalier::testing::Occupy(version_, control_->run_gate, occupants_);
  }
  void Free() {
    control_->run_gate.Open();
    EXPECT_TRUE(running_->status().ok());
  }
  uint64_t Failures(FailureReason reason) const {
    return version_->statistics().by_reason[static_cast<int>(reason)];
  }

  inference::ModelConfig config_;
  std::shared_ptr<FakeControl> control_;
  VersionHandle version_;
  std::list<TestRequest> occupants_;
  TestRequest* running_ = nullptr;
};

TEST_F(QueuePolicyTest, AFullQueueRefusesPromptlyAndPendingNeverExceedsIt) {
  policy()->set_max_queue_size(4);
  ServeBusily();
  EXPECT_EQ(version_->pending(), 0);
  std::list<TestRequest> requests;
  for (int i = 0; i < 7; ++i) {
    requests.emplace_back(1).Submit(version_);
    EXPECT_LE(version_->pending(), 4);
    EXPECT_EQ(requests.back().answered(), i >= 4);
  }
  EXPECT_THAT(std::string(requests.back().status().message()),
              HasSubstr("Exceeds maximum queue size: 4 requests wait"));
  EXPECT_EQ(Failures(FailureReason::kQueueFull), 3u);
  EXPECT_EQ(version_->pending(), 4);
  Free();
  int served = 0;
  for (TestRequest& request : requests) served += request.status().ok();
  EXPECT_EQ(served, 4);
  EXPECT_EQ(version_->pending(), 0);
  EXPECT_EQ(version_->PendingByLevel().at(0).requests, 0);
}

TEST_F(QueuePolicyTest, AnExpiredRequestIsAnsweredWhileTheInstanceIsBusyAndNeverExecuted) {
  policy()->set_default_timeout_microseconds(20'000);
  ServeBusily();
  const uint64_t before = Failures(FailureReason::kTimeout);
  TestRequest waiting(1);
  waiting.Submit(version_);
  EXPECT_EQ(waiting.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(waiting.status().message()), HasSubstr("Request timeout expired"));
  EXPECT_GE(waiting.answered_nanos(), waiting.arrival_nanos + 20 * kMilli);
  EXPECT_LT(waiting.answered_nanos(), waiting.arrival_nanos + 20 * kMilli + kPrompt);
  EXPECT_FALSE(running_->answered());
  Free();
  EXPECT_THAT(control_->sizes(), ElementsAre(1));
  EXPECT_EQ(Failures(FailureReason::kTimeout), before + 1);
}

TEST_F(QueuePolicyTest, ARequestPastItsDeadlineIsAnsweredWhileTheInstanceIsBusy) {
  ServeBusily();
  TestRequest waiting(1);
  waiting.deadline_nanos = NowNanos() + 20 * kMilli;
  waiting.Submit(version_);
  EXPECT_EQ(waiting.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(waiting.answered_nanos(), waiting.deadline_nanos + kPrompt);
  EXPECT_FALSE(running_->answered());
  Free();
  EXPECT_THAT(control_->sizes(), ElementsAre(1));
  EXPECT_EQ(Failures(FailureReason::kDeadline), 1u);
}

TEST_F(QueuePolicyTest, ACancelledRequestIsAnsweredWhileTheInstanceIsBusy) {
  ServeBusily();
  TestRequest waiting(1), other(2);
  waiting.Submit(version_);
  other.Submit(version_);
  waiting.Cancel();
  EXPECT_TRUE(waiting.answered());
  EXPECT_EQ(waiting.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(version_->pending(), 1);
  Free();
  EXPECT_TRUE(other.status().ok());
  EXPECT_THAT(control_->sizes(), ElementsAre(1, 2));
  EXPECT_EQ(Failures(FailureReason::kCancelled), 1u);
  EXPECT_EQ(version_->statistics().inferences, 3u);
}

TEST_F(QueuePolicyTest, DelayServesAnExpiredRequestAfterTheOthers) {
  policy()->set_timeout_action(inference::ModelQueuePolicy::DELAY);
  policy()->set_allow_timeout_override(true);
  config_.mutable_dynamic_batching()->add_preferred_batch_size(1);  // one at a time
  ServeBusily();
  TestRequest first(1), second(1);
  first.timeout_micros = 1000;
  first.Submit(version_);
  second.Submit(version_);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(first.answered());
  Free();
  EXPECT_TRUE(first.status().ok());
  EXPECT_TRUE(second.status().ok());
  EXPECT_LT(second.answered_nanos(), first.answered_nanos());
}

TEST_F(QueuePolicyTest, ALaterRequestOfHighPriorityOvertakes) {
  auto* batching = config_.mutable_dynamic_batching();
  batching->set_priority_levels(uint64_t{1} << 40);
  batching->set_default_priority_level(uint64_t{1} << 39);
  batching->add_preferred_batch_size(1);
  ServeBusily();
  TestRequest low(1), middle(1), high(1);
  low.priority = uint64_t{1} << 40;
  high.priority = 1;
  for (TestRequest* request : {&low, &middle, &high}) request->Submit(version_);
  Free();
  EXPECT_LT(high.answered_nanos(), middle.answered_nanos());
  EXPECT_LT(middle.answered_nanos(), low.answered_nanos());
}

TEST_F(QueuePolicyTest, ADifferentShapeIsRefusedAndNeverMerged) {
  ServeBusily();
  TestRequest good(1), other, good_too(1);
  other.AddInput("x", "FP32", {1, 3}, std::string(12, '\0'));
  good.Submit(version_);
  other.Submit(version_);
  good_too.Submit(version_);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Failures(FailureReason::kInvalid), 1u);
  Free();
  EXPECT_TRUE(good.status().ok() && good_too.status().ok());
  EXPECT_THAT(control_->sizes(), ElementsAre(1, 2));
}

}  // namespace
}  // namespace espalier::runtime
