// The list of CUDA variants as the host sees it: what a machine without a GPU can know and decide.
#include "kernels/cuda/variants.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kernels/cuda/module_loader.h"
#include "tests/kernels/cuda/random_weight.h"

namespace espalier::kernels::cuda {
namespace {

LinearDesc Problem(Layout layout, DType dtype, int32_t block, int64_t tokens) {
  return {tokens, 1024, 512, layout, dtype, dtype, block, block, 8};
}

std::set<std::string> Supported(const LinearDesc& desc, Arch arch) {
  std::set<std::string> names;
  for (const LinearVariant& variant : CudaLinearVariants()) {
    if (RunsOn(variant, arch) && variant.supports(desc)) names.insert(variant.name);
  }
  return names;
}

TEST(CudaVariantsTest, NamesAreUniqueAndSayLayoutTypeAndArchitecture) {
  std::set<std::string> names;
  for (const LinearVariant& variant : CudaLinearVariants()) {
    const std::string name = variant.name;
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(name.find(NameOf(variant.layout)), 0u) << name;
    if (variant.arch == Arch::kSm90) {
      EXPECT_NE(name.find("_sm90_"), std::string::npos) << name;
    }
    EXPECT_NE(KernelOf(variant), CudaKernel::kCount);
  }
  EXPECT_EQ(KernelOf(LinearVariant{}), CudaKernel::kCount);
}

TEST(CudaVariantsTest, APortableGpuGetsPortableKernelsOnly) {
  EXPECT_EQ(Supported(Problem(Layout::kDiagonal, DType::kBFloat16, 64, 1000), Arch::kSm80),
            std::set<std::string>{"diagonal_linear_bf16_sm80_mma"});
  EXPECT_TRUE(
      Supported(Problem(Layout::kDiagonal, DType::kBFloat16, 64, 1000), Arch::kCpu).empty());
}

TEST(CudaVariantsTest, HopperGetsTheKernelsOfItsBlockSize) {
  const auto wide = Supported(Problem(Layout::kBlockCsr, DType::kFloat16, 64, 1000), Arch::kSm90);
  EXPECT_TRUE(wide.contains("block_csr_linear_f16_sm90_slab_full"));
  EXPECT_TRUE(wide.contains("block_csr_linear_f16_sm80_mma"));
  EXPECT_FALSE(wide.contains("block_csr_linear_f16_sm90_row_group"));
  EXPECT_FALSE(wide.contains("block_csr_linear_f16_sm90_stream")) << "for few tokens";
  const auto narrow = Supported(Problem(Layout::kBlockCsr, DType::kFloat16, 16, 16), Arch::kSm90);
  EXPECT_TRUE(narrow.contains("block_csr_linear_f16_sm90_row_group"));
  EXPECT_TRUE(narrow.contains("block_csr_linear_f16_sm90_stream"));
  EXPECT_FALSE(narrow.contains("block_csr_linear_f16_sm90_slab64"));
  EXPECT_TRUE(wide.contains("block_csr_linear_f16_sm90_twin256"));
}

TEST(CudaVariantsTest, Fp32GetsItsOwnKernelsAndNoOthers) {
  EXPECT_EQ(Supported(Problem(Layout::kDiagonal, DType::kFloat32, 64, 10), Arch::kSm90),
            std::set<std::string>{"diagonal_linear_f32_sm80_fma"});
  EXPECT_EQ(Supported(Problem(Layout::kBlockCsr, DType::kFloat32, 16, 1000), Arch::kSm80),
            std::set<std::string>{"block_csr_linear_f32_sm80_fma"});
  EXPECT_EQ(Supported(Problem(Layout::kCsr, DType::kFloat32, 1, 1000), Arch::kSm90),
            std::set<std::string>{"csr_linear_f32_sm90_gather"});
}

TEST(CudaVariantsTest, ScatteredWeightsOfTwoBytesGetTensorCoresToo) {
  for (Layout layout : {Layout::kCsr, Layout::kDiagonal}) {
    const auto found = Supported(Problem(layout, DType::kBFloat16, 1, 100), Arch::kSm90);
    EXPECT_TRUE(found.contains(std::string(NameOf(layout)) + "_linear_bf16_sm90_expand"));
    EXPECT_TRUE(found.contains(std::string(NameOf(layout)) + "_linear_bf16_sm90_two_four"));
  }
}

TEST(CudaVariantsTest, WhatNoKernelTakesIsUnsupportedAndNotACrash) {
  EXPECT_TRUE(Supported(Problem(Layout::kBlockCsr, DType::kBFloat16, 48, 10), Arch::kSm90).empty());
  LinearDesc mixed = Problem(Layout::kDiagonal, DType::kBFloat16, 64, 10);
  mixed.io_dtype = DType::kFloat32;
  EXPECT_TRUE(Supported(mixed, Arch::kSm90).empty());
  LinearDesc huge = Problem(Layout::kBlockCsr, DType::kBFloat16, 16, 10);
  huge.count = int64_t{1} << 40;
  EXPECT_TRUE(Supported(huge, Arch::kSm90).empty());
}

TEST(CudaVariantsTest, VariantsThatShareAPackingPackTheSameBytes) {
  for (Layout layout : {Layout::kBlockCsr, Layout::kDiagonal}) {
    const testing::RandomWeight weight({layout, DType::kBFloat16, 200, 300, 64, 64, 0.4});
    std::vector<char> first;
    for (const LinearVariant& variant : CudaLinearVariants()) {
      if (variant.layout != layout || std::string(variant.packing) != "cuda_block_image") continue;
      std::vector<char> packed(variant.packed_bytes(weight.view()));
      ASSERT_TRUE(variant.pack(weight.view(), packed.data()).ok());
      if (first.empty()) first = packed;
      EXPECT_EQ(first, packed) << variant.name;
    }
    EXPECT_FALSE(first.empty());
  }
}

TEST(CudaVariantsTest, WithoutAModuleAVariantSaysSo) {
  UseCudaModule(nullptr);
  const KernelStatus status = CudaLinearVariants()[0].run(KernelContext{}, LinearArgs{});
  EXPECT_EQ(status.code, KernelCode::kUnsupported);
  EXPECT_STREQ(status.message, "the CUDA module is not loaded");
}

TEST(CudaModuleTest, AMissingModuleIsNamedInTheError) {
  std::string error;
  EXPECT_EQ(OpenCudaModule("/nonexistent/libespalier_cuda.so", &error), nullptr);
  EXPECT_NE(error.find("/nonexistent/libespalier_cuda.so"), std::string::npos) << error;
}

TEST(CudaModuleTest, AnotherLibraryIsNotTakenForTheModule) {
  std::string error;
  EXPECT_EQ(OpenCudaModule("libm.so.6", &error), nullptr);
  EXPECT_NE(error.find("espalier_cuda_module"), std::string::npos) << error;
}

}  // namespace
}  // namespace espalier::kernels::cuda
