#include "engine/planner/device_peak.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "engine/graph/device_forms.h"
#include "engine/planner/cost_table.h"
#include "kernels/cuda/variants.h"

namespace espalier::planner {
namespace {

constexpr int kLaunches = 4, kReplays = 4;

// A square product that fills every multiprocessor with several tiles: 4224 on an H200.
int64_t SideFor(const CudaDevice& device) { return 32 * int64_t{device.info().multiprocessors}; }
// Several times the L2.
size_t CopyBytesFor(const CudaDevice& device) {
  return 4 * std::max<size_t>(device.info().l2_bytes, size_t{1} << 20);
}

// Seconds of one `enqueue`, the best of several replays; 0 on any error.
double BestSeconds(const CudaDevice& device, void* stream,
                   const std::function<absl::Status()>& enqueue) {
  auto begin = device.NewEvent(), end = device.NewEvent();
  auto graph = device.Capture(stream, [&]() -> absl::Status {
    for (int i = 0; i < kLaunches; ++i) {
      if (absl::Status status = enqueue(); !status.ok()) return status;
    }
    return absl::OkStatus();
  });
  if (!begin.ok() || !end.ok() || !graph.ok()) return 0;
  const auto& module = device.module();
  float best = 0;
  for (int i = 0; i <= kReplays; ++i) {  // the first warms up
    float micros = 0;
    for (const kernels::KernelStatus& status :
         {module.record_event(begin->get(), stream), module.launch_graph(graph->get(), stream),
          module.record_event(end->get(), stream), module.synchronize_event(end->get()),
          module.elapsed_micros(begin->get(), end->get(), &micros)}) {
      if (!status.ok()) return 0;
    }
    if (i == 1 || (i > 1 && micros < best)) best = micros;
  }
  return static_cast<double>(best) * 1e-6 / kLaunches;
}

double Flops(const CudaDevice& device, void* stream, DType dtype) {
  const int64_t side = SideFor(device);
  kernels::LinearArgs args;
  args.weight.dtype = args.io_dtype = dtype;
  args.weight.out = args.weight.in = args.tokens = side;
  args.weight.count = side * side;
  args.x_stride = args.y_stride = graph::RowStrideOf(side);
  double best = 0;
  for (const kernels::LinearVariant& variant : device.linear_variants()) {
    const kernels::LinearDesc desc = kernels::DescOf(args.weight, side, dtype);
    if (variant.layout != kernels::Layout::kDense || !device.Runs(variant) ||
        !variant.supports(desc)) {
      continue;
    }
    auto weight = device.Allocate(variant.packed_bytes(args.weight));
    auto x = device.Allocate(side * args.x_stride * SizeOf(dtype));
    auto y = device.Allocate(side * args.y_stride * SizeOf(dtype));
    auto scratch = device.Allocate(variant.scratch_bytes(desc, 1));
    if (!weight.ok() || !x.ok() || !y.ok() || !scratch.ok()) return 0;
    // Power and so clocks depend on the bits that toggle: 0x3c3c is a common bf16, f16 and f32.
    for (CudaHandle* memory : {&*weight, &*x}) {
      if (!device.module().fill(memory->get(), 0x3c, memory->bytes(), stream).ok()) return 0;
    }
    args.weight.packed = weight->get();
    args.x = x->get();
    args.y = y->get();
    args.scratch = scratch->get();
    kernels::KernelContext context = device.MakeContext();
    context.stream = stream;
    const std::lock_guard lock(device.setup_mutex());
    if (!device.module().settle(kernels::cuda::KernelOf(variant), context, args).ok()) continue;
    const double seconds = BestSeconds(
        device, stream, [&] { return device.Explain(variant.run(context, args), variant.name); });
    if (seconds > 0) best = std::max(best, 2.0 * std::pow(static_cast<double>(side), 3) / seconds);
  }
  return best;
}

double BytesPerSecond(const CudaDevice& device, void* stream) {
  const size_t bytes = CopyBytesFor(device);
  auto from = device.Allocate(bytes), to = device.Allocate(bytes);
  if (!from.ok() || !to.ok()) return 0;
  const double seconds = BestSeconds(device, stream, [&] {
    return device.Explain(device.module().copy(to->get(), from->get(), bytes, stream), "copy");
  });
  return seconds > 0 ? 2.0 * static_cast<double>(bytes) / seconds : 0;
}

}  // namespace

DevicePeak MeasuredPeak(const CudaDevice& device, DType dtype) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, DType>, DevicePeak> known;
  const std::lock_guard lock(mutex);
  const auto key = std::make_pair(device.Description(), dtype);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  auto stream = device.NewStream();
  if (!device.Use().ok() || !stream.ok()) return {};
  const DevicePeak peak = {Flops(device, stream->get(), dtype),
                           BytesPerSecond(device, stream->get())};
  return known[key] = peak;
}

}  // namespace espalier::planner
