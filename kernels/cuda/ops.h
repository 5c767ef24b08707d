// ops.h — the functions of the module's OpTable (op_table.h).
#pragma once

#include "kernels/cuda/op_table.h"

namespace espalier::kernels::cuda {

KernelStatus ConvertOnDevice(const KernelContext& ctx, const ConvertArgs& args);
KernelStatus ActivateOnDevice(const KernelContext& ctx, const ActivateArgs& args);
KernelStatus BinaryOnDevice(const KernelContext& ctx, const BinaryArgs& args);
KernelStatus SoftmaxOnDevice(const KernelContext& ctx, const SoftmaxArgs& args);
KernelStatus LayerNormOnDevice(const KernelContext& ctx, const LayerNormArgs& args);
KernelStatus TransposeOnDevice(const KernelContext& ctx, const TransposeArgs& args);
KernelStatus PatchOnDevice(const KernelContext& ctx, const PatchArgs& args);
KernelStatus LinearPairOnDevice(const KernelContext& ctx, const LinearPairArgs& args);

}  // namespace espalier::kernels::cuda
