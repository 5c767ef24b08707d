// hdr_histogram.h — a high dynamic range histogram: every value to three digits, whatever its size.
//
//   HdrHistogram latency;
//   latency.Record(nanos);
//   int64_t p99 = latency.Percentile(99);
//
// Buckets  0 … 2047 one by one; above, each power of two is cut into 1,024 equal parts, so a
//          reported value is at most 1/1024 above a recorded one.
// Limits   [0, 2^43), 2.4 hours in nanoseconds; what lies outside is counted at the nearer end.
// Memory   272 KiB, reserved at once: recording allocates nothing.
// Not thread-safe: each thread fills its own, Add joins them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace espalier::bench {

class HdrHistogram {
 public:
  HdrHistogram() : counts_(kCells) {}

  void Record(int64_t value);
  void Add(const HdrHistogram& other);

  uint64_t count() const { return count_; }
  int64_t min() const { return count_ == 0 ? 0 : min_; }  // exact, like max and mean
  int64_t max() const { return max_; }
  double mean() const;
  // The smallest value that `percent` of all are at or below (nearest rank), rounded up to its
  // bucket's end; 0 when nothing was recorded.
  int64_t Percentile(double percent) const;

  struct Bucket {
    int64_t highest;  // value in it
    uint64_t count;
  };
  std::vector<Bucket> Buckets() const;  // that are not empty, ascending

 private:
  static constexpr int kValueBits = 43, kDigitBits = 10;
  static constexpr size_t kCells = (size_t{kValueBits} - kDigitBits + 1) << kDigitBits;
  static size_t CellOf(int64_t value);
  static int64_t HighestIn(size_t cell);

  std::vector<uint64_t> counts_;
  uint64_t count_ = 0;
  int64_t min_ = INT64_MAX, max_ = 0;
  double sum_ = 0;
};

}  // namespace espalier::bench
