// update_probation.h — whether a new version does as well as the one before it. What it is asked, and what of that
// outlives a restart: engine/updates/probation.h.
//
// Restart  The version is judged by the same terms for what is left of its time; ended meanwhile, it is confirmed,
//          unless the store gave it up for its starts (StoreOptions::max_unconfirmed_starts). It is compared with what
//          the old version had done when it was replaced; where that is not known, because it was replaced at a start,
//          failures are compared with none, and compute times not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/runtime/served_version.h"
#include "engine/updates/probation.h"

namespace espalier::runtime {

using updates::Conduct;
using updates::ProbationOptions;

// So far, of requests to this instance of the version.
Conduct ConductOf(const ServedVersion& version);

// Requests before a version is judged, so that one slow or unlucky one decides nothing.
inline constexpr uint64_t kJudgedRequests = 20;

// Why the version has failed; empty: it has not. `last`: there will be no more to judge by.
std::string Breach(const ProbationOptions& terms, const Conduct& old, const Conduct& now,
                   bool last);

// What the version that is active and not confirmed is judged by.
struct OnProbation {
  int64_t version = 0;
  std::weak_ptr<ServedVersion> served;
  Conduct before;  // its own, before it was activated
};

}  // namespace espalier::runtime
