#include "engine/runtime/repository_watch.h"

#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "engine/runtime/repository.h"
#include "engine/runtime/thread_priority.h"
#include "engine/runtime/version_content.h"

namespace espalier::runtime {
namespace {

// Between tries of what may mend itself without a change of the files: memory that was short.
constexpr absl::Duration kMaxPatience = absl::Minutes(5);

// Nothing but other files helps.
bool IsOfFiles(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
         absl::IsNotFound(status);
}

}  // namespace

absl::Status RepositoryWatch::ListOne(size_t index, std::vector<Found>& found) {
  const std::string& path = options_.repositories[index];
  Repository& repository = repositories_[index];
  auto models = ScanRepository(path);
  if (!models.ok()) return models.status();
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return absl::ErrnoToStatus(errno, path);
  if (models->empty() && repository.had_models && info.st_dev != repository.device) {
    return absl::UnavailableError(
        absl::StrCat(path, " is empty and on another device than before: is its volume mounted?"));
  }
  if (!models->empty()) repository.device = info.st_dev;
  repository.had_models = !models->empty();
  for (RepositoryModel& model : *models)
    found.push_back({std::move(model.name), std::move(model.directory), index});
  return absl::OkStatus();
}

std::vector<RepositoryWatch::Found> RepositoryWatch::List() {
  std::vector<Found> found;
  for (size_t i = 0; i < repositories_.size(); ++i) {
    const absl::Status status = ListOne(i, found);
    if (!status.ok() && !repositories_[i].failing) {
      LogEvent(spdlog::level::warn, "repository cannot be looked at; its models stay as they are",
               {{"repository", options_.repositories[i]}, {"reason", status.message()}});
    }
    repositories_[i].failing = !status.ok();
  }
  return found;
}

void RepositoryWatch::Begin() {
  for (const Found& found : List()) {
    auto fingerprint = ModelFingerprint(found.directory);
    const std::lock_guard lock(mutex_);
    Watched& model = models_[found.name];
    model.repository = found.repository;
    model.loaded = model.seen = fingerprint.ok() ? *fingerprint : "";
    model.loading = true;
  }
}

bool RepositoryWatch::ShouldLoadLocked(Watched& model, const std::string& fingerprint) const {
  const bool still = fingerprint == model.seen;
  model.seen = fingerprint;
  if (model.loading) return false;
  if (fingerprint == model.loaded) return model.failed && absl::Now() >= model.retry;
  return !model.failed || still;
}

std::vector<std::string> RepositoryWatch::TakeGone() {
  std::vector<std::string> gone;
  const std::lock_guard lock(mutex_);
  for (auto place = models_.begin(); place != models_.end();) {
    const bool stays = place->second.there || repositories_[place->second.repository].failing;
    place->second.there = false;
    if (!stays) gone.push_back(place->first);
    place = stays ? std::next(place) : models_.erase(place);
  }
  return gone;
}

void RepositoryWatch::Look() {
  for (const Found& found : List()) {
    auto fingerprint = ModelFingerprint(found.directory);
    bool load = false;
    {
      const std::lock_guard lock(mutex_);
      Watched& model = models_[found.name];
      model.there = true;
      model.repository = found.repository;
      // What cannot be looked at is as it was.
      load = fingerprint.ok() && ShouldLoadLocked(model, *fingerprint);
      if (load) {
        model.loading = true;
        model.loaded = *fingerprint;
      }
    }
    if (load) options_.load(found.name);
  }
  for (const std::string& name : TakeGone()) options_.remove(name);
}

void RepositoryWatch::Ended(const std::string& name, const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  const auto place = models_.find(name);
  if (place == models_.end()) return;
  Watched& model = place->second;
  model.loading = false;
  model.failed = !status.ok();
  model.retry = absl::InfiniteFuture();
  if (status.ok() || IsOfFiles(status)) {
    model.patience = absl::ZeroDuration();
    return;
  }
  model.patience = std::min(std::max(2 * model.patience, options_.interval), kMaxPatience);
  model.retry = absl::Now() + model.patience;
}

void RepositoryWatch::Run() {
  thread_ = std::thread([this] {
    EnterBackground();
    std::unique_lock lock(mutex_);
    const auto interval = absl::ToChronoNanoseconds(options_.interval);
    while (!stop_.wait_for(lock, interval, [this] { return stopping_; })) {
      lock.unlock();
      {
        const BackgroundWork work;
        Look();
      }
      lock.lock();
    }
  });
  pthread_setname_np(thread_.native_handle(), "watch");
}

void RepositoryWatch::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stop_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace espalier::runtime
