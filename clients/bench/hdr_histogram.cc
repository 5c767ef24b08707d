#include "clients/bench/hdr_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace espalier::bench {

size_t HdrHistogram::CellOf(int64_t value) {
  const uint64_t bits = static_cast<uint64_t>(value);
  const int shift = std::max(0, static_cast<int>(std::bit_width(bits)) - (kDigitBits + 1));
  // From shift 1 on the upper half of 2,048 steps is in use: its cells follow those of shift − 1.
  return (static_cast<size_t>(shift) << kDigitBits) + (bits >> shift);
}

int64_t HdrHistogram::HighestIn(size_t cell) {
  const size_t shift = cell < (size_t{2} << kDigitBits) ? 0 : (cell >> kDigitBits) - 1;
  return static_cast<int64_t>(((cell - (shift << kDigitBits) + 1) << shift) - 1);
}

void HdrHistogram::Record(int64_t value) {
  value = std::clamp<int64_t>(value, 0, (int64_t{1} << kValueBits) - 1);
  ++counts_[CellOf(value)];
  ++count_;
  min_ = std::min(min_, value);
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
}

void HdrHistogram::Add(const HdrHistogram& other) {
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
  count_ += other.count_;
  min_ = std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
}

double HdrHistogram::mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }

int64_t HdrHistogram::Percentile(double percent) const {
  // 99.99 % of 20,000 is rank 19,998, although it comes out a little above that in binary.
  const double exact_rank = std::ceil(percent * static_cast<double>(count_) / 100 - 1e-6);
  const uint64_t rank = std::max<uint64_t>(1, static_cast<uint64_t>(std::max(0.0, exact_rank)));
  uint64_t seen = 0;
  for (size_t cell = 0; cell < counts_.size(); ++cell) {
    seen += counts_[cell];
    if (seen >= rank) return std::min(HighestIn(cell), max_);
  }
  return max_;
}

std::vector<HdrHistogram::Bucket> HdrHistogram::Buckets() const {
  std::vector<Bucket> buckets;
  for (size_t cell = 0; cell < counts_.size(); ++cell) {
    if (counts_[cell] > 0) buckets.push_back({HighestIn(cell), counts_[cell]});
  }
  return buckets;
}

}  // namespace espalier::bench
