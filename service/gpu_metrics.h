// gpu_metrics.h — what the driver says of the GPUs, in base units; asked when scraped.
//
//   espalier_gpu_utilization_ratio{gpu}     share of the last second in which a kernel ran
//   espalier_gpu_memory_used_bytes{gpu}     by all processes
//   espalier_gpu_memory_total_bytes{gpu}
//   espalier_gpu_power_watts{gpu}
//   espalier_gpu_lost{gpu}                  1 after an error that this process cannot recover from
#pragma once

#include <memory>

#include "engine/tensor/devices.h"
#include "engine/tensor/gpu_usage.h"
#include "prometheus/collectable.h"

namespace espalier::service {

// Of the GPUs of `devices`, which outlives the collector. `reader` may be null: then only espalier_gpu_lost is told.
std::shared_ptr<prometheus::Collectable> MakeGpuMetricsCollector(
    const Devices& devices, std::unique_ptr<GpuUsageReader> reader);

}  // namespace espalier::service
