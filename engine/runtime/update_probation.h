// update_probation.h — whether a new version does as well as the one before it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "engine/runtime/served_version.h"

namespace espalier::runtime {

// What is asked of a version after its activation. Zero values ask nothing.
struct ProbationOptions {
  absl::Duration duration;  // 0: the version is confirmed at once. Infinite: until Confirm
  // Before the flip it answers this share of the requests that name no version, 0 to 1.
  double canary_share = 0;
  absl::Duration canary_duration;
  double max_error_rate = 1;     // share of failed requests, beyond the old version's
  double max_latency_ratio = 0;  // of the mean compute time over the old version's; 0: any
  bool golden_requests = false;  // <model>/golden/ of the repository must pass before the flip
};

// What a version did, as far as it can be held against it: requests that it was not to blame for
// (refused, expired, faulty) are left out.
struct Conduct {
  uint64_t answered = 0, failed = 0;
  uint64_t compute_nanos = 0;
  uint64_t nonfinite_batches = 0;

  static Conduct Of(const ServedVersion& version);
  Conduct Since(const Conduct& before) const;
  double error_rate() const;
};

// Requests before a version is judged, so that one slow or unlucky one decides nothing.
inline constexpr uint64_t kJudgedRequests = 20;

// Why the version has failed; empty: it has not. `last`: there will be no more to judge by.
std::string Breach(const ProbationOptions& terms, const Conduct& old, const Conduct& now,
                   bool last);

// A version that is active and not confirmed.
struct OnProbation {
  int64_t version = 0;
  ProbationOptions terms;
  absl::Time until;
  std::weak_ptr<ServedVersion> served;
  Conduct old, before;  // of the version that it replaced; its own before it was activated
};

}  // namespace espalier::runtime
