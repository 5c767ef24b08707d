// kernels.h — the CUDA linear kernels: one enumerator a kernel, shared by the host's variant list and the module's table.
//
// Each is a function KernelStatus Run<Name>(const KernelContext&, const LinearArgs&) with every pointer of LinearArgs in
// device memory except the struct itself; of the weight only shape, count and `packed` are read.
#pragma once

#include <cstdint>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {
struct LinearArgs;
}

namespace espalier::kernels::cuda {

// One line a kernel. The order is the order of the module's table: append, or raise the ABI number.
#define ESPALIER_CUDA_KERNELS(X) \
  X(DenseCublasLt)               \
  X(BlockMma)                    \
  X(BlockSlabFull)               \
  X(BlockSlab128)                \
  X(BlockSlab64)                 \
  X(BlockTwin256)                \
  X(BlockTwin128)                \
  X(BlockRowGroup)               \
  X(BlockStream)                 \
  X(GatherStream)                \
  X(GatherPairs)                 \
  X(GatherWhole)                 \
  X(ExpandTiles)                 \
  X(BlockFma)                    \
  X(TwoFour)                     \
  X(BlockSlab64Pairs)            \
  X(BlockTwin16)                 \
  X(GatherMmaStream)             \
  X(GatherMmaPairs)              \
  X(GatherMmaWhole)

enum class CudaKernel : int32_t {
#define ESPALIER_CUDA_KERNEL_ENUM(name) k##name,
  ESPALIER_CUDA_KERNELS(ESPALIER_CUDA_KERNEL_ENUM)
#undef ESPALIER_CUDA_KERNEL_ENUM
      kCount
};

#define ESPALIER_CUDA_KERNEL_RUN(name) \
  KernelStatus Run##name(const KernelContext&, const LinearArgs&);
ESPALIER_CUDA_KERNELS(ESPALIER_CUDA_KERNEL_RUN)
#undef ESPALIER_CUDA_KERNEL_RUN

}  // namespace espalier::kernels::cuda
