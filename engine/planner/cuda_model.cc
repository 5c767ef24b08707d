#include "engine/planner/cuda_model.h"

#include <algorithm>
#include <utility>

#include "engine/graph/cuda_executor.h"
#include "engine/graph/device_forms.h"
#include "engine/planner/executor_model.h"

namespace espalier::planner {
namespace {

class CudaModel final : public ExecutorModel<graph::CudaExecutor, graph::CudaExecutorState> {
 public:
  explicit CudaModel(graph::Program program) : ExecutorModel(std::move(program)) {}

  absl::Status Plan(const CudaDevice& device, const PrepareOptions& options) {
    const DType compute = ComputeType(program_, options.precision);
    graph::PrepareForDevice(program_, compute);
    auto planned = PlanModel(program_, device, options, compute);
    if (!planned.ok()) return planned.status();
    Keep(*planned);
    auto executor = graph::CudaExecutor::Create(program_, device, std::move(planned->buckets),
                                                std::move(planned->bindings));
    if (!executor.ok()) return executor.status();
    executor_ = *std::move(executor);
    return absl::OkStatus();
  }
};

}  // namespace

DType ComputeType(const graph::Program& program, formats::Precision precision) {
  if (precision == formats::Precision::kBFloat16) return DType::kBFloat16;
  if (precision == formats::Precision::kFloat32 || program.weights.empty()) return DType::kFloat32;
  const DType first = program.weights[0].tensor->dtype();
  const bool alike =
      std::all_of(program.weights.begin(), program.weights.end(),
                  [&](const graph::Weight& weight) { return weight.tensor->dtype() == first; });
  return alike && graph::StorageOf(first) != first ? first : DType::kFloat32;
}

absl::StatusOr<std::unique_ptr<PreparedModel>> PrepareOnCuda(graph::Program program,
                                                             const CudaDevice& device,
                                                             const PrepareOptions& options) {
  auto model = std::make_unique<CudaModel>(std::move(program));
  if (absl::Status status = model->Plan(device, options); !status.ok()) return status;
  return model;
}

}  // namespace espalier::planner
