#include "engine/tensor/cuda_device.h"

#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/variants.h"
#include "tests/testing/fake_cuda.h"

namespace espalier {
namespace {

using ::testing::AllOf;
using testing::FakeCuda;
using ::testing::HasSubstr;

std::unique_ptr<CudaDevice> MustOpen(CudaDevice::Options options = {}) {
  auto device = CudaDevice::Open(FakeCuda::Module(), std::move(options));
  EXPECT_TRUE(device.ok()) << device.status();
  return device.ok() ? *std::move(device) : nullptr;
}

TEST(CudaDeviceTest, OpensWhatIsThereAndSaysWhatIsNot) {
  FakeCuda& fake = FakeCuda::Reset();
  EXPECT_EQ(MustOpen()->Description(), "cuda Fake GPU, sm_90, driver 13000, fake CUDA");
  const auto refusal = [](int index) {
    return CudaDevice::Open(FakeCuda::Module(), {.index = index}).status();
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(refusal(1)));
  EXPECT_THAT(std::string(refusal(1).message()), HasSubstr("there is no GPU 1, expected 0 to 0"));
  fake.compute_major = 7;
  EXPECT_THAT(std::string(refusal(0).message()),
              AllOf(HasSubstr("capability 7.0"), HasSubstr("expected 8.0")));
  fake.devices = 0;
  EXPECT_THAT(std::string(refusal(0).message()), HasSubstr("the driver lists none"));
  fake.broken = "CUDA driver version is insufficient";
  EXPECT_THAT(std::string(refusal(0).message()), HasSubstr("driver version is insufficient"));
}

TEST(CudaDeviceTest, RunsWhatItsArchitectureHasAndThePortablePathWhereForced) {
  FakeCuda::Reset();
  const auto device = MustOpen(), portable = MustOpen({.portable = true});
  int newest = 0, everywhere = 0;
  for (const kernels::LinearVariant& variant : device->linear_variants()) {
    EXPECT_TRUE(device->Runs(variant)) << variant.name;
    EXPECT_EQ(portable->Runs(variant), variant.arch == kernels::Arch::kSm80) << variant.name;
    ++(variant.arch == kernels::Arch::kSm90 ? newest : everywhere);
  }
  EXPECT_GT(newest, 0);
  EXPECT_GT(everywhere, 0);
  EXPECT_NE(device->Description(), portable->Description());
  EXPECT_NE(device->MakeContext().ops, nullptr);
}

TEST(CudaDeviceTest, UploadsAndFreesWhatItAllocates) {
  FakeCuda& fake = FakeCuda::Reset();
  const auto device = MustOpen();
  const std::vector<char> bytes(1000, 7);
  {
    auto memory = device->Upload(bytes.data(), bytes.size());
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(memory->bytes(), bytes.size());
    EXPECT_EQ(std::memcmp(memory->get(), bytes.data(), bytes.size()), 0);
    auto pinned = device->AllocatePinned(10);
    auto stream = device->NewStream();
    ASSERT_TRUE(pinned.ok() && stream.ok());
    CudaHandle moved = *std::move(memory);
    EXPECT_EQ(fake.allocations.size(), 1u);
    EXPECT_EQ(fake.live_handles, 2);
  }
  EXPECT_TRUE(fake.allocations.empty());
  EXPECT_EQ(fake.live_handles, 0);
}

TEST(CudaDeviceTest, WithoutMemoryTheSizesAreTold) {
  FakeCuda::Reset().memory_bytes = 4096;
  const auto device = MustOpen();
  const auto memory = device->Allocate(5000);
  EXPECT_TRUE(absl::IsResourceExhausted(memory.status()));
  EXPECT_THAT(std::string(memory.status().message()),
              AllOf(HasSubstr("5000 bytes"), HasSubstr("4096 of 4096 are free")));
  EXPECT_FALSE(device->lost());
}

TEST(CudaDeviceTest, AFailureThatPassesIsNoLostDevice) {
  FakeCuda::Reset();
  int told = 0;
  const auto device = MustOpen({.on_lost = [&](const absl::Status&) { ++told; }});
  const absl::Status status =
      device->Explain({kernels::KernelCode::kLaunchFailed, "invalid configuration"}, "layer 'a'");
  EXPECT_TRUE(absl::IsInternal(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 'a': invalid configuration"));
  EXPECT_FALSE(device->lost());
  EXPECT_EQ(told, 0);
}

TEST(CudaDeviceTest, AStickyErrorIsToldOnceAndEveryCallFailsFromThenOn) {
  FakeCuda& fake = FakeCuda::Reset();
  int told = 0;
  const auto device = MustOpen({.on_lost = [&](const absl::Status& status) {
    ++told;
    EXPECT_THAT(std::string(status.message()), HasSubstr("illegal memory access"));
  }});
  fake.broken = "an illegal memory access was encountered";
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(absl::IsUnavailable(device->Allocate(1).status()));
    EXPECT_TRUE(device->lost());
  }
  EXPECT_EQ(told, 1);
}

TEST(CudaDeviceTest, WhatOneProcessExportsAnotherOpensWithItsSizeUntilBothAreDone) {
  FakeCuda& fake = FakeCuda::Reset();
  const auto device = MustOpen();
  auto memory = device->Upload("before", 6);
  ASSERT_TRUE(memory.ok()) << memory.status();
  testing::FakeIpcHandle handle;
  ASSERT_TRUE(device->module().export_ipc_memory(memory->get(), &handle).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(device->OpenIpc(handle.bytes()).status()))
      << "within the process that exported it";
  handle.owner = 1;
  auto opened = device->OpenIpc(handle.bytes());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->bytes(), fake.allocations.at(memory->get()));
  EXPECT_EQ(std::memcmp(opened->get(), "before", 6), 0);
  ASSERT_TRUE(device->Copy(memory->data() + 2, "xyz", 3, nullptr).ok());
  char got[6];
  ASSERT_TRUE(device->Copy(got, opened->get(), 6, nullptr).ok());
  EXPECT_EQ(std::memcmp(got, "bexyze", 6), 0);
  {
    const auto again = device->OpenIpc(handle.bytes());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->get(), opened->get());
    EXPECT_EQ(fake.ipc.open(), 2);
  }
  opened = CudaHandle();
  EXPECT_EQ(fake.ipc.open(), 0);
  memory = CudaHandle();
  EXPECT_TRUE(absl::IsInvalidArgument(device->OpenIpc(handle.bytes()).status()))
      << "its owner has freed it";
}

TEST(CudaDeviceTest, AGraphRunsWhenItIsLaunchedAndAFailedCaptureSaysWhy) {
  FakeCuda& fake = FakeCuda::Reset();
  const auto device = MustOpen();
  const auto stream = device->NewStream();
  ASSERT_TRUE(stream.ok());
  char from = 1, to = 0;
  {
    auto graph = device->Capture(stream->get(), [&] {
      return device->Explain(device->module().copy(&to, &from, 1, stream->get()), "copy");
    });
    ASSERT_TRUE(graph.ok()) << graph.status();
    EXPECT_EQ(to, 0);
    ASSERT_TRUE(device->module().launch_graph(graph->get(), stream->get()).ok());
    EXPECT_EQ(to, 1);
  }
  const auto refused =
      device->Capture(stream->get(), [] { return absl::UnimplementedError("no such kernel"); });
  EXPECT_EQ(refused.status().message(), "no such kernel");
  EXPECT_EQ(fake.live_handles, 1);  // the stream
}

}  // namespace
}  // namespace espalier
