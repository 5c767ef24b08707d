#include "clients/bench/hdr_histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace espalier::bench {
namespace {

TEST(HdrHistogramTest, SmallValuesAreExact) {
  HdrHistogram histogram;
  for (int64_t value = 0; value < 2048; ++value) histogram.Record(value);
  for (int64_t value = 0; value < 2048; ++value) {
    EXPECT_EQ(histogram.Percentile(100.0 * static_cast<double>(value + 1) / 2048), value);
  }
}

TEST(HdrHistogramTest, PercentilesAreWithinAThousandthAboveTheNearestRank) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(0, 42);
  HdrHistogram histogram;
  std::vector<int64_t> values;
  for (int i = 0; i < 20000; ++i) {
    values.push_back(static_cast<int64_t>(std::exp2(exponent(random))));
    histogram.Record(values.back());
  }
  std::sort(values.begin(), values.end());
  for (double percent : {0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 99.99, 100.0}) {
    const size_t rank = std::max<size_t>(1, static_cast<size_t>(std::ceil(percent * 200)));
    const int64_t exact = values[rank - 1];
    const int64_t got = histogram.Percentile(percent);
    EXPECT_GE(got, exact) << percent;
    EXPECT_LE(got, exact + exact / 1024 + 1) << percent;
  }
  EXPECT_EQ(histogram.min(), values.front());
  EXPECT_EQ(histogram.max(), values.back());
}

TEST(HdrHistogramTest, EdgesOfEveryPowerOfTwoFallIntoTheirOwnBucket) {
  for (int bit = 11; bit < 43; ++bit) {
    HdrHistogram histogram;
    const int64_t power = int64_t{1} << bit;
    histogram.Record(power - 1);
    histogram.Record(power);
    ASSERT_EQ(histogram.Buckets().size(), 2u) << bit;
    EXPECT_EQ(histogram.Buckets()[0].highest, power - 1) << bit;
    EXPECT_EQ(histogram.Percentile(50), power - 1) << bit;
  }
}

TEST(HdrHistogramTest, WhatLiesOutsideIsCountedAtTheEnds) {
  HdrHistogram histogram;
  histogram.Record(-5);
  histogram.Record(INT64_MAX);
  EXPECT_EQ(histogram.count(), 2u);
  EXPECT_EQ(histogram.min(), 0);
  EXPECT_EQ(histogram.max(), (int64_t{1} << 43) - 1);
}

TEST(HdrHistogramTest, AddedHistogramsAreAsIfRecordedInOne) {
  HdrHistogram one, other, both;
  for (int64_t i = 1; i < 5000; ++i) {
    (i % 3 == 0 ? one : other).Record(i * i);
    both.Record(i * i);
  }
  one.Add(other);
  EXPECT_EQ(one.count(), both.count());
  EXPECT_DOUBLE_EQ(one.mean(), both.mean());
  for (double percent : {10.0, 50.0, 99.0}) {
    EXPECT_EQ(one.Percentile(percent), both.Percentile(percent));
  }
}

TEST(HdrHistogramTest, EmptyHasZeros) {
  const HdrHistogram histogram;
  EXPECT_EQ(histogram.Percentile(99), 0);
  EXPECT_EQ(histogram.mean(), 0);
  EXPECT_EQ(histogram.min(), 0);
  EXPECT_TRUE(histogram.Buckets().empty());
}

}  // namespace
}  // namespace espalier::bench
