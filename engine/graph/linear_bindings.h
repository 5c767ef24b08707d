// linear_bindings.h — what the kernels that a program's linear layers are bound to ask of an executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/graph/program.h"

namespace espalier::graph {

// bindings[b][layer] as Executor has them, for batches of up to buckets[b].
using BucketBindings = std::vector<std::vector<LinearBinding>>;

// Scratch that is enough for every layer in every bucket.
size_t LinearScratchBytes(const Program& program, const std::vector<int64_t>& buckets,
                          const BucketBindings& bindings, int threads);

// Unimplemented, with the kernel, when one does not take its weight.
absl::Status CheckBindings(const Program& program, const std::vector<int64_t>& buckets,
                           const BucketBindings& bindings);

}  // namespace espalier::graph
