#include "tests/bench/cuda/layer_stack.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tests/kernels/cuda/gpu_reference.h"

namespace espalier::bench {
namespace {

using namespace kernels;           // NOLINT: a bench of that namespace
using namespace kernels::testing;  // NOLINT

constexpr int kMaxCopies = 20;

// Making and packing 10 million random values takes seconds, and cases that differ in tokens share them: kept to the end.
std::shared_ptr<RandomWeight> SharedWeight(const RandomWeightSpec& spec) {
  static std::map<std::string, std::shared_ptr<RandomWeight>> made;
  std::shared_ptr<RandomWeight>& weight = made[ToString(spec)];
  if (weight == nullptr) weight = std::make_shared<RandomWeight>(spec);
  return weight;
}

const std::vector<char>& SharedPacked(const LinearVariant& variant, const RandomWeight& weight) {
  static std::map<std::string, std::vector<char>> packed;
  std::vector<char>& bytes = packed[ToString(weight.spec) + " " + variant.packing];
  if (bytes.empty()) bytes = PackOnHost(variant, weight.view());
  return bytes;
}

}  // namespace

LayerStack::LayerStack(const cuda::CudaModule* module, std::vector<LayerSpec> layers,
                       int64_t tokens, size_t least_bytes)
    : module_(module), layers_(std::move(layers)), tokens_(tokens) {
  for (const LayerSpec& layer : layers_) {
    weights_.push_back(SharedWeight(layer.weight));
    strides_.push_back(RowStride(layer.weight.in));
  }
  strides_.push_back(RowStride(layers_.back().weight.out));
  if (least_bytes > 0) {
    copies_ = static_cast<int>(std::ceil(static_cast<double>(least_bytes) / TouchedBytes()));
    copies_ = std::clamp(copies_, 2, kMaxCopies);
  }
  const DType dtype = layers_[0].weight.dtype;
  for (int copy = 0; copy < copies_; ++copy) {
    std::vector<DeviceBuffer> buffers;
    for (size_t i = 0; i < strides_.size(); ++i) {
      buffers.emplace_back(module, tokens * strides_[i] * SizeOf(dtype));
      if (i == 0)
        OrDie(GpuFillRandom(buffers[0].as(), dtype, tokens * strides_[0], 1 + copy), "fill x");
    }
    activations_.push_back(std::move(buffers));
  }
}

LinearArgs LayerStack::Args(int copy, int layer, int64_t first_token, int64_t tokens) const {
  const auto rows_from = [&](int buffer) {
    const bool is_outer = buffer == 0 || buffer == static_cast<int>(layers_.size());
    const size_t row = strides_[buffer] * SizeOf(layers_[0].weight.dtype);
    return activations_[copy][buffer].as<char>() + (is_outer ? first_token * row : 0);
  };
  LinearArgs args;
  args.weight = weights_[layer]->view();
  args.weight.row_ptr = args.weight.col_idx = args.weight.offsets = nullptr;
  args.weight.values = nullptr;
  args.io_dtype = layers_[layer].weight.dtype;
  args.x = rows_from(layer);
  args.x_stride = strides_[layer];
  args.y = rows_from(layer + 1);
  args.y_stride = strides_[layer + 1];
  args.activation = layers_[layer].activation;
  args.tokens = tokens;
  return args;
}

double LayerStack::TouchedBytes() const {
  double bytes = 0;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const RandomWeightSpec& w = layers_[l].weight;
    const double element = static_cast<double>(SizeOf(w.dtype));
    bytes += element * (static_cast<double>(weights_[l]->stored) +
                        static_cast<double>(tokens_ * (w.in + w.out)));
  }
  return bytes;
}

double LayerStack::UsefulFlops() const {
  double flops = 0;
  for (const auto& weight : weights_)
    flops += 2.0 * static_cast<double>(weight->stored) * static_cast<double>(tokens_);
  return flops;
}

PackedLayer::PackedLayer(const LayerStack& stack, int layer, const LinearVariant& variant,
                         const PackedLayer* like)
    : stack_(&stack), layer_(layer), variant_(&variant) {
  const WeightView view = Args(0).weight;
  if (variant.layout == Layout::kDense) {
    weight_bytes_ = variant.packed_bytes(view);
    for (int copy = 0; copy < stack.copies(); ++copy) {
      weights_.emplace_back(stack.module(), weight_bytes_);
      OrDie(GpuFillRandom(weights_.back().as(), view.dtype,
                          static_cast<int64_t>(weight_bytes_ / SizeOf(view.dtype)), 100 + copy),
            "fill dense");
    }
  } else {
    const std::vector<char>& packed = SharedPacked(variant, stack.weight(layer));
    weight_bytes_ = packed.size();
    for (int copy = 0; copy < stack.copies(); ++copy) {
      weights_.emplace_back(stack.module(), weight_bytes_);
      const void* from = like != nullptr ? like->weights_[0].as()
                         : copy == 0     ? packed.data()
                                         : weights_[0].as();
      OrDie(stack.module()->copy(weights_.back().as(), from, weight_bytes_, nullptr),
            "copy weights");
    }
    OrDie(stack.module()->synchronize_stream(nullptr), "copy weights");
  }
  const size_t scratch = variant.scratch_bytes(DescOfWeight(view, stack.tokens()), 1);
  if (scratch > 0) {
    scratch_ = DeviceBuffer(stack.module(), scratch);
    scratch_.Fill(0);
  }
}

LinearArgs PackedLayer::Args(int copy, int64_t first_token, int64_t tokens) const {
  LinearArgs args = stack_->Args(copy, layer_, first_token, tokens);
  if (variant_->layout == Layout::kDense) {
    args.weight.layout = Layout::kDense;
    args.weight.block_rows = args.weight.block_cols = 1;
    args.weight.count = args.weight.out * args.weight.in;
  }
  args.weight.packed = weights_.empty() ? nullptr : weights_[copy].as();
  args.scratch = scratch_.as();
  return args;
}

KernelStatus PackedLayer::Enqueue(void* stream, int copy, int64_t first_token,
                                  int64_t tokens) const {
  KernelContext ctx;
  ctx.arch = variant_->arch;
  ctx.stream = stream;
  return variant_->run(ctx, Args(copy, first_token, tokens));
}

void PackedLayer::Settle(int64_t tokens) const {
  OrDie(stack_->module()->settle(cuda::KernelOf(*variant_), KernelContext{}, Args(0, 0, tokens)),
        variant_->name);
  OrDie(stack_->module()->synchronize_stream(nullptr), variant_->name);
}

std::string PackedLayer::Verify(void* stream) const {
  const cuda::CudaModule* module = stack_->module();
  LinearArgs args = Args(0);
  const int64_t tokens = args.tokens, out = args.weight.out;
  const DType dtype = args.io_dtype;
  OrDie(module->fill(args.y, 0xff, tokens * args.y_stride * SizeOf(dtype), nullptr), "poison");
  OrDie(module->synchronize_stream(nullptr), "poison");
  if (const KernelStatus status = Enqueue(stream, 0); !status.ok()) return status.message;
  if (const KernelStatus status = module->synchronize_stream(stream); !status.ok())
    return status.message;
  int64_t unwritten = 0;
  OrDie(GpuCountNan(args.y, dtype, tokens, out, args.y_stride, &unwritten), "count");
  if (unwritten > 0) return std::to_string(unwritten) + " outputs are NaN or were not written";
  if (variant_->layout == Layout::kDense)
    return "";  // random weights of its own; a library's arithmetic

  std::vector<int64_t> sample;
  for (int64_t t = 0; t < tokens; ++t) {
    if (t < 24 || t >= tokens - 24 || t % (tokens / 16 + 1) == 0) sample.push_back(t);
  }
  const auto count = static_cast<int64_t>(sample.size());
  const DeviceArrays arrays(module, stack_->weight(layer_));
  const DeviceBuffer tokens_there(module, sample.data(), sample.size() * 8);
  const DeviceBuffer expected_there(module, count * out * 8),
      magnitude_there(module, count * out * 8);
  args.weight = arrays.view();
  OrDie(GpuReferenceLinear(args, tokens_there.as<int64_t>(), count, expected_there.as<double>(),
                           magnitude_there.as<double>()),
        "oracle");
  std::vector<double> expected(count * out), magnitude(count * out);
  expected_there.Download(expected.data());
  magnitude_there.Download(magnitude.data());
  std::vector<char> row(args.y_stride * SizeOf(dtype));
  // As in linear_gpu_check, with the mean number of terms of a row.
  const double terms =
      static_cast<double>(stack_->weight(layer_).stored) / static_cast<double>(out);
  const double summation = 1.13 * (8 * std::sqrt(terms) + 2) * 0x1p-24;
  const double half_ulp = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  for (int64_t i = 0; i < count; ++i) {
    const char* from =
        static_cast<const char*>(args.y) + sample[i] * static_cast<int64_t>(row.size());
    OrDie(module->copy(row.data(), from, row.size(), nullptr), "download");
    OrDie(module->synchronize_stream(nullptr), "download");
    for (int64_t c = 0; c < out; ++c) {
      const double want = expected[i * out + c], actual = FromElement(row.data(), dtype, c);
      const double allowed = (half_ulp + 4e-4) * 1.01 * std::abs(want) +
                             summation * magnitude[i * out + c] +
                             (args.activation == Activation::kGeluTanh ? 1.5e-3 : 1e-30);
      if (!(std::abs(actual - want) <= allowed)) {
        return "token " + std::to_string(sample[i]) + " output " + std::to_string(c) +
               ": expected " + std::to_string(want) + ", actual " + std::to_string(actual);
      }
    }
  }
  return "";
}

}  // namespace espalier::bench
