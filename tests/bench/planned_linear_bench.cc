// planned_linear_bench — one linear layer as the planner serves it, against dense. See --help.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/planner/prepared_model.h"
#include "tests/bench/onednn_baseline.h"
#include "tests/bench/result_file.h"
#include "tests/bench/timing.h"
#include "tests/kernels/linear/linear_problem.h"

namespace espalier::bench {
namespace {

namespace testing = kernels::testing;
using kernels::Layout;
using planner::PreparedModel;
using planner::WeightMemory;

constexpr char kHelp[] =
    R"(planned_linear_bench: y = x · Wᵀ as planned and run by the engine, against dense, one thread.

  planned_linear_bench [--layout L] [--sparsity S] [--batch N] [--weight_memory M] [--size N] [--samples N]
                       [--out FILE]

  --layout         only this structure: diagonal(1), diagonal(16), block_csr(16) or csr
  --sparsity       only this sparsity, e.g. 0.9               (default 50, 70, 80, 90, 95, 99 %)
  --batch          only this batch                            (default 1, 4, 16, 64, 256)
  --weight_memory  smallest, balanced or fastest              (default balanced)
  --size           in = out = N                               (default 4096)
  --samples        interleaved samples (default 21); every row is a median of them
  --out            write JSON there

A model of one MatMul is prepared by the planner, which measures and chooses for itself. What it chose is then timed,
in turn with the engine's dense plan of the same weight ("engine_dense_us") and with oneDNN in the best of its forms
("dense_us"). "vs_dense" is the median of planned / engine dense over the pairs: the planner's promise is that it stays
below 1.05 in the modes balanced and fastest. Rows of case "memory" hold the resident bytes in every weight_memory mode.
Answers are compared with a double-precision loop first. Random weights, fixed seed.
)";

struct Kind {
  const char* name;
  Layout layout;
  int32_t block;
  testing::Pattern pattern;
};
constexpr Kind kKinds[] = {{"diagonal(1)", Layout::kDiagonal, 1, testing::Pattern::kDiagonals},
                           {"diagonal(16)", Layout::kDiagonal, 16, testing::Pattern::kDiagonals},
                           {"block_csr(16)", Layout::kBlockCsr, 16, testing::Pattern::kBlocks},
                           {"csr", Layout::kCsr, 1, testing::Pattern::kScattered}};

struct Mode {
  const char* name;
  WeightMemory mode;
};
constexpr Mode kModes[] = {{"smallest", WeightMemory::kSmallest},
                           {"balanced", WeightMemory::kBalanced},
                           {"fastest", WeightMemory::kFastest}};

struct Options {
  std::string layout, weight_memory = "balanced", out, command = "planned_linear_bench";
  double sparsity = -1;
  int64_t batch = 0, size = 4096;
  TimingOptions timing;
};

[[noreturn]] void Fail(const std::string& text) {
  std::fprintf(stderr, "planned_linear_bench: %s\n", text.c_str());
  std::exit(1);
}

// One MatMul by the dense matrix [out, in].
formats::ModelGraph OneLayer(const std::vector<float>& dense, int64_t size) {
  formats::ModelGraph graph;
  graph.source = "planned_linear_bench";
  graph.opset = 17;
  graph.inputs.push_back({"x", DType::kFloat32, {kBatch, size}});
  graph.outputs.push_back({"y", DType::kFloat32, {kBatch, size}});
  Tensor weight = *Tensor::Allocate(DType::kFloat32, {size, size});
  std::copy(dense.begin(), dense.end(), weight.As<float>());
  graph.initializers.emplace("w", std::move(weight));
  graph.nodes.push_back({"layer", "Gemm", "", {"x", "w"}, {"y"}, {}});
  graph.nodes[0].attributes.emplace("transB", int64_t{1});
  return graph;
}

// A planned model with a state of its own.
struct Planned {
  std::unique_ptr<PreparedModel> model;
  std::unique_ptr<planner::ExecutionState> state;

  const planner::LayerPlan& layer() const { return model->plan().layers[0]; }
  void Run(int64_t batch) {
    if (!model->Run(*state, batch).ok()) std::abort();
  }
};

Planned Plan(formats::ModelGraph graph, const Device& device, WeightMemory mode,
             const std::string& plan_cache_dir) {
  planner::PrepareOptions options;
  options.weight_memory = mode;
  options.plan_cache_dir = plan_cache_dir;  // one measurement for all modes
  auto model = PreparedModel::Prepare(std::move(graph), device, options);
  if (!model.ok()) Fail(model.status().ToString());
  auto state = (*model)->NewState();
  if (!state.ok()) Fail(state.status().ToString());
  return {*std::move(model), *std::move(state)};
}

void Verify(Planned& planned, const std::vector<float>& dense, const std::vector<float>& x,
            int64_t size, int64_t batch) {
  planned.Run(batch);
  const float* y = static_cast<const float*>(planned.state->output(0));
  kernels::WeightView weight;
  weight.out = weight.in = size;
  weight.count = size * size;
  weight.values = dense.data();
  for (const int64_t token : {int64_t{0}, batch / 2, batch - 1}) {
    const std::vector<float> x_row(x.begin() + token * size, x.begin() + (token + 1) * size);
    const std::vector<float> y_row(y + token * size, y + (token + 1) * size);
    const std::string wrong = testing::CompareWithReference(weight, x_row, 1, nullptr, {}, y_row);
    if (!wrong.empty()) Fail(wrong);
  }
}

const planner::BucketChoice& ChoiceAt(const planner::LayerPlan& layer, int64_t batch) {
  for (const planner::BucketChoice& bucket : layer.buckets) {
    if (batch <= bucket.batch) return bucket;
  }
  Fail("batch above the largest bucket");
}

std::string MeasureBatch(const Kind& kind, double sparsity, int64_t batch, const Options& options,
                         Planned& planned, Planned& engine_dense, const std::vector<float>& dense,
                         const std::vector<float>& x) {
  const planner::BucketChoice& choice = ChoiceAt(planned.layer(), batch);
  // The engine computes the same with bias null; oneDNN's forms have one, which costs it nothing.
  const std::vector<float> bias(options.size, 0.0f);
  std::vector<float> y(batch * options.size);
  std::vector<std::shared_ptr<OneDnnDense>> forms;
  std::vector<std::function<void()>> calls = {[&] { planned.Run(batch); },
                                              [&] { engine_dense.Run(batch); }};
  for (const auto form :
       {OneDnnDense::Form::kMatmulPacked, OneDnnDense::Form::kInnerProductPacked}) {
    forms.push_back(
        std::make_shared<OneDnnDense>(form, dense, bias.data(), options.size, options.size, batch));
    calls.push_back([&, onednn = forms.back()] { onednn->Run(x.data(), y.data()); });
  }
  Verify(planned, dense, x, options.size, batch);
  const auto samples = TimeInTurn(calls, options.timing);
  std::vector<double> ratios;
  for (size_t i = 0; i < samples[0].size(); ++i) ratios.push_back(samples[0][i] / samples[1][i]);
  const Summary ours = Summarize(samples[0]), own_dense = Summarize(samples[1]);
  const double onednn = std::min(Summarize(samples[2]).median, Summarize(samples[3]).median);
  const bool is_dense = choice.chosen.spec.layout == Layout::kDense;
  const double vs_dense = is_dense ? 1.0 : Summarize(ratios).median;
  const std::string chosen = sparse::ToString(choice.chosen.spec);
  std::printf(
      "%-14s %4.0f %%  M %3d  %-14s %-34s %9.1f us  dense %9.1f us  oneDNN %9.1f us  %6.2fx  %s\n",
      kind.name, 100 * sparsity, static_cast<int>(batch), chosen.c_str(),
      choice.chosen.variant.c_str(), ours.median, own_dense.median, onednn, onednn / ours.median,
      vs_dense > 1.05 ? "SLOWER THAN DENSE" : "");
  std::fflush(stdout);
  return absl::StrFormat(
      R"({"case": "grid", "layout": "%s", "block": %d, "sparsity": %g, "M": %d, "K": %d, "N": %d, "dtype": "f32", )"
      R"("mode": "warm", "us": %.2f, "dense_us": %.2f, "planned": true, "engine_dense_us": %.2f, "vs_dense": %.4f, )"
      R"("chosen": "%s", "variant": "%s", "plan_us": %.2f, "plan_dense_us": %.2f, "weight_memory": "%s", )"
      R"("min_us": %.2f, "spread": %.3f})",
      NameOf(kind.layout), kind.block, sparsity, batch, options.size, options.size, ours.median,
      onednn, own_dense.median, vs_dense, chosen, choice.chosen.variant, choice.chosen.micros,
      choice.dense_micros, options.weight_memory, ours.min, ours.spread);
}

std::string MemoryRow(const Kind& kind, double sparsity, const Mode& mode, const Options& options,
                      const planner::LayerPlan& layer) {
  const double share =
      static_cast<double>(layer.weight_bytes) / static_cast<double>(layer.dense_bytes);
  std::printf("%-14s %4.0f %%  %-9s %10d bytes, %5.1f %% of dense, %.3f of density\n", kind.name,
              100 * sparsity, mode.name, static_cast<int>(layer.weight_bytes), 100 * share,
              share / (1 - layer.sparsity));
  return absl::StrFormat(
      R"({"case": "memory", "layout": "%s", "block": %d, "sparsity": %.6f, "M": 0, "K": %d, "N": %d, "dtype": "f32", )"
      R"("mode": "resident", "weight_memory": "%s", "planned": true, "bytes": %d, "dense_bytes": %d})",
      NameOf(kind.layout), kind.block, layer.sparsity, options.size, options.size, mode.name,
      layer.weight_bytes, layer.dense_bytes);
}

void MeasureWeight(const Kind& kind, double sparsity, const Options& options, Planned& engine_dense,
                   const Device& device, const std::string& plan_cache_dir,
                   std::vector<std::string>& rows) {
  std::mt19937_64 random(20260101);
  const std::vector<float> dense = testing::MakeDense(options.size, options.size, kind.pattern,
                                                      1 - sparsity, kind.block, kind.block, random);
  Planned timed;
  for (const Mode& mode : kModes) {
    Planned planned = Plan(OneLayer(dense, options.size), device, mode.mode, plan_cache_dir);
    rows.push_back(MemoryRow(kind, sparsity, mode, options, planned.layer()));
    if (options.weight_memory == mode.name) timed = std::move(planned);
  }
  for (const int64_t batch : {1, 4, 16, 64, 256}) {
    if (options.batch > 0 && batch != options.batch) continue;
    std::vector<float> x(batch * options.size);
    std::uniform_real_distribution<float> unit(-1, 1);
    for (float& value : x) value = unit(random);
    std::memcpy(timed.state->input(0), x.data(), x.size() * sizeof(float));
    std::memcpy(engine_dense.state->input(0), x.data(), x.size() * sizeof(float));
    rows.push_back(MeasureBatch(kind, sparsity, batch, options, timed, engine_dense, dense, x));
  }
}

bool ParseOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    absl::StrAppend(&options->command, " ", flag, " ",
                    value.find('(') != std::string::npos ? absl::StrCat("'", value, "'") : value);
    if (flag == "--layout") {
      options->layout = value;
    } else if (flag == "--sparsity") {
      options->sparsity = std::atof(value.c_str());
    } else if (flag == "--batch") {
      options->batch = std::atoll(value.c_str());
    } else if (flag == "--weight_memory") {
      options->weight_memory = value;
    } else if (flag == "--size") {
      options->size = std::atoll(value.c_str());
    } else if (flag == "--samples") {
      options->timing.samples = std::atoi(value.c_str());
    } else if (flag == "--out") {
      options->out = value;
    } else {
      return false;
    }
  }
  const bool known_mode = std::any_of(std::begin(kModes), std::end(kModes), [&](const Mode& mode) {
    return options->weight_memory == mode.name;
  });
  return argc % 2 == 1 && known_mode && options->size >= 1 && options->timing.samples >= 1;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, &options)) {
    std::fputs(kHelp, stderr);
    return 2;
  }
#ifndef NDEBUG
  std::fputs("planned_linear_bench: built without NDEBUG; build the release preset\n", stderr);
  return 2;
#endif
  std::string plan_cache_dir = "/tmp/planned_linear_bench_XXXXXX";
  if (mkdtemp(plan_cache_dir.data()) == nullptr) Fail("cannot make a directory for plans");
  const auto device = MakeCpuDevice(1);
  std::mt19937_64 random(20260101);
  // A weight without zeros can only be planned dense.
  Planned engine_dense = Plan(OneLayer(testing::MakeDense(options.size, options.size,
                                                          testing::Pattern::kFull, 1, 1, 1, random),
                                       options.size),
                              *device, WeightMemory::kBalanced, plan_cache_dir);
  std::vector<std::string> rows;
  for (const Kind& kind : kKinds) {
    if (!options.layout.empty() && options.layout != kind.name) continue;
    for (const double sparsity : {0.5, 0.7, 0.8, 0.9, 0.95, 0.99}) {
      if (options.sparsity >= 0 && std::abs(sparsity - options.sparsity) > 1e-9) continue;
      MeasureWeight(kind, sparsity, options, engine_dense, *device, plan_cache_dir, rows);
    }
  }
  std::filesystem::remove_all(plan_cache_dir);
  if (!options.out.empty() &&
      !WriteResultFile(options.out, DescribeCpu() + ", 1 thread", options.command, rows)) {
    Fail("cannot write " + options.out);
  }
  return 0;
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) { return espalier::bench::Main(argc, argv); }
