// device_weight.h — a random weight in device memory: its plain arrays for the oracle, packed for one variant.
#pragma once

#include <vector>

#include "kernels/cuda/variants.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/random_weight.h"

namespace espalier::kernels::testing {

inline LinearDesc DescOfWeight(const WeightView& w, int64_t tokens) {
  return {tokens, w.out, w.in, w.layout, w.dtype, w.dtype, w.block_rows, w.block_cols, w.count};
}

// The arrays of weight_view.h; `view()` points to device memory.
class DeviceArrays {
 public:
  DeviceArrays(const cuda::CudaModule* module, const RandomWeight& weight)
      : view_(weight.view()),
        row_ptr_(module, weight.row_ptr.data(), weight.row_ptr.size() * 4),
        col_idx_(module, weight.col_idx.data(), weight.col_idx.size() * 4),
        offsets_(module, weight.offsets.data(), weight.offsets.size() * 4),
        values_(module, weight.values.data(), weight.values.size()) {
    view_.row_ptr = row_ptr_.as<int32_t>();
    view_.col_idx = col_idx_.as<int32_t>();
    view_.offsets = offsets_.as<int32_t>();
    view_.values = values_.as();
  }
  const WeightView& view() const { return view_; }

 private:
  WeightView view_;
  DeviceBuffer row_ptr_, col_idx_, offsets_, values_;
};

// The variant's packed form, on the host.
inline std::vector<char> PackOnHost(const LinearVariant& variant, const WeightView& weight) {
  std::vector<char> packed(variant.packed_bytes(weight));
  OrDie(variant.pack(weight, packed.data()), variant.name);
  return packed;
}

}  // namespace espalier::kernels::testing
