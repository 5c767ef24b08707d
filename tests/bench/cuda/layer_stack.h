// layer_stack.h — a stack of linear layers on the device in several copies, so that replays find cold or warm caches.
//
// Copy i holds weights, input and outputs of its own. A cold run walks over as many copies as fill several times the L2;
// a warm one stays on copy 0. Layer l + 1 reads what layer l wrote.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/variants.h"
#include "tests/kernels/cuda/device_weight.h"

namespace espalier::bench {

struct LayerSpec {
  kernels::testing::RandomWeightSpec weight;
  kernels::Activation activation = kernels::Activation::kNone;
};

// The shared data of a stack: random weights on the host, inputs and outputs on the device.
class LayerStack {
 public:
  // `least_bytes` that all copies together must touch (0: one copy); the weights of the cheapest form count.
  LayerStack(const kernels::cuda::CudaModule* module, std::vector<LayerSpec> layers, int64_t tokens,
             size_t least_bytes);

  int copies() const { return copies_; }
  int64_t tokens() const { return tokens_; }
  const std::vector<LayerSpec>& layers() const { return layers_; }
  const kernels::testing::RandomWeight& weight(int layer) const { return *weights_[layer]; }
  const kernels::cuda::CudaModule* module() const { return module_; }

  // Arguments of a layer on a copy, without weight and scratch: for all tokens, or for a chunk of them, which reuses the
  // first rows of the buffers between layers (they stay in L2 that way).
  kernels::LinearArgs Args(int copy, int layer) const { return Args(copy, layer, 0, tokens_); }
  kernels::LinearArgs Args(int copy, int layer, int64_t first_token, int64_t tokens) const;
  // Bytes read and written once by the sparse form: values, x, y.
  double TouchedBytes() const;
  double UsefulFlops() const;

 private:
  const kernels::cuda::CudaModule* module_;
  std::vector<LayerSpec> layers_;
  int64_t tokens_;
  int copies_ = 1;
  std::vector<std::shared_ptr<kernels::testing::RandomWeight>> weights_;  // equal specs share one
  std::vector<int64_t> strides_;  // of the input of layer l; the last of the output
  std::vector<std::vector<kernels::testing::DeviceBuffer>>
      activations_;  // [copy][layer input … output]
};

// One layer's weight in the form of one variant, in every copy, with its scratch.
class PackedLayer {
 public:
  // Sparse: packs the stack's weight. Dense: random values of the layer's shape, made on the device.
  // `like`, may be null: a layer of the same weight and variant, whose packed bytes are copied.
  PackedLayer(const LayerStack& stack, int layer, const kernels::LinearVariant& variant,
              const PackedLayer* like = nullptr);

  const kernels::LinearVariant& variant() const { return *variant_; }
  size_t weight_bytes() const { return weight_bytes_; }
  kernels::LinearArgs Args(int copy) const { return Args(copy, 0, stack_->tokens()); }
  kernels::LinearArgs Args(int copy, int64_t first_token, int64_t tokens) const;
  kernels::KernelStatus Enqueue(void* stream, int copy) const {
    return Enqueue(stream, copy, 0, stack_->tokens());
  }
  kernels::KernelStatus Enqueue(void* stream, int copy, int64_t first_token, int64_t tokens) const;
  // Lets a library choose its algorithm; before any capture.
  void Settle(int64_t tokens) const;
  // Empty when a sample of tokens agrees with the oracle and no output is left unwritten.
  std::string Verify(void* stream) const;

 private:
  const LayerStack* stack_;
  int layer_;
  const kernels::LinearVariant* variant_;
  size_t weight_bytes_ = 0;
  std::vector<kernels::testing::DeviceBuffer> weights_;
  kernels::testing::DeviceBuffer scratch_;
};

}  // namespace espalier::bench
