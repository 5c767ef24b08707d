// cusparse_baseline.h — cuSPARSE's product as the other baseline: CSR for scattered weights, BSR for blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/linear/linear.h"
#include "tests/kernels/cuda/device_memory.h"

namespace espalier::bench {

// y = x · Wᵀ for one weight on fixed buffers, with the fastest of cuSPARSE's algorithms for its format and of the two orders
// of x and y: row-major [tokens, features] as they are, or feature-major copies, which it likes better at large batches and
// whose transposition is not counted.
class CusparseProduct {
 public:
  // `weight` in host memory, csr (CSR) or block_csr of square blocks that divide W (BSR), 2-byte or f32 values; of `args` x,
  // y, strides and tokens are used. Null, with a line on stderr, where cuSPARSE has no algorithm for it; dies on any other
  // error.
  static std::unique_ptr<CusparseProduct> CreateOrNull(const kernels::cuda::CudaModule* module,
                                                       const kernels::WeightView& weight,
                                                       const kernels::LinearArgs& args);
  ~CusparseProduct();
  CusparseProduct(const CusparseProduct&) = delete;
  CusparseProduct& operator=(const CusparseProduct&) = delete;

  kernels::KernelStatus Enqueue(void* stream);

 private:
  struct Handles;
  CusparseProduct(const kernels::cuda::CudaModule* module, const kernels::WeightView& weight,
                  const kernels::LinearArgs& args);
  kernels::KernelStatus Choose(int algorithm, bool feature_major);
  kernels::KernelStatus ChooseFastest();
  kernels::KernelStatus Time(double* micros);

  const kernels::cuda::CudaModule* module_;
  kernels::testing::DeviceBuffer row_ptr_, col_idx_, values_, workspace_, turned_x_, turned_y_;
  Handles* handles_;
};

// A csr, block_csr or diagonal weight as csr arrays (blocks of one element) or block_csr arrays, for baselines that know no
// diagonals.
struct RowArrays {
  std::vector<int32_t> row_ptr, col_idx;
  std::vector<char> values;
  kernels::WeightView view;
};
RowArrays ToRows(const kernels::WeightView& weight);

}  // namespace espalier::bench
