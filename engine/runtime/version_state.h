// version_state.h — the life of one version of one model.
//
//   UNKNOWN ──load──▶ LOADING ──loaded──▶ READY ──unload──▶ UNLOADING ──all answered──▶ UNAVAILABLE
//      │               │    ▲                                   │                       │     ▲
//      │               │    └────────────── load ───────────────┴───────────────────────┘     │
//      │               └─────────── failed, or unloaded while loading ────────────────────────┤
//      └─────────────────────────── refused: bad config, name taken twice ────────────────────┘
//
//   UNKNOWN      in the repository, never asked to load: its version policy does not select it, or
//                its turn has not come
//   READY        stays so while other content of the same number is loaded, also when that fails:
//                the reason then says why
//   UNLOADING    no new request finds it; those that hold it are still answered, whatever becomes
//                of the number meanwhile
//   UNAVAILABLE  not in memory; the reason says why
#pragma once

#include <cstdint>

namespace espalier::runtime {

// One line per state: enumerator, name on the wire (RepositoryIndex).
#define ESPALIER_VERSION_STATES(X) \
  X(kUnknown, "UNKNOWN")           \
  X(kLoading, "LOADING")           \
  X(kReady, "READY")               \
  X(kUnloading, "UNLOADING")       \
  X(kUnavailable, "UNAVAILABLE")

enum class VersionState : uint8_t {
#define ESPALIER_STATE_ENUM(name, text) name,
  ESPALIER_VERSION_STATES(ESPALIER_STATE_ENUM)
#undef ESPALIER_STATE_ENUM
};

constexpr const char* NameOf(VersionState state) {
  constexpr const char* kNames[] = {
#define ESPALIER_STATE_NAME(name, text) text,
      ESPALIER_VERSION_STATES(ESPALIER_STATE_NAME)
#undef ESPALIER_STATE_NAME
  };
  return kNames[static_cast<uint8_t>(state)];
}

// Whether the chain above has an arrow from `from` to `to`.
constexpr bool IsTransition(VersionState from, VersionState to) {
  switch (from) {
    case VersionState::kUnknown:
      return to == VersionState::kLoading || to == VersionState::kUnavailable;
    case VersionState::kUnavailable:
      return to == VersionState::kLoading;
    case VersionState::kLoading:
      return to == VersionState::kReady || to == VersionState::kUnavailable;
    case VersionState::kReady:
      return to == VersionState::kUnloading;
    case VersionState::kUnloading:
      return to == VersionState::kLoading || to == VersionState::kUnavailable;
  }
  return false;
}

}  // namespace espalier::runtime
