// scratch.h — what CUDA kernels expect of LinearArgs::scratch.
//
// The first kTicketBytes are tickets: zero when a scratch buffer is handed to its first kernel, zero again after every
// kernel. Kernels that split a sum between thread blocks count arrivals there, so that the last one finishes the sum
// without a second launch. The rest is undefined before and after. One buffer serves one stream at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

constexpr size_t kTicketBytes = 4096;  // 4 bytes a ticket, at most 1024 thread blocks

}  // namespace espalier::kernels::cuda
