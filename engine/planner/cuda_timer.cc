#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/graph/device_forms.h"
#include "engine/planner/option_timer.h"
#include "kernels/cuda/variants.h"

namespace espalier::planner {
namespace {

// A launch takes the host 2–3 µs, longer than many kernels: only inside a graph is the device's own time seen.
constexpr int kLaunches = 20;
// There and back; fewer when a replay takes long, for then its own noise is small.
constexpr int kRounds = 5, kRoundsOfLong = 2;
constexpr float kLongMicros = 2000;

struct Timed {
  int option = 0;
  std::shared_ptr<const ResidentWeight> weight;
  CudaHandle scratch, graph;
  std::vector<float> micros;  // per replay
};

class CudaTimer final : public OptionTimer {
 public:
  CudaTimer(const CudaDevice& device, int64_t out, int64_t in, DType dtype)
      : device_(device), out_(out), in_(in), dtype_(dtype), context_(device.MakeContext()) {}

  absl::Status Allocate(int64_t tokens) {
    const size_t element = SizeOf(dtype_);
    const auto place = [](absl::StatusOr<CudaHandle> made, CudaHandle& handle) -> absl::Status {
      if (made.ok()) handle = *std::move(made);
      return made.status();
    };
    for (absl::Status status :
         {place(device_.Allocate(tokens * graph::RowStrideOf(in_) * element), x_),
          place(device_.Allocate(tokens * graph::RowStrideOf(out_) * element), y_),
          place(device_.NewStream(), stream_), place(device_.NewEvent(), begin_),
          place(device_.NewEvent(), end_)}) {
      if (!status.ok()) return status;
    }
    context_.stream = stream_.get();
    // Power and so clocks depend on the bits that toggle: 0x3c3c is a common bf16, f16 and f32.
    return device_.Explain(device_.module().fill(x_.get(), 0x3c, x_.bytes(), stream_.get()),
                           "fill");
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
    const bool is_long = std::any_of(all.begin(), all.end(), [](const Timed& timed) {
      return timed.micros.front() > kLongMicros;
    });
    for (int round = 0; round < (is_long ? kRoundsOfLong : kRounds); ++round) {
      for (size_t i = 0; i < 2 * all.size(); ++i) {
        const size_t turn = i < all.size() ? i : 2 * all.size() - 1 - i;
        if (absl::Status status = Replay(all[turn]); !status.ok()) return status;
      }
    }
    for (Timed& timed : all) {
      timed.micros.erase(timed.micros.begin());  // the warm-up
      std::nth_element(timed.micros.begin(), timed.micros.begin() + timed.micros.size() / 2,
                       timed.micros.end());
      const double median =
          std::max<double>(timed.micros[timed.micros.size() / 2] / kLaunches, 1e-3);
      double& measured = table.costs[bucket][timed.option].measured;
      measured = measured > 0 ? std::min(measured, median) : median;
    }
    return absl::OkStatus();
  }

 private:
  // Settles, captures and warms up. Unimplemented when the kernel does not run this problem on this device.
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
    absl::Status settled =
        explain(device_.module().settle(kernels::cuda::KernelOf(variant), context_, args));
    if (!settled.ok()) return settled;
    auto graph = device_.Capture(stream_.get(), [&]() -> absl::Status {
      for (int launch = 0; launch < kLaunches; ++launch) {
        if (const auto status = variant.run(context_, args); !status.ok()) return explain(status);
      }
      return absl::OkStatus();
    });
    if (!graph.ok()) return graph.status();
    timed.graph = *std::move(graph);
    return Replay(timed);
  }

  absl::Status Replay(Timed& timed) {
    const auto& module = device_.module();
    void* stream = stream_.get();
    float micros = 0;
    for (const kernels::KernelStatus& status :
         {module.record_event(begin_.get(), stream), module.launch_graph(timed.graph.get(), stream),
          module.record_event(end_.get(), stream), module.synchronize_event(end_.get()),
          module.elapsed_micros(begin_.get(), end_.get(), &micros)}) {
      if (!status.ok()) return device_.Explain(status, "measure");
    }
    timed.micros.push_back(micros);
    return absl::OkStatus();
  }

  const CudaDevice& device_;
  const int64_t out_, in_;
  const DType dtype_;
  kernels::KernelContext context_;
  CudaHandle x_, y_, stream_, begin_, end_;
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
