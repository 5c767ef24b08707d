#include "tests/kernels/cuda/random_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace espalier::kernels::testing {
namespace {

void StoreElement(DType dtype, float value, char* array, int64_t i) {
  if (dtype == DType::kFloat32) {
    std::memcpy(array + 4 * i, &value, 4);
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? ToBFloat16(value) : ToFloat16(value);
  std::memcpy(array + 2 * i, &bits, 2);
}

// Ascending distinct numbers below n.
std::vector<int32_t> Choose(int64_t count, int64_t n, Random& random) {
  std::vector<int32_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < count; ++i) std::swap(all[i], all[i + random.Below(n - i)]);
  all.resize(count);
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace

uint64_t Random::Next() {  // splitmix64
  uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

std::vector<char> RandomRows(DType dtype, int64_t rows, int64_t width, int64_t stride,
                             Random& random) {
  std::vector<char> values(rows * stride * SizeOf(dtype), static_cast<char>(0xff));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c)
      StoreElement(dtype, random.Unit(), values.data(), r * stride + c);
  }
  return values;
}

uint16_t ToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint16_t ToFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  const uint32_t magnitude = static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 1023);
  const uint32_t rest = bits & 0x1fff;
  const uint32_t up = rest > 0x1000 || (rest == 0x1000 && (magnitude & 1)) ? 1 : 0;
  return static_cast<uint16_t>(sign | (exponent >= 31 ? 0x7c00u : magnitude + up));
}

float FromElement(const void* array, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(array)[i];
  const uint16_t half = static_cast<const uint16_t*>(array)[i];
  if (dtype == DType::kBFloat16) {
    const uint32_t bits = uint32_t{half} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25));
}

std::string ToString(const RandomWeightSpec& spec) {
  std::string text = std::string(NameOf(spec.layout)) + " " + std::to_string(spec.block_rows) +
                     "x" + std::to_string(spec.block_cols) + " " + espalier::NameOf(spec.dtype) +
                     " out " + std::to_string(spec.out) + " in " + std::to_string(spec.in) +
                     " density " + std::to_string(spec.density);
  return text + (spec.even_rows ? " even" : "") + " seed " + std::to_string(spec.seed);
}

RandomWeight::RandomWeight(const RandomWeightSpec& s) : spec(s) {
  Random random(s.seed);
  const WeightView shape = view();
  const int64_t R = shape.block_row_count(), C = shape.block_col_count(),
                D = shape.diagonal_length();
  std::vector<BlockPosition> blocks;  // in the layout's order
  if (s.layout == Layout::kDiagonal) {
    const auto wanted = static_cast<int64_t>(
        std::llround(s.density * static_cast<double>(R * C) / static_cast<double>(D)));
    if (s.density > 0)
      offsets = Choose(std::clamp<int64_t>(wanted, 1, std::max(R, C)), std::max(R, C), random);
    for (int32_t offset : offsets) {
      for (int64_t t = 0; t < D; ++t) blocks.push_back(DiagonalBlock(R, C, offset, t));
    }
    count = static_cast<int64_t>(offsets.size());
  } else if (s.layout == Layout::kDense) {
    for (int64_t r = 0; r < R; ++r) {
      for (int64_t c = 0; c < C; ++c) blocks.push_back({r, c});
    }
    count = s.out * s.in;
  } else {
    row_ptr.push_back(0);
    for (int64_t r = 0; r < R; ++r) {
      std::vector<int32_t> columns;
      if (s.even_rows) {
        columns = Choose(std::llround(s.density * static_cast<double>(C)), C, random);
      } else {
        for (int32_t c = 0; c < C; ++c) {
          if ((random.Unit() + 1) / 2 < s.density) columns.push_back(c);
        }
      }
      for (int32_t c : columns) blocks.push_back({r, c});
      col_idx.insert(col_idx.end(), columns.begin(), columns.end());
      row_ptr.push_back(static_cast<int32_t>(col_idx.size()));
    }
    count = static_cast<int64_t>(col_idx.size());
  }
  const int64_t br = s.block_rows, bc = s.block_cols;
  stored = static_cast<int64_t>(blocks.size()) * br * bc;
  values.assign(stored * SizeOf(s.dtype), 0);
  int64_t i = 0;
  for (const BlockPosition& at : blocks) {
    for (int64_t r = 0; r < br; ++r) {
      for (int64_t c = 0; c < bc; ++c, ++i) {
        if (at.row * br + r < s.out && at.col * bc + c < s.in)
          StoreElement(s.dtype, random.Unit(), values.data(), i);
      }
    }
  }
}

WeightView RandomWeight::view() const {
  WeightView w;
  w.layout = spec.layout;
  w.dtype = spec.dtype;
  w.out = spec.out;
  w.in = spec.in;
  w.block_rows = spec.block_rows;
  w.block_cols = spec.block_cols;
  w.count = count;
  w.row_ptr = row_ptr.empty() ? nullptr : row_ptr.data();
  w.col_idx = col_idx.empty() ? nullptr : col_idx.data();
  w.offsets = offsets.empty() ? nullptr : offsets.data();
  w.values = values.data();
  return w;
}

}  // namespace espalier::kernels::testing
