#include "engine/updates/update_state.h"

namespace espalier::updates {

const char* NameOf(UpdateState state) {
  constexpr const char* kNames[kUpdateStates + 1] = {
      "",     "RECEIVING",  "VERIFIED",    "STAGED",  "CANARY",
      "LIVE", "SUPERSEDED", "ROLLED_BACK", "REFUSED", "QUARANTINED"};
  return kNames[static_cast<uint8_t>(state)];
}

bool MayBecome(UpdateState from, UpdateState to) {
  using enum UpdateState;
  switch (from) {
    case kReceiving:
      return to == kVerified || to == kRefused;
    case kVerified:
      return to == kStaged || to == kRefused;
    case kStaged:
      return to == kCanary || to == kLive || to == kSuperseded || to == kRefused;
    case kCanary:
      return to == kStaged || to == kLive || to == kSuperseded || to == kRefused ||
             to == kQuarantined;
    case kLive:
      return to == kSuperseded || to == kRolledBack || to == kQuarantined;
    case kSuperseded:
    case kRolledBack:
      return to == kLive || to == kQuarantined;
    case kRefused:
      return to == kVerified;
    case kQuarantined:
      break;
  }
  return false;
}

}  // namespace espalier::updates
