// device_peak.h — what a GPU reaches at its best, measured: the yardstick for what models reach on it.
#pragma once

#include "engine/planner/prepared_model.h"
#include "engine/tensor/cuda_device.h"

namespace espalier::planner {

// Arithmetic: a square dense product that fills the device (4224 on each side on an H200) by its fastest dense kernel for
// `dtype`. Memory: a copy of four times the L2 within the device, bytes read and written. Best of several graph replays; 0 for what could not be measured (no
// memory for it, no kernel). Measured once for each kind of device and type in this process (some 0.2 s), then remembered.
DevicePeak MeasuredPeak(const CudaDevice& device, DType dtype);

}  // namespace espalier::planner
