// probation.h — what is asked of a version for a while after its activation, and what of that outlives a restart.
//
//   asked for ──▶ golden requests, canary ──▶ activated: its probation begins ──▶ confirmed, or given up
//                 before the flip              durable with the decision           after `until` · at a breach
//
// Durable  The terms, when the probation ends (by the clock: time in which the server is down counts), and what the
//          version that was replaced had done: its requests, its failures, its compute time.
// Not      What the version itself has done. A breach is acted upon while it happens, so that all a restart takes is
//          evidence of good conduct, or of fewer requests than decide anything: the count begins anew.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/updates/bytes.h"

namespace espalier::updates {

// What is asked of a version that is to be active. Zero values ask nothing.
struct ProbationOptions {
  absl::Duration duration;  // 0: the version is confirmed at once. Infinite: until Confirm
  // Before the flip it answers this share of the requests that name no version, 0 to 1.
  double canary_share = 0;
  absl::Duration canary_duration;
  double max_error_rate = 1;     // share of failed requests, beyond the old version's
  double max_latency_ratio = 0;  // of the mean compute time over the old version's; 0: any
  bool golden_requests = false;  // <model>/golden/ of the repository must pass before the flip

  bool has_canary() const { return canary_share > 0 && canary_duration > absl::ZeroDuration(); }
  bool operator==(const ProbationOptions&) const = default;
};

// What a version did, as far as it can be held against it: requests that it was not to blame for
// (refused, expired, faulty) are left out.
struct Conduct {
  uint64_t answered = 0, failed = 0;
  uint64_t compute_nanos = 0;
  uint64_t nonfinite_batches = 0;

  Conduct Since(const Conduct& before) const;
  double error_rate() const;
  bool operator==(const Conduct&) const = default;
};

// Of a version that is active and not confirmed.
struct Probation {
  ProbationOptions terms;
  int64_t until_micros = 0;  // since 1970; 0: until Confirm
  Conduct old;               // of the version that it replaced, before; zeros: not known

  bool operator==(const Probation&) const = default;
};

// Of a version that is activated now; none: the terms ask for no probation.
std::optional<Probation> BeginProbation(const ProbationOptions& terms, const Conduct& old,
                                        absl::Time now);

// InvalidArgument for terms that mean nothing: a share above 1, a time below zero.
absl::Status CheckTerms(const ProbationOptions& terms);

// In files (STORE.md), durations to the microsecond. What is read is checked.
void SerializeTerms(ByteWriter& out, const ProbationOptions& terms);
absl::StatusOr<ProbationOptions> ParseTerms(ByteReader& reader);
void SerializeProbation(ByteWriter& out, const Probation& probation);
absl::StatusOr<Probation> ParseProbation(ByteReader& reader);

}  // namespace espalier::updates
