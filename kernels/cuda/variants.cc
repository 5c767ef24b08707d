#include "kernels/cuda/variants.h"

#include <atomic>
#include <cstddef>
#include <iterator>

#include "kernels/cuda/block_image.h"
#include "kernels/cuda/dense_image.h"
#include "kernels/cuda/expand_image.h"
#include "kernels/cuda/gather_image.h"
#include "kernels/cuda/gather_mma_image.h"
#include "kernels/cuda/row_group_image.h"
#include "kernels/cuda/two_four_image.h"

namespace espalier::kernels::cuda {
namespace {

std::atomic<const CudaModule*> loaded_module{nullptr};

size_t NoScratch(const LinearDesc&, int) { return 0; }

struct DenseForm {
  static constexpr const char* kPacking = "cuda_dense";
  static bool Fits(const LinearDesc& desc) { return FitsDenseImage(desc); }
  static constexpr auto kBytes = DenseImageBytes;
  static constexpr auto kPack = PackDenseImage;
  static constexpr auto kLocate = LocateInDenseImage;
  static size_t Scratch(const LinearDesc& desc, int) { return DenseScratchBytes(desc); }
};

struct BlockForm {
  static constexpr const char* kPacking = "cuda_block_image";
  static bool Fits(const LinearDesc& desc) { return FitsBlockImage(desc); }
  static constexpr auto kBytes = BlockImageBytes;
  static constexpr auto kPack = PackBlockImage;
  static constexpr auto kLocate = LocateInBlockImage;
  static constexpr auto Scratch = NoScratch;
};

struct F32BlockForm : BlockForm {
  static bool Fits(const LinearDesc& desc) { return FitsF32BlockImage(desc); }
};

struct SlabForm : BlockForm {
  static bool Fits(const LinearDesc& desc) {
    return FitsBlockImage(desc) && desc.block_rows >= 64 && desc.block_cols >= 64;
  }
};

struct TwinForm : BlockForm {
  static bool Fits(const LinearDesc& desc) { return SlabForm::Fits(desc) && desc.block_rows == 64; }
};

struct StreamForm : BlockForm {
  static bool Fits(const LinearDesc& desc) { return FitsBlockStream(desc); }
};

struct RowGroupForm {
  static constexpr const char* kPacking = "cuda_row_group_image";
  static bool Fits(const LinearDesc& desc) { return FitsRowGroupImage(desc); }
  static constexpr auto kBytes = RowGroupImageBytes;
  static constexpr auto kPack = PackRowGroupImage;
  static constexpr auto kLocate = LocateInRowGroupImage;
  static constexpr auto Scratch = NoScratch;
};

struct GatherForm {
  static constexpr const char* kPacking = "cuda_gather_image";
  static bool Fits(const LinearDesc& desc) { return FitsGatherImage(desc); }
  static constexpr auto kBytes = GatherImageBytes;
  static constexpr auto kPack = PackGatherImage;
  static constexpr auto kLocate = LocateInGatherImage;
  static constexpr auto Scratch = NoScratch;
};

struct GatherStreamForm : GatherForm {
  static bool Fits(const LinearDesc& desc) {
    return FitsGatherImage(desc) && desc.tokens <= kMaxStreamTokens;
  }
};

struct GatherMmaForm {
  static constexpr const char* kPacking = "cuda_gather_mma_image";
  static bool Fits(const LinearDesc& desc) { return FitsGatherMmaImage(desc, false); }
  static constexpr auto kBytes = GatherMmaImageBytes;
  static constexpr auto kPack = PackGatherMmaImage;
  static constexpr auto kLocate = LocateInGatherMmaImage;
  static constexpr auto Scratch = NoScratch;
};

struct GatherMmaStreamForm : GatherMmaForm {
  static bool Fits(const LinearDesc& desc) {
    return desc.tokens <= kMaxStreamTokens && FitsGatherMmaImage(desc, true);
  }
};

struct ExpandForm {
  static constexpr const char* kPacking = "cuda_expand_image";
  static bool Fits(const LinearDesc& desc) { return FitsExpandImage(desc); }
  static constexpr auto kBytes = ExpandImageBytes;
  static constexpr auto kPack = PackExpandImage;
  static constexpr std::nullptr_t kLocate =
      nullptr;  // the last entry of a tile may be there four times
  static constexpr auto Scratch = NoScratch;
};

struct TwoFourForm {
  static constexpr const char* kPacking = "cuda_two_four_image";
  static bool Fits(const LinearDesc& desc) { return FitsTwoFourImage(desc); }
  static constexpr auto kBytes = TwoFourImageBytes;
  static constexpr auto kPack = PackTwoFourImage;
  static constexpr auto kLocate = LocateInTwoFourImage;
  static constexpr auto Scratch = NoScratch;
};

template <Layout kLayout, DType kType, typename Form>
bool Supports(const LinearDesc& desc) {
  return desc.layout == kLayout && desc.io_dtype == kType && desc.weight_dtype == kType &&
         Form::Fits(desc);
}

template <CudaKernel kKernel>
KernelStatus RunThroughModule(const KernelContext& ctx, const LinearArgs& args) {
  const CudaModule* module = loaded_module.load(std::memory_order_acquire);
  if (module == nullptr) return {KernelCode::kUnsupported, "the CUDA module is not loaded"};
  return module->linear[static_cast<int>(kKernel)](ctx, args);
}

constexpr LinearVariant kVariants[] = {
#define ESPALIER_CUDA_VARIANT(name, layout, dtype, arch, kernel, form) \
  {#name,                                                              \
   Layout::layout,                                                     \
   Arch::arch,                                                         \
   Layout::layout != Layout::kDense,                                   \
   Supports<Layout::layout, DType::dtype, form>,                       \
   form::kPacking,                                                     \
   form::kBytes,                                                       \
   form::kPack,                                                        \
   form::kLocate,                                                      \
   form::Scratch,                                                      \
   RunThroughModule<CudaKernel::k##kernel>},
#include "kernels/cuda/variants.inc"
#undef ESPALIER_CUDA_VARIANT
};

constexpr CudaKernel kKernels[] = {
#define ESPALIER_CUDA_VARIANT(name, layout, dtype, arch, kernel, form) CudaKernel::k##kernel,
#include "kernels/cuda/variants.inc"
#undef ESPALIER_CUDA_VARIANT
};

}  // namespace

std::span<const LinearVariant> CudaLinearVariants() { return kVariants; }

CudaKernel KernelOf(const LinearVariant& variant) {
  const bool is_ours = &variant >= std::begin(kVariants) && &variant < std::end(kVariants);
  return is_ours ? kKernels[&variant - kVariants] : CudaKernel::kCount;
}

Arch ArchOf(const CudaDeviceInfo& device) {
  if (device.compute_major == 9 && device.compute_minor == 0) return Arch::kSm90;
  return device.compute_major >= 8 ? Arch::kSm80 : Arch::kCpu;
}

bool RunsOn(const LinearVariant& variant, Arch device_arch) {
  if (variant.arch == Arch::kCpu || device_arch == Arch::kCpu) return variant.arch == device_arch;
  return variant.arch <= device_arch;
}

void UseCudaModule(const CudaModule* module) {
  loaded_module.store(module, std::memory_order_release);
}

}  // namespace espalier::kernels::cuda
