#include "engine/runtime/batcher.h"

#include <list>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::TestRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMilli = 1'000'000, kSecond = 1000 * kMilli;
// What comes at once may take so long on a busy machine; what must not be waited for would take ten times that.
constexpr int64_t kAtOnce = 60 * kSecond, kTooLong = 10 * kAtOnce;

// Batches of requests that a test pushes, without a model. Requests are known by their number.
class BatcherTest : public ::testing::Test {
 protected:
  void Use(BatchingPolicy policy) {
    policy_ = std::move(policy);
    batcher_ = std::make_unique<Batcher>(policy_, [this](InferRequest* request, Refusal refusal) {
      const std::lock_guard lock(mutex_);
      refused_.emplace_back(static_cast<TestRequest*>(request), refusal.reason);
      request->Answer(std::move(refusal.status));
    });
  }

  TestRequest& Make(int64_t batch, uint64_t priority = 0) {
    requests_.emplace_back();
    requests_.back().batch = batch;
    requests_.back().priority = priority;
    return requests_.back();
  }
  Refusal Push(TestRequest& request) {
    request.arrival_nanos = NowNanos();
    return batcher_->Push(&request);
  }
  TestRequest& Push(int64_t batch, uint64_t priority = 0) {
    TestRequest& request = Make(batch, priority);
    const Refusal refusal = Push(request);
    EXPECT_TRUE(refusal.status.ok()) << refusal.status;
    return request;
  }
  void PushAll(const std::vector<int64_t>& batches) {
    for (int64_t batch : batches) Push(batch);
  }

  // The sizes of the requests of the next batch.
  std::vector<int64_t> Next() {
    Batch batch;
    return Next(batch);
  }
  // The same for an instance that comes back from `batch`.
  std::vector<int64_t> Next(Batch& batch) {
    EXPECT_TRUE(batcher_->Next(batch));
    std::vector<int64_t> sizes;
    int64_t items = 0;
    for (InferRequest* request : batch.requests) {
      sizes.push_back(request->batch);
      items += request->batch;
    }
    EXPECT_EQ(batch.items, items);
    return sizes;
  }
  // The same, and how long it took.
  std::vector<int64_t> NextWithin(int64_t* nanos) {
    const int64_t began = NowNanos();
    std::vector<int64_t> sizes = Next();
    *nanos = NowNanos() - began;
    return sizes;
  }

  static BatchingPolicy Greedy(int64_t max_batch_size) {
    return {.max_batch_size = max_batch_size};
  }
  // What Triton's own batcher suite uses: [2, 6] of at most 8, with a delay that a test notices.
  static BatchingPolicy Preferring26(int64_t delay_nanos = kTooLong) {
    return {.max_batch_size = 8, .preferred = {2, 6}, .max_delay_nanos = delay_nanos};
  }

  BatchingPolicy policy_;
  std::list<TestRequest> requests_;
  std::mutex mutex_;
  std::vector<std::pair<TestRequest*, FailureReason>> refused_;
  std::unique_ptr<Batcher> batcher_;  // goes first, and waits for the timer
};

TEST_F(BatcherTest, WithoutSettingsWhatWaitsRunsTogetherAtOnceUpToTheMaximum) {
  Use(Greedy(8));
  PushAll({1, 2, 1});
  EXPECT_THAT(Next(), ElementsAre(1, 2, 1));
  PushAll({3, 3, 3, 2});
  EXPECT_THAT(Next(), ElementsAre(3, 3));
  EXPECT_THAT(Next(), ElementsAre(3, 2));
  Push(8);
  EXPECT_THAT(Next(), ElementsAre(8));
  EXPECT_EQ(batcher_->pending(), 0);
}

// An instance's last batch: `answered` requests, a run so long, `waited` requests at its end. It has patience for a
// quarter of the run, and for a pause of a sixteenth.
Batch LongRun(int answered, int64_t waited, int64_t run_nanos = 16 * kTooLong) {
  Batch batch;
  batch.requests.resize(static_cast<size_t>(answered), nullptr);
  batch.run_nanos = run_nanos;
  batch.waited_meanwhile = waited;
  return batch;
}

TEST_F(BatcherTest, ABusyInstanceWaitsForTheClientsThatItHasJustAnswered) {
  Use(Greedy(8));
  Batch batch = LongRun(2, 1);
  Push(1);
  std::thread clients([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Push(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Push(1);
  });
  const int64_t began = NowNanos();
  EXPECT_THAT(Next(batch), ElementsAre(1, 1, 1));
  // Well before its patience ends: three were expected, and three are there.
  EXPECT_LT(NowNanos() - began, kAtOnce);
  clients.join();
}

TEST_F(BatcherTest, ClientsThatDoNotComeBackAreNotWaitedForLongerThanAPause) {
  Use(Greedy(8));
  Batch batch = LongRun(3, 0, 24 * kSecond);
  Push(1);
  const int64_t began = NowNanos();
  EXPECT_THAT(Next(batch), ElementsAre(1));
  EXPECT_GE(NowNanos() - began, 1400 * kMilli);  // a sixteenth of the run is 1500
  EXPECT_LT(NowNanos() - began, 6 * kSecond);    // a quarter, which is the most
}

TEST_F(BatcherTest, ALoneClientIsNotHeldUpByPatience) {
  Use(Greedy(8));
  Batch batch = LongRun(1, 0);
  Push(1);
  const int64_t began = NowNanos();
  EXPECT_THAT(Next(batch), ElementsAre(1));
  EXPECT_LT(NowNanos() - began, kAtOnce);
}

TEST_F(BatcherTest, AFullBatchAndASetDelayLeaveNothingToPatience) {
  Use(Greedy(2));
  Batch batch = LongRun(2, 2);
  const int64_t began = NowNanos();
  PushAll({1, 1});
  EXPECT_THAT(Next(batch), ElementsAre(1, 1));
  Use({.max_batch_size = 8, .max_delay_nanos = 1});
  batch = LongRun(8, 8);
  Push(1);
  EXPECT_THAT(Next(batch), ElementsAre(1));
  EXPECT_LT(NowNanos() - began, kAtOnce);
}

TEST_F(BatcherTest, AModelThatDoesNotBatchRunsOneRequestAtATime) {
  Use(Greedy(1));
  PushAll({1, 1});
  EXPECT_THAT(Next(), ElementsAre(1));
  EXPECT_THAT(Next(), ElementsAre(1));
}

TEST_F(BatcherTest, APreferredSizeIsClosedLongBeforeTheDelay) {
  Use(Preferring26());
  PushAll({1, 1});
  int64_t took = 0;
  EXPECT_THAT(NextWithin(&took), ElementsAre(1, 1));
  EXPECT_LT(took, kAtOnce);
}

TEST_F(BatcherTest, AnInstanceThatWaitsForTheDelayIsWokenByTheRequestThatCompletesAPreferredSize) {
  Use(Preferring26());
  Push(1);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Push(1);
  });
  int64_t took = 0;
  EXPECT_THAT(NextWithin(&took), ElementsAre(1, 1));
  EXPECT_LT(took, kAtOnce);
  later.join();
}

TEST_F(BatcherTest, BelowAPreferredSizeARequestWaitsTheWholeDelay) {
  Use(Preferring26(60 * kMilli));
  TestRequest& request = Push(1);
  EXPECT_THAT(Next(), ElementsAre(1));
  EXPECT_GE(NowNanos() - request.arrival_nanos, 60 * kMilli);
}

TEST_F(BatcherTest, ASumBetweenPreferredSizesIsMergedWhenTheOldestHasWaitedTheDelay) {
  Use(Preferring26(60 * kMilli));
  PushAll({3, 1});
  TestRequest& oldest = requests_.front();
  EXPECT_THAT(Next(), ElementsAre(3, 1));
  EXPECT_GE(NowNanos() - oldest.arrival_nanos, 60 * kMilli);
}

TEST_F(BatcherTest, TheDelayCountsFromTheOldestAndNotFromTheLast) {
  constexpr int64_t kDelay = 3 * kSecond;
  Use({.max_batch_size = 8, .max_delay_nanos = kDelay});
  TestRequest& oldest = Push(1);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kDelay / 2));
    Push(1);
  });
  EXPECT_THAT(Next(), ElementsAre(1, 1));
  const int64_t closed = NowNanos();
  later.join();
  EXPECT_GE(closed - oldest.arrival_nanos, kDelay);
  EXPECT_LT(closed - requests_.back().arrival_nanos, kDelay);
}

TEST_F(BatcherTest, ARequestAboveThePreferredSizesRunsAtOnceAndAlone) {
  Use(Preferring26());
  int64_t took = 0;
  Push(7);
  EXPECT_THAT(NextWithin(&took), ElementsAre(7));
  PushAll({3, 7});
  EXPECT_THAT(NextWithin(&took), ElementsAre(3));
  EXPECT_THAT(NextWithin(&took), ElementsAre(7));
  EXPECT_LT(took, kAtOnce);
}

TEST_F(BatcherTest, SumsAboveTheLargestPreferredSizeAreSplitBetweenRequests) {
  constexpr int64_t kDelay = 2 * kSecond;
  Use(Preferring26(kDelay));
  PushAll({3, 4});
  EXPECT_THAT(Next(), ElementsAre(3));
  EXPECT_LT(NowNanos() - requests_.front().arrival_nanos, kDelay);
  EXPECT_THAT(Next(), ElementsAre(4));
}

TEST_F(BatcherTest, TheBiggestPreferredSizeThatCanBeFormedIsChosen) {
  Use(Preferring26());
  PushAll({1, 1, 1, 1, 1, 1, 1, 1});
  EXPECT_THAT(Next(), ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_THAT(Next(), ElementsAre(1, 1));
  PushAll({2, 3, 4});  // sums 2, 5, 9
  EXPECT_THAT(Next(), ElementsAre(2));
}

TEST_F(BatcherTest, NeverOneMoreThanPreferredUnderLoad) {
  Use({.max_batch_size = 64, .preferred = {4, 8}, .max_delay_nanos = kTooLong});
  std::vector<std::thread> clients;
  std::list<TestRequest> requests(800);
  for (TestRequest& request : requests) request.batch = 1;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      int i = 0;
      for (TestRequest& request : requests) {
        if (i++ % 4 != c) continue;
        EXPECT_TRUE(batcher_->Push(&request).status.ok());
      }
    });
  }
  int64_t seen = 0;
  while (seen < 800) {
    const size_t size = Next().size();
    EXPECT_TRUE(size == 4 || size == 8) << size;
    seen += static_cast<int64_t>(size);
  }
  for (std::thread& client : clients) client.join();
}

TEST_F(BatcherTest, WithADelayAloneABatchIsClosedWhenFullOrDue) {
  constexpr int64_t kDelay = 2 * kSecond;
  Use({.max_batch_size = 4, .max_delay_nanos = kDelay});
  PushAll({1, 1, 2});
  int64_t took = 0;
  EXPECT_THAT(NextWithin(&took), ElementsAre(1, 1, 2));
  EXPECT_LT(took, kDelay);
  PushAll({3, 2});  // no more fits beside the 3
  EXPECT_THAT(NextWithin(&took), ElementsAre(3));
  EXPECT_LT(took, kDelay);
  EXPECT_THAT(NextWithin(&took), ElementsAre(2));
  EXPECT_GE(NowNanos() - requests_.back().arrival_nanos, kDelay);
}

TEST_F(BatcherTest, AClosedBatchDoesNotGrow) {
  Use(Greedy(8));
  Push(1);
  Batch closed;
  ASSERT_TRUE(batcher_->Next(closed));
  Push(1);
  EXPECT_EQ(closed.requests.size(), 1u);
  EXPECT_EQ(batcher_->pending(), 1);
  EXPECT_THAT(Next(), ElementsAre(1));
}

TEST_F(BatcherTest, BatchesAreNumberedInTheOrderOfTheirClosing) {
  Use(Greedy(2));
  PushAll({2, 2});
  Batch first, second;
  ASSERT_TRUE(batcher_->Next(first));
  ASSERT_TRUE(batcher_->Next(second));
  EXPECT_EQ(first.sequence, 0u);
  EXPECT_EQ(second.sequence, 1u);
}

TEST_F(BatcherTest, HigherPrioritiesOvertakeLowerOnes) {
  BatchingPolicy policy = Greedy(2);
  policy.levels = 3;
  policy.default_level = 2;
  Use(policy);
  TestRequest& low = Push(1, 3);
  TestRequest& middle = Push(1);
  TestRequest& high = Push(1, 1);
  TestRequest& unknown = Push(1, 17);  // no such level: the default one
  Batch batch;
  ASSERT_TRUE(batcher_->Next(batch));
  EXPECT_THAT(batch.requests, ElementsAre(&high, &middle));
  ASSERT_TRUE(batcher_->Next(batch));
  EXPECT_THAT(batch.requests, ElementsAre(&unknown, &low));
}

TEST_F(BatcherTest, LevelsMayHave64BitsAndLeaveNothingBehind) {
  BatchingPolicy policy = Greedy(8);
  policy.levels = uint64_t{1} << 60;
  policy.default_level = 1;
  policy.level_policies[uint64_t{1} << 50] = {.max_pending = 1};
  Use(policy);
  const size_t levels = batcher_->PendingByLevel().size();
  TestRequest& low = Push(1, uint64_t{1} << 50);
  TestRequest& high = Push(1, uint64_t{1} << 40);
  TestRequest& refused = Make(1, uint64_t{1} << 50);
  EXPECT_THAT(std::string(Push(refused).status.message()),
              HasSubstr(absl::StrCat("at priority level ", uint64_t{1} << 50)));
  EXPECT_EQ(batcher_->PendingByLevel().size(), levels + 2);
  Batch batch;
  ASSERT_TRUE(batcher_->Next(batch));
  EXPECT_THAT(batch.requests, ElementsAre(&high, &low));
  EXPECT_EQ(batcher_->PendingByLevel().size(), levels);
}

TEST_F(BatcherTest, EveryLevelHasItsOwnQueueSize) {
  BatchingPolicy policy = Greedy(8);
  policy.levels = policy.default_level = 2;
  policy.default_policy.max_pending = 1;
  policy.level_policies[1] = {.max_pending = 2};
  Use(policy);
  Push(1, 1);
  Push(1, 1);
  Push(1, 2);
  EXPECT_EQ(Push(Make(1, 1)).reason, FailureReason::kQueueFull);
  EXPECT_EQ(Push(Make(1, 2)).reason, FailureReason::kQueueFull);
  const auto pending = batcher_->PendingByLevel();
  ASSERT_EQ(pending.size(), 2u);
  EXPECT_EQ(pending[0].level, 1u);
  EXPECT_EQ(pending[0].requests, 2);
  EXPECT_EQ(pending[1].requests, 1);
  EXPECT_EQ(Next().size(), 3u);
}

TEST_F(BatcherTest, TheServersLimitHoldsForAllLevelsWithoutOneTogether) {
  BatchingPolicy policy = Greedy(8);
  policy.levels = policy.default_level = 9;
  policy.max_pending_elsewhere = 3;
  policy.level_policies[4] = {.max_pending = 1};
  Use(policy);
  for (uint64_t level : {1, 2, 3, 4}) Push(1, level);
  EXPECT_EQ(Push(Make(1, 5)).reason, FailureReason::kQueueFull);
  EXPECT_EQ(batcher_->pending(), 4);
  EXPECT_EQ(Next().size(), 4u);
  Push(1, 5);
  EXPECT_EQ(Next().size(), 1u);
}

TEST_F(BatcherTest, AnExpiredRequestMakesRoomForANewOne) {
  BatchingPolicy policy = Greedy(8);
  policy.default_policy = {.max_pending = 1, .default_timeout_micros = 1};
  Use(policy);
  TestRequest& expired = Push(1);
  while (NowNanos() < expired.arrival_nanos + 1000) {
  }
  Push(1);
  EXPECT_THAT(std::string(expired.status().message()), HasSubstr("Request timeout expired"));
}

TEST_F(BatcherTest, DelayedRequestsAreServedAfterThoseOfTheirLevelThatHaveNotExpired) {
  BatchingPolicy policy = Greedy(1);
  policy.levels = policy.default_level = 2;
  policy.default_policy = {.default_timeout_micros = kTooLong / 1000,
                           .allow_timeout_override = true,
                           .delays_expired = true};
  Use(policy);
  TestRequest& first = Make(1);
  first.timeout_micros = 1000;
  ASSERT_TRUE(Push(first).status.ok());
  TestRequest& second = Push(1);
  TestRequest& high = Push(1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Batch batch;
  std::vector<InferRequest*> order;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(batcher_->Next(batch));
    order.push_back(batch.requests[0]);
  }
  EXPECT_THAT(order, ElementsAre(&high, &second, &first));
  EXPECT_THAT(refused_, IsEmpty());
}

TEST_F(BatcherTest, ADelayedRequestStillHasItsDeadline) {
  BatchingPolicy policy = Greedy(1);
  policy.default_policy = {.default_timeout_micros = 1000, .delays_expired = true};
  Use(policy);
  TestRequest& request = Make(1);
  request.deadline_nanos = NowNanos() + kSecond;
  ASSERT_TRUE(Push(request).status.ok());
  EXPECT_EQ(request.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(request.answered_nanos(), request.deadline_nanos);
  EXPECT_LT(request.answered_nanos(), request.deadline_nanos + kAtOnce);
}

TEST_F(BatcherTest, ACancelledRequestIsNotTakenIn) {
  Use(Greedy(8));
  TestRequest& cancelled = Make(1);
  cancelled.Cancel();
  EXPECT_EQ(Push(cancelled).reason, FailureReason::kCancelled);
  TestRequest& late = Make(1);
  late.deadline_nanos = NowNanos() - 1;
  EXPECT_EQ(Push(late).reason, FailureReason::kDeadline);
  EXPECT_EQ(batcher_->pending(), 0);
}

TEST_F(BatcherTest, CancelTakesAWaitingRequestOutAndAnswersItInTheCall) {
  Use(Greedy(8));
  TestRequest& kept = Push(1);
  TestRequest& cancelled = Push(2);
  cancelled.Cancel();
  EXPECT_TRUE(cancelled.answered());
  EXPECT_EQ(cancelled.status().code(), absl::StatusCode::kCancelled);
  cancelled.Cancel();
  EXPECT_EQ(cancelled.answers(), 1);
  EXPECT_EQ(batcher_->pending(), 1);
  Batch batch;
  ASSERT_TRUE(batcher_->Next(batch));
  EXPECT_THAT(batch.requests, ElementsAre(&kept));
  kept.Cancel();  // an instance has it
  EXPECT_FALSE(kept.answered());
}

TEST_F(BatcherTest, AClientThatGivesUpAtItsDeadlineCountsAsDeadline) {
  Use(Greedy(8));
  TestRequest& at_deadline = Make(1);
  at_deadline.deadline_nanos = NowNanos() + kSecond;
  ASSERT_TRUE(Push(at_deadline).status.ok());
  while (NowNanos() < at_deadline.deadline_nanos - 9 * kMilli)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  at_deadline.Cancel();
  EXPECT_EQ(at_deadline.status().code(), absl::StatusCode::kDeadlineExceeded);
  TestRequest& early = Make(1);
  early.deadline_nanos = NowNanos() + kTooLong;
  ASSERT_TRUE(Push(early).status.ok());
  early.Cancel();
  EXPECT_EQ(early.status().code(), absl::StatusCode::kCancelled);
}

TEST_F(BatcherTest, ClosingWakesThoseThatWait) {
  Use(Greedy(8));
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    batcher_->Close();
  });
  Batch batch;
  EXPECT_FALSE(batcher_->Next(batch));
  closer.join();
}

TEST_F(BatcherTest, ManyDeadlinesExpireInTheirOrderAndInTime) {
  Use(Greedy(8));
  // In no order: multiples of 7 modulo 50, in milliseconds.
  const int64_t began = NowNanos();
  for (int64_t i = 0; i < 50; ++i) {
    TestRequest& request = Make(1);
    request.deadline_nanos = began + (1000 + i * 7 % 50) * kMilli;
    ASSERT_TRUE(Push(request).status.ok());
  }
  int64_t latest = 0;
  for (TestRequest& request : requests_) {
    EXPECT_EQ(request.status().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_GE(request.answered_nanos(), request.deadline_nanos);
    latest = std::max(latest, request.answered_nanos() - request.deadline_nanos);
  }
  EXPECT_LT(latest, kAtOnce);
  for (size_t i = 1; i < refused_.size(); ++i)
    EXPECT_LE(refused_[i - 1].first->deadline_nanos, refused_[i].first->deadline_nanos);
}

}  // namespace
}  // namespace espalier::runtime
