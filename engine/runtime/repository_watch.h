// repository_watch.h — looks again and again whether the repositories changed, and says what to load
// and what to remove.
//
// A look lists folders and stats files; only what changed is loaded, and the load itself then
// decides by content whether anything did. Nothing is taken for gone that could not be looked at: a
// repository that cannot be listed, or that is empty all of a sudden on another device (its volume
// is not mounted), keeps its models.
//
//   changed ──▶ load ──ends well──▶ wait for a change
//                 │
//                 └──fails──▶ when the files changed and then stood still for one look (a copy under
//                             way has ended), or, unless the files themselves are to blame, after a
//                             while that doubles: load
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace espalier::runtime {

class RepositoryWatch {
 public:
  struct Options {
    std::vector<std::string> repositories;
    absl::Duration interval;
    // Begins to load; Ended is called when that is done.
    std::function<void(const std::string& model)> load;
    std::function<void(const std::string& model)> remove;
  };

  explicit RepositoryWatch(Options options) : options_(std::move(options)) {}
  ~RepositoryWatch() { Stop(); }

  // Notes what is there. The caller loads these models and calls Ended for each.
  void Begin();
  // Looks every `interval` from now on, on a thread in the background.
  void Run();
  // Waits for a look that is under way.
  void Stop();

  // One look. Not from two threads at once.
  void Look();
  // From any thread.
  void Ended(const std::string& model, const absl::Status& status);

 private:
  struct Watched {
    size_t repository = 0;
    std::string loaded;  // fingerprint when the last load began
    std::string seen;    // at the last look
    bool loading = false;
    bool failed = false;
    absl::Duration patience;  // before the next try without a change
    absl::Time retry = absl::InfiniteFuture();
    bool there = false;  // at this look
  };
  struct Repository {
    dev_t device = 0;
    bool had_models = false;
    bool failing = false;  // at the last look
  };
  // A model's folder as it is now.
  struct Found {
    std::string name, directory;
    size_t repository = 0;
  };

  // The models of those repositories that can be listed.
  std::vector<Found> List();
  absl::Status ListOne(size_t index, std::vector<Found>& found);
  bool ShouldLoadLocked(Watched& model, const std::string& fingerprint) const;
  std::vector<std::string> TakeGone();

  const Options options_;
  std::vector<Repository> repositories_ = std::vector<Repository>(options_.repositories.size());
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, Watched> models_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace espalier::runtime
