// fake_model.h — models and a loader whose timing a test decides: y = 2 · x per item, with a delay
// or behind a gate.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/runtime/model_loader.h"

namespace espalier::testing {

// A door that a model waits at; open unless closed.
class Gate {
 public:
  void Close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
  }
  int waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }
  // Waits until `count` stand at the closed door.
  void AwaitWaiting(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

class FakeState;

// What a test sets and reads while a fake model runs; shared by the versions of a model.
struct FakeControl {
  Gate run_gate, load_gate;
  absl::Duration run_delay = absl::ZeroDuration();
  absl::Duration load_delay = absl::ZeroDuration();
  absl::Status run_status, load_status;
  std::atomic<int> runs{0}, loads{0}, alive{0};
  // Called at the start of a run, set while none is running.
  std::function<void(FakeState&, int64_t batch)> on_run;

  // The batch sizes of all runs so far, in the order of their starts.
  std::vector<int64_t> sizes() {
    const std::lock_guard lock(mutex);
    return run_sizes;
  }
  void Count(int64_t batch) {
    const std::lock_guard lock(mutex);
    run_sizes.push_back(batch);
    ++runs;
  }

  std::mutex mutex;
  std::vector<int64_t> run_sizes;
};

struct FakeModelOptions {
  std::vector<formats::ValueInfo> inputs = {{"x", DType::kFloat32, {kBatch, 4}}};
  std::vector<formats::ValueInfo> outputs = {{"y", DType::kFloat32, {kBatch, 4}}};
  int64_t max_batch_size = 8;
  bool copies_anywhere = false;  // as a GPU
  std::shared_ptr<FakeControl> control = std::make_shared<FakeControl>();
};

class FakeState final : public planner::ExecutionState {
 public:
  explicit FakeState(const FakeModelOptions& options) : copies_anywhere_(options.copies_anywhere) {
    const auto allocate = [&](const std::vector<formats::ValueInfo>& values,
                              std::vector<Tensor>& tensors) {
      for (const formats::ValueInfo& value : values) {
        Shape shape = value.shape;
        if (!shape.empty() && shape[0] == kBatch) shape[0] = options.max_batch_size;
        tensors.push_back(*Tensor::Allocate(value.dtype, shape));
      }
    };
    allocate(options.inputs, inputs);
    allocate(options.outputs, outputs);
  }
  void* input(int i) override { return inputs[i].data(); }
  const void* output(int i) const override { return outputs[i].data(); }
  size_t arena_bytes() const override { return 1024; }
  bool copies_anywhere() const override { return copies_anywhere_; }
  void ReadFrom(int i, size_t offset, size_t bytes, const void* from) override {
    reads.push_back({static_cast<std::byte*>(input(i)) + offset, from, bytes});
  }
  void WriteTo(int i, size_t offset, size_t bytes, void* to) override {
    writes.push_back({to, outputs[i].As<std::byte>() + offset, bytes});
  }

  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  static void Make(std::vector<Copy>& copies) {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    copies.clear();
  }
  std::vector<Tensor> inputs, outputs;
  std::vector<Copy> reads, writes;  // of the next run

 private:
  const bool copies_anywhere_;
};

// Output i is input min(i, last) element by element: doubled when both are FP32 of the same size,
// copied when both have equally many bytes, else left alone.
class FakeModel final : public planner::PreparedModel {
 public:
  explicit FakeModel(FakeModelOptions options) : options_(std::move(options)) {
    planner::LayerPlan layer{
        .name = "fc", .out = 4, .in = 4, .sparsity = 0.75, .structure = "diagonal(1)"};
    layer.buckets.push_back(
        {.batch = 8, .tokens = 8, .chosen = {.spec = {sparse::Layout::kDiagonal, 1, 1}}});
    plan_ = {.layers = {layer}, .source = "deterministic", .device = "fake"};
    ++options_.control->alive;
  }
  ~FakeModel() override { --options_.control->alive; }

  const std::vector<formats::ValueInfo>& inputs() const override { return options_.inputs; }
  const std::vector<formats::ValueInfo>& outputs() const override { return options_.outputs; }
  const planner::ModelPlan& plan() const override { return plan_; }
  size_t weight_bytes() const override { return 16; }
  size_t dense_weight_bytes() const override { return 64; }
  absl::StatusOr<std::unique_ptr<planner::ExecutionState>> NewState() const override {
    return std::make_unique<FakeState>(options_);
  }
  absl::Status Run(planner::ExecutionState& state, int64_t batch) const override {
    auto& fake = static_cast<FakeState&>(state);
    options_.control->Count(batch);
    if (options_.control->on_run) options_.control->on_run(fake, batch);
    options_.control->run_gate.Pass();
    absl::SleepFor(options_.control->run_delay);
    FakeState::Make(fake.reads);
    for (size_t i = 0; i < fake.outputs.size(); ++i) {
      Tensor& from = fake.inputs[std::min(i, fake.inputs.size() - 1)];
      Tensor& to = fake.outputs[i];
      if (from.bytes() != to.bytes()) continue;
      if (from.dtype() == DType::kFloat32 && to.dtype() == DType::kFloat32) {
        for (int64_t e = 0; e < from.elements(); ++e) to.As<float>()[e] = 2 * from.As<float>()[e];
      } else {
        std::copy_n(from.As<char>(), from.bytes(), to.As<char>());
      }
    }
    FakeState::Make(fake.writes);
    return options_.control->run_status;
  }

 private:
  FakeModelOptions options_;
  planner::ModelPlan plan_;
};

// Loads fake models by name; every model that a test wants to load is put into `models` before.
class FakeLoader final : public runtime::ModelLoader {
 public:
  std::map<std::string, FakeModelOptions> models;
  std::map<std::string, inference::ModelConfig> configs;
  std::map<std::string, runtime::Labels> labels;
  std::shared_ptr<const formats::FilesInMemory> last_files;  // of the last load that had some

  absl::StatusOr<inference::ModelConfig> ReadConfig(const std::string& directory) override {
    const std::string name = std::filesystem::path(directory).filename();
    const auto found = configs.find(name);
    return found == configs.end() ? inference::ModelConfig() : found->second;
  }

  absl::StatusOr<runtime::LoadedModel> Load(runtime::LoadJob job) override {
    const auto found = models.find(job.model);
    if (found == models.end()) return absl::NotFoundError("no fake for " + job.model);
    FakeControl& control = *found->second.control;
    ++control.loads;
    if (job.files != nullptr) last_files = job.files;
    control.load_gate.Pass();
    absl::SleepFor(control.load_delay);
    if (!control.load_status.ok()) return control.load_status;
    job.config.set_name(job.model);
    job.config.set_platform("espalier");
    job.config.set_max_batch_size(static_cast<int>(found->second.max_batch_size));
    const auto labelled = labels.find(job.model);
    return runtime::LoadedModel{std::move(job.config), std::make_unique<FakeModel>(found->second),
                                labelled == labels.end() ? runtime::Labels() : labelled->second};
  }
};

// A directory that goes with the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = std::filesystem::temp_directory_path() / "espalier-test-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  // Makes `<path>/<relative>` and everything above it.
  void MakeDirectory(const std::string& relative) const {
    std::filesystem::create_directories(path_ + "/" + relative);
  }
  void Write(const std::string& relative, const std::string& text) const {
    std::ofstream(path_ + "/" + relative) << text;
  }

 private:
  std::string path_;
};

// Polls; true when `condition` came true. A minute, as a busy machine takes long for what is quick elsewhere; what a
// test asserts of a state that changes beside it, it waits for here, and not for another one that changes with it.
template <typename Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < 60'000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

}  // namespace espalier::testing
