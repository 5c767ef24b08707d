#include "engine/runtime/statistics.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace espalier::runtime {
namespace {

TEST(LatencyHistogramTest, ABoundBelongsToTheBucketBelowIt) {
  LatencyHistogram histogram;
  for (const int64_t nanos : {int64_t{0}, int64_t{10'000}, int64_t{10'001}, int64_t{10'000'000'000},
                              int64_t{10'000'000'001}}) {
    histogram.Observe(nanos);
  }
  const auto snapshot = histogram.Read();
  EXPECT_EQ(snapshot.buckets[0], 2u);
  EXPECT_EQ(snapshot.buckets[1], 1u);
  EXPECT_EQ(snapshot.buckets[LatencyHistogram::kBuckets - 2], 1u);
  EXPECT_EQ(snapshot.buckets[LatencyHistogram::kBuckets - 1], 1u);
  EXPECT_EQ(snapshot.count, 5u);
  EXPECT_EQ(snapshot.nanos, 20'000'020'002u);
}

TEST(LatencyHistogramTest, BoundsAscend) {
  const auto bounds = LatencyHistogram::Bounds();
  ASSERT_EQ(bounds.size(), static_cast<size_t>(LatencyHistogram::kBuckets - 1));
  for (size_t i = 1; i < bounds.size(); ++i) EXPECT_LT(bounds[i - 1], bounds[i]);
}

TEST(LatencyHistogramTest, NothingIsLostWhenManyCount) {
  LatencyHistogram histogram;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) histogram.Observe(i * 1000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.Read().count, 40000u);
}

TEST(VersionStatisticsTest, FailuresCountByCodeAndReasonAndNotAsInferences) {
  VersionStatistics statistics(4);
  const PhaseNanos phases = {1, 2, 3, 4};
  statistics.RecordSuccess(10, 4, phases);
  statistics.RecordFailure(absl::StatusCode::kUnavailable, FailureReason::kTimeout, 5);
  EXPECT_EQ(statistics.inferences, 4u);
  EXPECT_EQ(statistics.success.nanos, 10u);
  EXPECT_EQ(statistics.failure.nanos, 5u);
  EXPECT_EQ(statistics.by_code[static_cast<int>(absl::StatusCode::kUnavailable)], 1u);
  EXPECT_EQ(statistics.by_reason[static_cast<int>(FailureReason::kTimeout)], 1u);
  EXPECT_EQ(statistics.phases[static_cast<int>(Phase::kComputeOutput)].nanos, 4u);
  EXPECT_GT(statistics.last_inference_millis, 0);
}

TEST(VersionStatisticsTest, ACodeTellsItsReason) {
  EXPECT_EQ(ReasonOf(absl::StatusCode::kUnimplemented), FailureReason::kInvalid);
  EXPECT_EQ(ReasonOf(absl::StatusCode::kCancelled), FailureReason::kCancelled);
  EXPECT_EQ(ReasonOf(absl::StatusCode::kDeadlineExceeded), FailureReason::kDeadline);
  EXPECT_EQ(ReasonOf(absl::StatusCode::kUnavailable), FailureReason::kUnavailable);
  EXPECT_EQ(ReasonOf(absl::StatusCode::kResourceExhausted), FailureReason::kOther);
  EXPECT_STREQ(kFailureReasonNames[static_cast<int>(FailureReason::kQueueFull)], "queue_full");
}

}  // namespace
}  // namespace espalier::runtime
