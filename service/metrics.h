// metrics.h — everything that the server counts, as Prometheus families; read from atomics when
// scraped.
//
//   espalier_build_info{version}                    1
//   espalier_ready                                  1 when the server takes requests
//   espalier_requests_total{model,version,code}     ModelInfer requests that reached the model
//   espalier_inferences_total{model,version}        items: a request of batch 8 counts 8
//   espalier_executions_total{model,version}        runs of the model
//   espalier_request_duration_seconds{model}        histogram, arrival to answer
//   espalier_phase_duration_seconds{model,phase}    histogram, phase queue | compute_input | …
//   espalier_rpcs_total{rpc,code}                   every RPC, also those that name no model
//   espalier_rpc_duration_seconds{rpc}              histogram
//   espalier_requests_in_flight                     ModelInfer, from message to answer
//   espalier_request_bytes_in_flight                their messages
//   espalier_queue_pending{model,version}           requests that wait
//   espalier_model_resident_weight_bytes{model,version}
//   espalier_model_dense_weight_bytes{model,version}
//   espalier_model_arena_bytes{model,version}
//   espalier_model_load_seconds{model,version}
//   espalier_model_load_failures_total
//
// Labels come from the repository and from lists in the code, never from a request, so their number
// is bounded. Series with a version end when the version is unloaded.
#pragma once

#include <memory>

#include "prometheus/collectable.h"
#include "service/service_state.h"

namespace espalier::service {

// `state` must outlive the collector.
std::shared_ptr<prometheus::Collectable> MakeMetricsCollector(const ServiceState& state);

}  // namespace espalier::service
