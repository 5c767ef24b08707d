#include "tests/engine/graph/graph_harness.h"

#include <algorithm>
#include <cmath>

#include "engine/graph/ops/linear.h"
#include "gtest/gtest.h"

namespace espalier::testing {
namespace {

kernels::KernelStatus RunOracle(const kernels::KernelContext&, const kernels::LinearArgs& args) {
  std::vector<double> y(args.tokens * args.weight.out);
  kernels::ReferenceLinear(args, y.data(), nullptr);
  for (size_t i = 0; i < y.size(); ++i) static_cast<float*>(args.y)[i] = static_cast<float>(y[i]);
  return {};
}

constexpr kernels::LinearVariant kOracle = {"oracle",
                                            kernels::Layout::kDense,
                                            kernels::Arch::kCpu,
                                            true,
                                            nullptr,
                                            nullptr,
                                            nullptr,
                                            nullptr,
                                            nullptr,
                                            nullptr,
                                            RunOracle};

kernels::WeightView ViewOf(const Tensor& tensor) {
  kernels::WeightView view;
  view.dtype = tensor.dtype();
  view.out = tensor.shape()[0];
  view.in = tensor.shape()[1];
  view.count = tensor.elements();
  view.values = tensor.data();
  return view;
}

Shape AtBatch(Shape shape, int64_t batch) {
  if (!shape.empty() && shape[0] == kBatch) shape[0] = batch;
  return shape;
}

}  // namespace

Runner::Runner(graph::Program program, int64_t max_batch)
    : program_(std::move(program)), device_(MakeCpuDevice(1)) {
  std::vector<graph::LinearBinding> bindings;
  for (const graph::LinearOp* linear : program_.linears) {
    bindings.push_back({&kOracle, ViewOf(*program_.weights[linear->weight()].tensor)});
  }
  executor_ = std::make_unique<graph::Executor>(
      program_, *device_, std::vector<int64_t>{std::max<int64_t>(max_batch, 1)},
      std::vector<std::vector<graph::LinearBinding>>{bindings});
  state_ = *executor_->NewState();
}

std::map<std::string, Values> Runner::Run(const std::map<std::string, Values>& inputs,
                                          int64_t batch) {
  std::ranges::fill(state_->arena(), std::byte{0xff});
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    const formats::ValueInfo& info = program_.inputs[i];
    const Values& values = inputs.at(info.name);
    ConvertElements(values.data.data(), DType::kFloat64, state_->input(static_cast<int>(i)),
                    info.dtype, static_cast<int64_t>(values.data.size()));
  }
  const absl::Status status = executor_->Run(*state_, batch);
  EXPECT_TRUE(status.ok()) << status;
  std::map<std::string, Values> outputs;
  for (size_t i = 0; i < program_.outputs.size(); ++i) {
    const formats::ValueInfo& info = program_.outputs[i];
    outputs[info.name] =
        ToValues({info.dtype, AtBatch(info.shape, batch), state_->output(static_cast<int>(i))});
  }
  return outputs;
}

std::map<std::string, Values> RandomInputs(const formats::ModelGraph& graph, int64_t batch,
                                           uint32_t seed) {
  std::map<std::string, Values> inputs;
  for (const formats::ValueInfo& info : graph.inputs) {
    const Shape shape = AtBatch(info.shape, batch);
    int64_t count = 1;
    for (int64_t dim : shape) count *= dim;
    const bool is_float =
        graph::StorageOf(info.dtype) == DType::kFloat32 || info.dtype == DType::kFloat64;
    std::vector<double> data = RandomData(count, seed++);
    if (!is_float) {
      for (double& v : data) v = std::floor((v + 1) * 50);
    }
    inputs[info.name] = ToValues(MakeTensor(info.dtype, shape, data).view());
  }
  return inputs;
}

void ExpectMatchesReference(const Build& build, int64_t max_batch, double tolerance) {
  const formats::ModelGraph graph = build();
  for (const bool fuse : {true, false}) {
    auto program = graph::Lower(build(), {.max_batch_size = max_batch, .fuse = fuse});
    ASSERT_TRUE(program.ok()) << program.status();
    Runner runner(*std::move(program), max_batch);
    for (const int64_t batch :
         max_batch == 0 ? std::vector<int64_t>{1} : std::vector<int64_t>{1, 2, 3, 7}) {
      if (batch > std::max<int64_t>(max_batch, 1)) continue;
      const auto inputs = RandomInputs(graph, batch, 17 * static_cast<uint32_t>(batch));
      const auto expected = EvaluateReference(graph, inputs);
      const auto actual = runner.Run(inputs, batch);
      for (const auto& [name, want] : expected) {
        const Values& got = actual.at(name);
        ASSERT_EQ(got.shape, want.shape) << name << " at batch " << batch;
        for (size_t i = 0; i < want.data.size(); ++i) {
          ASSERT_LE(std::abs(got.data[i] - want.data[i]),
                    tolerance * std::max(1.0, std::abs(want.data[i])))
              << name << "[" << i << "] at batch " << batch << (fuse ? ", fused" : ", unfused")
              << ": expected " << want.data[i] << ", got " << got.data[i];
        }
      }
    }
  }
}

absl::Status LowerStatus(formats::ModelGraph graph, int64_t max_batch) {
  return graph::Lower(std::move(graph), {.max_batch_size = max_batch}).status();
}

}  // namespace espalier::testing
