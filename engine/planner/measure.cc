#include "engine/planner/measure.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace espalier::planner {
namespace {

// Rounds of taking turns: at least so many, and more while they are cheap.
constexpr int kRounds = 4;
constexpr int kMaxRounds = 50;
constexpr double kMicrosPerOption = 400;
// Calls shorter than this are timed in groups, to make the clock's 20–50 ns disappear.
constexpr double kSampleMicros = 20;

// Smallest, largest, then the middle of the widest gap: when time runs out, what is known is
// spread.
std::vector<size_t> BucketOrder(size_t count) {
  std::vector<size_t> order;
  std::vector<bool> taken(count, false);
  const auto take = [&](size_t b) {
    taken[b] = true;
    order.push_back(b);
  };
  take(0);
  if (count > 1) take(count - 1);
  while (order.size() < count) {
    size_t best = 0, best_gap = 0, last = 0;
    for (size_t b = 1; b < count; ++b) {
      if (!taken[b]) continue;
      if (b - last > best_gap) {
        best_gap = b - last;
        best = (last + b) / 2;
      }
      last = b;
    }
    take(best);
  }
  return order;
}

struct Timed {
  int option = 0;
  std::shared_ptr<const ResidentWeight> weight;
  kernels::LinearArgs args;
  Buffer scratch;
  int calls = 1;  // per sample
  double fastest = kCannotRun;
};

class BucketMeter {
 public:
  BucketMeter(const Device& device, const float* x, float* y)
      : context_(device.MakeContext()), threads_(device.threads()), x_(x), y_(y) {}

  absl::Status Add(const CostTable& table, const sparse::WeightStructure& structure, int option,
                   int64_t tokens, std::shared_ptr<const ResidentWeight> weight) {
    Timed timed;
    timed.option = option;
    timed.args.weight = weight->view();
    timed.args.x = x_;
    timed.args.x_stride = structure.in;
    timed.args.y = y_;
    timed.args.y_stride = structure.out;
    timed.args.tokens = tokens;
    const kernels::LinearVariant& variant = *table.options[option].variant;
    auto scratch = Buffer::Allocate(
        variant.scratch_bytes(kernels::DescOf(timed.args.weight, tokens), threads_));
    if (!scratch.ok()) return scratch.status();
    timed.scratch = *std::move(scratch);
    timed.args.scratch = timed.scratch.data();
    timed.weight = std::move(weight);
    // The warm-up, and a first idea of the time.
    auto micros = Sample(variant, timed);
    if (micros.ok()) micros = Sample(variant, timed);
    if (!micros.ok()) return micros.status();
    timed.fastest = *micros;
    timed.calls = std::max(1, static_cast<int>(std::ceil(kSampleMicros / std::max(*micros, 0.1))));
    timed_.push_back(std::move(timed));
    return absl::OkStatus();
  }

  absl::Status Run(CostTable& table, size_t bucket) {
    const absl::Time enough =
        absl::Now() + absl::Microseconds(kMicrosPerOption * static_cast<double>(timed_.size()));
    for (int round = 0; round < kRounds || (round < kMaxRounds && absl::Now() < enough); ++round) {
      for (Timed& timed : timed_) {
        auto micros = Sample(*table.options[timed.option].variant, timed);
        if (!micros.ok()) return micros.status();
        timed.fastest = std::min(timed.fastest, *micros);
      }
    }
    for (const Timed& timed : timed_) table.costs[bucket][timed.option].measured = timed.fastest;
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<double> Sample(const kernels::LinearVariant& variant, const Timed& timed) {
    const int64_t begin = absl::GetCurrentTimeNanos();
    for (int call = 0; call < timed.calls; ++call) {
      const kernels::KernelStatus status = variant.run(context_, timed.args);
      if (!status.ok())
        return absl::InternalError(absl::StrCat(variant.name, ": ", status.message));
    }
    return std::max(1e-3,
                    static_cast<double>(absl::GetCurrentTimeNanos() - begin) / 1e3 / timed.calls);
  }

  const kernels::KernelContext context_;
  const int threads_;
  const float* x_;
  float* y_;
  std::vector<Timed> timed_;
};

bool IsKnown(const CostTable& table, size_t bucket) {
  const std::vector<int> options = WorthMeasuring(table, bucket);
  return std::all_of(options.begin(), options.end(),
                     [&](int i) { return table.costs[bucket][i].measured > 0; });
}

double PredictBucketMicros(const CostTable& table, size_t bucket) {
  double micros = 0;
  for (int i : WorthMeasuring(table, bucket)) {
    micros += std::max((kRounds + 2) * table.costs[bucket][i].micros, kMicrosPerOption);
  }
  return micros;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ResidentWeight>> WeightCopies::For(const LayerOption& option) {
  for (const auto& [other, copy] : copies_) {
    if (SharesMemory(other, option)) return copy;
  }
  auto made = ResidentWeight::Create(dense_, option.layout.spec, *option.variant);
  if (!made.ok()) return made.status();
  copies_.emplace_back(option, *std::move(made));
  return copies_.back().second;
}

void WeightCopies::DropUnused() {
  std::erase_if(copies_, [](const auto& copy) { return copy.second.use_count() == 1; });
}

std::vector<int> WorthMeasuring(const CostTable& table, size_t bucket) {
  double best = kCannotRun;
  size_t fewest = SIZE_MAX;
  for (size_t i = 0; i < table.options.size(); ++i) {
    best = std::min(best, table.costs[bucket][i].predicted);
    fewest = std::min(fewest, table.options[i].layout.bytes);
  }
  std::vector<int> options;
  for (size_t i = 0; i < table.options.size(); ++i) {
    const double predicted = table.costs[bucket][i].predicted;
    if (predicted == kCannotRun) continue;
    const bool smallest = table.options[i].layout.bytes == fewest;
    if (table.options[i].is_dense() || smallest || predicted <= kWorthMeasuring * best) {
      options.push_back(static_cast<int>(i));
    }
  }
  return options;
}

absl::Duration PredictMeasuring(const CostTable& table) {
  double micros = 0;
  for (size_t b = 0; b < table.tokens.size(); ++b) {
    if (!IsKnown(table, b)) micros += PredictBucketMicros(table, b);
  }
  return absl::Microseconds(micros);
}

absl::StatusOr<int> Measure(CostTable& table, const sparse::WeightStructure& structure,
                            WeightCopies& copies, const Device& device, absl::Time deadline) {
  const int64_t most = table.tokens.back();
  auto x = Buffer::Allocate(sizeof(float) * most * structure.in);
  if (!x.ok()) return x.status();
  auto y = Buffer::Allocate(sizeof(float) * most * structure.out);
  if (!y.ok()) return y.status();
  float* values = reinterpret_cast<float*>(x->data());
  for (int64_t i = 0; i < most * structure.in; ++i)
    values[i] = static_cast<float>(i % 17) / 17 - 0.5f;
  int measured = 0;
  for (size_t bucket : BucketOrder(table.tokens.size())) {
    if (IsKnown(table, bucket)) continue;
    table.Calibrate();
    if (absl::Now() + absl::Microseconds(PredictBucketMicros(table, bucket)) > deadline) continue;
    BucketMeter meter(device, values, reinterpret_cast<float*>(y->data()));
    for (int option : WorthMeasuring(table, bucket)) {
      auto weight = copies.For(table.options[option]);
      if (!weight.ok()) return weight.status();
      table.options[option].resident_bytes = (*weight)->bytes();
      absl::Status added = meter.Add(table, structure, option, table.tokens[bucket], *weight);
      if (!added.ok()) return added;
    }
    if (absl::Status status = meter.Run(table, bucket); !status.ok()) return status;
    ++measured;
  }
  table.Calibrate();
  return measured;
}

}  // namespace espalier::planner
