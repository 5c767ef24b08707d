#include "engine/runtime/model_loader.h"

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/reader.h"
#include "engine/runtime/log.h"
#include "engine/runtime/statistics.h"

namespace espalier::runtime {
namespace {

// What a config's precision means on this device.
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
  FileModelLoader(const Device& device, std::string plan_cache_dir)
      : device_(device), plan_cache_dir_(std::move(plan_cache_dir)) {
    StartWorkers(device);
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
    if (absl::Status status = CheckPrecision(settings->precision, config_path); !status.ok()) {
      return status;
    }
    const std::string filename = job.config.default_model_filename().empty()
                                     ? formats::kDefaultModelFilename
                                     : job.config.default_model_filename();
    const std::string folder = absl::StrCat(job.directory, "/", job.version);
    const std::string model_path = absl::StrCat(folder, "/", filename);
    auto graph = job.files == nullptr ? formats::ReadModel(model_path)
                                      : formats::ReadModelInMemory(*job.files, filename, folder);
    job.files.reset();
    if (!graph.ok()) return graph.status();
    // A config that is not there is made from the model alone.
    const bool has_config = job.config.ByteSizeLong() > 0;
    std::vector<std::string> warnings;
    auto config = formats::CompleteModelConfig(std::move(job.config), job.model, *graph, &warnings);
    if (!config.ok()) {
      return InFile(config.status(), has_config ? config_path : "completed from " + model_path);
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
    options.plan_cache_dir = plan_cache_dir_;
    options.measure_budget_millis = job.measure_budget_millis;
    auto model = planner::PreparedModel::Prepare(*std::move(graph), device_, options);
    if (!model.ok()) return model.status();
    return LoadedModel{*std::move(config), *std::move(model), *std::move(labels)};
  }

 private:
  const Device& device_;
  const std::string plan_cache_dir_;
};

}  // namespace

std::unique_ptr<ModelLoader> MakeFileModelLoader(const Device& device, std::string plan_cache_dir) {
  return std::make_unique<FileModelLoader>(device, std::move(plan_cache_dir));
}

}  // namespace espalier::runtime
