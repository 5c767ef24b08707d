#include "engine/runtime/update_line.h"

#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "engine/runtime/statistics.h"
#include "engine/runtime/stored_weights.h"
#include "engine/tensor/buffer.h"
#include "engine/updates/journal_chain.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

constexpr size_t kLargeWeightBytes = size_t{32} << 20;

absl::StatusOr<std::shared_ptr<const StoredWeights>> OpenWeights(const updates::VersionStore& store,
                                                                 int64_t number) {
  auto reader = store.Weights(number);
  if (!reader.ok()) return reader.status();
  return std::make_shared<const StoredWeights>(*std::move(reader),
                                               store.List().Find(number)->weights);
}

// Weights that are opened when somebody reads them, which few edits need: the way to them may be long.
class LaterWeights final : public formats::WeightSource {
 public:
  using Open = std::function<absl::StatusOr<std::shared_ptr<const StoredWeights>>()>;
  explicit LaterWeights(Open open) : open_(std::move(open)) {}

  bool Has(const std::string& initializer) const override {
    const auto& weights = Opened();
    return !weights.ok() || (*weights)->Has(initializer);  // Read says what is wrong
  }
  absl::Status Read(const std::string& initializer, Tensor& tensor) const override {
    const auto& weights = Opened();
    return weights.ok() ? (*weights)->Read(initializer, tensor) : weights.status();
  }

 private:
  const absl::StatusOr<std::shared_ptr<const StoredWeights>>& Opened() const {
    const std::lock_guard lock(mutex_);
    if (!weights_) weights_ = open_();
    return *weights_;
  }

  const Open open_;
  mutable std::mutex mutex_;
  mutable std::optional<absl::StatusOr<std::shared_ptr<const StoredWeights>>> weights_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void UpdateLine::Announce() {
  const std::lock_guard lock(mutex_);
  if (store_ == nullptr) return;
  std::map<int64_t, std::pair<updates::UpdateState, std::string>> now;
  for (const updates::VersionRecord& record : store_->List().versions) {
    auto state = std::make_pair(record.state, record.reason);
    if (const auto before = announced_.find(record.number);
        before == announced_.end() || before->second != state) {
      events_.Add({.seconds = record.seconds,
                   .model = model_,
                   .version = record.number,
                   .state = record.state,
                   .reason = record.reason});
    }
    now.emplace(record.number, std::move(state));
  }
  announced_ = std::move(now);
}

updates::FleetLog& UpdateLine::fleet() const {
  const std::lock_guard lock(mutex_);
  return *fleet_;
}

int64_t UpdateLine::NowSeconds() { return absl::ToUnixSeconds(absl::Now()); }

absl::Status UpdateLine::SettleFleet() {
  using updates::FleetDecision;
  const auto pending = fleet().Pending();
  if (!pending || pending->decision != FleetDecision::kUndecided) return absl::OkStatus();
  FleetDecision decision = FleetDecision::kAbort;
  if (pending->decides()) {
    if (NowSeconds() < pending->expires_seconds) return absl::OkStatus();
  } else {
    if (!options_.ask_participant) return absl::UnavailableError("nobody can be asked");
    auto answer = options_.ask_participant(pending->participants[0], model_, pending->id);
    if (!answer.ok()) return answer.status();
    if (*answer == FleetDecision::kUndecided) return absl::OkStatus();
    decision = *answer;
  }
  return fleet().Decide(pending->id, decision, NowSeconds()).status();
}

void UpdateLine::FollowFleet(updates::VersionStore& store) {
  absl::Status status = SettleFleet();
  const auto pending = fleet().Pending();
  if (status.ok() && pending && pending->decision == updates::FleetDecision::kCommit) {
    // What serves is not loaded yet, so that nothing is known of its conduct.
    if (!store.List().IsQuarantined(pending->version)) {
      status = store.Activate(pending->version,
                              updates::BeginProbation(pending->probation, {}, absl::Now()));
    }
    if (status.ok()) status = fleet().Done(pending->id);
  }
  if (!status.ok()) {
    LogEvent(spdlog::level::warn, "transaction not done",
             {{"model", model_}, {"reason", status.message()}});
  }
}

absl::Status UpdateLine::EditShadow(updates::VersionStore& store,
                                    const ModelManager::Active& active, Shadow& shadow,
                                    int64_t number) {
  const int64_t from = shadow.model != nullptr ? shadow.version : active.version->version();
  auto changes = store.JournalsBetween(from, number);
  if (!changes.ok()) return changes.status();
  const auto tensors = store.Tensors(number);
  if (!tensors.ok()) return tensors.status();
  if (shadow.model == nullptr) {
    auto clone = active.version->model().Clone();
    if (!clone.ok()) return clone.status();
    shadow = {*std::move(clone), from};
  }
  const LaterWeights after([&] { return OpenWeights(store, number); });
  const auto edits = shadow.model->BeginEdit(after);
  if (!edits.ok()) return edits.status();
  for (;;) {
    const auto change = changes->Next();
    if (!change.ok()) return change.status();
    if (!*change) return (*edits)->Finish();
    if ((*change)->tensor >= tensors->size())
      return absl::DataLossError(StrCat("a journal changes tensor ", (*change)->tensor));
    const planner::TensorEdit piece = {(*tensors)[(*change)->tensor].name, (*change)->entries};
    if (auto status = (*edits)->Apply(piece); !status.ok()) return status;
  }
}

void UpdateLine::PlanDrifted(updates::VersionStore& store, planner::PreparedModel& model,
                             int64_t number) {
  const LaterWeights now([&] { return OpenWeights(store, number); });
  for (const planner::WeightReplan& replan : model.PlanDrifted(now)) {
    counts_.Add([&](UpdateStatistics& counts) {
      ++(!replan.status.ok() ? counts.replans_failed
         : replan.changed    ? counts.replans_changed
                             : counts.replans_kept);
    });
    if (!replan.status.ok()) {
      LogEvent(spdlog::level::warn, "weight not planned anew, it runs as before",
               {{"model", model_},
                {"version", number},
                {"weight", replan.weight},
                {"reason", replan.status.message()}});
      continue;
    }
    LogEvent(replan.changed ? spdlog::level::info : spdlog::level::debug,
             "weight planned anew, as its non-zeros moved",
             {{"model", model_},
              {"version", number},
              {"weight", replan.weight},
              {"moved_percent", 100 * replan.moved},
              {"before", replan.before},
              {"after", replan.after}});
  }
}

absl::StatusOr<std::unique_ptr<planner::PreparedModel>> UpdateLine::LoadAnew(
    ModelManager& models, updates::VersionStore& store, const LoadJob& like, int64_t number) {
  const updates::StoreState state = store.List();
  auto weights = OpenWeights(store, number);
  if (!weights.ok()) return weights.status();
  LoadJob job = like;
  const int64_t root = RootOf(state, number);
  // Its own file, if the repository still has it: between two of its versions graphs may differ.
  if (root != 0 && OpenRepository(root).ok()) job.version = root;
  job.weights = *std::move(weights);
  job.measure_budget_millis = 0;  // beside requests
  auto loaded = models.LoadModel(std::move(job));
  if (!loaded.ok()) return loaded.status();
  return std::move(loaded->model);
}

absl::StatusOr<std::unique_ptr<planner::PreparedModel>> UpdateLine::Prepare(
    ModelManager& models, const ModelManager::Active& active, int64_t number, Shadow shadow) {
  auto store = Store();
  if (!store.ok()) return store.status();
  absl::StatusOr<std::unique_ptr<planner::PreparedModel>> prepared = nullptr;
  models.InBackground([&] {
    const absl::Status edited = EditShadow(**store, active, shadow, number);
    if (edited.ok()) {
      counts_.Add([](UpdateStatistics& counts) { ++counts.edited; });
      PlanDrifted(**store, *shadow.model, number);
      prepared = std::move(shadow.model);
      return;
    }
    const bool expected = absl::IsUnimplemented(edited) || absl::IsNotFound(edited);
    LogEvent(expected ? spdlog::level::debug : spdlog::level::warn,
             "weights are prepared anew, as they could not be edited",
             {{"model", model_}, {"version", number}, {"reason", edited.message()}});
    shadow.model.reset();  // before the next copy comes
    prepared = LoadAnew(models, **store, *active.job, number);
    if (prepared.ok()) counts_.Add([](UpdateStatistics& counts) { ++counts.rebuilt; });
  });
  return prepared;
}

absl::StatusOr<VersionHandle> UpdateLine::MakeReady(ModelManager& models,
                                                    const ModelManager::Active& active,
                                                    int64_t number) {
  if (active.version->version() == number) return active.version;
  if (VersionHandle ready = other_copy_.Ready(number); ready != nullptr) return ready;
  if (auto served = models.Find(model_, StrCat(number)); served.ok()) return *served;
  const int64_t began = NowNanos();
  auto shadow = other_copy_.Take(options_.patience);
  if (!shadow.ok()) return shadow.status();
  // What it took to look through a delta, and then to edit, is not to be kept beside both copies: a tenth of a large
  // model's weights. Here and not in the background, where a thread may nap with the allocator's locks.
  const bool is_large = active.version->model().weight_bytes() >= kLargeWeightBytes;
  if (is_large) ReturnFreedMemory();
  auto prepared = Prepare(models, active, number, *std::move(shadow));
  if (is_large) ReturnFreedMemory();
  if (!prepared.ok()) return prepared.status();
  auto version = models.MakeVersion(active, number, *std::move(prepared),
                                    static_cast<double>(NowNanos() - began) * 1e-9);
  if (!version.ok()) return version.status();
  other_copy_.Keep(*version);
  return version;
}

}  // namespace espalier::runtime
