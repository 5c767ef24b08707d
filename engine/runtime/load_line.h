// load_line.h — the loads of each model, waiting in line: one runs at a time.
//
// Loads that ask for nothing special are one load: those that wait are answered together. An unload
// overtakes: what waits is answered Aborted, what runs goes on without publishing.
// Not thread-safe; ModelManager's mutex guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/runtime/load_request.h"

namespace espalier::runtime {

struct LoadOperation {
  using Done = absl::AnyInvocable<void(absl::Status)>;

  std::string model;
  LoadRequest request;
  std::vector<Done> done;
  // Not null: no load, but somebody who wants none to run meanwhile (ModelManager::TakeTurn).
  std::shared_ptr<std::latch> turn;
  bool at_start = false;
  int64_t measure_budget_millis = 0;  // at start; later decided when it runs

  // While it runs.
  bool overtaken = false;            // by an unload of the model
  std::set<int64_t> overtaken_here;  // or of single versions
  std::set<int64_t> selected;        // to be ready at the end
  int loading = 0;                   // versions under way
  absl::Status failure;              // the first
};

class LoadLines {
 public:
  using OperationPtr = std::shared_ptr<LoadOperation>;

  // Loads that may wait, over all models: each holds its files in memory.
  static constexpr int kMaxWaiting = 1024;

  // True when the line was empty: the caller has to begin it (Next).
  absl::StatusOr<bool> Add(OperationPtr operation);
  // The next load to run; null when none waits or one runs.
  OperationPtr Next(const std::string& model);
  void End(const std::string& model);
  // What waits is taken out and returned, what runs is marked.
  std::vector<OperationPtr> Overtake(absl::string_view model, std::optional<int64_t> version);
  // Waiting loads of all models, taken out.
  std::vector<OperationPtr> TakeWaiting();

  bool Busy(absl::string_view model) const { return lines_.find(model) != lines_.end(); }
  bool empty() const { return lines_.empty(); }

 private:
  struct Line {
    OperationPtr running;
    std::deque<OperationPtr> waiting;
  };
  std::map<std::string, Line, std::less<>> lines_;  // those with anything in them
  int waiting_ = 0;
};

}  // namespace espalier::runtime
