// linear_pair_choice.h — which pairs of layers a GPU runs in one kernel: those that it makes faster.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "engine/graph/linear_pairs.h"
#include "engine/planner/model_planner.h"
#include "engine/tensor/cuda_device.h"

namespace espalier::planner {

// Whether the two layers' weights, in the packings they are bound to, can run as a pair.
bool FitsPair(const graph::LinearBinding& first, const graph::LinearBinding& second);

// Compares, in every bucket, each pair that fits with its two layers one after the other, and notes in `planned`, plan
// included, those that gain at least kPairGain. An equal pair is measured once in a process; without `measure` only what
// is known counts. Biases and residuals, which both ways read alike, are left out. Errors are the device's.
absl::Status ChoosePairs(const graph::Program& program, const std::vector<graph::LinearPair>& pairs,
                         const CudaDevice& device, bool measure, PlannedModel& planned);

inline constexpr double kPairGain = 1.02;

}  // namespace espalier::planner
