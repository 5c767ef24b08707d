// plan.h — the plan as data: per layer, per batch bucket, which layout and kernel, what it costs,
// what it beat.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/sparse/layout_spec.h"

namespace espalier::planner {

// One way to run one layer in one bucket.
struct Candidate {
  sparse::LayoutSpec spec;
  std::string variant;  // kernel name
  double micros = 0;    // measured, or predicted when !measured
  bool measured = false;
  size_t weight_bytes = 0;  // resident bytes of this layout in the variant's packing
};

struct BucketChoice {
  int64_t batch = 0;   // the bucket: serves batches above the previous bucket, up to this
  int64_t tokens = 0;  // rows of x at this batch
  Candidate chosen;
  Candidate runner_up;  // variant empty when there was only one
  double dense_micros = 0;
  std::string note;    // why a runner-up that costs less was not chosen; else empty
  std::string paired;  // with which layer before it in one kernel, and what that gains; else empty
  double speedup_over_dense() const {
    return chosen.micros > 0 ? dense_micros / chosen.micros : 1.0;
  }
};

struct LayerPlan {
  std::string name;    // node name
  std::string weight;  // layers that multiply by the same one share its memory
  int64_t out = 0, in = 0;
  double sparsity = 0;
  std::string structure;              // sparse::WeightStructure::found
  std::vector<BucketChoice> buckets;  // ascending
  size_t weight_bytes = 0;            // all resident copies of this layer
  size_t dense_bytes = 0;
};

struct ModelPlan {
  std::vector<LayerPlan> layers;
  // Of all layers; what several of them share counts once.
  size_t weight_bytes = 0, dense_bytes = 0;
  std::string source;  // "measured", "cache", "cost model", "deterministic"
  std::string device;  // Device::Description()
};

// A table for people (`espalier plan`) and JSON for programs (ModelConfig parameter "plan",
// metrics, the plan cache).
std::string ToTable(const ModelPlan& plan);
std::string ToJson(const ModelPlan& plan);

}  // namespace espalier::planner
