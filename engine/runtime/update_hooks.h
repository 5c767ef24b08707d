// update_hooks.h — what ModelManager asks of, and tells, whoever updates the weights of its models.
//
//   look into the repository ──▶ Redirect ──▶ BeforeLoad ──▶ load, warm up ──▶ BeforePublish ──▶ publish
//   unload ──▶ Unloaded                        last handle dropped, instances joined ──▶ Retired
//
// Threads  All but Unloaded and Stop are called on loaders, where blocking is fine (but not waiting
//          for a turn, which a load may hold). Unloaded comes from any thread, without a lock held.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "engine/planner/prepared_model.h"
#include "engine/runtime/load_request.h"

namespace espalier::runtime {

class ServedVersion;

class UpdateHooks {
 public:
  virtual ~UpdateHooks() = default;
  // Puts the version that the model's updates led to in the place of the one they led from.
  virtual void Redirect(const std::string& model, const LoadRequest& request,
                        const std::map<int64_t, VersionContent>& known, Inspection& found) = 0;
  // A version is about to be loaded from files: what is kept beside the one that serves has to go.
  virtual void BeforeLoad(const std::string& model) = 0;
  // A version of the repository is ready and above the active one: the decision, before it is seen.
  virtual absl::Status BeforePublish(const std::string& model, int64_t version) = 0;
  virtual void Unloaded(const std::string& model) = 0;
  virtual void Retired(const ServedVersion* version,
                       std::unique_ptr<planner::PreparedModel> model) = 0;
  // Waits for updates under way. No turn is taken and no handle held any more.
  virtual void Stop() = 0;
};

}  // namespace espalier::runtime
