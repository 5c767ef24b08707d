// update_state.h — what becomes of a version, as one enum and the steps that it may take.
//
//   RECEIVING ──▶ VERIFIED ──▶ STAGED ──▶ CANARY ──▶ LIVE ──▶ SUPERSEDED ──▶ LIVE   (rolled back to)
//                                │ ▲────────┘│        ▲ │
//                                ├───────────┼────────┘ └───▶ ROLLED_BACK ──▶ LIVE  (activated again)
//                                └───────────┴──▶ SUPERSEDED      (a version made from it went live)
//
//   RECEIVING, VERIFIED, STAGED, CANARY ──▶ REFUSED ──▶ VERIFIED  (the same bytes were sent again)
//   CANARY, LIVE, SUPERSEDED, ROLLED_BACK ──▶ QUARANTINED         (it failed; it never serves again)
//
// Exactly one version of a model is LIVE. A canary ends, and is STAGED again, when the process does.
#pragma once

#include <cstdint>

namespace espalier::updates {

enum class UpdateState : uint8_t {
  kReceiving = 1,    // bytes come in; no number is taken yet
  kVerified = 2,     // every check passed; the number is taken
  kStaged = 3,       // its journal is durable: it can be activated
  kCanary = 4,       // answers a share of the requests
  kLive = 5,         // the one that serves
  kSuperseded = 6,   // served, or lies on the way to one that did
  kRolledBack = 7,   // served, and was given up for an earlier one
  kRefused = 8,      // given up before it served
  kQuarantined = 9,  // failed while it served
};
inline constexpr uint8_t kUpdateStates = 9;

const char* NameOf(UpdateState state);  // "RECEIVING", …
bool MayBecome(UpdateState from, UpdateState to);

}  // namespace espalier::updates
