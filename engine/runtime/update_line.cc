#include "engine/runtime/update_line.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "engine/runtime/statistics.h"
#include "engine/runtime/stored_weights.h"
#include "engine/updates/journal_chain.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;

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
    status = store.Activate(pending->version, updates::Probation::kNone);
    if (status.ok()) status = fleet().Done(pending->id);
  }
  if (!status.ok()) {
    LogEvent(spdlog::level::warn, "transaction not done",
             {{"model", model_}, {"reason", status.message()}});
  }
}

absl::Status UpdateLine::EditShadow(updates::VersionStore& store, Shadow& shadow, int64_t number) {
  auto steps = store.JournalsBetween(shadow.version, number);
  if (!steps.ok()) return steps.status();
  updates::Journal whole;
  for (updates::JournalStep& step : *steps)
    whole = whole.tensors.empty() ? std::move(step.journal) : Compose(whole, step.journal);
  auto reader = store.Weights(number);
  if (!reader.ok()) return reader.status();
  const auto& tensors = (*reader)->tensors();
  std::vector<planner::TensorEdit> edits;
  for (const updates::TensorJournal& tensor : whole.tensors)
    edits.push_back({tensors[tensor.tensor].name, tensor.entries});
  const auto state = store.List();
  const StoredWeights after(*std::move(reader), state.Find(number)->weights);
  return shadow.model->Edit(edits, after);
}

absl::StatusOr<std::unique_ptr<planner::PreparedModel>> UpdateLine::LoadAnew(
    ModelManager& models, updates::VersionStore& store, const LoadJob& like, int64_t number) {
  const updates::StoreState state = store.List();
  auto weights = store.Weights(number);
  if (!weights.ok()) return weights.status();
  LoadJob job = like;
  const int64_t root = RootOf(state, number);
  // Its own file, if the repository still has it: between two of its versions graphs may differ.
  if (root != 0 && OpenRepository(root).ok()) job.version = root;
  job.weights = std::make_shared<StoredWeights>(*std::move(weights), state.Find(number)->weights);
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
    if (shadow.model != nullptr) {
      const absl::Status edited = EditShadow(**store, shadow, number);
      if (edited.ok()) {
        counts_.Add([](UpdateStatistics& counts) { ++counts.edited; });
        prepared = std::move(shadow.model);
        return;
      }
      LogEvent(absl::IsUnimplemented(edited) ? spdlog::level::debug : spdlog::level::warn,
               "weights are prepared anew, as they could not be edited",
               {{"model", model_}, {"version", number}, {"reason", edited.message()}});
      shadow.model.reset();  // before the next copy comes
    }
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
  auto prepared = Prepare(models, active, number, *std::move(shadow));
  if (!prepared.ok()) return prepared.status();
  auto version = models.MakeVersion(active, number, *std::move(prepared),
                                    static_cast<double>(NowNanos() - began) * 1e-9);
  if (!version.ok()) return version.status();
  other_copy_.Keep(*version);
  return version;
}

}  // namespace espalier::runtime
