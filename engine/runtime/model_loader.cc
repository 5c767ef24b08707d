#include "engine/runtime/model_loader.h"

#include <atomic>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/reader.h"
#include "engine/planner/plan_cache.h"
#include "engine/planner/replicated_model.h"
#include "engine/runtime/log.h"
#include "engine/runtime/placement.h"
#include "engine/runtime/statistics.h"

namespace espalier::runtime {
namespace {

// What a config's precision means on the CPU.
absl::Status CheckPrecision(formats::Precision precision, const std::string& config_path) {
  if (precision == formats::Precision::kAsStored || precision == formats::Precision::kFloat32) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(config_path, ": precision ",
                   precision == formats::Precision::kBFloat16 ? "'bf16'" : "asked for",
                   " is not available on the CPU: expected fp32 (or leave it out)"));
}

// Starting a thread takes some 50 µs; on a busy machine ten times that, times the number of threads.
constexpr int64_t kStartWorkersNanos = 200'000'000;

// The same error, told where it comes from.
absl::Status InFile(const absl::Status& status, absl::string_view file) {
  return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
}

// A device starts its workers when they are first needed, with the scheduling class of the thread
// that needs them. So that this is never a loader in the background, they all start now: each of
// the tasks waits a moment until there are as many threads as the device has.
void StartWorkers(const Device& device) {
  struct Meeting {
    std::atomic<int> there{0};
    int expected = 0;
    int64_t until = 0;
  } meeting;
  meeting.expected = device.threads();
  meeting.until = NowNanos() + kStartWorkersNanos;
  const kernels::KernelContext context = device.MakeContext();
  context.parallel_for(
      context.pool, meeting.expected,
      [](void* arg, int64_t) {
        Meeting& here = *static_cast<Meeting*>(arg);
        ++here.there;
        while (here.there < here.expected && NowNanos() < here.until) std::this_thread::yield();
      },
      &meeting);
}

class FileModelLoader final : public ModelLoader {
 public:
  FileModelLoader(const Devices& devices, std::string plan_cache_dir)
      : devices_(devices), plan_cache_dir_(std::move(plan_cache_dir)) {
    const bool all = devices.instance_cpus.size() > static_cast<size_t>(devices.cpu->threads());
    StartWorkers(all ? *devices.instance_cpus.back() : *devices.cpu);
  }

  absl::StatusOr<inference::ModelConfig> ReadConfig(const std::string& directory) override {
    auto config = formats::ReadModelConfig(directory);
    if (absl::IsNotFound(config.status())) return inference::ModelConfig();
    return config;
  }

  absl::StatusOr<LoadedModel> Load(LoadJob job) override {
    const std::string config_path = job.directory + "/config.pbtxt";
    auto settings = formats::ReadModelSettings(job.config);
    if (!settings.ok()) return InFile(settings.status(), config_path);
    const auto placement = PlaceInstances(job.config, devices_);
    if (!placement.ok()) return InFile(placement.status(), config_path);
    if (placement->gpus.empty()) {
      absl::Status status = CheckPrecision(settings->precision, config_path);
      if (!status.ok()) return status;
    }
    const std::string filename = job.config.default_model_filename().empty()
                                     ? formats::kDefaultModelFilename
                                     : job.config.default_model_filename();
    const std::string folder = absl::StrCat(job.directory, "/", job.version);
    const std::string model_path = absl::StrCat(folder, "/", filename);
    const Read read = [&]() -> absl::StatusOr<formats::ModelGraph> {
      auto graph = job.files == nullptr ? formats::ReadModel(model_path)
                                        : formats::ReadModelInMemory(*job.files, filename, folder);
      if (!graph.ok() || job.weights == nullptr) return graph;
      absl::Status status = formats::ReplaceWeights(*graph, *job.weights);
      if (!status.ok()) return status;
      return graph;
    };
    auto graph = read();
    // A model for GPUs may have to be read again: for the next GPU, or for the CPU.
    if (placement->gpus.empty()) job.files.reset();
    if (!graph.ok()) return graph.status();
    // A config that is not there is made from the model alone.
    const bool has_config = job.config.ByteSizeLong() > 0;
    std::vector<std::string> warnings;
    auto config = formats::CompleteModelConfig(std::move(job.config), job.model, *graph, &warnings);
    if (!config.ok()) {
      return InFile(config.status(), has_config ? config_path : "completed from " + model_path);
    }
    if (settings->threads > 0 && !placement->gpus.empty()) {
      warnings.push_back("parameters.threads: instances run on a GPU");
    }
    for (const std::string& warning : warnings) {
      LogEvent(spdlog::level::warn, "config setting without effect",
               {{"model", job.model}, {"version", job.version}, {"setting", warning}});
    }
    auto labels = ReadLabels(job.directory, *config);
    if (!labels.ok()) return labels.status();
    planner::PrepareOptions options;
    options.max_batch_size = config->max_batch_size();
    options.weight_memory = settings->weight_memory;
    options.deterministic = settings->deterministic;
    options.flush_subnormals = settings->flush_subnormals;
    options.precision = settings->precision;
    // A new version of a known structure must not lose what was measured for the old one.
    options.plan_cache_dir =
        plan_cache_dir_.empty() ? std::string(planner::kPlansInMemory) : plan_cache_dir_;
    options.measure_budget_millis = job.measure_budget_millis;
    options.measure_peak = true;
    auto model =
        Prepare(*std::move(graph), read, *placement, devices_.CpuWith(settings->threads), options);
    if (!model.ok()) return model.status();
    return LoadedModel{*std::move(config), *std::move(model), *std::move(labels)};
  }

 private:
  using Read = std::function<absl::StatusOr<formats::ModelGraph>()>;
  using Prepared = absl::StatusOr<std::unique_ptr<planner::PreparedModel>>;

  Prepared Prepare(formats::ModelGraph graph, const Read& read, const Placement& placement,
                   const Device& cpu, const planner::PrepareOptions& options) const {
    if (placement.gpus.empty()) {
      return planner::PreparedModel::Prepare(std::move(graph), cpu, options);
    }
    Prepared model = PrepareOnGpus(std::move(graph), read, placement, options);
    const bool cpu_will_do = !placement.demands_gpu &&
                             options.precision != formats::Precision::kBFloat16 &&
                             absl::IsUnimplemented(model.status());
    if (!cpu_will_do) return model;
    LogEvent(spdlog::level::warn, "model runs on the CPU: the GPU has no kernel for it",
             {{"reason", model.status().message()}});
    auto again = read();  // preparing consumed the first one
    if (!again.ok()) return again.status();
    return planner::PreparedModel::Prepare(*std::move(again), cpu, options);
  }

  // A copy of the weights on each GPU that has an instance.
  Prepared PrepareOnGpus(formats::ModelGraph graph, const Read& read, const Placement& placement,
                         const planner::PrepareOptions& options) const {
    std::vector<std::unique_ptr<planner::PreparedModel>> replicas;
    std::vector<int> replica_of(placement.gpus.size());
    for (const auto& gpu : devices_.gpus) {
      bool used = false;
      for (size_t i = 0; i < placement.gpus.size(); ++i) {
        if (placement.gpus[i] != gpu->index()) continue;
        replica_of[i] = static_cast<int>(replicas.size());
        used = true;
      }
      if (!used) continue;
      if (!replicas.empty()) {
        auto again = read();
        if (!again.ok()) return again.status();
        graph = *std::move(again);
      }
      Prepared replica = planner::PreparedModel::Prepare(std::move(graph), *gpu, options);
      if (!replica.ok()) return replica;
      replicas.push_back(*std::move(replica));
    }
    return planner::MakeReplicatedModel(std::move(replicas), std::move(replica_of));
  }

  const Devices& devices_;
  const std::string plan_cache_dir_;
};

}  // namespace

std::unique_ptr<ModelLoader> MakeFileModelLoader(const Devices& devices,
                                                 std::string plan_cache_dir) {
  return std::make_unique<FileModelLoader>(devices, std::move(plan_cache_dir));
}

}  // namespace espalier::runtime
