// cusparse_baseline.h — cuSPARSE's CSR product as the other baseline of scattered weights.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/linear/linear.h"
#include "tests/kernels/cuda/device_memory.h"

namespace espalier::bench {

// y = x · Wᵀ for one csr weight on fixed buffers, with the fastest of cuSPARSE's CSR algorithms and of the two orders of x
// and y: row-major [tokens, features] as they are, or feature-major copies, which it likes better at large batches and
// whose transposition is not counted. Dies on any error.
class CusparseCsr {
 public:
  // `weight` in host memory, csr with 2-byte or f32 values; of `args` x, y, strides and tokens are used.
  CusparseCsr(const kernels::cuda::CudaModule* module, const kernels::WeightView& weight,
              const kernels::LinearArgs& args);
  ~CusparseCsr();
  CusparseCsr(const CusparseCsr&) = delete;
  CusparseCsr& operator=(const CusparseCsr&) = delete;

  kernels::KernelStatus Enqueue(void* stream);

 private:
  struct Handles;
  void Choose(int algorithm, bool feature_major);
  double Time();

  const kernels::cuda::CudaModule* module_;
  kernels::testing::DeviceBuffer row_ptr_, col_idx_, values_, workspace_, turned_x_, turned_y_;
  Handles* handles_;
};

// The same weight as csr arrays, for baselines that know no diagonals.
struct CsrArrays {
  std::vector<int32_t> row_ptr, col_idx;
  std::vector<char> values;
  kernels::WeightView view;
};
CsrArrays ToCsr(const kernels::WeightView& weight);

}  // namespace espalier::bench
