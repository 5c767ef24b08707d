// dense_epilogue.h — what cuBLASLt does not do itself: biases in the type of y, and the activations it lacks.
#pragma once

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"
#include "kernels/linear/linear.h"

namespace espalier::kernels::cuda {

// to[i] = args.bias[i] in args.io_dtype, i in [0, out).
KernelStatus ConvertBias(const KernelContext& ctx, const LinearArgs& args, void* to);

// y = act(y) in place.
KernelStatus ActivateInPlace(const KernelContext& ctx, const LinearArgs& args);

}  // namespace espalier::kernels::cuda
