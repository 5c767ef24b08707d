#include "tests/kernels/linear/linear_problem.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "kernels/block_csr_linear/block_csr_linear.h"

namespace espalier::kernels::testing {
namespace {

uint16_t ToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Normal range only: what the tests store lies in [2^-14, 1].
uint16_t ToFloat16(float value) {
  if (value == 0) return 0;
  int exponent;
  const float fraction = std::frexp(std::abs(value), &exponent);                     // [0.5, 1)
  const auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11)));  // [1024, 2048]
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | ((exponent + 13) * 1024 + mantissa));
}

void StoreAs(DType dtype, float value, void* array, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<uint16_t*>(array)[i] = ToBFloat16(value);
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(array)[i] = ToFloat16(value);
      break;
    default:
      static_cast<float*>(array)[i] = value;
      break;
  }
}

void RunThreads(void* pool, int64_t n, KernelContext::Task task, void* arg) {
  const int64_t threads = std::min<int64_t>(n, reinterpret_cast<intptr_t>(pool));
  std::atomic<int64_t> next = 0;
  std::vector<std::thread> workers;
  for (int64_t t = 0; t < threads; ++t) {
    workers.emplace_back([&] {
      for (int64_t i = next++; i < n; i = next++) task(arg, i);
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// Stored values per row, and the row of the largest count.
std::vector<int64_t> StoredPerRow(const WeightView& w) {
  const int64_t R = w.block_row_count(), C = w.block_col_count();
  std::vector<int64_t> stored(R * w.block_rows, 0);
  const auto add = [&](int64_t block_row, int64_t n) {
    for (int64_t r = 0; r < w.block_rows; ++r) stored[block_row * w.block_rows + r] += n;
  };
  for (int64_t row = 0; row < R; ++row) {
    if (w.layout == Layout::kDense) add(row, w.in);
    if (w.row_ptr != nullptr) add(row, int64_t{w.row_ptr[row + 1] - w.row_ptr[row]} * w.block_cols);
  }
  for (int64_t k = 0; w.layout == Layout::kDiagonal && k < w.count; ++k) {
    for (int64_t t = 0; t < w.diagonal_length(); ++t)
      add(DiagonalBlock(R, C, w.offsets[k], t).row, w.block_cols);
  }
  return stored;
}

}  // namespace

ExactBuffer::ExactBuffer(size_t bytes, unsigned char fill) : size_(bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) != 0) std::abort();
  std::memset(data, fill, bytes);
  data_.reset(data);
}

WeightView OwnedWeight::view() const {
  WeightView w;
  w.layout = layout;
  w.dtype = dtype;
  w.out = out;
  w.in = in;
  w.block_rows = block_rows;
  w.block_cols = block_cols;
  w.count = count;
  w.row_ptr = row_ptr.empty() ? nullptr : row_ptr.data();
  w.col_idx = col_idx.data();
  w.col_idx16 = col_idx16.empty() ? nullptr : col_idx16.data();
  w.offsets = offsets.data();
  w.values = values.as();
  return w;
}

const char* NameOf(Pattern pattern) {
  constexpr const char* kNames[] = {"scattered",  "blocks",   "diagonals",
                                    "empty_rows", "all_zero", "full"};
  return kNames[static_cast<int>(pattern)];
}

std::vector<float> MakeDense(int64_t out, int64_t in, Pattern pattern, double density,
                             int32_t block_rows, int32_t block_cols, std::mt19937_64& random) {
  std::vector<float> dense(out * in, 0.0f);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  const auto value = [&] {
    return (0.05f + 0.95f * unit(random)) * (unit(random) < 0.5f ? -1.0f : 1.0f);
  };
  const auto fill_block = [&](int64_t block_row, int64_t block_col) {
    for (int64_t r = block_row * block_rows;
         r < std::min<int64_t>(out, (block_row + 1) * block_rows); ++r) {
      for (int64_t c = block_col * block_cols;
           c < std::min<int64_t>(in, (block_col + 1) * block_cols); ++c) {
        dense[r * in + c] = value();
      }
    }
  };
  const int64_t R = (out + block_rows - 1) / block_rows, C = (in + block_cols - 1) / block_cols;
  switch (pattern) {
    case Pattern::kAllZero:
      break;
    case Pattern::kFull:
      std::generate(dense.begin(), dense.end(), value);
      break;
    case Pattern::kEmptyRows:
    case Pattern::kScattered:
      for (int64_t r = 0; r < out; ++r) {
        if (pattern == Pattern::kEmptyRows && r % 3 != 1) continue;
        for (int64_t c = 0; c < in; ++c) {
          if (unit(random) < density) dense[r * in + c] = value();
        }
      }
      break;
    case Pattern::kBlocks:
      for (int64_t r = 0; r < R; ++r) {
        for (int64_t c = 0; c < C; ++c) {
          if (unit(random) < density) fill_block(r, c);
        }
      }
      break;
    case Pattern::kDiagonals: {
      std::vector<int64_t> offsets(std::max(R, C));
      for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<int64_t>(i);
      std::shuffle(offsets.begin(), offsets.end(), random);
      // As DynaDiag counts: K = max(1, ceil(density · in · out / D)).
      const double wanted =
          std::ceil(density * static_cast<double>(R * C) / static_cast<double>(std::min(R, C)));
      offsets.resize(std::min<size_t>(offsets.size(), std::max(1, static_cast<int>(wanted))));
      for (const int64_t offset : offsets) {
        for (int64_t t = 0; t < std::min(R, C); ++t) {
          const BlockPosition at = DiagonalBlock(R, C, offset, t);
          fill_block(at.row, at.col);
        }
      }
      break;
    }
  }
  return dense;
}

OwnedWeight EncodeWeight(const std::vector<float>& dense, int64_t out, int64_t in, Layout layout,
                         int32_t block_rows, int32_t block_cols, DType dtype) {
  OwnedWeight weight;
  weight.layout = layout;
  weight.dtype = dtype;
  weight.out = out;
  weight.in = in;
  weight.block_rows = layout == Layout::kDense || layout == Layout::kCsr ? 1 : block_rows;
  weight.block_cols = layout == Layout::kDense || layout == Layout::kCsr ? 1 : block_cols;
  const WeightView view = weight.view();
  const int64_t R = view.block_row_count(), C = view.block_col_count(), D = view.diagonal_length();
  const int64_t block = int64_t{view.block_rows} * view.block_cols;
  const auto at = [&](int64_t row, int64_t col) {
    return row < out && col < in ? dense[row * in + col] : 0.0f;
  };

  std::vector<BlockPosition> stored;  // blocks in the layout's order
  const auto occupied = [&](int64_t block_row, int64_t block_col) {
    for (int64_t r = 0; r < view.block_rows; ++r) {
      for (int64_t c = 0; c < view.block_cols; ++c) {
        if (at(block_row * view.block_rows + r, block_col * view.block_cols + c) != 0) return true;
      }
    }
    return false;
  };
  if (layout == Layout::kDiagonal) {
    for (int64_t offset = 0; offset < std::max(R, C); ++offset) {
      bool any = false;
      for (int64_t t = 0; t < D && !any; ++t) {
        const BlockPosition position = DiagonalBlock(R, C, offset, t);
        any = occupied(position.row, position.col);
      }
      if (!any) continue;
      weight.offsets.push_back(static_cast<int32_t>(offset));
      for (int64_t t = 0; t < D; ++t) stored.push_back(DiagonalBlock(R, C, offset, t));
    }
    weight.count = static_cast<int64_t>(weight.offsets.size());
  } else {
    if (layout != Layout::kDense) weight.row_ptr.push_back(0);
    for (int64_t r = 0; r < R; ++r) {
      for (int64_t c = 0; c < C; ++c) {
        if (layout != Layout::kDense && !occupied(r, c)) continue;
        stored.push_back({r, c});
        if (layout == Layout::kCsr) weight.col_idx.push_back(static_cast<int32_t>(c));
        if (layout == Layout::kBlockCsr) weight.col_idx16.push_back(static_cast<uint16_t>(c));
      }
      if (layout != Layout::kDense) weight.row_ptr.push_back(static_cast<int32_t>(stored.size()));
    }
    weight.count = static_cast<int64_t>(stored.size());
  }
  weight.values = ExactBuffer(stored.size() * block * SizeOf(dtype), 0);
  int64_t i = 0;
  for (const BlockPosition& position : stored) {
    for (int64_t r = 0; r < view.block_rows; ++r) {
      for (int64_t c = 0; c < view.block_cols; ++c) {
        StoreAs(dtype, at(position.row * view.block_rows + r, position.col * view.block_cols + c),
                weight.values.as(), i++);
      }
    }
  }
  return weight;
}

KernelContext ThreadedContext(int threads) {
  KernelContext ctx;
  ctx.threads = threads;
  ctx.parallel_for = threads > 1 ? &RunThreads : nullptr;
  ctx.pool = reinterpret_cast<void*>(static_cast<intptr_t>(threads));
  return ctx;
}

ExactBuffer PackFor(const LinearVariant& variant, const WeightView& weight) {
  if (variant.packing == nullptr) return ExactBuffer();
  ExactBuffer packed(variant.packed_bytes(weight));
  if (!variant.pack(weight, packed.as()).ok()) std::abort();
  return packed;
}

WeightView PackedView(const LinearVariant& variant, const WeightView& weight,
                      const ExactBuffer& packed) {
  WeightView view = weight;
  if (variant.packing == nullptr) return view;
  view.values = nullptr;
  view.packed = packed.as();
  if (variant.arch == Arch::kCpu && BlockCsrLinearCpu::PacksColumns(weight)) {
    view.col_idx = nullptr;
    view.col_idx16 = nullptr;
  }
  return view;
}

std::vector<float> RunVariant(const LinearVariant& variant, const WeightView& weight,
                              const std::vector<float>& x, int64_t tokens, const float* bias,
                              const RunOptions& options, std::string* error) {
  constexpr size_t kGuard = 256;
  constexpr uint32_t kPoison = 0xffffffff;  // a NaN
  LinearArgs args;
  args.weight = weight;
  args.x_stride = weight.in + options.x_padding;
  args.y_stride = weight.out + options.y_padding;
  args.tokens = tokens;
  args.bias = bias;
  args.activation = options.activation;
  // Exactly up to the last element of the last row; padding between rows is NaN.
  ExactBuffer x_rows(tokens == 0 ? 0 : ((tokens - 1) * args.x_stride + weight.in) * sizeof(float));
  for (int64_t t = 0; t < tokens; ++t) {
    std::copy_n(&x[t * weight.in], weight.in, x_rows.as<float>() + t * args.x_stride);
  }
  args.x = x_rows.as();
  ExactBuffer y_rows(tokens * args.y_stride * sizeof(float) + kGuard);
  args.y = y_rows.as();
  ExactBuffer residual_rows;
  if (options.residual != nullptr) {
    args.residual_stride =
        options.residual_in_y ? args.y_stride : weight.out + options.residual_padding;
    if (!options.residual_in_y && tokens > 0) {
      residual_rows =
          ExactBuffer(((tokens - 1) * args.residual_stride + weight.out) * sizeof(float));
    }
    const ExactBuffer& rows = options.residual_in_y ? y_rows : residual_rows;
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(options.residual + t * weight.out, weight.out,
                  rows.as<float>() + t * args.residual_stride);
    }
    args.residual = rows.as();
  }
  const size_t scratch_bytes = variant.scratch_bytes(DescOf(weight, tokens), options.threads);
  ExactBuffer scratch(scratch_bytes + kGuard);
  args.scratch = scratch.as();

  error->clear();
  const KernelStatus status = variant.run(ThreadedContext(options.threads), args);
  if (!status.ok()) *error = std::string("run failed: ") + status.message;

  std::vector<float> y(tokens * weight.out);
  const auto* words = y_rows.as<uint32_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    std::memcpy(y.data() + t * weight.out, words + t * args.y_stride, weight.out * sizeof(float));
    for (int64_t i = weight.out; i < args.y_stride; ++i) {
      if (words[t * args.y_stride + i] != kPoison)
        *error = "wrote to the padding of y, token " + std::to_string(t);
    }
  }
  const auto* y_guard = y_rows.as<unsigned char>() + y_rows.size() - kGuard;
  const auto* scratch_guard = scratch.as<unsigned char>() + scratch_bytes;
  for (size_t i = 0; i < kGuard; ++i) {
    if (y_guard[i] != 0xff) *error = "wrote past the end of y, byte " + std::to_string(i);
    if (scratch_guard[i] != 0xff)
      *error = "wrote past the end of scratch, byte " + std::to_string(i);
  }
  return y;
}

std::string CompareWithReference(const WeightView& weight, const std::vector<float>& x,
                                 int64_t tokens, const float* bias, const RunOptions& options,
                                 const std::vector<float>& y) {
  LinearArgs args;
  args.weight = weight;
  args.x = x.data();
  args.x_stride = weight.in;
  args.bias = bias;
  args.residual = options.residual;
  args.residual_stride = weight.out;
  args.activation = options.activation;
  args.tokens = tokens;
  std::vector<double> expected(y.size()), magnitude(y.size());
  ReferenceLinear(args, expected.data(), magnitude.data());
  const std::vector<int64_t> stored = StoredPerRow(weight);

  constexpr double kUnit = 0x1p-24;
  double worst = 0;
  size_t worst_index = 0;
  double worst_tolerance = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double n = static_cast<double>(stored[i % weight.out]) + 3;
    const double tolerance = 1.13 * std::min(n, 8 * std::sqrt(n) + 2) * kUnit * magnitude[i] +
                             8 * kUnit * std::abs(expected[i]) + std::numeric_limits<float>::min();
    double excess;
    if (std::isnan(expected[i]) || std::isnan(y[i])) {
      excess = std::isnan(expected[i]) == std::isnan(y[i]) ? 0 : INFINITY;
    } else if (std::isinf(expected[i]) || std::isinf(y[i])) {
      excess = expected[i] == y[i] ? 0 : INFINITY;
    } else {
      excess = std::isinf(tolerance) ? 0 : std::abs(y[i] - expected[i]) / tolerance;
    }
    if (excess > worst) {
      worst = excess;
      worst_index = i;
      worst_tolerance = tolerance;
    }
  }
  if (worst <= 1) return "";
  char text[256];
  std::snprintf(text, sizeof(text),
                "worst at token %lld, row %lld: expected %.9g, actual %.9g, tolerance %.3g",
                static_cast<long long>(worst_index / weight.out),
                static_cast<long long>(worst_index % weight.out), expected[worst_index],
                static_cast<double>(y[worst_index]), worst_tolerance);
  return text;
}

}  // namespace espalier::kernels::testing
