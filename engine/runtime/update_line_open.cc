// What a load is to bring for a model whose weights are updated.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/reader.h"
#include "engine/runtime/log.h"
#include "engine/runtime/stored_weights.h"
#include "engine/runtime/thread_priority.h"
#include "engine/runtime/update_line.h"
#include "engine/updates/version_graph.h"
#include "engine/updates/weight_digest.h"

namespace espalier::runtime {
namespace {

using absl::StrCat;
using updates::UpdateState;

bool Has(const std::vector<int64_t>& versions, int64_t version) {
  return std::binary_search(versions.begin(), versions.end(), version);
}

}  // namespace

int64_t RootOf(const updates::StoreState& state, int64_t version) {
  const auto way = updates::WayTo(
      state, version, [](const updates::VersionRecord& record) { return record.repository; });
  return way.empty() ? 0 : way.back();
}

std::string UpdateLine::PathOf(int64_t version) const {
  return StrCat(directory_, "/", version, "/", filename_);
}

absl::StatusOr<std::shared_ptr<const updates::TensorReader>> UpdateLine::OpenRepository(
    int64_t version) {
  std::string path;
  {
    const std::lock_guard lock(mutex_);
    if (const auto base = bases_.find(version); base != bases_.end())
      return std::shared_ptr<const updates::TensorReader>(base->second.checkpoint);
    path = PathOf(version);
  }
  auto checkpoint = updates::Checkpoint::Open(path);
  if (!checkpoint.ok()) return checkpoint.status();
  return std::shared_ptr<const updates::TensorReader>(*std::move(checkpoint));
}

absl::StatusOr<updates::Digest> UpdateLine::DigestOfBase(int64_t version,
                                                         const std::string& content) {
  std::string path;
  {
    const std::lock_guard lock(mutex_);
    const auto base = bases_.find(version);
    if (base != bases_.end() && !content.empty() && base->second.content == content)
      return base->second.weights;
    path = PathOf(version);
  }
  auto checkpoint = updates::Checkpoint::Open(path);
  if (!checkpoint.ok()) return checkpoint.status();
  auto digest = updates::DigestOf(**checkpoint);
  if (!digest.ok()) return digest.status();
  const std::lock_guard lock(mutex_);
  bases_[version] = {content, *digest, *std::move(checkpoint)};
  return *digest;
}

absl::StatusOr<updates::VersionStore*> UpdateLine::Store() const {
  const std::lock_guard lock(mutex_);
  if (store_ != nullptr) return store_.get();
  return absl::Status(no_store_.code(),
                      StrCat("model '", model_, "' takes no updates: ", no_store_.message()));
}

absl::Status UpdateLine::Open(const LoadRequest& request, const Inspection& found,
                              int64_t highest) {
  const auto state = updates::ReadStoreState(
      *options_.files, StrCat(options_.state_dir, "/models/", model_, "/state"));
  if (!state.ok() && !absl::IsNotFound(state.status())) return state.status();
  int64_t number = highest;
  if (state.ok()) {
    const int64_t root = RootOf(*state, state->active);
    if (Has(found.available, root)) number = root;
  }
  const FoundVersion base = InspectVersion(request, found, number, {});
  if (!base.status.ok()) return base.status;
  auto digest = DigestOfBase(number, base.content.digest);
  if (!digest.ok()) return digest.status();
  auto store = updates::VersionStore::Open(
      options_.state_dir, model_, {number, *digest},
      {.files = options_.files,
       .repository = [this](int64_t version) { return OpenRepository(version); },
       .max_delta_bytes = options_.max_delta_bytes,
       .compact_in_background = true,
       .compactor_scope = BeginBackgroundWork});
  if (!store.ok()) return store.status();
  if (const std::string lost = (*store)->lost_files(); !lost.empty()) {
    LogEvent(spdlog::level::err, "versions of the model are not kept any more, files were lost",
             {{"model", model_}, {"reason", lost}});
  }
  auto fleet =
      updates::FleetLog::Open(*options_.files, StrCat(options_.state_dir, "/fleet/", model_));
  if (!fleet.ok()) return fleet.status();
  const std::lock_guard lock(mutex_);
  fleet_ = *std::move(fleet);
  store_ = *std::move(store);
  for (const updates::VersionRecord& record : store_->List().versions)
    announced_[record.number] = {record.state, record.reason};
  return absl::OkStatus();
}

// The files of a version of the repository still are what they were when its number was given.
absl::Status UpdateLine::CheckBase(const updates::VersionRecord& record,
                                   const std::string& content) {
  auto digest = DigestOfBase(record.number, content);
  if (!digest.ok()) return digest.status();
  if (*digest == record.weights) return absl::OkStatus();
  return absl::FailedPreconditionError(
      StrCat("version ", record.number, " has the digest ", updates::ShortHex(record.weights),
             "…, the repository's has ", updates::ShortHex(*digest),
             "…: a version number names one set of bytes for ever; give it another number"));
}

bool UpdateLine::Admit(updates::VersionStore& store, int64_t highest, const Inspection& found) {
  updates::StoreState state = store.List();
  if (highest <= state.active) return false;
  const FoundVersion& version = found.selected.at(highest);
  if (const auto* record = state.Find(highest); record == nullptr || !record->repository) {
    const auto digest = DigestOfBase(highest, version.content.digest);
    const absl::Status status = digest.ok() ? store.AddBase({highest, *digest}) : digest.status();
    if (!status.ok()) {
      LogEvent(spdlog::level::err, "version of the repository not activated",
               {{"model", model_}, {"version", highest}, {"reason", status.message()}});
      return false;
    }
    state = store.List();
  }
  return state.Find(highest)->state == UpdateState::kStaged;
}

void UpdateLine::LeadToActive(updates::VersionStore& store, const LoadRequest& request,
                              const std::map<int64_t, VersionContent>& known, int64_t highest,
                              Inspection& found) {
  const updates::StoreState state = store.List();
  const int64_t active = state.active;
  const int64_t root = RootOf(state, active);
  const int64_t source = Has(found.available, root) ? root : found.available.back();
  // The version of the repository that its own file is of, in the terms of what is served.
  std::map<int64_t, VersionContent> content;
  if (const auto served = known.find(active); served != known.end())
    content[source] = served->second;
  FoundVersion version = InspectVersion(request, found, source, content);
  version.source = source;
  version.leads = true;
  if (version.status.ok() && source == root)
    version.status = CheckBase(*state.Find(root), version.content.digest);
  if (version.status.ok() && active != source) {
    auto weights = store.Weights(active);
    version.status = weights.status();
    if (weights.ok())
      version.weights =
          std::make_shared<StoredWeights>(*std::move(weights), state.active_weights());
  }
  if (highest != 0 && highest != active) {
    found.selected.erase(highest);
    found.superseded[highest] = active;
  }
  found.selected[active] = std::move(version);
}

void UpdateLine::Redirect(const LoadRequest& request,
                          const std::map<int64_t, VersionContent>& known, Inspection& found) {
  if (!found.status.ok() || !request.files.empty() || found.available.empty()) return;
  int64_t highest = 0;
  for (const auto& [number, version] : found.selected) {
    if (version.status.ok()) highest = std::max(highest, number);
  }
  {
    const std::lock_guard lock(mutex_);
    directory_ = found.directory;
    filename_ = found.config.default_model_filename().empty()
                    ? formats::kDefaultModelFilename
                    : found.config.default_model_filename();
  }
  auto store = Store();
  if (!store.ok()) {
    const absl::Status opened =
        Open(request, found, highest != 0 ? highest : found.available.back());
    const auto durable =
        options_.files->Exists(StrCat(options_.state_dir, "/models/", model_, "/state"));
    if (!opened.ok()) {
      {
        const std::lock_guard lock(mutex_);
        no_store_ = absl::FailedPreconditionError(opened.message());
      }
      // Without a history it serves as the repository has it; with one, that may be the wrong weights.
      if (durable.ok() && !*durable) {
        LogEvent(spdlog::level::warn, "model takes no updates",
                 {{"model", model_}, {"reason", opened.message()}});
      } else {
        found.status = opened;
      }
      return;
    }
    store = Store();
  }
  if (known.empty()) FollowFleet(**store);
  const int64_t active = (*store)->List().active;
  if (request.version && *request.version != active) return;
  if (!request.version && highest != 0 && Admit(**store, highest, found)) {
    found.selected[highest].leads = found.selected[highest].activates = true;
  } else {
    LeadToActive(**store, request, known, highest, found);
  }
  Announce();
}

}  // namespace espalier::runtime
