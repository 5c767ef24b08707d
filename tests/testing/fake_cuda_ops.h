// fake_cuda_ops.h — what the fake device computes, at once and on host memory.
#pragma once

#include "kernels/cuda/module.h"
#include "kernels/cuda/op_table.h"

namespace espalier::testing {

kernels::KernelStatus FakeLinear(kernels::cuda::CudaKernel kernel, const kernels::LinearArgs& args);
kernels::KernelStatus FakeConvert(const kernels::cuda::ConvertArgs& args);
kernels::KernelStatus FakeActivate(const kernels::ActivateArgs& args);
kernels::KernelStatus FakeBinary(const kernels::BinaryArgs& args);
kernels::KernelStatus FakeSoftmax(const kernels::SoftmaxArgs& args);
kernels::KernelStatus FakeLayerNorm(const kernels::LayerNormArgs& args);
kernels::KernelStatus FakeTranspose(const kernels::TransposeArgs& args);
kernels::KernelStatus FakePatch(const kernels::PatchArgs& args);

}  // namespace espalier::testing
