// update_fixture.h — a server's models that take updates, and a publisher of versions of a small one.
//
// Weights and inputs are small integers, so that every sum is exact: what a version answers is known
// bit for bit, whatever layout its weights are in and in whatever order they are added.
#pragma once

#include <atomic>
#include <filesystem>
#include <fstream>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/update_manager.h"
#include "engine/tensor/devices.h"
#include "engine/updates/create_delta.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::testing {

// y = x · Wᵀ + b, x FP32 [N, 24], W [16, 24].
struct LinearWeights {
  static constexpr int kIn = 24, kOut = 16;
  std::vector<float> w = std::vector<float>(kIn * kOut), b = std::vector<float>(kOut);

  std::vector<float> Answer(const std::vector<float>& x) const {
    std::vector<float> y = b;
    for (int o = 0; o < kOut; ++o) {
      for (int i = 0; i < kIn; ++i) y[o] += w[o * kIn + i] * x[i];
    }
    return y;
  }
  std::string Onnx() const {
    onnx::ModelProto model = SmallModel();
    auto& graph = *model.mutable_graph();
    const auto features = [](onnx::ValueInfoProto& value, int64_t count) {
      value.mutable_type()->mutable_tensor_type()->mutable_shape()->mutable_dim(1)->set_dim_value(
          count);
    };
    features(*graph.mutable_input(0), kIn);
    features(*graph.mutable_output(0), kOut);
    graph.mutable_node()->RemoveLast();  // Relu
    graph.mutable_node(0)->set_output(0, "y");
    *graph.mutable_initializer(0) = MakeRaw("w", onnx::TensorProto::FLOAT, {kOut, kIn}, w);
    *graph.mutable_initializer(1) = MakeRaw("b", onnx::TensorProto::FLOAT, {kOut}, b);
    return model.SerializeAsString();
  }
};

struct DeltaTerms {
  int64_t sequence = 0;  // 0: the version's number
  int64_t expires_seconds = 0;
  std::string model;  // empty: the publisher's
  std::vector<updates::PrivateKey> keys;
};

// Version 1 is the repository's; any other is made from one that exists.
class LinearPublisher {
 public:
  explicit LinearPublisher(std::string model = "m") : model_(std::move(model)) {
    LinearWeights first;
    std::mt19937 random(7);
    for (float& value : first.w)
      value = random() % 4 == 0 ? static_cast<float>(random() % 9) - 4 : 0.0f;
    for (float& value : first.b) value = static_cast<float>(random() % 5);
    Remember(1, std::move(first));
  }
  const LinearWeights& weights(int64_t version) const { return weights_.at(version); }
  std::string FileOf(int64_t version) const {
    return absl::StrCat(folder_.path(), "/", version, ".onnx");
  }
  // A few weights change, come and go; the number alone decides which.
  void MakeVersion(int64_t base, int64_t version) {
    LinearWeights next = weights_.at(base);
    std::mt19937 random(static_cast<uint32_t>(version));
    for (int i = 0; i < 10; ++i) {
      float& value = next.w[random() % next.w.size()];
      value = value == 0 || random() % 2 == 0 ? static_cast<float>(random() % 9) - 4 : 0.0f;
    }
    next.b[0] = static_cast<float>(version);  // so that no two are the same
    Remember(version, std::move(next));
  }
  void SetVersion(int64_t version, LinearWeights weights) { Remember(version, std::move(weights)); }
  std::string Delta(int64_t base, int64_t version, const DeltaTerms& terms = {}) const {
    auto before = updates::Checkpoint::Open(FileOf(base));
    auto after = updates::Checkpoint::Open(FileOf(version));
    EXPECT_TRUE(before.ok() && after.ok());
    const std::string out = folder_.path() + "/delta.espd";
    updates::CreateOptions options;
    options.model = terms.model.empty() ? model_ : terms.model;
    options.base_version = base;
    options.target_version = version;
    options.sequence = terms.sequence == 0 ? version : terms.sequence;
    options.created_seconds = 1'700'000'000;
    options.expires_seconds = terms.expires_seconds;
    options.keys = terms.keys;
    auto manifest = updates::CreateDelta(**before, **after, out, options);
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    std::ifstream file(out, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  void Remember(int64_t version, LinearWeights weights) {
    std::ofstream(FileOf(version), std::ios::binary) << weights.Onnx();
    weights_[version] = std::move(weights);
  }

  const std::string model_;
  TemporaryDirectory folder_;
  std::map<int64_t, LinearWeights> weights_;
};

// Counts the models that are in memory; lets a test refuse to edit, or fail to load.
class CountingLoader final : public runtime::ModelLoader {
 public:
  struct Control {
    std::atomic<int> alive{0}, most{0}, loads{0}, edits{0}, clones{0};
    std::atomic<bool> edits_unimplemented{false}, loads_fail{false}, runs_fail{false},
        plans_fail{false};
    Gate prepare_gate;  // of loads and clones
    Gate plan_gate;     // of asking the planner again
  };
  CountingLoader(std::unique_ptr<runtime::ModelLoader> inner, std::shared_ptr<Control> control)
      : inner_(std::move(inner)), control_(std::move(control)) {}

  absl::StatusOr<inference::ModelConfig> ReadConfig(const std::string& directory) override {
    return inner_->ReadConfig(directory);
  }
  absl::StatusOr<runtime::LoadedModel> Load(runtime::LoadJob job) override {
    ++control_->loads;
    control_->prepare_gate.Pass();
    if (control_->loads_fail) return absl::ResourceExhaustedError("no memory, as asked for");
    auto loaded = inner_->Load(std::move(job));
    if (loaded.ok()) loaded->model = std::make_unique<Counted>(std::move(loaded->model), control_);
    return loaded;
  }

 private:
  class Counted final : public planner::PreparedModel {
   public:
    Counted(std::unique_ptr<planner::PreparedModel> inner, std::shared_ptr<Control> control)
        : inner_(std::move(inner)), control_(std::move(control)) {
      const int alive = ++control_->alive;
      if (alive > control_->most) control_->most = alive;
    }
    ~Counted() override { --control_->alive; }
    const std::vector<formats::ValueInfo>& inputs() const override { return inner_->inputs(); }
    const std::vector<formats::ValueInfo>& outputs() const override { return inner_->outputs(); }
    const planner::ModelPlan& plan() const override { return inner_->plan(); }
    size_t weight_bytes() const override { return inner_->weight_bytes(); }
    size_t dense_weight_bytes() const override { return inner_->dense_weight_bytes(); }
    absl::StatusOr<std::unique_ptr<planner::ExecutionState>> NewState() const override {
      return inner_->NewState();
    }
    absl::Status Run(planner::ExecutionState& state, int64_t batch) const override {
      if (control_->runs_fail) return absl::InternalError("as asked for");
      return inner_->Run(state, batch);
    }
    absl::StatusOr<std::unique_ptr<PreparedModel>> Clone() const override {
      control_->prepare_gate.Pass();
      auto clone = inner_->Clone();
      if (!clone.ok()) return clone.status();
      ++control_->clones;
      return std::make_unique<Counted>(*std::move(clone), control_);
    }
    absl::StatusOr<std::unique_ptr<planner::WeightEdits>> BeginEdit(
        const formats::WeightSource& after) override {
      ++control_->edits;
      if (control_->edits_unimplemented) return absl::UnimplementedError("as asked for");
      return inner_->BeginEdit(after);
    }
    std::vector<planner::WeightReplan> PlanDrifted(const formats::WeightSource& now) override {
      control_->plan_gate.Pass();
      class Failing final : public formats::WeightSource {
        bool Has(const std::string&) const override { return true; }
        absl::Status Read(const std::string&, Tensor&) const override {
          return absl::ResourceExhaustedError("no memory, as asked for");
        }
      };
      return control_->plans_fail ? inner_->PlanDrifted(Failing()) : inner_->PlanDrifted(now);
    }

   private:
    const std::unique_ptr<planner::PreparedModel> inner_;
    const std::shared_ptr<Control> control_;
  };

  const std::unique_ptr<runtime::ModelLoader> inner_;
  const std::shared_ptr<Control> control_;
};

class UpdateFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.state_dir = state_.path();
    AddRepositoryVersion(1);
  }
  void TearDown() override { StopServer(); }

  void AddRepositoryVersion(int64_t version, const std::string& model = "m") {
    repository_.MakeDirectory(absl::StrCat(model, "/", version));
    std::filesystem::copy_file(
        publisher_.FileOf(version),
        absl::StrCat(repository_.path(), "/", model, "/", version, "/model.onnx"),
        std::filesystem::copy_options::overwrite_existing);
    if (!std::filesystem::exists(repository_.path() + "/" + model + "/config.pbtxt"))
      repository_.Write(model + "/config.pbtxt", config_);
  }

  void StartServer() {
    auto updates = runtime::UpdateManager::Create(options_);
    ASSERT_TRUE(updates.ok()) << updates.status();
    updates_ = *std::move(updates);
    std::latch started{1};
    runtime::ModelManager::Options options;
    options.repositories = {repository_.path()};
    options.loader_threads = 2;
    options.measure_budget_millis = 200;
    options.on_started = [&started] { started.count_down(); };
    options.updates = updates_.get();
    manager_ = std::make_unique<runtime::ModelManager>(
        options,
        std::make_unique<CountingLoader>(runtime::MakeFileModelLoader(devices_, ""), control_));
    updates_->Attach(*manager_);
    ASSERT_TRUE(manager_->Start().ok());
    started.wait();
  }
  void StopServer() {
    manager_.reset();
    updates_.reset();
  }
  void RestartServer() {
    StopServer();
    StartServer();
  }

  absl::StatusOr<int64_t> Push(const std::string& delta, const std::string& model = "m") {
    const updates::Digest file = updates::Sha256Of(delta);
    auto offset = updates_->BeginReceive(model, file, delta.size());
    if (!offset.ok()) return offset.status();
    for (size_t at = *offset; at < delta.size(); at += 300) {
      auto status = updates_->Append(model, file, at, absl::string_view(delta).substr(at, 300));
      if (!status.ok()) return status;
    }
    return updates_->Stage(model, file);
  }
  // Made from `base`, staged, and served.
  void Publish(int64_t base, int64_t version) {
    publisher_.MakeVersion(base, version);
    auto staged = Push(publisher_.Delta(base, version));
    ASSERT_TRUE(staged.ok()) << staged.status();
    const absl::Status activated = updates_->Activate("m", version);
    ASSERT_TRUE(activated.ok()) << activated;
  }
  absl::Status Load(const std::string& model, runtime::LoadRequest request = {}) {
    absl::Status result;
    std::latch done{1};
    manager_->Load(model, std::move(request), [&](absl::Status status) {
      result = std::move(status);
      done.count_down();
    });
    done.wait();
    return result;
  }

  static std::vector<float> SomeInput(uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<float> x(LinearWeights::kIn);
    for (float& value : x) value = static_cast<float>(random() % 17) - 8;
    return x;
  }
  static std::string Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
  }
  static absl::Status AskOf(const runtime::VersionHandle& version, uint32_t seed = 1) {
    TestRequest request;
    request.AddInput("x", "FP32", {1, LinearWeights::kIn}, Bytes(SomeInput(seed)));
    request.Submit(version);
    return request.status();
  }
  // Requests that the model fails.
  void AskInVain(int count, const std::string& model = "m") {
    control_->runs_fail = true;
    const runtime::VersionHandle asked = *manager_->Find(model, "");
    for (int i = 0; i < count; ++i) EXPECT_EQ(AskOf(asked).code(), absl::StatusCode::kInternal);
    control_->runs_fail = false;
  }
  // Asks; fails the test unless the answer is that of the version which gave it. Its number, or 0.
  int64_t Ask(uint32_t seed = 1, const std::string& version = "", const std::string& model = "m") {
    auto found = manager_->Find(model, version);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok()) return 0;
    const std::vector<float> x = SomeInput(seed);
    TestRequest request;
    request.AddInput("x", "FP32", {1, LinearWeights::kIn}, Bytes(x));
    request.Submit(*found);
    EXPECT_TRUE(request.status().ok()) << request.status();
    if (!request.status().ok()) return 0;
    const int64_t number = (*found)->version();
    EXPECT_EQ(request.Floats(), publisher_.weights(number).Answer(x)) << "version " << number;
    return number;
  }
  runtime::ModelVersions Versions(const std::string& model = "m") {
    auto list = updates_->List(model);
    EXPECT_TRUE(list.ok()) << list.status();
    return list.ok() ? list->front() : runtime::ModelVersions();
  }
  updates::UpdateState StateOf(int64_t version) {
    const runtime::ModelVersions versions = Versions();
    const auto* record = versions.store.Find(version);
    EXPECT_NE(record, nullptr) << "version " << version;
    return record == nullptr ? updates::UpdateState::kReceiving : record->state;
  }
  runtime::UpdateStatistics Counts() {
    for (auto& counts : updates_->Statistics()) {
      if (counts.model == "m") return counts;
    }
    return {};
  }

  std::string config_ = R"(parameters { key: "deterministic" value { string_value: "true" } })";
  LinearPublisher publisher_;
  TemporaryDirectory repository_, state_;
  Devices devices_ = *OpenDevices({.mode = DeviceMode::kCpu, .threads = 2});
  std::shared_ptr<CountingLoader::Control> control_ = std::make_shared<CountingLoader::Control>();
  runtime::UpdateManager::Options options_;
  std::unique_ptr<runtime::UpdateManager> updates_;
  std::unique_ptr<runtime::ModelManager> manager_;
};

}  // namespace espalier::testing
