#include "service/model_messages.h"

#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

void FillTensors(
    const std::vector<runtime::TensorSpec>& specs,
    google::protobuf::RepeatedPtrField<inference::ModelMetadataResponse::TensorMetadata>* tensors) {
  for (const runtime::TensorSpec& spec : specs) {
    auto* tensor = tensors->Add();
    tensor->set_name(spec.name);
    tensor->set_datatype(NameOf(spec.dtype));
    tensor->mutable_shape()->Add(spec.shape.begin(), spec.shape.end());
  }
}

void Fill(const runtime::DurationCounter& counter, inference::StatisticDuration* duration) {
  duration->set_count(counter.count.load(std::memory_order_relaxed));
  duration->set_ns(counter.nanos.load(std::memory_order_relaxed));
}

void Fill(uint64_t count, const std::atomic<uint64_t>& nanos,
          inference::StatisticDuration* duration) {
  duration->set_count(count);
  duration->set_ns(nanos.load(std::memory_order_relaxed));
}

}  // namespace

void FillMetadata(const runtime::ServedVersion& version, const std::vector<int64_t>& ready_versions,
                  inference::ModelMetadataResponse* response) {
  response->set_name(version.name());
  for (const int64_t number : ready_versions) response->add_versions(absl::StrCat(number));
  response->set_platform(version.config().platform());
  FillTensors(version.signature().inputs, response->mutable_inputs());
  FillTensors(version.signature().outputs, response->mutable_outputs());
}

void FillStatistics(const runtime::ServedVersion& version, inference::ModelStatistics* statistics) {
  const runtime::VersionStatistics& from = version.statistics();
  statistics->set_name(version.name());
  statistics->set_version(absl::StrCat(version.version()));
  statistics->set_last_inference(
      static_cast<uint64_t>(from.last_inference_millis.load(std::memory_order_relaxed)));
  statistics->set_inference_count(from.inferences.load(std::memory_order_relaxed));
  statistics->set_execution_count(from.executions.load(std::memory_order_relaxed));
  auto* sums = statistics->mutable_inference_stats();
  Fill(from.success, sums->mutable_success());
  Fill(from.failure, sums->mutable_fail());
  Fill(from.phases[static_cast<int>(runtime::Phase::kQueue)], sums->mutable_queue());
  Fill(from.phases[static_cast<int>(runtime::Phase::kComputeInput)], sums->mutable_compute_input());
  Fill(from.phases[static_cast<int>(runtime::Phase::kComputeInfer)], sums->mutable_compute_infer());
  Fill(from.phases[static_cast<int>(runtime::Phase::kComputeOutput)],
       sums->mutable_compute_output());
  for (size_t size = 0; size < from.by_batch_size().size(); ++size) {
    const auto& execution = from.by_batch_size()[size];
    const uint64_t count = execution.count.load(std::memory_order_relaxed);
    if (count == 0) continue;
    auto* batch = statistics->add_batch_stats();
    batch->set_batch_size(size);
    Fill(count, execution.input_nanos, batch->mutable_compute_input());
    Fill(count, execution.infer_nanos, batch->mutable_compute_infer());
    Fill(count, execution.output_nanos, batch->mutable_compute_output());
  }
  auto* memory = statistics->add_memory_usage();
  memory->set_type("CPU");
  memory->set_byte_size(version.model().weight_bytes() + version.arena_bytes());
}

void FillIndex(const runtime::ModelManager::IndexEntry& entry,
               inference::RepositoryIndexResponse::ModelIndex* index) {
  index->set_name(entry.name);
  if (entry.version > 0) index->set_version(absl::StrCat(entry.version));
  index->set_state(NameOf(entry.state));
  index->set_reason(entry.reason);
}

}  // namespace espalier::service
