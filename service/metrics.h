// metrics.h — everything that the server counts, as Prometheus families; read from atomics when
// scraped.
//
//   espalier_build_info{version,commit}             1
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
//   espalier_requests_in_flight_limit               0: no limit
//   espalier_request_bytes_in_flight_limit
//   espalier_requests_refused_total{reason}         by these limits: requests_in_flight | bytes_…
//   espalier_request_failures_total{model,version,reason}   at the model: queue_full | timeout | …
//   espalier_batch_size{model,version}              histogram, items in a run of the model
//   espalier_queue_pending{model,version}           requests that wait
//   espalier_queue_priority_pending{model,version,priority}   of models with priority levels
//   espalier_padding_items_total{model,version}     executed without a request, to an allowed size
//   espalier_model_resident_weight_bytes{model,version}
//   espalier_model_dense_weight_bytes{model,version}
//   espalier_model_arena_bytes{model,version}
//   espalier_model_load_seconds{model,version}
//   espalier_model_timed_device_seconds_total{model,version}   of the runs on a GPU that were timed,
//   espalier_model_timed_flops_total{model,version}            one in sixteen: rate(flops) /
//   espalier_model_timed_bytes_total{model,version}            rate(seconds) is what was achieved
//   espalier_model_flops_per_second{model,version}             the same since the load: useful flops
//   espalier_model_bytes_per_second{model,version}             and bytes of the linear layers
//   espalier_model_peak_ratio{model,version,bound}             of what the GPU reached at its best at
//                                                              load, bound compute | memory
//   espalier_model_loads_total{code}                loads that have ended, by outcome
//   process_…                                       memory, CPU, files, threads, start
//
// Labels come from the repository and from lists in the code, never from a request, so their number
// is bounded. Series with a version end when the version is unloaded.
#pragma once

#include <memory>
#include <string>

#include "prometheus/collectable.h"
#include "service/service_state.h"

namespace espalier::service {

// `state` must outlive the collectors. `commit` is that of the build.
std::shared_ptr<prometheus::Collectable> MakeMetricsCollector(const ServiceState& state,
                                                              std::string commit);
// The same facts under Triton's names, nv_inference_… and nv_cpu_…, with its labels and units, so
// that dashboards and tools made for it work (perf_analyzer --collect-metrics).
std::shared_ptr<prometheus::Collectable> MakeTritonMetricsCollector(const ServiceState& state);

}  // namespace espalier::service
