// service_state.h — what the handlers share; they own none of it.
#pragma once

#include <atomic>
#include <string>

#include "engine/runtime/model_manager.h"
#include "service/shared_memory.h"
#include "service/stream_registry.h"
#include "service/telemetry.h"
#include "service/trace.h"

namespace espalier::service {

struct ServiceState {
  runtime::ModelManager& models;
  Telemetry telemetry;
  StreamRegistry streams;
  SharedMemoryRegions shared_memory;
  Tracer tracer;
  const absl::StatusCode overload_code;  // what too many waiting requests are answered with
  bool model_control = false;            // clients may load and unload models
  std::atomic<bool> draining{false};
  std::atomic<bool> caught_up{false};  // with the fleet, if there is one

  // Every model that is loaded at start has been, with the weights of its fleet, and nobody asked the
  // server to stop.
  bool ready() const { return caught_up && !draining.load(std::memory_order_relaxed); }
};

}  // namespace espalier::service
