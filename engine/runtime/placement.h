// placement.h — which device each instance of a model runs on, from its config's instance_group:
//
//   KIND_GPU   `count` instances on each of `gpus`, or on every GPU when it names none
//   KIND_CPU   `count` instances on the CPU
//   KIND_AUTO  as KIND_GPU where there is one (gpus in the group make it KIND_GPU), else as KIND_CPU
//   no group   KIND_AUTO with one instance, or two on each GPU: then one batch is copied while the other computes
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "engine/tensor/devices.h"
#include "proto/inference/model_config.pb.h"

namespace espalier::runtime {

inline constexpr int kDefaultInstancesOfGpu = 2;

struct Placement {
  std::vector<int> gpus;     // GPU of every instance; empty: the CPU
  bool demands_gpu = false;  // the CPU is no way out
};

// InvalidArgument for instances on CPU and GPU at once; FailedPrecondition for a GPU that is not there.
absl::StatusOr<Placement> PlaceInstances(const inference::ModelConfig& config,
                                         const Devices& devices);

}  // namespace espalier::runtime
