// linear_gpu — sparse linear kernels against the best of cuBLASLt, on the GPU of this machine.
//
//   linear_gpu [--module libespalier_cuda.so] [--suite NAMES] [--variant SUBSTRING] [--out FILE.json] [--commit HASH]
//              [--seconds S]
//
// Every row: the kernel's result is checked against the oracle in double, then captured in a graph of at least 20
// launches beside cuBLASLt's best heuristic, and both are replayed in ABBA order; medians. `cold` walks over copies of
// weights, inputs and outputs that together are several times the L2, `warm` stays on one. Beside a row: `dense_us`,
// cuBLASLt in the row's type; `dense_fp32_us` and `dense_tf32_us`, the same shape in 32 bits; `cusparse_us`, CSR or BSR;
// torch_baselines.py adds `cusparselt_us` and `torch_bsr_us`. `floor_us` is the largest of useful arithmetic at 790 TFLOP/s
// (fp32: 60), bytes from memory at 4.3 TB/s (cold), bytes from L2 at 9 TB/s and from shared memory at 30 TB/s: rates
// measured on an H200, bytes that no kernel can do without. Suites: bars, skinny, scattered, expand, two_four, gather_mma,
// fp32, vit, vit64 (its blocks of 64 alone), grid, curves (what the picture shows), network, or one problem as LAYOUT/BLOCK/DENSITY/TOKENS/OUT/IN/ACTIVATION/STATE.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/bench/cuda/cusparse_baseline.h"
#include "tests/bench/cuda/dense_baseline.h"
#include "tests/bench/cuda/graph_timer.h"
#include "tests/bench/cuda/layer_stack.h"
#include "tests/bench/cuda/linear_cases.h"
#include "tests/kernels/cuda/pair_reference.h"

namespace espalier::bench {
namespace {

using kernels::Layout;
using kernels::LinearVariant;
using kernels::cuda::CudaModule;
using kernels::testing::OrDie;
using kernels::testing::RandomWeightSpec;

constexpr double kTensorFlops = 790e12, kFmaFlops = 60e12, kMemoryBytes = 4.3e12, kL2Bytes = 9e12;
constexpr double kSharedBytes =
    132 * 128 * 1.755e9;  // multiprocessors, bytes a clock, clocks under load
constexpr size_t kColdBytes = size_t{256} << 20;
constexpr int kLeastNodes = 20, kLeastSamples = 4;

struct Options {
  std::string module = "libespalier_cuda.so", suite = "bars", variant, out, commit = "unknown",
              command;
  double seconds = 0.4;  // of replays a row
};

// Column of a row, and microseconds.
using Baselines = std::map<std::string, double>;

// One way to run every layer of a stack.
struct Implementation {
  std::vector<std::unique_ptr<PackedLayer>> layers;
  std::string name;
  bool fused = false;  // both layers in one kernel

  size_t weight_bytes() const {
    size_t bytes = 0;
    for (const auto& layer : layers) bytes += layer->weight_bytes();
    return bytes;
  }
  // Of the `tokens` tokens of copy `copy` from `first` on.
  kernels::KernelStatus Enqueue(const CudaModule* module, void* stream, int copy, int64_t first,
                                int64_t tokens) const;
};

kernels::KernelStatus Implementation::Enqueue(const CudaModule* module, void* stream, int copy,
                                              int64_t first, int64_t tokens) const {
  if (fused) {
    kernels::KernelContext ctx;
    ctx.arch = layers[0]->variant().arch;
    ctx.stream = stream;
    ctx.ops = module->ops;
    return kernels::RunLinearPair(
        ctx, {layers[0]->Args(copy, first, tokens), layers[1]->Args(copy, first, tokens)});
  }
  for (const auto& layer : layers) {
    const kernels::KernelStatus status = layer->Enqueue(stream, copy, first, tokens);
    if (!status.ok()) return status;
  }
  return {};
}

// Empty when a sample of tokens of a fused pair agrees with the oracle.
std::string VerifyPair(const CudaModule* module, void* stream, const LayerStack& stack,
                       const Implementation& pair) {
  const kernels::LinearArgs first = stack.Args(0, 0), second = stack.Args(0, 1);
  const size_t element = SizeOf(first.io_dtype);
  OrDie(module->fill(second.y, 0xff, second.tokens * second.y_stride * element, stream), "poison");
  kernels::KernelStatus status = pair.Enqueue(module, stream, 0, 0, stack.tokens());
  if (status.ok()) status = module->synchronize_stream(stream);
  if (!status.ok()) return status.message;
  std::vector<char> x, y;
  int64_t count = 0;
  const auto add_row = [&](std::vector<char>& to, const void* from, int64_t bytes) {
    to.resize(to.size() + bytes);
    OrDie(module->copy(to.data() + to.size() - bytes, from, bytes, nullptr), "download");
    OrDie(module->synchronize_stream(nullptr), "download");
  };
  for (int64_t t = 0; t < stack.tokens(); ++t) {
    if (t >= 24 && t < stack.tokens() - 24 && t % (stack.tokens() / 16 + 1) != 0) continue;
    add_row(x, static_cast<const char*>(first.x) + t * first.x_stride * element,
            first.weight.in * element);
    add_row(y, static_cast<const char*>(second.y) + t * second.y_stride * element,
            second.weight.out * element);
    ++count;
  }
  return kernels::testing::ComparePair({stack.weight(0), stack.weight(1), nullptr, nullptr,
                                        first.activation, second.activation, count},
                                       x.data(), y.data());
}

// What the multiprocessors must fetch from L2, at least: an output tile of T tokens × N outputs in all the accumulators that
// a multiprocessor has registers for (64 K of 4 bytes) reads the columns of x that its rows touch, and its weights, once.
double L2Bytes(const kernels::testing::RandomWeight& weight, int64_t tokens) {
  constexpr double kAccumulators = 65536;
  const RandomWeightSpec& w = weight.spec;
  const auto out = static_cast<double>(w.out), in = static_cast<double>(w.in),
             m = static_cast<double>(tokens), stored = static_cast<double>(weight.stored);
  const double zeros = 1 - std::min(1.0, stored / (out * in));
  double least = 0;
  for (double tile = 1; tile <= 1024; tile *= 2) {
    const double rows = std::min(out, kAccumulators / tile);
    const double touched = 1 - std::pow(zeros, std::max(1.0, rows / w.block_rows));
    const double elements = m * in * touched * std::ceil(out / rows) + std::ceil(m / tile) * stored;
    if (tile == 1 || elements < least) least = elements;
  }
  return least * static_cast<double>(SizeOf(w.dtype));
}

// What shared memory must deliver: a tensor-core instruction reads the x of a block once for at most 64 rows of it; single
// elements read an x for every product, unless the whole matrix they are in is multiplied as 2:4 operands, at twice the rate
// of dense ones.
double SharedMemorySeconds(const kernels::testing::RandomWeight& weight, int64_t tokens) {
  const RandomWeightSpec& w = weight.spec;
  const double products = static_cast<double>(weight.stored) * static_cast<double>(tokens);
  const double reads =
      products / std::min(w.block_rows, 64) * static_cast<double>(SizeOf(w.dtype)) / kSharedBytes;
  if (w.block_rows > 1 || w.dtype == DType::kFloat32) return reads;
  const double whole =
      static_cast<double>(w.out) * static_cast<double>(w.in) * static_cast<double>(tokens);
  return std::min(reads, std::max(whole / 64 * static_cast<double>(SizeOf(w.dtype)) / kSharedBytes,
                                  whole / kTensorFlops));
}

double FloorMicros(const LayerStack& stack, bool cold) {
  double seconds = 0;
  for (size_t l = 0; l < stack.layers().size(); ++l) {
    const kernels::testing::RandomWeight& weight = stack.weight(static_cast<int>(l));
    seconds += std::max(L2Bytes(weight, stack.tokens()) / kL2Bytes,
                        SharedMemorySeconds(weight, stack.tokens()));
  }
  const bool is_f32 = stack.layers()[0].weight.dtype == DType::kFloat32;
  return 1e6 * std::max({seconds, stack.UsefulFlops() / (is_f32 ? kFmaFlops : kTensorFlops),
                         cold ? stack.TouchedBytes() / kMemoryBytes : 0.0});
}

class Bench {
 public:
  Bench(const CudaModule* module, const Options& options, kernels::Arch arch)
      : module_(module), options_(options), arch_(arch) {
    OrDie(module->create_stream(&stream_), "stream");
  }
  ~Bench() { OrDie(module_->destroy_stream(stream_), "stream"); }

  void Run(const Case& c);
  const std::vector<std::string>& rows() const { return rows_; }
  int failures() const { return failures_; }

 private:
  // `chunk`: tokens that go through all layers before the next ones do.
  std::unique_ptr<TimedGraph> Capture(const LayerStack& stack, const Implementation& implementation,
                                      int64_t chunk);
  Implementation Dense(const LayerStack& stack, const std::vector<int64_t>& chunks);
  std::vector<const LinearVariant*> Candidates(const LayerSpec& layer, int64_t tokens) const;
  const LinearVariant* FastestOrNull(const Case& c, const LayerSpec& layer);
  bool PacksForPair(const Case& c, const std::vector<const LinearVariant*>& chosen) const;
  // A case's layers, each for its variant.
  static Implementation Pack(const LayerStack& stack, const Case& c,
                             const std::vector<const LinearVariant*>& variants);
  void Report(const Case& c, const LayerStack& stack, const std::string& variant,
              const Timing& sparse, const Timing& dense, const Baselines& baselines, bool planned,
              size_t weight_bytes);
  Baselines TimeBaselines(const Case& c, const LayerStack& stack);

  const CudaModule* module_;
  const Options& options_;
  kernels::Arch arch_;
  void* stream_ = nullptr;
  std::vector<std::string> rows_;
  std::map<std::string, const LinearVariant*> fastest_;
  std::map<std::string, Baselines> dense32_;  // by shape and state
  int failures_ = 0;
};

std::unique_ptr<TimedGraph> Bench::Capture(const LayerStack& stack,
                                           const Implementation& implementation, int64_t chunk) {
  const int64_t chunks = (stack.tokens() + chunk - 1) / chunk;
  const auto launches =
      static_cast<int>(static_cast<int64_t>(implementation.layers.size()) * chunks);
  const int repeats = std::max(1, (kLeastNodes + launches - 1) / launches);
  const auto enqueue = [&](void* stream, int i) {
    kernels::KernelStatus status;
    for (int64_t first = 0; status.ok() && first < stack.tokens(); first += chunk) {
      status = implementation.Enqueue(module_, stream, i % stack.copies(), first,
                                      std::min(chunk, stack.tokens() - first));
    }
    return status;
  };
  return std::make_unique<TimedGraph>(module_, stream_, repeats, enqueue, implementation.name);
}

std::vector<const LinearVariant*> Bench::Candidates(const LayerSpec& layer, int64_t tokens) const {
  std::vector<const LinearVariant*> found;
  const RandomWeightSpec& w = layer.weight;
  for (const LinearVariant& variant : kernels::cuda::CudaLinearVariants()) {
    if (variant.layout == w.layout &&
        std::string(variant.name).find(options_.variant) != std::string::npos &&
        kernels::cuda::RunsOn(variant, arch_) &&
        variant.supports(
            {tokens, w.out, w.in, w.layout, w.dtype, w.dtype, w.block_rows, w.block_cols, 1})) {
      found.push_back(&variant);
    }
  }
  return found;
}

Implementation Bench::Dense(const LayerStack& stack, const std::vector<int64_t>& chunks) {
  Implementation dense;
  const bool is_f32 = stack.layers()[0].weight.dtype == DType::kFloat32;
  dense.name = is_f32 ? "dense_linear_f32_cublaslt" : "dense_linear_bf16_cublaslt";
  const auto variants = kernels::cuda::CudaLinearVariants();
  const auto variant = std::find_if(variants.begin(), variants.end(),
                                    [&](const LinearVariant& v) { return dense.name == v.name; });
  for (size_t l = 0; l < stack.layers().size(); ++l) {
    dense.layers.push_back(std::make_unique<PackedLayer>(stack, static_cast<int>(l), *variant));
    const auto same = [&](size_t other) {
      return ToString(stack.layers()[other].weight) == ToString(stack.layers()[l].weight);
    };
    if (l > 0 && same(l - 1)) continue;  // the choice is kept per problem
    for (int64_t chunk : chunks) {
      dense.layers.back()->Settle(chunk);
      if (stack.tokens() % chunk != 0) dense.layers.back()->Settle(stack.tokens() % chunk);
    }
  }
  return dense;
}

void Bench::Report(const Case& c, const LayerStack& stack, const std::string& variant,
                   const Timing& sparse, const Timing& dense, const Baselines& baselines,
                   bool planned, size_t weight_bytes) {
  const RandomWeightSpec& w = c.layers[0].weight;
  double nonzero = 0, size = 0;
  for (size_t l = 0; l < c.layers.size(); ++l) {
    nonzero += static_cast<double>(stack.weight(static_cast<int>(l)).stored);
    size +=
        static_cast<double>(c.layers[l].weight.in) * static_cast<double>(c.layers[l].weight.out);
  }
  const double floor = FloorMicros(stack, c.cold), speedup = dense.median_us / sparse.median_us;
  char json[1024];
  std::snprintf(
      json, sizeof(json),
      "{\"case\": \"%s\", \"layout\": \"%s\", \"block\": %d, \"sparsity\": %.4f, \"M\": %lld, "
      "\"K\": %lld, "
      "\"N\": %lld, \"layers\": %zu, \"dtype\": \"%s\", \"mode\": \"graph\", \"state\": \"%s\", "
      "\"activation\": \"%s\", \"variant\": \"%s\", \"planned\": %s, \"us\": %.3f, \"min_us\": "
      "%.3f, "
      "\"spread\": %.4f, \"samples\": %d, \"dense_us\": %.3f, \"floor_us\": %.3f, "
      "\"weight_bytes\": %zu, "
      "\"tflops\": %.1f, \"gbytes_per_s\": %.1f}",
      c.name.c_str(), NameOf(w.layout), w.block_rows, 1.0 - nonzero / size,
      static_cast<long long>(c.tokens), static_cast<long long>(w.in), static_cast<long long>(w.out),
      c.layers.size(), w.dtype == DType::kFloat32 ? "f32" : "bf16", c.cold ? "cold" : "warm",
      NameOf(c.layers[0].activation), variant.c_str(), planned ? "true" : "false", sparse.median_us,
      sparse.min_us, sparse.spread, sparse.samples, dense.median_us, floor, weight_bytes,
      stack.UsefulFlops() / sparse.median_us * 1e-6,
      stack.TouchedBytes() / sparse.median_us * 1e-3);
  std::string row = json;
  for (const auto& [column, micros] : baselines) {
    row.insert(row.size() - 1, ", \"" + column + "\": " + std::to_string(micros));
  }
  rows_.push_back(row);
  std::printf(
      "%-9s %-9s b%-3d %4.1f%% M %5lld K %5lld N %5lld %s %-45s %9.2f us  dense %9.2f  %5.2fx  "
      "floor %4.0f%% %s\n",
      c.name.c_str(), NameOf(w.layout), w.block_rows, 100 * (1.0 - nonzero / size),
      static_cast<long long>(c.tokens), static_cast<long long>(w.in), static_cast<long long>(w.out),
      c.cold ? "cold" : "warm", variant.c_str(), sparse.median_us, dense.median_us, speedup,
      100 * floor / sparse.median_us, planned ? "*" : "");
  for (const auto& [column, micros] : baselines) {
    if (planned) std::printf("%60s %s %.2f\n", "", column.c_str(), micros);
  }
  std::fflush(stdout);
}

// What else could multiply by the layer's weight, or by a dense one of its shape. cuSPARSE runs from one copy (warm), which
// can only flatter it.
Baselines Bench::TimeBaselines(const Case& c, const LayerStack& stack) {
  Baselines baselines;
  const RandomWeightSpec& w = c.layers[0].weight;
  const RowArrays rows = ToRows(stack.weight(0).view());
  if (auto cusparse = CusparseProduct::CreateOrNull(module_, rows.view, stack.Args(0, 0))) {
    const TimedGraph graph(
        module_, stream_, kLeastNodes / 4,
        [&](void* stream, int) { return cusparse->Enqueue(stream); }, "cusparse");
    baselines["cusparse_us"] =
        TimeInTurn(module_, {&graph}, kLeastSamples, options_.seconds)[0].median_us;
  }
  const std::string shape = std::to_string(c.tokens) + "x" + std::to_string(w.out) + "x" +
                            std::to_string(w.in) + (c.cold ? "c" : "w");
  Baselines& dense = dense32_[shape];
  if (dense.empty()) {
    using kernels::cuda::DenseMath;
    const auto time = [&](DenseMath math) {
      return TimeDense32(module_, stream_, c.tokens, w.out, w.in, c.cold ? kColdBytes : 0, math,
                         options_.seconds)
          .median_us;
    };
    dense = {{"dense_fp32_us", time(DenseMath::kStrict)},
             {"dense_tf32_us", time(DenseMath::kTf32)}};
  }
  baselines.insert(dense.begin(), dense.end());
  return baselines;
}

// Of the variants for one layer on its own; measured once a (layer, tokens, state).
const LinearVariant* Bench::FastestOrNull(const Case& c, const LayerSpec& layer) {
  const std::string key = kernels::testing::ToString(layer.weight) + NameOf(layer.activation) +
                          std::to_string(c.tokens) + (c.cold ? "c" : "w");
  if (const auto known = fastest_.find(key); known != fastest_.end()) return known->second;
  const LayerStack stack(module_, {layer}, c.tokens, c.cold ? kColdBytes : 0);
  std::vector<Implementation> implementations;
  std::vector<std::unique_ptr<TimedGraph>> graphs;
  std::vector<const TimedGraph*> order;
  for (const LinearVariant* variant : Candidates(layer, c.tokens)) {
    Implementation one;
    one.name = variant->name;
    one.layers.push_back(std::make_unique<PackedLayer>(stack, 0, *variant));
    if (const std::string error = one.layers[0]->Verify(stream_); !error.empty()) {
      std::printf("FAILED %s, %lld tokens, %s: %s\n",
                  kernels::testing::ToString(layer.weight).c_str(),
                  static_cast<long long>(c.tokens), variant->name, error.c_str());
      ++failures_;
      continue;
    }
    graphs.push_back(Capture(stack, one, c.tokens));
    order.push_back(graphs.back().get());
    implementations.push_back(std::move(one));
  }
  Implementation dense = Dense(stack, {c.tokens});
  graphs.push_back(Capture(stack, dense, c.tokens));
  order.push_back(graphs.back().get());
  const std::vector<Timing> timings = TimeInTurn(module_, order, kLeastSamples, options_.seconds);
  const Baselines baselines =
      c.layers.size() == 1 && !implementations.empty() ? TimeBaselines(c, stack) : Baselines();
  size_t best = 0;
  for (size_t i = 1; i < implementations.size(); ++i) {
    if (timings[i].median_us < timings[best].median_us) best = i;
  }
  for (size_t i = 0; i < implementations.size(); ++i) {
    if (c.layers.size() == 1) {
      Report(c, stack, implementations[i].name, timings[i], timings.back(), baselines, i == best,
             implementations[i].layers[0]->weight_bytes());
    }
  }
  const LinearVariant* fastest =
      implementations.empty() ? nullptr : &implementations[best].layers[0]->variant();
  return fastest_[key] = fastest;
}

bool Bench::PacksForPair(const Case& c, const std::vector<const LinearVariant*>& chosen) const {
  if (c.layers.size() != 2) return false;
  kernels::LinearDesc descs[2];
  for (int l : {0, 1}) {
    if (std::string(chosen[l]->packing) != kernels::kLinearPairPacking) return false;
    descs[l] = kernels::testing::DescOfWeight(
        kernels::testing::RandomWeight(c.layers[l].weight).view(), c.tokens);
  }
  return kernels::FitsLinearPair(descs[0], descs[1], arch_);
}

Implementation Bench::Pack(const LayerStack& stack, const Case& c,
                           const std::vector<const LinearVariant*>& variants) {
  Implementation packed;
  for (size_t l = 0; l < variants.size(); ++l) {
    const bool repeats = l > 0 && variants[l] == variants[l - 1] &&
                         kernels::testing::ToString(c.layers[l].weight) ==
                             kernels::testing::ToString(c.layers[l - 1].weight);
    packed.layers.push_back(std::make_unique<PackedLayer>(
        stack, static_cast<int>(l), *variants[l], repeats ? packed.layers.back().get() : nullptr));
    if (l == 0 || variants[l] != variants[l - 1])
      packed.name += (l == 0 ? "" : "+") + std::string(variants[l]->name);
  }
  return packed;
}

void Bench::Run(const Case& c) {
  std::vector<const LinearVariant*> chosen;
  for (const LayerSpec& layer : c.layers) chosen.push_back(FastestOrNull(c, layer));
  if (c.layers.size() == 1 || std::find(chosen.begin(), chosen.end(), nullptr) != chosen.end())
    return;
  const LayerStack stack(module_, c.layers, c.tokens,
                         c.cold && c.layers.size() < kLeastNodes ? kColdBytes : 0);
  std::vector<Implementation> sparse;
  sparse.push_back(Pack(stack, c, chosen));
  // Two layers' kernels overlap where both leave room for the other's thread blocks: what is fastest alone need not be so here.
  if (c.layers.size() == 2 && chosen[0] != chosen[1]) {
    for (const LinearVariant* both : chosen) {
      const auto runs = [&](const LayerSpec& layer) {
        const auto candidates = Candidates(layer, c.tokens);
        return std::find(candidates.begin(), candidates.end(), both) != candidates.end();
      };
      if (runs(c.layers[0]) && runs(c.layers[1])) sparse.push_back(Pack(stack, c, {both, both}));
    }
  }
  // Both sides may send the tokens through in chunks, so that what lies between the layers stays in L2; the best of each.
  std::vector<int64_t> chunks = {c.tokens};
  if (c.layers.size() == 2) {
    for (int64_t chunk : {6336, 4224, 3168, 2112}) {
      if (chunk < c.tokens) chunks.push_back(chunk);
    }
  }
  const Implementation dense = Dense(stack, chunks);
  std::vector<std::unique_ptr<TimedGraph>> graphs;
  std::vector<const TimedGraph*> order;
  std::vector<std::string> names;  // of the sparse ones, which come first
  const auto capture = [&](const Implementation& implementation, int64_t chunk) {
    graphs.push_back(Capture(stack, implementation, chunk));
    order.push_back(graphs.back().get());
  };
  std::vector<size_t> weight_bytes;
  const auto capture_sparse = [&](const Implementation& implementation, const std::string& name,
                                  int64_t chunk) {
    capture(implementation, chunk);
    names.push_back(name + (chunk == c.tokens ? "" : " chunks of " + std::to_string(chunk)));
    weight_bytes.push_back(implementation.weight_bytes());
  };
  for (int64_t chunk : chunks) capture_sparse(sparse[0], sparse[0].name, chunk);
  for (size_t i = 1; i < sparse.size(); ++i) capture_sparse(sparse[i], sparse[i].name, c.tokens);
  Implementation pair;
  if (PacksForPair(c, chosen)) {
    pair.fused = true;
    for (int l : {0, 1})
      pair.layers.push_back(
          std::make_unique<PackedLayer>(stack, l, *chosen[l], sparse[0].layers[l].get()));
    if (const std::string error = VerifyPair(module_, stream_, stack, pair); !error.empty()) {
      std::printf("FAILED pair, %lld tokens: %s\n", static_cast<long long>(c.tokens),
                  error.c_str());
      ++failures_;
    } else {
      capture_sparse(pair, "linear_pair", c.tokens);
    }
  }
  for (int64_t chunk : chunks) capture(dense, chunk);
  const std::vector<Timing> timings = TimeInTurn(module_, order, kLeastSamples, options_.seconds);
  const auto by_median = [](const Timing& a, const Timing& b) { return a.median_us < b.median_us; };
  const auto half = timings.begin() + static_cast<int64_t>(names.size());
  const auto best = std::min_element(timings.begin(), half, by_median);
  const Timing best_dense = *std::min_element(half, timings.end(), by_median);
  for (size_t i = 0; i < names.size(); ++i) {
    const bool planned = timings.begin() + static_cast<int64_t>(i) == best;
    Report(c, stack, names[i], timings[i], best_dense, Baselines(), planned, weight_bytes[i]);
  }
}

void WriteRows(const Options& options, const CudaModule& module,
               const kernels::cuda::CudaDeviceInfo& info, const std::vector<std::string>& rows) {
  if (options.out.empty()) return;
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  std::ofstream file(options.out);
  file << "{\"device\": \"" << info.name << ", driver CUDA " << info.driver_version / 1000 << "."
       << info.driver_version % 1000 / 10 << ", " << module.build << "\",\n \"commit\": \""
       << options.commit << "\",\n \"date\": \"" << date << "\",\n \"command\": \""
       << options.command << "\",\n \"rows\": [\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    file << "  " << rows[i] << (i + 1 < rows.size() ? ",\n" : "\n");
  }
  file << " ]}\n";
}

int Main(const Options& options) {
  const CudaModule* module = kernels::testing::OpenModuleOrNull(options.module);
  if (module == nullptr) return 2;
  kernels::cuda::CudaDeviceInfo info;
  OrDie(module->device_info(0, &info), "device");
  kernels::cuda::UseCudaModule(module);
  Bench bench(module, options, kernels::cuda::ArchOf(info));
  std::stringstream suites(options.suite);
  for (std::string suite; std::getline(suites, suite, ',');) {
    for (const Case& c : Suite(suite)) {
      bench.Run(c);
      WriteRows(options, *module, info, bench.rows());  // so that a run cut short keeps what it has
    }
  }
  std::printf("%zu rows, %d wrong results\n", bench.rows().size(), bench.failures());
  return bench.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) {
  espalier::bench::Options options;
  options.command = "linear_gpu";
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--module") options.module = value;
    if (flag == "--suite") options.suite = value;
    if (flag == "--variant") options.variant = value;
    if (flag == "--out") options.out = value;
    if (flag == "--commit") options.commit = value;
    if (flag == "--seconds") options.seconds = std::atof(value.c_str());
    if (flag == "--suite" || flag == "--seconds") options.command += " " + flag + " " + value;
  }
#ifndef NDEBUG
  std::fprintf(stderr, "linear_gpu: a Debug build measures nothing worth keeping\n");
  return 2;
#endif
  return espalier::bench::Main(options);
}
