// other_copy.h — the resident copy of a model's weights that does not serve.
//
//   none ──Keep──▶ ready ──Take──▶ draining ──Retired──▶ shadow ──Take──▶ (the caller's) ──Keep──▶ …
//                  a version,      requests still        a model that nothing
//                  to flip to      hold it               runs on
//
// There is one at most, in whatever form: whoever wants another takes this one. Drop lets it go, to be
// freed by whoever holds it last.
// Threads  Thread-safe. Take blocks; one caller at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/planner/prepared_model.h"
#include "engine/runtime/served_version.h"

namespace espalier::runtime {

struct Shadow {
  std::unique_ptr<planner::PreparedModel> model;  // null: there is none
  int64_t version = 0;                            // whose weights it has
};

class OtherCopy {
 public:
  void Keep(VersionHandle version);
  // The version if it is ready and has this number, else null.
  VersionHandle Ready(int64_t number) const;
  // Null when there is none.
  VersionHandle Ready() const;
  int64_t version() const;  // 0: there is none
  // Unavailable when requests still hold it after `patience`; Cancelled after Drop.
  absl::StatusOr<Shadow> Take(absl::Duration patience);
  // True, and `model` is taken, when this is the version that is waited for.
  bool Retired(const ServedVersion* version, std::unique_ptr<planner::PreparedModel>& model);
  void Drop();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  VersionHandle ready_ ABSL_GUARDED_BY(mutex_);
  const ServedVersion* draining_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int64_t draining_version_ ABSL_GUARDED_BY(mutex_) = 0;
  Shadow shadow_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::runtime
