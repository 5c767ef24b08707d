// linear_bench — linear layers on one CPU thread, sparse kernels against oneDNN's best packed dense. See --help.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>

#include "kernels/linear/linear.h"
#include "tests/bench/onednn_baseline.h"
#include "tests/bench/result_file.h"
#include "tests/bench/timing.h"
#include "tests/kernels/linear/linear_problem.h"

namespace espalier::bench {
namespace {

namespace testing = kernels::testing;
using kernels::Layout;
using kernels::LinearVariant;

constexpr char kHelp[] =
    R"(linear_bench: y = x · Wᵀ + b on one CPU thread, sparse kernels against oneDNN dense.

  linear_bench [--cases bar|grid|all] [--layout L] [--batch N] [--sparsity S] [--dtype D] [--size N]
               [--samples N] [--out FILE]

  --cases     bar: diagonal(1) 90 % at batch 1, 16, 64; csr and block_csr(16) 90 % at batch 64, and the
              same again with the caches swept before every call (bar_cold)   (default)
              grid: sparsity 50..99 % x batch 1..256 x diagonal(1), diagonal(16), block_csr(16), csr
  --layout    only this layout, e.g. 'diagonal(1)', 'block_csr(16)', csr, dense
  --batch     only this batch (with grid: any value, also one that is not in the grid)
  --sparsity  only this sparsity, e.g. 0.9
  --dtype     f32 (default), bf16 or f16: type of the sparse weights; the baseline stays f32
  --size      in = out = N (default 4096)
  --samples   interleaved pairs (default 21); every row is a median of them
  --out       write JSON there

x and y are row-major [tokens, features], every transposition is timed. The baseline is oneDNN with weights packed
once, in the form (matmul or inner_product) that is faster at that batch. Before anything is timed, the kernel's
answer is compared with a double-precision loop. Random weights, fixed seed. Calls are back to back, weights as warm
as they fit, except in bar_cold.
)";

struct Options {
  std::string cases = "bar", layout, dtype = "f32", out;
  int64_t batch = 0, size = 4096;
  double sparsity = -1;
  TimingOptions timing;
  std::string command;
};

struct BenchCase {
  std::string name;
  Layout layout;
  int32_t block;
  double sparsity;
  int64_t tokens;
  bool cold = false;
};

std::string LayoutText(const BenchCase& c) {
  std::string text = NameOf(c.layout);
  if (c.layout == Layout::kDiagonal || c.layout == Layout::kBlockCsr)
    text += "(" + std::to_string(c.block) + ")";
  return text;
}

std::vector<BenchCase> ListCases(const Options& options) {
  struct Kind {
    Layout layout;
    int32_t block;
  };
  constexpr Kind kKinds[] = {
      {Layout::kDiagonal, 1}, {Layout::kDiagonal, 16}, {Layout::kBlockCsr, 16}, {Layout::kCsr, 1}};
  std::vector<BenchCase> cases;
  if (options.cases != "grid") {
    for (const bool cold : {false, true}) {
      const char* name = cold ? "bar_cold" : "bar";
      for (const int64_t batch : {1, 16, 64}) {
        cases.push_back({name, Layout::kDiagonal, 1, 0.9, batch, cold});
      }
      cases.push_back({name, Layout::kCsr, 1, 0.9, 64, cold});
      cases.push_back({name, Layout::kBlockCsr, 16, 0.9, 64, cold});
    }
  }
  if (options.cases != "bar") {
    std::vector<int64_t> batches = {1, 4, 16, 64, 256};
    if (options.batch > 0) batches = {options.batch};
    for (const Kind& kind : kKinds) {
      for (const double sparsity : {0.5, 0.7, 0.8, 0.9, 0.95, 0.99}) {
        for (const int64_t batch : batches)
          cases.push_back({"grid", kind.layout, kind.block, sparsity, batch});
      }
    }
    if (options.layout == "dense") {
      for (const int64_t batch : batches) cases.push_back({"grid", Layout::kDense, 1, 0.0, batch});
    }
  }
  std::erase_if(cases, [&](const BenchCase& c) {
    return (!options.layout.empty() && options.layout != LayoutText(c)) ||
           (options.batch > 0 && options.batch != c.tokens) ||
           (options.sparsity >= 0 && c.layout != Layout::kDense &&
            std::abs(options.sparsity - c.sparsity) > 1e-9);
  });
  return cases;
}

// A weight and everything that runs on it.
class Problem {
 public:
  Problem(const BenchCase& c, int64_t size, DType dtype) : case_(c), size_(size) {
    std::mt19937_64 random(20260101);
    const testing::Pattern pattern = c.layout == Layout::kDiagonal   ? testing::Pattern::kDiagonals
                                     : c.layout == Layout::kBlockCsr ? testing::Pattern::kBlocks
                                     : c.layout == Layout::kCsr      ? testing::Pattern::kScattered
                                                                     : testing::Pattern::kFull;
    dense_ = testing::MakeDense(size, size, pattern, 1 - c.sparsity, c.block, c.block, random);
    weight_ = testing::EncodeWeight(dense_, size, size, c.layout, c.block, c.block, dtype);
    std::uniform_real_distribution<float> unit(-1, 1);
    x_.resize(c.tokens * size);
    bias_.resize(size);
    for (float& value : x_) value = unit(random);
    for (float& value : bias_) value = unit(random);
    y_.resize(c.tokens * size);
  }

  const std::vector<float>& dense() const { return dense_; }
  const float* bias() const { return bias_.data(); }
  const float* x() const { return x_.data(); }
  float* y() { return y_.data(); }

  std::vector<const LinearVariant*> Variants() const {
    std::vector<const LinearVariant*> variants;
    for (const LinearVariant& variant : kernels::LinearVariants()) {
      if (variant.supports(DescOf(weight_.view(), case_.tokens))) variants.push_back(&variant);
    }
    return variants;
  }

  // A call of the variant on this problem; what it needs lives as long as the function.
  std::function<void()> Call(const LinearVariant& variant) {
    auto packed = std::make_shared<testing::ExactBuffer>(testing::PackFor(variant, weight_.view()));
    auto scratch = std::make_shared<testing::ExactBuffer>(
        variant.scratch_bytes(DescOf(weight_.view(), case_.tokens), 1), 0);
    kernels::LinearArgs args;
    args.weight = weight_.view();
    args.weight.packed = packed->as();
    args.x = x_.data();
    args.y = y_.data();
    args.x_stride = args.y_stride = size_;
    args.bias = bias_.data();
    args.tokens = case_.tokens;
    args.scratch = scratch->as();
    return [&variant, args, packed, scratch] {
      if (!variant.run({}, args).ok()) std::abort();
    };
  }

  // Empty when the y of the last call is right; looks at the first, a middle and the last token.
  std::string Verify() const {
    std::vector<float> x, y;
    for (const int64_t token : {int64_t{0}, case_.tokens / 2, case_.tokens - 1}) {
      x.insert(x.end(), x_.begin() + token * size_, x_.begin() + (token + 1) * size_);
      y.insert(y.end(), y_.begin() + token * size_, y_.begin() + (token + 1) * size_);
    }
    return testing::CompareWithReference(weight_.view(), x, 3, bias_.data(), {}, y);
  }

 private:
  BenchCase case_;
  int64_t size_;
  std::vector<float> dense_, x_, bias_, y_;
  testing::OwnedWeight weight_;
};

// Of several ways to do the same, the fastest in a short pass; `micros` gets the medians.
size_t Fastest(const std::vector<std::function<void()>>& calls, TimingOptions timing,
               std::vector<double>* micros) {
  timing.samples = 5;
  size_t best = 0;
  micros->clear();
  for (const auto& samples : TimeInTurn(calls, timing))
    micros->push_back(Summarize(samples).median);
  for (size_t i = 1; i < calls.size(); ++i) {
    if ((*micros)[i] < (*micros)[best]) best = i;
  }
  return best;
}

// One JSON row, or nothing when no variant takes the problem. Exits when an answer is wrong.
std::optional<std::string> Measure(const BenchCase& c, const Options& options) {
  TimingOptions timing = options.timing;
  timing.cold = c.cold;
  const DType dtype = options.dtype == "bf16"  ? DType::kBFloat16
                      : options.dtype == "f16" ? DType::kFloat16
                                               : DType::kFloat32;
  Problem problem(c, options.size, dtype);
  const std::vector<const LinearVariant*> variants = problem.Variants();
  if (variants.empty()) return std::nullopt;
  std::vector<std::function<void()>> calls, dense_calls;
  for (const LinearVariant* variant : variants) {
    calls.push_back(problem.Call(*variant));
    std::fill_n(problem.y(), c.tokens * options.size, NAN);
    calls.back()();
    if (const std::string wrong = problem.Verify(); !wrong.empty()) {
      std::fprintf(stderr, "linear_bench: %s is wrong: %s\n", variant->name, wrong.c_str());
      std::exit(1);
    }
  }
  std::vector<std::shared_ptr<OneDnnDense>> forms;
  constexpr OneDnnDense::Form kForms[] = {OneDnnDense::Form::kMatmulPacked,
                                          OneDnnDense::Form::kInnerProductPacked,
                                          OneDnnDense::Form::kMatmulPlain};
  for (const OneDnnDense::Form form : kForms) {
    forms.push_back(std::make_shared<OneDnnDense>(form, problem.dense(), problem.bias(),
                                                  options.size, options.size, c.tokens));
    dense_calls.push_back(
        [&problem, dense = forms.back()] { dense->Run(problem.x(), problem.y()); });
  }
  std::vector<double> variant_micros, dense_micros;
  const size_t variant = Fastest(calls, timing, &variant_micros);
  const size_t form = Fastest(dense_calls, timing, &dense_micros);
  const auto samples = TimeInTurn({calls[variant], dense_calls[form]}, timing);
  std::vector<double> ratios;
  for (size_t i = 0; i < samples[0].size(); ++i) ratios.push_back(samples[1][i] / samples[0][i]);
  const Summary ours = Summarize(samples[0]), dense = Summarize(samples[1]),
                ratio = Summarize(ratios);

  const char* mode = c.cold ? "cold" : "warm";
  std::printf(
      "%-8s %-14s %4.0f %%  M %3lld  %-36s %9.1f us (min %.1f, spread %.0f %%)  dense %9.1f us  "
      "%6.2fx\n",
      c.name.c_str(), LayoutText(c).c_str(), 100 * c.sparsity, static_cast<long long>(c.tokens),
      variants[variant]->name, ours.median, ours.min, 100 * ours.spread, dense.median,
      ratio.median);
  for (size_t i = 0; i < variants.size(); ++i) {
    if (variants.size() > 1)
      std::printf("      %-36s %9.1f us\n", variants[i]->name, variant_micros[i]);
  }
  std::fflush(stdout);
  char text[640];
  std::snprintf(
      text, sizeof(text),
      R"({"case": "%s", "layout": "%s", "block": %d, "sparsity": %g, "M": %lld, "K": %lld, "N": %lld, )"
      R"("dtype": "%s", "mode": "%s", "us": %.2f, "dense_us": %.2f, "planned": false, "variant": "%s", )"
      R"("dense_form": "%s", "speedup": %.3f, "min_us": %.2f, "spread": %.3f, "dense_min_us": %.2f)",
      c.name.c_str(), NameOf(c.layout), c.block, c.sparsity, static_cast<long long>(c.tokens),
      static_cast<long long>(options.size), static_cast<long long>(options.size),
      options.dtype.c_str(), mode, ours.median, dense.median, variants[variant]->name,
      OneDnnDense::NameOf(kForms[form]), ratio.median, ours.min, ours.spread, dense.min);
  std::string row = text;
  for (size_t i = 0; i < forms.size(); ++i) {
    std::snprintf(text, sizeof(text), R"(, "%s_us": %.2f)", OneDnnDense::NameOf(kForms[i]),
                  dense_micros[i]);
    row += text;
  }
  return row + "}";
}

bool ParseOptions(int argc, char** argv, Options* options) {
  options->command = "linear_bench";
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    options->command += " " + flag;
    if (flag == "--help" || i + 1 >= argc) return false;
    const std::string value = argv[++i];
    options->command += value.find('(') != std::string::npos ? " '" + value + "'" : " " + value;
    if (flag == "--cases")
      options->cases = value;
    else if (flag == "--layout")
      options->layout = value;
    else if (flag == "--batch")
      options->batch = std::atoll(value.c_str());
    else if (flag == "--sparsity")
      options->sparsity = std::atof(value.c_str());
    else if (flag == "--dtype")
      options->dtype = value;
    else if (flag == "--size")
      options->size = std::atoll(value.c_str());
    else if (flag == "--samples")
      options->timing.samples = std::atoi(value.c_str());
    else if (flag == "--out")
      options->out = value;
    else
      return false;
  }
  return options->size >= 1 && options->timing.samples >= 1 &&
         (options->cases == "bar" || options->cases == "grid" || options->cases == "all") &&
         (options->dtype == "f32" || options->dtype == "bf16" || options->dtype == "f16");
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, &options)) {
    std::fputs(kHelp, stderr);
    return 2;
  }
#ifndef NDEBUG
  std::fputs("linear_bench: built without NDEBUG; build the release preset\n", stderr);
  return 2;
#endif
  std::vector<std::string> rows;
  for (const BenchCase& c : ListCases(options)) {
    if (auto row = Measure(c, options)) rows.push_back(*row);
  }
  if (!options.out.empty() &&
      !WriteResultFile(options.out, DescribeCpu() + ", 1 thread", options.command, rows)) {
    std::fprintf(stderr, "linear_bench: cannot write %s\n", options.out.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) { return espalier::bench::Main(argc, argv); }
