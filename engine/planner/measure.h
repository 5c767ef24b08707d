// measure.h — times the options of a layer on this machine, at the token counts it will serve.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/planner/cost_table.h"
#include "engine/planner/resident_weight.h"
#include "engine/tensor/device.h"

namespace espalier::planner {

// The resident copies of one weight, made when first asked for.
class WeightCopies {
 public:
  // On `device` when it is a GPU, in host memory when it is null.
  explicit WeightCopies(const TensorView& dense, const CudaDevice* device = nullptr)
      : dense_(dense), device_(device) {}

  // The copy that `option` reads.
  absl::StatusOr<std::shared_ptr<ResidentWeight>> For(const LayerOption& option);
  // Forgets the copies that nobody else holds.
  void DropUnused();

 private:
  const TensorView dense_;
  const CudaDevice* device_;
  std::vector<std::pair<LayerOption, std::shared_ptr<ResidentWeight>>> copies_;
};

struct Measured {
  int buckets = 0;
  absl::Duration waited;  // for other loads that were measuring
};

// Measures what `table` does not know yet, bucket after bucket (smallest, largest, then between),
// passing over those that would end after `deadline`. Per bucket: dense, the smallest layout, and
// what the cost model puts within kWorthMeasuring of its best. Options take turns, after a warm-up,
// and each counts its fastest call: a neighbour on the machine can only slow calls down. Close calls
// (choose.h) are then measured again, beside dense. Nothing has a bias, a residual or an activation: those cost every option
// of a layer about the same, and without them layers with equal weights share what was measured. Also sets resident_bytes of
// what it packs.
// Errors are of packing or of kernels that refuse.
//
// Of all threads of the process one measures at a time, else loads would measure each other; the
// deadline moves by the time spent waiting for that.
absl::StatusOr<Measured> Measure(CostTable& table, const sparse::WeightStructure& structure,
                                 WeightCopies& copies, const Device& device, absl::Time deadline);

// Held by the one thread of the process that measures.
[[nodiscard]] std::unique_lock<std::mutex> MeasureAlone();

// The options that Measure times in `bucket`.
std::vector<int> WorthMeasuring(const CostTable& table, size_t bucket);

// What Measure should take, by the cost model.
absl::Duration PredictMeasuring(const CostTable& table);

inline constexpr double kWorthMeasuring = 3.0;

}  // namespace espalier::planner
