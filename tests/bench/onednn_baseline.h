// onednn_baseline.h — oneDNN's dense y = x · Wᵀ + b in every form it offers, one thread: what our kernels are measured
// against. The forms differ by batch (matmul and inner_product choose different kernels), so a bench takes the best.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace espalier::bench {

class OneDnnDense {
 public:
  enum class Form {
    kMatmulPacked,        // weights reordered once to the format that matmul asks for
    kInnerProductPacked,  // the same for inner_product
    kMatmulPlain,         // weights [out, in] as they are
  };
  static const char* NameOf(Form form);

  OneDnnDense(Form form, const std::vector<float>& weight, const float* bias, int64_t out,
              int64_t in, int64_t tokens);
  ~OneDnnDense();
  void Run(const float* x, float* y);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier::bench
