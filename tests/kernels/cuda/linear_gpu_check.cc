// linear_gpu_check — every CUDA variant on generated problems, on the GPU of this machine, against the oracle in double.
//
// A program of its own (no GoogleTest), so that it runs on a machine that has only CUDA and a driver:
//
//   linear_gpu_check [--module libespalier_cuda.so] [--variant SUBSTRING] [--arch sm80|sm90] [--cases N] [--seed N]
//
// Prints a line a variant and a line a failure; exits 0 when all passed, 1 when one failed, 2 without a usable GPU.
// Each problem: y (unless the residual lies in it), its padding and scratch poisoned with NaN, padding of x and residual
// poisoned too; then every output within tolerance, nothing written beside them, a second run bit-equal, and for
// batch-invariant variants the first token alone bit-equal to its row in the batch.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/variants.h"
#include "tests/kernels/cuda/device_weight.h"
#include "tests/kernels/cuda/gpu_reference.h"
#include "tests/kernels/cuda/pair_reference.h"

namespace espalier::kernels::testing {
namespace {

struct Options {
  std::string module = "libespalier_cuda.so", variant;
  Arch arch = Arch::kCpu;  // kCpu: the device's own
  int cases = 12;
  uint64_t seed = 1;
};

struct Case {
  RandomWeightSpec spec;
  int64_t tokens = 0;
  bool bias = false;
  Activation activation = Activation::kNone;
  Residual residual = Residual::kNone;
  int64_t x_padding = 0, y_padding = 0, residual_padding = 0;
};

std::string Describe(const Case& c) {
  return ToString(c.spec) + " tokens " + std::to_string(c.tokens) + (c.bias ? " bias " : " ") +
         NameOf(c.residual) + NameOf(c.activation) + " padding " + std::to_string(c.x_padding) +
         "/" + std::to_string(c.residual_padding) + "/" + std::to_string(c.y_padding);
}

// The dense fallback rounds before a second-pass activation.
double Tolerance(const Case& c, double expected, double magnitude, double terms) {
  const double twice =
      c.spec.layout == Layout::kDense ? 2.0 * HalfUlp(c.spec.dtype) * magnitude : 0.0;
  return LinearTolerance(c.spec.dtype, c.activation, expected, magnitude, terms) + twice;
}

class Check {
 public:
  Check(const cuda::CudaModule* module, void* stream, const LinearVariant& variant, const Case& c)
      : module_(module),
        stream_(stream),
        variant_(variant),
        case_(c),
        weight_(c.spec),
        arrays_(module, weight_) {}

  // Empty when the case passes.
  std::string Run();

 private:
  LinearArgs Args(int64_t tokens) {
    LinearArgs args;
    args.weight = weight_.view();
    args.weight.row_ptr = args.weight.col_idx = args.weight.offsets = nullptr;
    args.weight.values = nullptr;
    args.weight.packed = packed_.as();
    args.io_dtype = case_.spec.dtype;
    args.x = x_.as();
    args.x_stride = x_stride_;
    args.y = y_.as();
    args.y_stride = y_stride_;
    args.bias = case_.bias ? bias_.as<float>() : nullptr;
    args.residual = case_.residual == Residual::kNone    ? nullptr
                    : case_.residual == Residual::kApart ? residual_.as()
                                                         : y_.as();
    args.residual_stride = residual_stride_;
    args.activation = case_.activation;
    args.tokens = tokens;
    args.scratch = scratch_.bytes() > 0 ? scratch_.as() : nullptr;
    return args;
  }
  void MakeInputs();
  std::string RunOnce(int64_t tokens, std::vector<char>* y);
  std::string Compare(const std::vector<char>& y);

  const cuda::CudaModule* module_;
  void* stream_;
  const LinearVariant& variant_;
  Case case_;
  RandomWeight weight_;
  DeviceArrays arrays_;
  int64_t x_stride_ = 0, y_stride_ = 0, residual_stride_ = 0;
  std::vector<float> host_bias_;
  DeviceBuffer packed_, x_, y_, bias_, residual_, scratch_;
};

void Check::MakeInputs() {
  const size_t element = SizeOf(case_.spec.dtype);
  x_stride_ = RowStride(case_.spec.in) + case_.x_padding;
  y_stride_ = RowStride(case_.spec.out) + case_.y_padding;
  residual_stride_ = case_.residual == Residual::kInY
                         ? y_stride_
                         : RowStride(case_.spec.out) + case_.residual_padding;
  Random random(case_.spec.seed + 77);
  const std::vector<char> x =
      RandomRows(case_.spec.dtype, case_.tokens, case_.spec.in, x_stride_, random);
  host_bias_.resize(case_.spec.out);
  for (float& b : host_bias_) b = random.Unit();
  if (case_.spec.layout == Layout::kDense) {  // cuBLASLt takes the bias in the type of y
    for (float& b : host_bias_) {
      const uint16_t half = case_.spec.dtype == DType::kBFloat16 ? ToBFloat16(b) : ToFloat16(b);
      if (element == 2) b = FromElement(&half, case_.spec.dtype, 0);
    }
  }
  if (case_.residual != Residual::kNone) {
    const std::vector<char> residual =
        RandomRows(case_.spec.dtype, case_.tokens, case_.spec.out, residual_stride_, random);
    residual_ = DeviceBuffer(module_, residual.data(), residual.size());
  }
  const std::vector<char> packed = PackOnHost(variant_, weight_.view());
  packed_ = DeviceBuffer(module_, packed.data(), packed.size());
  x_ = DeviceBuffer(module_, x.data(), x.size());
  bias_ = DeviceBuffer(module_, host_bias_.data(), host_bias_.size() * 4);
  y_ = DeviceBuffer(module_, case_.tokens * y_stride_ * element);
  const size_t scratch = variant_.scratch_bytes(DescOfWeight(weight_.view(), case_.tokens), 1);
  if (scratch > 0) {
    scratch_ = DeviceBuffer(module_, scratch);
    scratch_.Fill(0xff);
  }
}

std::string Check::RunOnce(int64_t tokens, std::vector<char>* y) {
  if (case_.residual == Residual::kInY) {
    y_.CopyFrom(residual_);
  } else {
    y_.Fill(0xff);
  }
  KernelContext ctx;
  ctx.arch = variant_.arch;
  ctx.stream = stream_;
  if (const KernelStatus status = variant_.run(ctx, Args(tokens)); !status.ok()) {
    return std::string("run: ") + status.message;
  }
  if (const KernelStatus status = module_->synchronize_stream(stream_); !status.ok()) {
    std::fprintf(stderr, "%s: %s: %s\n", variant_.name, Describe(case_).c_str(), status.message);
    std::exit(1);  // sticky: nothing after it can work
  }
  y->resize(y_.bytes());
  y_.Download(y->data());
  return "";
}

std::string Check::Compare(const std::vector<char>& y) {
  const size_t element = SizeOf(case_.spec.dtype);
  const int64_t tokens = case_.tokens, out = case_.spec.out;
  std::vector<int64_t> all(tokens);
  for (int64_t i = 0; i < tokens; ++i) all[i] = i;
  const DeviceBuffer device_tokens(module_, all.data(), all.size() * 8);
  const DeviceBuffer device_expected(module_, tokens * out * 8),
      device_magnitude(module_, tokens * out * 8);
  LinearArgs args = Args(tokens);
  args.weight = arrays_.view();
  if (args.residual != nullptr) args.residual = residual_.as();
  OrDie(GpuReferenceLinear(args, device_tokens.as<int64_t>(), tokens, device_expected.as<double>(),
                           device_magnitude.as<double>()),
        "oracle");
  std::vector<double> expected(tokens * out), magnitude(tokens * out);
  device_expected.Download(expected.data());
  device_magnitude.Download(magnitude.data());
  double worst = 0;
  std::string text;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < y_stride_; ++c) {
      const char* at = y.data() + (t * y_stride_ + c) * element;
      if (c >= out) {
        // Up to the next 16 bytes a kernel may write the zeros that the tail of a row holds anyway.
        const char poison[4] = {-1, -1, -1, -1}, zero[4] = {};
        const bool is_tail = c < (out + 7) / 8 * 8 && std::memcmp(at, zero, element) == 0;
        if (std::memcmp(at, poison, element) != 0 && !is_tail) {
          return "wrote to the padding of y, token " + std::to_string(t);
        }
        continue;
      }
      const double actual = FromElement(at, case_.spec.dtype, 0), want = expected[t * out + c];
      const double allowed =
          Tolerance(case_, want, magnitude[t * out + c], static_cast<double>(case_.spec.in + 1));
      const double excess = std::isnan(actual) ? INFINITY : std::abs(actual - want) / allowed;
      if (excess <= worst) continue;
      worst = excess;
      if (excess > 1) {
        char line[200];
        std::snprintf(line, sizeof(line),
                      "token %lld output %lld: expected %.9g, actual %.9g, tolerance %.3g",
                      static_cast<long long>(t), static_cast<long long>(c), want, actual, allowed);
        text = line;
      }
    }
  }
  return text;
}

std::string Check::Run() {
  MakeInputs();
  std::vector<char> y, again, alone;
  if (std::string error = RunOnce(case_.tokens, &y); !error.empty()) return error;
  if (std::string error = Compare(y); !error.empty()) return error;
  if (std::string error = RunOnce(case_.tokens, &again); !error.empty()) return "again: " + error;
  if (y != again) return "two runs differ";
  if (variant_.batch_invariant && case_.tokens > 1) {
    if (std::string error = RunOnce(1, &alone); !error.empty()) return "alone: " + error;
    const size_t row = case_.spec.out * SizeOf(case_.spec.dtype);
    if (std::memcmp(y.data(), alone.data(), row) != 0)
      return "the first token alone differs from its row in the batch";
  }
  return "";
}

// Problems for one variant and block shape: all activations, each with residuals and without, ragged and whole edges, tile
// sizes ± 1.
std::vector<Case> CasesFor(const LinearVariant& variant, DType dtype, int32_t br, int32_t bc,
                           const Options& options) {
  constexpr int64_t kTokens[] = {1,   2,   7,   8,   9,   16,  17,  31,   33,
                                 63,  64,  65,  96,  127, 128, 129, 197,  255,
                                 256, 257, 383, 511, 512, 513, 641, 1021, 1025};
  constexpr double kDensities[] = {0.1, 0.3, 0.05, 1.0, 0.6, 0.0};
  constexpr int64_t kWidths[] = {1, 10, 97, 211, 784};
  std::vector<Case> cases;
  Random random(options.seed * 1000003 + br * 131 + bc);
  for (int i = 0; i < options.cases; ++i) {
    const auto width = [&](int32_t side) {
      // Large enough for several thread blocks a row of tiles, several rows a thread block, rings that wrap.
      if (i == 6 && side == 1 && variant.layout != Layout::kDense)
        return static_cast<int64_t>(2500 + random.Below(6500));
      if (i % 4 == 3) return kWidths[random.Below(std::size(kWidths))];
      const int64_t blocks = side * (1 + random.Below(side >= 64 ? 9 : side > 1 ? 40 : 700));
      return i % 2 == 0 ? blocks : std::max<int64_t>(1, blocks - random.Below(side));
    };
    Case c;
    c.spec = {variant.layout,
              dtype,
              width(br),
              width(bc),
              br,
              bc,
              kDensities[i % std::size(kDensities)],
              i % 3 == 0,
              options.seed + i};
    c.tokens = i == 1 ? 0 : kTokens[random.Below(std::size(kTokens))];
    if (!variant.supports(
            {c.tokens, c.spec.out, c.spec.in, variant.layout, dtype, dtype, br, bc, 0})) {
      c.tokens = 1 + random.Below(32);  // a variant for few tokens
    }
    c.bias = i % 2 == 0;
    c.activation = static_cast<Activation>(i % 6);
    c.x_padding = i % 5 == 0 ? 64 : 0;
    c.y_padding = i % 7 == 0 ? 8 : 0;
    c.residual = static_cast<Residual>((i + i / 6) % 3);
    c.residual_padding = i % 3 == 0 ? 8 : 0;
    cases.push_back(c);
  }
  return cases;
}

std::vector<std::pair<int32_t, int32_t>> BlockShapes(Layout layout, DType dtype,
                                                     const LinearVariant& variant) {
  std::vector<std::pair<int32_t, int32_t>> shapes;
  if (layout == Layout::kDense || layout == Layout::kCsr) {
    if (variant.supports({1, 1024, 1024, layout, dtype, dtype, 1, 1, 4})) shapes.push_back({1, 1});
    return shapes;
  }
  for (int32_t br : {1, 16, 32, 64, 128}) {
    for (int32_t bc : {1, 16, 32, 64, 128}) {
      if (variant.supports({1, 1024, 1024, layout, dtype, dtype, br, bc, 4}))
        shapes.push_back({br, bc});
    }
  }
  return shapes;
}

// The oracle of the large shapes against the oracle of the small ones.
std::string CheckOracle(const cuda::CudaModule* module) {
  for (Layout layout : {Layout::kDense, Layout::kCsr, Layout::kBlockCsr, Layout::kDiagonal}) {
    const int32_t side = layout == Layout::kBlockCsr || layout == Layout::kDiagonal ? 16 : 1;
    const RandomWeight weight({layout, DType::kBFloat16, 75, 131, side, side, 0.3, false, 5});
    const DeviceArrays arrays(module, weight);
    constexpr int64_t kTokens = 5;
    std::vector<uint16_t> x(kTokens * 131), residual(kTokens * 80);
    Random random(9);
    for (std::vector<uint16_t>* values : {&x, &residual}) {
      for (uint16_t& value : *values) value = ToBFloat16(random.Unit());
    }
    LinearArgs args;
    args.weight = weight.view();
    args.io_dtype = DType::kBFloat16;
    args.x = x.data();
    args.x_stride = 131;
    args.residual = residual.data();
    args.residual_stride = 80;
    args.tokens = kTokens;
    args.activation = Activation::kGeluErf;
    std::vector<double> expected(kTokens * 75), magnitude(kTokens * 75), actual(kTokens * 75);
    ReferenceLinear(args, expected.data(), magnitude.data());
    const DeviceBuffer device_x(module, x.data(), x.size() * 2),
        device_residual(module, residual.data(), residual.size() * 2);
    const int64_t tokens[kTokens] = {0, 1, 2, 3, 4};
    const DeviceBuffer device_tokens(module, tokens, sizeof(tokens));
    const DeviceBuffer y(module, actual.size() * 8), m(module, actual.size() * 8);
    args.weight = arrays.view();
    args.x = device_x.as();
    args.residual = device_residual.as();
    OrDie(GpuReferenceLinear(args, device_tokens.as<int64_t>(), kTokens, y.as<double>(),
                             m.as<double>()),
          "oracle");
    y.Download(actual.data());
    for (size_t i = 0; i < actual.size(); ++i) {
      if (!(std::abs(actual[i] - expected[i]) <= 1e-12 * (1 + magnitude[i]))) {
        return std::string("the device's oracle differs from the host's, layout ") + NameOf(layout);
      }
    }
  }
  return "";
}

int Main(const Options& options) {
  const cuda::CudaModule* module = OpenModuleOrNull(options.module);
  if (module == nullptr) return 2;
  cuda::CudaDeviceInfo info;
  OrDie(module->device_info(0, &info), "device");
  const Arch arch = options.arch == Arch::kCpu ? cuda::ArchOf(info) : options.arch;
  std::printf("%s, compute %d.%d, %d multiprocessors, driver %d, module built with %s\n", info.name,
              info.compute_major, info.compute_minor, info.multiprocessors, info.driver_version,
              module->build);
  cuda::UseCudaModule(module);
  void* stream = nullptr;
  OrDie(module->create_stream(&stream), "stream");
  int failures = 0, total = 0;
  if (const std::string error = CheckOracle(module); !error.empty()) {
    std::printf("FAILED oracle: %s\n", error.c_str());
    ++failures;
  }
  for (const LinearVariant& variant : cuda::CudaLinearVariants()) {
    if (!cuda::RunsOn(variant, arch) ||
        std::string(variant.name).find(options.variant) == std::string::npos)
      continue;
    int passed = 0, failed = 0;
    for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const auto& [br, bc] : BlockShapes(variant.layout, dtype, variant)) {
        for (const Case& c : CasesFor(variant, dtype, br, bc, options)) {
          const std::string problem = Check(module, stream, variant, c).Run();
          if (problem.empty()) {
            ++passed;
          } else if (++failed <= 5) {
            std::printf("FAILED %s: %s: %s\n", variant.name, Describe(c).c_str(), problem.c_str());
          }
        }
      }
    }
    std::printf("%-45s %4d passed, %d failed\n", variant.name, passed, failed);
    std::fflush(stdout);
    failures += failed;
    total += passed + failed;
  }
  OrDie(module->destroy_stream(stream), "stream");
  std::printf("%d problems, %d failed\n", total, failures);
  return failures == 0 && total > 0 ? 0 : 1;
}

}  // namespace
}  // namespace espalier::kernels::testing

int main(int argc, char** argv) {
  espalier::kernels::testing::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--module") options.module = value;
    if (flag == "--variant") options.variant = value;
    if (flag == "--arch")
      options.arch =
          value == "sm80" ? espalier::kernels::Arch::kSm80 : espalier::kernels::Arch::kSm90;
    if (flag == "--cases") options.cases = std::atoi(value.c_str());
    if (flag == "--seed") options.seed = std::strtoull(value.c_str(), nullptr, 10);
  }
  return espalier::kernels::testing::Main(options);
}
