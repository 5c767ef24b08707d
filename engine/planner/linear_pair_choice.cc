#include "engine/planner/linear_pair_choice.h"

#include <cstring>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/graph/device_forms.h"
#include "engine/graph/ops/linear.h"
#include "engine/planner/cuda_stopwatch.h"
#include "engine/planner/measure.h"
#include "kernels/linear_pair/linear_pair.h"

namespace espalier::planner {
namespace {

// Microseconds of two layers, one after the other and as a pair.
struct Micros {
  double apart = 0, paired = 0;
};

// What pairs took that were measured in this process, by problem: models with equal layers, and the copies of a model
// that are made beside requests, when nothing is measured, find it here.
std::map<std::string, Micros>& KnownPairs() {
  static std::map<std::string, Micros> known;
  return known;
}

// What two layers compute from and into, for the largest batch.
class PairMeter {
 public:
  static absl::StatusOr<PairMeter> Make(const CudaDevice& device, const graph::LinearOp& first,
                                        const graph::LinearOp& second, DType dtype,
                                        int64_t most_tokens) {
    PairMeter meter(device, first, second, dtype);
    auto stopwatch = CudaStopwatch::Make(device);
    if (!stopwatch.ok()) return stopwatch.status();
    meter.stopwatch_ = *std::move(stopwatch);
    for (int i = 0; i < 3; ++i) {
      auto memory = device.Allocate(most_tokens * meter.strides_[i] * SizeOf(dtype));
      if (!memory.ok()) return memory.status();
      meter.memory_[i] = *std::move(memory);
    }
    absl::Status filled =
        FillWithNumbers(device, meter.memory_[0], meter.stopwatch_->context().stream);
    if (!filled.ok()) return filled;
    return meter;
  }

  absl::StatusOr<Micros> Time(const graph::LinearBinding& first, const graph::LinearBinding& second,
                              int64_t tokens) const {
    const kernels::LinearPairArgs args = {Args(first, first_, 0, tokens),
                                          Args(second, second_, 1, tokens)};
    const kernels::KernelContext& context = stopwatch_->context();
    const auto explain = [&](const kernels::KernelStatus& status) {
      return device_.Explain(status, "linear pair");
    };
    absl::StatusOr<CudaHandle> apart, paired;
    {
      const std::lock_guard lock(device_.setup_mutex());
      apart = stopwatch_->Capture([&] {
        absl::Status status = explain(first.variant->run(context, args.first));
        return status.ok() ? explain(second.variant->run(context, args.second)) : status;
      });
      paired = stopwatch_->Capture([&] { return explain(kernels::RunLinearPair(context, args)); });
    }
    for (const auto* graph : {&apart, &paired}) {
      if (!graph->ok()) return graph->status();
    }
    auto micros = stopwatch_->Time({&*apart, &*paired});
    if (!micros.ok()) return micros.status();
    return Micros{(*micros)[0], (*micros)[1]};
  }

 private:
  PairMeter(const CudaDevice& device, const graph::LinearOp& first, const graph::LinearOp& second,
            DType dtype)
      : device_(device),
        first_(first),
        second_(second),
        dtype_(dtype),
        strides_{graph::RowStrideOf(first.in()), graph::RowStrideOf(first.out()),
                 graph::RowStrideOf(second.out())} {}

  kernels::LinearArgs Args(const graph::LinearBinding& binding, const graph::LinearOp& linear,
                           int from, int64_t tokens) const {
    kernels::LinearArgs args;
    args.weight = binding.weight;
    args.io_dtype = dtype_;
    args.x = memory_[from].get();
    args.x_stride = strides_[from];
    args.y = memory_[from + 1].get();
    args.y_stride = strides_[from + 1];
    args.activation = linear.activation();
    args.tokens = tokens;
    return args;
  }

  const CudaDevice& device_;
  const graph::LinearOp &first_, &second_;
  const DType dtype_;
  const int64_t strides_[3];  // of x, what is between, and y
  CudaHandle memory_[3];
  std::unique_ptr<CudaStopwatch> stopwatch_;
};

std::string ProblemOf(const CudaDevice& device, const graph::LinearBinding& binding,
                      const graph::LinearOp& linear, int64_t tokens) {
  const kernels::WeightView& w = binding.weight;
  return absl::StrCat(device.Description(), " ", binding.variant->name, " ", w.out, " ", w.in, " ",
                      w.block_rows, " ", w.block_cols, " ", w.count, " ",
                      NameOf(linear.activation()), " ", tokens, ";");
}

}  // namespace

bool FitsPair(const graph::LinearBinding& first, const graph::LinearBinding& second) {
  const auto packs = [](const graph::LinearBinding& binding) {
    return binding.variant->packing != nullptr &&
           std::strcmp(binding.variant->packing, kernels::kLinearPairPacking) == 0;
  };
  const auto desc = [](const graph::LinearBinding& binding) {
    return kernels::DescOf(binding.weight, /*tokens=*/1, binding.weight.dtype);
  };
  return packs(first) && packs(second) &&
         kernels::FitsLinearPair(desc(first), desc(second), first.variant->arch);
}

absl::Status ChoosePairs(const graph::Program& program, const std::vector<graph::LinearPair>& pairs,
                         const CudaDevice& device, bool measure, PlannedModel& planned) {
  if (pairs.empty()) return absl::OkStatus();  // and nobody is waited for
  if (absl::Status status = device.Use(); !status.ok()) return status;
  const std::vector<std::vector<graph::LinearBinding>> bindings = planned.Bindings();
  const std::unique_lock alone = MeasureAlone();
  for (const graph::LinearPair& pair : pairs) {
    const graph::LinearOp& first = *program.linears[pair.first];
    const graph::LinearOp& second = *program.linears[pair.second];
    PlannedPair found{pair, std::vector<bool>(planned.buckets.size(), false)};
    std::optional<PairMeter> meter;
    for (size_t b = 0; b < planned.buckets.size(); ++b) {
      const graph::LinearBinding& one = bindings[b][pair.first];
      const graph::LinearBinding& other = bindings[b][pair.second];
      if (!FitsPair(one, other)) continue;
      const int64_t tokens = first.tokens_per_item() * planned.buckets[b];
      Micros& micros = KnownPairs()[ProblemOf(device, one, first, tokens) +
                                    ProblemOf(device, other, second, tokens)];
      if (micros.paired == 0) {
        if (!measure) continue;
        if (!meter) {
          auto made = PairMeter::Make(device, first, second, one.weight.dtype,
                                      first.tokens_per_item() * planned.buckets.back());
          if (absl::IsResourceExhausted(made.status())) break;  // the layers run apart
          if (!made.ok()) return made.status();
          meter.emplace(*std::move(made));
        }
        auto timed = meter->Time(one, other, tokens);
        if (!timed.ok()) return timed.status();
        micros = *timed;
      }
      if (micros.apart < kPairGain * micros.paired) continue;
      found.in_bucket[b] = true;
      planned.plan.layers[pair.second].buckets[b].paired =
          absl::StrFormat("in one kernel with %s: %.3g us instead of %.3g",
                          planned.plan.layers[pair.first].name, micros.paired, micros.apart);
    }
    planned.pairs.push_back(std::move(found));
  }
  return absl::OkStatus();
}

}  // namespace espalier::planner
