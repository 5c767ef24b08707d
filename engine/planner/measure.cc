#include "engine/planner/measure.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/planner/choose.h"
#include "engine/planner/option_timer.h"

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
    for (const Timed& timed : timed_) {
      double& measured = table.costs[bucket][timed.option].measured;
      measured = measured > 0 ? std::min(measured, timed.fastest) : timed.fastest;
    }
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

class CpuTimer final : public OptionTimer {
 public:
  CpuTimer(const sparse::WeightStructure& structure, const Device& device)
      : structure_(structure), device_(device) {}

  absl::Status Allocate(int64_t tokens) {
    auto x = Buffer::Allocate(sizeof(float) * tokens * structure_.in);
    if (!x.ok()) return x.status();
    auto y = Buffer::Allocate(sizeof(float) * tokens * structure_.out);
    if (!y.ok()) return y.status();
    x_ = *std::move(x);
    y_ = *std::move(y);
    float* values = reinterpret_cast<float*>(x_.data());
    for (int64_t i = 0; i < tokens * structure_.in; ++i)
      values[i] = static_cast<float>(i % 17) / 17 - 0.5f;
    return absl::OkStatus();
  }

  absl::Status Time(CostTable& table, size_t bucket, const std::vector<int>& options,
                    const std::vector<std::shared_ptr<const ResidentWeight>>& weights) override {
    BucketMeter meter(device_, reinterpret_cast<const float*>(x_.data()),
                      reinterpret_cast<float*>(y_.data()));
    for (size_t i = 0; i < options.size(); ++i) {
      absl::Status added =
          meter.Add(table, structure_, options[i], table.tokens[bucket], weights[i]);
      if (!added.ok()) return added;
    }
    return meter.Run(table, bucket);
  }

 private:
  const sparse::WeightStructure& structure_;
  const Device& device_;
  Buffer x_, y_;
};

bool IsKnown(const CostTable& table, size_t bucket) {
  const std::vector<int> options = WorthMeasuring(table, bucket);
  return std::all_of(options.begin(), options.end(),
                     [&](int i) { return table.costs[bucket][i].measured > 0; });
}

double PredictMicros(const CostTable& table, size_t bucket, const std::vector<int>& options) {
  double micros = 0;
  for (int i : options) {
    micros += std::max(table.measuring_calls * table.costs[bucket][i].micros,
                       table.measuring_least_micros);
  }
  return micros;
}

// One layer while it is measured.
class LayerMeter {
 public:
  LayerMeter(CostTable& table, const sparse::WeightStructure& structure, WeightCopies& copies,
             const Device& device, absl::Time deadline)
      : table_(table),
        structure_(structure),
        copies_(copies),
        device_(device),
        deadline_(deadline) {}

  absl::StatusOr<Measured> Run() {
    const CudaDevice* gpu = device_.AsCudaOrNull();
    auto timer = gpu != nullptr ? MakeCudaTimer(table_, structure_, *gpu)
                                : MakeCpuTimer(table_, structure_, device_);
    if (!timer.ok()) return timer.status();
    timer_ = *std::move(timer);
    for (size_t bucket : BucketOrder(table_.tokens.size())) {
      if (IsKnown(table_, bucket)) continue;
      table_.Calibrate();
      auto done = MeasureBucket(bucket, WorthMeasuring(table_, bucket));
      if (!done.ok()) return done.status();
      result_.buckets += *done ? 1 : 0;
    }
    table_.Calibrate();
    if (result_.buckets > 0) {
      if (absl::Status status = MeasureCloseCalls(); !status.ok()) return status;
    }
    return result_;
  }

 private:
  // False when that would take until after the deadline.
  absl::StatusOr<bool> MeasureBucket(size_t bucket, const std::vector<int>& options) {
    const absl::Duration predicted = absl::Microseconds(PredictMicros(table_, bucket, options));
    if (absl::Now() + predicted > deadline_) return false;
    std::vector<std::shared_ptr<const ResidentWeight>> weights;
    for (int option : options) {
      auto weight = copies_.For(table_.options[option]);
      if (!weight.ok()) return weight.status();
      table_.options[option].resident_bytes = (*weight)->bytes();
      weights.push_back(*std::move(weight));
    }
    const absl::Time asked = absl::Now();
    const std::unique_lock alone = MeasureAlone();
    const absl::Duration waited = absl::Now() - asked;
    result_.waited += waited;
    deadline_ += waited;
    if (absl::Status status = timer_->Time(table_, bucket, options, weights); !status.ok())
      return status;
    return true;
  }

  absl::Status MeasureCloseCalls() {
    const std::vector<CloseCall> calls = CloseCalls(table_);
    for (size_t bucket = 0; bucket < table_.tokens.size(); ++bucket) {
      std::vector<int> options;
      for (const CloseCall& call : calls) {
        if (call.bucket == bucket) options.push_back(call.option);
      }
      if (options.empty()) continue;
      for (size_t i = 0; i < table_.options.size(); ++i) {
        if (table_.options[i].is_dense() && table_.costs[bucket][i].measured > 0) {
          options.push_back(static_cast<int>(i));
        }
      }
      auto done = MeasureBucket(bucket, options);
      if (!done.ok()) return done.status();
    }
    table_.Calibrate();
    return absl::OkStatus();
  }

  CostTable& table_;
  const sparse::WeightStructure& structure_;
  WeightCopies& copies_;
  const Device& device_;
  absl::Time deadline_;
  std::unique_ptr<OptionTimer> timer_;
  Measured result_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OptionTimer>> MakeCpuTimer(const CostTable& table,
                                                          const sparse::WeightStructure& structure,
                                                          const Device& device) {
  auto timer = std::make_unique<CpuTimer>(structure, device);
  if (absl::Status status = timer->Allocate(table.tokens.back()); !status.ok()) return status;
  return timer;
}

absl::StatusOr<std::shared_ptr<ResidentWeight>> WeightCopies::For(const LayerOption& option) {
  for (const auto& [other, copy] : copies_) {
    if (SharesMemory(other, option)) return copy;
  }
  auto made = ResidentWeight::Create(dense_, option.layout.spec, *option.variant, device_);
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
    if (!IsKnown(table, b)) micros += PredictMicros(table, b, WorthMeasuring(table, b));
  }
  return absl::Microseconds(micros);
}

absl::StatusOr<Measured> Measure(CostTable& table, const sparse::WeightStructure& structure,
                                 WeightCopies& copies, const Device& device, absl::Time deadline) {
  return LayerMeter(table, structure, copies, device, deadline).Run();
}

std::unique_lock<std::mutex> MeasureAlone() {
  static std::mutex one_at_a_time;
  return std::unique_lock(one_at_a_time);
}

}  // namespace espalier::planner
