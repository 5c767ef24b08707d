// linear_problem.h — small linear problems for tests and benches of kernels: a sparsity pattern, a
// weight in any layout built from it, and a run of one variant with guards around everything it may
// write. Needs kernels/ only.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/linear/linear.h"

namespace espalier::kernels::testing {

// Heap memory of exactly `bytes` bytes, 64-byte aligned, so that a sanitizer sees the first byte
// read past its end.
class ExactBuffer {
 public:
  ExactBuffer() = default;
  explicit ExactBuffer(size_t bytes, unsigned char fill = 0xff);
  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<void, decltype(&std::free)> data_{nullptr, &std::free};
  size_t size_ = 0;
};

// A weight's arrays, and the view of them.
struct OwnedWeight {
  WeightView view() const;

  Layout layout = Layout::kDense;
  DType dtype = DType::kFloat32;
  int64_t out = 0, in = 0;
  int32_t block_rows = 1, block_cols = 1;
  int64_t count = 0;
  std::vector<int32_t> row_ptr, col_idx, offsets;
  std::vector<uint16_t> col_idx16;
  ExactBuffer values;
};

// Where the non-zeros are; a layout may store more than that (whole blocks, whole diagonals).
enum class Pattern { kScattered, kBlocks, kDiagonals, kEmptyRows, kAllZero, kFull };
const char* NameOf(Pattern pattern);

// A dense [out, in] matrix with about `density` non-zeros in [-1, 1], in pieces of block_rows x
// block_cols for kBlocks and kDiagonals.
std::vector<float> MakeDense(int64_t out, int64_t in, Pattern pattern, double density,
                             int32_t block_rows, int32_t block_cols, std::mt19937_64& random);

// The dense matrix in a layout, values rounded to dtype; blocks and diagonals that hold a non-zero
// are stored whole.
OwnedWeight EncodeWeight(const std::vector<float>& dense, int64_t out, int64_t in, Layout layout,
                         int32_t block_rows, int32_t block_cols, DType dtype);

// A parallel_for over real threads, started per call: slow, but it lets ThreadSanitizer see what
// kernels share.
KernelContext ThreadedContext(int threads);

// Packs the weight for a variant; empty when the variant reads the arrays as they are.
ExactBuffer PackFor(const LinearVariant& variant, const WeightView& weight);

// The weight as it stays in memory once packed: without what its owner may free. The weight itself for a variant that
// reads the arrays as they are.
WeightView PackedView(const LinearVariant& variant, const WeightView& weight,
                      const ExactBuffer& packed);

struct RunOptions {
  Activation activation = Activation::kNone;
  const float* residual = nullptr;  // [tokens, out] contiguous; RunVariant lays it out
  bool residual_in_y = false;       // it lies in the memory of y
  int64_t x_padding = 0;            // x_stride - in
  int64_t y_padding = 0;            // y_stride - out
  int64_t residual_padding = 0;     // residual_stride - out, unless it is in y
  int threads = 1;
};

// Runs `variant` and returns y [tokens, out] contiguous. y (where no residual lies in it), the paddings
// of x, y and residual and scratch are poisoned with NaN first; a write to the padding of y or past the
// end of y or scratch is an error. Empty string in *error when all went well.
std::vector<float> RunVariant(const LinearVariant& variant, const WeightView& weight,
                              const std::vector<float>& x, int64_t tokens, const float* bias,
                              const RunOptions& options, std::string* error);

// Compares y with the oracle. Empty when every element is within
//
//   1.13 · min(n, 8√n + 2) · u · (Σ|x·w| + |b| + |r|) + 8 u · |expected| + 2^-126,   u = 2^-24, n =
//   stored values in the row + 3 (bias b, residual r, the first product)
//
// n·u·Σ|x·w| bounds the error of any summation order; rounding errors are independent enough for √n
// to hold with a factor of 8 (Higham and Mary, 2019), which still notices one missing term of a row
// of 4096. 1.13 is the steepest slope of an activation (gelu), 8u its own error. Otherwise the
// worst element: index, expected, actual, tolerance.
std::string CompareWithReference(const WeightView& weight, const std::vector<float>& x,
                                 int64_t tokens, const float* bias, const RunOptions& options,
                                 const std::vector<float>& y);

}  // namespace espalier::kernels::testing
