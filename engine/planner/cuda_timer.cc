#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/graph/device_forms.h"
#include "engine/planner/cuda_stopwatch.h"
#include "engine/planner/option_timer.h"
#include "kernels/cuda/variants.h"

namespace espalier::planner {
namespace {

struct Timed {
  int option = 0;
  std::shared_ptr<const ResidentWeight> weight;
  CudaHandle scratch, graph;
};

class CudaTimer final : public OptionTimer {
 public:
  CudaTimer(const CudaDevice& device, int64_t out, int64_t in, DType dtype)
      : device_(device), out_(out), in_(in), dtype_(dtype) {}

  absl::Status Allocate(int64_t tokens) {
    const size_t element = SizeOf(dtype_);
    auto stopwatch = CudaStopwatch::Make(device_);
    auto x = device_.Allocate(tokens * graph::RowStrideOf(in_) * element);
    auto y = device_.Allocate(tokens * graph::RowStrideOf(out_) * element);
    for (const absl::Status& status : {stopwatch.status(), x.status(), y.status()}) {
      if (!status.ok()) return status;
    }
    stopwatch_ = *std::move(stopwatch);
    x_ = *std::move(x);
    y_ = *std::move(y);
    return FillWithNumbers(device_, x_, stopwatch_->context().stream);
  }

  absl::Status Time(CostTable& table, size_t bucket, const std::vector<int>& options,
                    const std::vector<std::shared_ptr<const ResidentWeight>>& weights) override {
    if (absl::Status status = device_.Use(); !status.ok()) return status;
    std::vector<Timed> all;
    for (size_t i = 0; i < options.size(); ++i) {
      Timed timed{options[i], weights[i]};
      absl::Status status =
          Prepare(*table.options[options[i]].variant, table.tokens[bucket], timed);
      if (absl::IsUnimplemented(status)) {
        table.costs[bucket][options[i]].measured = kCannotRun;
        continue;
      }
      if (!status.ok()) return status;
      all.push_back(std::move(timed));
    }
    std::vector<const CudaHandle*> graphs;
    for (const Timed& timed : all) graphs.push_back(&timed.graph);
    auto micros = stopwatch_->Time(graphs);
    if (!micros.ok()) return micros.status();
    for (size_t i = 0; i < all.size(); ++i) {
      double& measured = table.costs[bucket][all[i].option].measured;
      measured = measured > 0 ? std::min(measured, (*micros)[i]) : (*micros)[i];
    }
    return absl::OkStatus();
  }

 private:
  // Settles and captures. Unimplemented when the kernel does not run this problem on this device.
  absl::Status Prepare(const kernels::LinearVariant& variant, int64_t tokens, Timed& timed) {
    kernels::LinearArgs args;
    args.weight = timed.weight->view();
    args.io_dtype = dtype_;
    args.x = x_.get();
    args.x_stride = graph::RowStrideOf(in_);
    args.y = y_.get();
    args.y_stride = graph::RowStrideOf(out_);
    args.tokens = tokens;
    auto scratch =
        device_.Allocate(variant.scratch_bytes(kernels::DescOf(args.weight, tokens, dtype_), 1));
    if (!scratch.ok()) return scratch.status();
    timed.scratch = *std::move(scratch);
    args.scratch = timed.scratch.get();
    const auto explain = [&](const kernels::KernelStatus& status) {
      return status.code == kernels::KernelCode::kUnsupported
                 ? absl::UnimplementedError(absl::StrCat(variant.name, ": ", status.message))
                 : device_.Explain(status, variant.name);
    };
    const std::lock_guard lock(device_.setup_mutex());
    absl::Status settled = explain(
        device_.module().settle(kernels::cuda::KernelOf(variant), stopwatch_->context(), args));
    if (!settled.ok()) return settled;
    auto graph =
        stopwatch_->Capture([&] { return explain(variant.run(stopwatch_->context(), args)); });
    if (!graph.ok()) return graph.status();
    timed.graph = *std::move(graph);
    return absl::OkStatus();
  }

  const CudaDevice& device_;
  const int64_t out_, in_;
  const DType dtype_;
  std::unique_ptr<CudaStopwatch> stopwatch_;
  CudaHandle x_, y_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OptionTimer>> MakeCudaTimer(const CostTable& table,
                                                           const sparse::WeightStructure& structure,
                                                           const CudaDevice& device) {
  auto timer = std::make_unique<CudaTimer>(device, structure.out, structure.in, structure.dtype);
  if (absl::Status status = timer->Allocate(table.tokens.back()); !status.ok()) return status;
  return timer;
}

}  // namespace espalier::planner
