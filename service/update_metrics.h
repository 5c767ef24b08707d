// update_metrics.h — weight updates by model, read from the update manager when scraped.
//
//   espalier_update_received_bytes_total{model}     of deltas
//   espalier_update_staged_total{model}             deltas that passed every check
//   espalier_update_refused_total{model,reason}     deltas that did not
//   espalier_update_activated_total{model}          versions that began to serve
//   espalier_update_rolled_back_total{model}        versions given up for an earlier one
//   espalier_update_quarantined_total{model}        versions that failed while they served
//   espalier_update_shadow_total{model,how}         edited in place | rebuilt
//   espalier_update_replans_total{model,outcome}    weights whose structure drifted: changed | kept | failed
//   espalier_update_stage_seconds_total{model}      bytes complete to staged
//   espalier_update_commit_seconds_total{model}     activations: decision and flip
//   espalier_update_flip_seconds_total{model}       the part of it that a request may wait for
//   espalier_update_version{model}                  the active version's number
//   espalier_update_sequence{model}                 and its delta's sequence
//   espalier_update_probation{model}                1 while the active version is not confirmed
//
// The RPCs of the update service are among espalier_rpcs_total{rpc,code}.
#pragma once

#include <memory>

#include "engine/runtime/update_manager.h"
#include "prometheus/collectable.h"

namespace espalier::service {

// `manager` must outlive the collector.
std::shared_ptr<prometheus::Collectable> MakeUpdateMetricsCollector(
    const runtime::UpdateManager& manager);

}  // namespace espalier::service
