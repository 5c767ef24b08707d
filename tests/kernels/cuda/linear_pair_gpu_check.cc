// linear_pair_gpu_check — fused pairs of layers on generated problems, on the GPU of this machine, against the oracle.
//
//   linear_pair_gpu_check [--module libespalier_cuda.so] [--cases N] [--seed N]
//
// Each problem: y (unless the residual lies in it), its padding and those of x and residual poisoned with NaN; then every output within tolerance, nothing written
// beside them, a second run bit-equal, and the first token alone bit-equal to its row in the batch. Prints a line a failure
// and the count; exits 0 when all passed, 1 when one failed, 2 without a GPU that runs pairs.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/cuda/device_weight.h"
#include "tests/kernels/cuda/pair_reference.h"

namespace espalier::kernels::testing {
namespace {

struct Case {
  RandomWeightSpec first, second;
  int64_t tokens = 0;
  bool biases = false;
  Activation first_activation = Activation::kNone, second_activation = Activation::kNone;
  Residual residual = Residual::kNone;
  int64_t x_padding = 0, y_padding = 0;
};

std::string Describe(const Case& c) {
  return ToString(c.first) + " then " + ToString(c.second) + " tokens " + std::to_string(c.tokens) +
         (c.biases ? " biases " : " ") + NameOf(c.residual) + NameOf(c.first_activation) + " " +
         NameOf(c.second_activation) + " padding " + std::to_string(c.x_padding) + "/" +
         std::to_string(c.y_padding);
}

const LinearVariant& Packer(Layout layout, DType dtype) {
  for (const LinearVariant& variant : cuda::CudaLinearVariants()) {
    if (variant.layout == layout && variant.packing != nullptr &&
        std::string(variant.packing) == kLinearPairPacking &&
        variant.supports({1, 64, 64, layout, dtype, dtype, 64, 64, 1})) {
      return variant;
    }
  }
  std::fprintf(stderr, "no variant packs %s for a pair\n", kLinearPairPacking);
  std::exit(1);
}

class PairCheck {
 public:
  PairCheck(const cuda::CudaModule* module, void* stream, const Case& c)
      : module_(module), stream_(stream), case_(c), first_(c.first), second_(c.second) {
    Random random(c.first.seed + 77);
    const auto packed = [&](const RandomWeight& weight) {
      const std::vector<char> bytes =
          PackOnHost(Packer(weight.spec.layout, weight.spec.dtype), weight.view());
      return DeviceBuffer(module, bytes.data(), bytes.size());
    };
    packed1_ = packed(first_), packed2_ = packed(second_);
    for (auto [bias, width] : {std::pair(&bias1_, c.first.out), std::pair(&bias2_, c.second.out)}) {
      for (int64_t i = 0; i < width; ++i) bias->push_back(random.Unit());
    }
    device_bias1_ = DeviceBuffer(module, bias1_.data(), bias1_.size() * 4);
    device_bias2_ = DeviceBuffer(module, bias2_.data(), bias2_.size() * 4);
    x_stride_ = RowStride(c.first.in) + c.x_padding,
    y_stride_ = RowStride(c.second.out) + c.y_padding;
    x_.resize(c.tokens * c.first.in);
    std::vector<uint16_t> padded(c.tokens * x_stride_, 0xffff);
    for (int64_t i = 0; i < c.tokens * c.first.in; ++i) {
      const float value = random.Unit();
      x_[i] = c.first.dtype == DType::kBFloat16 ? ToBFloat16(value) : ToFloat16(value);
      padded[i / c.first.in * x_stride_ + i % c.first.in] = x_[i];
    }
    device_x_ = DeviceBuffer(module, padded.data(), padded.size() * 2);
    if (c.residual != Residual::kNone) {
      residual_stride_ =
          c.residual == Residual::kInY ? y_stride_ : RowStride(c.second.out) + c.x_padding;
      residual_ = RandomRows(c.first.dtype, c.tokens, c.second.out, residual_stride_, random);
      device_residual_ = DeviceBuffer(module, residual_.data(), residual_.size());
    }
    device_y_ = DeviceBuffer(module, c.tokens * y_stride_ * 2);
  }

  // Empty when the case passes.
  std::string Run() {
    std::vector<uint16_t> y, again, alone;
    if (std::string error = RunOnce(case_.tokens, &y); !error.empty()) return error;
    const int64_t out = case_.second.out;
    std::vector<uint16_t> dense, residual;
    for (int64_t i = 0; i < case_.tokens * y_stride_; ++i) {
      const int64_t column = i % y_stride_;
      if (column < out)
        dense.push_back(y[i]);
      else if (y[i] != 0xffff && !(column < (out + 7) / 8 * 8 && y[i] == 0))
        return "wrote to the padding of y, token " + std::to_string(i / y_stride_);
    }
    for (int64_t i = 0; i < case_.tokens && !residual_.empty(); ++i) {
      const auto* row = reinterpret_cast<const uint16_t*>(residual_.data()) + i * residual_stride_;
      residual.insert(residual.end(), row, row + out);
    }
    const HostPair pair{first_,
                        second_,
                        case_.biases ? bias1_.data() : nullptr,
                        case_.biases ? bias2_.data() : nullptr,
                        case_.first_activation,
                        case_.second_activation,
                        case_.tokens,
                        residual.empty() ? nullptr : residual.data()};
    if (std::string error = ComparePair(pair, x_.data(), dense.data()); !error.empty())
      return error;
    if (std::string error = RunOnce(case_.tokens, &again); !error.empty()) return "again: " + error;
    if (y != again) return "two runs differ";
    if (case_.tokens < 2) return "";
    if (std::string error = RunOnce(1, &alone); !error.empty()) return "alone: " + error;
    return std::memcmp(y.data(), alone.data(), out * 2) == 0
               ? ""
               : "the first token alone differs from its row in the batch";
  }

 private:
  std::string RunOnce(int64_t tokens, std::vector<uint16_t>* y) {
    if (case_.residual == Residual::kInY) {
      device_y_.CopyFrom(device_residual_);
    } else {
      device_y_.Fill(0xff);
    }
    LinearPairArgs args;
    const auto layer = [&](LinearArgs& to, const RandomWeight& weight, const DeviceBuffer& packed,
                           const DeviceBuffer& bias, Activation activation) {
      to.weight = weight.view();
      to.weight.row_ptr = to.weight.col_idx = to.weight.offsets = nullptr;
      to.weight.values = nullptr;
      to.weight.packed = packed.as();
      to.io_dtype = case_.first.dtype;
      to.bias = case_.biases ? bias.as<float>() : nullptr;
      to.activation = activation;
      to.tokens = tokens;
    };
    layer(args.first, first_, packed1_, device_bias1_, case_.first_activation);
    layer(args.second, second_, packed2_, device_bias2_, case_.second_activation);
    args.first.x = device_x_.as(), args.first.x_stride = x_stride_;
    args.second.y = device_y_.as(), args.second.y_stride = y_stride_;
    if (case_.residual != Residual::kNone) {
      args.second.residual =
          case_.residual == Residual::kInY ? device_y_.as() : device_residual_.as();
      args.second.residual_stride = residual_stride_;
    }
    KernelContext ctx;
    ctx.arch = Arch::kSm90;
    ctx.stream = stream_;
    ctx.ops = module_->ops;
    if (const KernelStatus status = RunLinearPair(ctx, args); !status.ok())
      return std::string("run: ") + status.message;
    if (const KernelStatus status = module_->synchronize_stream(stream_); !status.ok()) {
      std::fprintf(stderr, "%s: %s\n", Describe(case_).c_str(), status.message);
      std::exit(1);  // sticky: nothing after it can work
    }
    y->resize(device_y_.bytes() / 2);
    device_y_.Download(y->data());
    return "";
  }

  const cuda::CudaModule* module_;
  void* stream_;
  Case case_;
  RandomWeight first_, second_;
  std::vector<float> bias1_, bias2_;
  std::vector<uint16_t> x_;
  std::vector<char> residual_;  // with its padding
  int64_t x_stride_ = 0, y_stride_ = 0, residual_stride_ = 0;
  DeviceBuffer packed1_, packed2_, device_bias1_, device_bias2_, device_x_, device_residual_,
      device_y_;
};

// All activations and types, each with residuals and without, both layouts, ragged and whole edges, every tile of tokens ± 1, rows without a block.
Case CaseOf(int i, uint64_t seed) {
  constexpr int64_t kTokens[] = {1,  2,  15, 16,  17,  31,   33,   47,  48,
                                 49, 96, 97, 200, 640, 2113, 4300, 6337};
  constexpr double kDensities[] = {0.1, 0.3, 0.05, 0.6, 0.0, 1.0};
  constexpr Layout kLayouts[] = {Layout::kBlockCsr, Layout::kDiagonal};
  Random random(seed * 1000003 + i);
  const auto width = [&](int64_t blocks) {
    const int64_t whole = 64 * (1 + random.Below(blocks));
    return i % 2 == 0 ? whole : whole - random.Below(63);
  };
  const DType dtype = i % 3 == 2 ? DType::kFloat16 : DType::kBFloat16;
  const int64_t in = width(i % 4 == 0 ? 12 : 5), out = width(i % 5 == 0 ? 24 : 12);
  const int64_t hidden = width(i % 7 == 0 ? 48 : 11);
  const auto spec = [&](int64_t rows, int64_t columns, int turn) {
    return RandomWeightSpec{kLayouts[random.Below(2)],
                            dtype,
                            rows,
                            columns,
                            64,
                            (i + turn) % 4 == 1 ? 128 : 64,
                            kDensities[(i + turn) % std::size(kDensities)],
                            i % 3 == 0,
                            seed + 2 * i + turn};
  };
  Case c;
  c.first = spec(hidden, in, 0), c.second = spec(out, hidden, 1);
  c.tokens = i == 1 ? 0 : kTokens[random.Below(std::size(kTokens))];
  while (c.tokens * hidden * (in + out) > 400'000'000) c.tokens /= 2;  // the oracle's time
  c.biases = i % 2 == 0;
  c.first_activation = static_cast<Activation>(i % 6);
  c.second_activation = static_cast<Activation>(i / 6 % 6);
  c.x_padding = i % 5 == 0 ? 64 : 0;
  c.y_padding = i % 7 == 0 ? 8 : 0;
  c.residual = static_cast<Residual>((i + i / 6) % 3);
  return c;
}

int Main(const std::string& path, int cases, uint64_t seed) {
  const cuda::CudaModule* module = OpenModuleOrNull(path);
  if (module == nullptr) return 2;
  cuda::CudaDeviceInfo info;
  OrDie(module->device_info(0, &info), "device");
  if (cuda::ArchOf(info) != Arch::kSm90) {
    std::fprintf(stderr, "%s runs no pairs\n", info.name);
    return 2;
  }
  void* stream = nullptr;
  OrDie(module->create_stream(&stream), "stream");
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a hanging case leaves the lines before it
  int failed = 0, ran = 0;
  for (int i = 0; i < cases; ++i) {
    const Case c = CaseOf(i, seed);
    const auto desc = [&](const RandomWeightSpec& spec) {
      return DescOfWeight(RandomWeight(spec).view(), c.tokens);
    };
    if (!FitsLinearPair(desc(c.first), desc(c.second), Arch::kSm90)) continue;
    ++ran;
    const std::string problem = PairCheck(module, stream, c).Run();
    if (problem.empty()) continue;
    ++failed;
    std::printf("FAILED %s: %s\n", Describe(c).c_str(), problem.c_str());
  }
  OrDie(module->destroy_stream(stream), "stream");
  std::printf("%d problems, %d failed\n", ran, failed);
  return failed == 0 && ran > cases / 2 ? 0 : 1;
}

}  // namespace
}  // namespace espalier::kernels::testing

int main(int argc, char** argv) {
  std::string module = "libespalier_cuda.so";
  int cases = 60;
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--module") module = value;
    if (flag == "--cases") cases = std::atoi(value.c_str());
    if (flag == "--seed") seed = std::strtoull(value.c_str(), nullptr, 10);
  }
  return espalier::kernels::testing::Main(module, cases, seed);
}
