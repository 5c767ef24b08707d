// Regions on a GPU: the fake's, whose memory is shared memory of a client (tests/testing/fake_ipc.h). First the regions
// themselves, with a device that a test can break; then all that clients do with them through gRPC.
#include <thread>

#include "service/shared_memory.h"
#include "tests/service/client_memory.h"
#include "tests/service/cuda_region_client.h"
#include "tests/service/service_fixture.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::service {
namespace {

using espalier::testing::FakeCuda;
using espalier::testing::FakeIpcHandle;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kCuda = SharedMemoryKind::kCuda;
constexpr int kClient = 1;  // a process that is not this one

std::string HandleOf(const ClientMemory& memory, int device = 0, int owner = kClient) {
  return FakeIpcHandle(memory.key(), owner, device).bytes();
}

class CudaSharedMemoryTest : public ::testing::Test {
 protected:
  FakeCuda& fake_ = FakeCuda::Reset();
  const Devices devices_ = *OpenDevices({.threads = 1}, FakeCuda::Module());
  SharedMemoryRegions regions_{{.system = true, .cuda = true}, devices_};
};

TEST_F(CudaSharedMemoryTest, BytesGoInAndOut) {
  ClientMemory memory(100);
  memory.Put(0, "abcdef");
  ASSERT_TRUE(regions_.RegisterCuda("r", HandleOf(memory), 0, 50).ok());
  const auto region = *regions_.Find("r");
  EXPECT_EQ(region->kind(), kCuda);
  EXPECT_EQ(Read(*region, 2, 4), "cdef");
  ASSERT_TRUE(region->Write(47, Bytes("xyz")).ok());
  EXPECT_EQ(memory.Get(47, 3), "xyz");
  EXPECT_EQ(Read(*region, 50, 0), "");
}

TEST_F(CudaSharedMemoryTest, WhatTheHandleMapsIsTheLimitAndNotWhatTheClientSays) {
  ClientMemory memory(100);
  EXPECT_EQ(Message(regions_.RegisterCuda("r", HandleOf(memory), 0, 101), kInvalid),
            "CUDA shared memory region 'r': byte_size is 101, but its handle maps only 100 bytes");
  EXPECT_FALSE(regions_.RegisterCuda("r", HandleOf(memory), 0, UINT64_MAX).ok());
  EXPECT_THAT(Message(regions_.RegisterCuda("r", HandleOf(memory), 0, 0), kInvalid),
              HasSubstr("byte_size 0, expected at least 1"));
  EXPECT_EQ(fake_.ipc.open(), 0) << "what is refused is closed again";
  ASSERT_TRUE(regions_.RegisterCuda("r", HandleOf(memory), 0, 100).ok());
}

TEST_F(CudaSharedMemoryTest, RangesOutsideTheRegionAreRefusedAlsoWhereSumsOverflow) {
  ClientMemory memory(100);
  ASSERT_TRUE(regions_.RegisterCuda("r", HandleOf(memory), 0, 50).ok());
  const auto region = *regions_.Find("r");
  EXPECT_EQ(Read(*region, 48, 3),
            "shared memory region 'r' has 50 bytes, too few for 3 bytes at offset 48");
  EXPECT_FALSE(region->Write(51, {}).ok());
  EXPECT_FALSE(region->CheckRange(UINT64_MAX, 2).ok());
  EXPECT_FALSE(region->CheckRange(2, UINT64_MAX).ok());
}

TEST_F(CudaSharedMemoryTest, AHandleThatCannotBeOpenedIsRefusedWithTheDriversWords) {
  ClientMemory memory(100);
  const auto refusal = [&](const std::string& handle, int64_t device = 0) {
    return Message(regions_.RegisterCuda("r", handle, device, 10), kInvalid);
  };
  EXPECT_THAT(refusal(""), HasSubstr("a handle of 0 bytes, expected the 64 of a cudaIpcMemHandle"));
  EXPECT_THAT(refusal(std::string(65, 'x')), HasSubstr("a handle of 65 bytes"));
  EXPECT_THAT(refusal(std::string(64, 'x')),
              AllOf(HasSubstr("region 'r': GPU 0 (Fake GPU): open a handle of another process"),
                    HasSubstr("invalid argument")));
  EXPECT_THAT(refusal(FakeIpcHandle("/espalier_no_such_memory", kClient).bytes()),
              HasSubstr("invalid resource handle"));
  EXPECT_THAT(refusal(HandleOf(memory, 0, getpid())), HasSubstr("invalid device context"))
      << "a handle of the server's own process";
  EXPECT_THAT(Message(regions_.RegisterCuda("", HandleOf(memory), 0, 1), kInvalid),
              HasSubstr("has 0 bytes, expected 1 to 255"));
  EXPECT_EQ(fake_.ipc.open(), 0);
  EXPECT_FALSE(devices_.gpus[0]->lost());
}

TEST_F(CudaSharedMemoryTest, TheDeviceMustBeTheOneOnWhichTheMemoryLies) {
  fake_.devices = 2;
  const Devices two = *OpenDevices({.threads = 1}, FakeCuda::Module());
  SharedMemoryRegions regions({.cuda = true}, two);
  ClientMemory memory(100);
  for (const int64_t device : {int64_t{-1}, int64_t{2}, INT64_MAX, int64_t{1} << 32}) {
    EXPECT_EQ(Message(regions.RegisterCuda("r", HandleOf(memory), device, 1), kInvalid),
              absl::StrCat("CUDA shared memory region 'r': device_id is ", device,
                           ", expected a GPU of this server: 0, 1"));
  }
  EXPECT_THAT(Message(regions.RegisterCuda("r", HandleOf(memory), 1, 1), kInvalid),
              HasSubstr("the handle is of memory on GPU 0, expected GPU 1"));
  EXPECT_EQ(fake_.ipc.open(), 0);
  EXPECT_TRUE(regions.RegisterCuda("r", HandleOf(memory, 1), 1, 1).ok());
  EXPECT_EQ((*regions.List<CudaSharedMemory>("r"))[0]->device_id(), 1);
}

TEST_F(CudaSharedMemoryTest, AHandleMayBeRegisteredTwiceAndIsOpenUntilTheLastUserIsGone) {
  ClientMemory memory(100);
  memory.Put(0, "abc");
  ASSERT_TRUE(regions_.RegisterCuda("a", HandleOf(memory), 0, 10).ok());
  ASSERT_TRUE(regions_.RegisterCuda("b", HandleOf(memory), 0, 20).ok());
  EXPECT_EQ(fake_.ipc.open(), 2);
  auto held = *regions_.Find("a");
  ASSERT_TRUE(regions_.Unregister(kCuda, "a").ok());
  EXPECT_EQ(fake_.ipc.open(), 2) << "somebody still holds it";
  EXPECT_EQ(Read(*held, 0, 3), "abc");
  held.reset();
  EXPECT_EQ(fake_.ipc.open(), 1);
  EXPECT_EQ(Read(**regions_.Find("b"), 0, 3), "abc");
  ASSERT_TRUE(regions_.Unregister(kCuda, "").ok());
  EXPECT_EQ(fake_.ipc.open(), 0);
  EXPECT_EQ(fake_.live_handles, 0) << "streams";
}

TEST_F(CudaSharedMemoryTest, BothKindsShareOneSpaceOfNames) {
  ClientMemory memory(100);
  ASSERT_TRUE(regions_.RegisterSystem("s", memory.key(), 0, 10).ok());
  ASSERT_TRUE(regions_.RegisterCuda("c", HandleOf(memory), 0, 10).ok());
  EXPECT_THAT(Message(regions_.RegisterCuda("s", HandleOf(memory), 0, 10),
                      absl::StatusCode::kAlreadyExists),
              HasSubstr("'s' is registered already"));
  EXPECT_THAT(
      Message(regions_.RegisterSystem("c", memory.key(), 0, 10), absl::StatusCode::kAlreadyExists),
      HasSubstr("'c' is registered already"));
  const std::string as_system =
      "the region named 's' is registered as system shared memory, not CUDA shared memory";
  const std::string as_cuda =
      "the region named 'c' is registered as CUDA shared memory, not system shared memory";
  constexpr auto kNotFound = absl::StatusCode::kNotFound;
  EXPECT_EQ(Message(regions_.List<CudaSharedMemory>("s").status(), kNotFound), as_system);
  EXPECT_EQ(Message(regions_.List<SystemSharedMemory>("c").status(), kNotFound), as_cuda);
  EXPECT_EQ(Message(regions_.Unregister(kCuda, "s"), kNotFound), as_system);
  EXPECT_EQ(Message(regions_.Unregister(SharedMemoryKind::kSystem, "c"), kNotFound), as_cuda);
  EXPECT_EQ(regions_.List<SystemSharedMemory>("")->size(), 1u);
  EXPECT_EQ(regions_.List<CudaSharedMemory>("")->size(), 1u);
  EXPECT_TRUE(regions_.Unregister(SharedMemoryKind::kSystem, "").ok());
  EXPECT_FALSE(regions_.Find("s").ok());
  EXPECT_TRUE(regions_.Find("c").ok()) << "all of one kind are not all";
}

TEST_F(CudaSharedMemoryTest, OnALostGpuRegionsAreUnavailableAndCanBeForgotten) {
  ClientMemory memory(100);
  ASSERT_TRUE(regions_.RegisterCuda("r", HandleOf(memory), 0, 100).ok());
  // Outlives the loss: a lost device takes nothing back, which LeakSanitizer would find.
  const auto region = *regions_.Find("r");
  fake_.broken = "an illegal memory access was encountered";
  EXPECT_THAT(
      Message(regions_.RegisterCuda("s", HandleOf(memory), 0, 100), absl::StatusCode::kUnavailable),
      HasSubstr("illegal memory access"));
  EXPECT_THAT(Read(*region, 0, 1), HasSubstr("illegal memory access"));
  EXPECT_TRUE(regions_.Unregister(kCuda, "r").ok());
  fake_.broken.clear();
}

TEST_F(CudaSharedMemoryTest, EachKindIsOfferedOnlyWhereItIsAllowedAndThereIsAGpu) {
  const auto refusal = [](const absl::Status& status) {
    return Message(status, absl::StatusCode::kUnimplemented);
  };
  SharedMemoryRegions neither({}, devices_), system({.system = true}, devices_);
  EXPECT_THAT(refusal(neither.RegisterCuda("r", "", 0, 1)),
              HasSubstr("--allow_cuda_shared_memory"));
  EXPECT_THAT(refusal(neither.Find("r").status()),
              AllOf(HasSubstr("--allow_system_shared_memory"), HasSubstr("--allow_cuda")));
  for (const absl::Status& status :
       {system.RegisterCuda("r", "", 0, 1), system.Unregister(kCuda, ""),
        system.List<CudaSharedMemory>("").status(), system.CheckOffered(kCuda)}) {
    EXPECT_THAT(refusal(status), HasSubstr("--allow_cuda_shared_memory turns that on"));
  }
  EXPECT_TRUE(absl::IsNotFound(system.Find("r").status()));

  Devices none;
  none.why_no_gpu = "no NVIDIA driver (libcuda.so.1)";
  SharedMemoryRegions without({.cuda = true}, none);
  for (const absl::Status& status : {without.RegisterCuda("r", "", 0, 1),
                                     without.Unregister(kCuda, ""), without.Find("r").status()}) {
    EXPECT_THAT(refusal(status), HasSubstr("it has no GPU (no NVIDIA driver (libcuda.so.1))"));
  }
}

// Through gRPC, with the fake as the module that the server opens.
class CudaSharedMemoryRpcTest : public ServiceFixture {
 protected:
  static constexpr uint64_t kRegionBytes = 4096;

  CudaSharedMemoryRpcTest() {
    control_ = AddModel("m");
    options_.device = DeviceMode::kCuda;
    options_.cuda_module = FAKE_CUDA_MODULE;
    options_.allow_cuda_shared_memory = true;
    options_.allow_system_shared_memory = true;
  }

  grpc::Status Register(const std::string& name, const std::string& handle,
                        uint64_t byte_size = kRegionBytes, int64_t device = 0) {
    return RegisterCudaRegion(*stub_, name, handle, byte_size, device);
  }
  grpc::Status Unregister(const std::string& name) { return UnregisterCudaRegion(*stub_, name); }

  template <typename InputOrOutput>
  static void Share(InputOrOutput* tensor, const std::string& region, int64_t bytes,
                    int64_t offset = 0) {
    auto& parameters = *tensor->mutable_parameters();
    parameters["shared_memory_region"].set_string_param(region);
    parameters["shared_memory_byte_size"].set_int64_param(bytes);
    if (offset > 0) parameters["shared_memory_offset"].set_int64_param(offset);
  }
  // `batch` items of "m" from the region's beginning, and the answers to `offset`.
  static ModelInferRequest Shared(int64_t batch, const std::string& region, int64_t offset) {
    ModelInferRequest request = RawRequest(batch);
    request.clear_raw_input_contents();
    Share(request.mutable_inputs(0), region, batch * 16);
    request.add_outputs()->set_name("y");
    Share(request.mutable_outputs(0), region, batch * 16, offset);
    return request;
  }
  void PutInput(int64_t batch) { memory_.Put(0, RawRequest(batch).raw_input_contents(0)); }

  ClientMemory memory_{kRegionBytes};
  std::shared_ptr<FakeControl> control_;
};

TEST_F(CudaSharedMemoryRpcTest, TensorsComeFromARegionAndGoThere) {
  StartServer();
  PutInput(2);
  ASSERT_TRUE(Register("r", HandleOf(memory_)).ok());
  ModelInferResponse response;
  const grpc::Status status = Infer(Shared(2, "r", 1024), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(FloatsOf(memory_.Get(1024, 32)), (std::vector<float>{0, 2, 4, 6, 8, 10, 12, 14}));
  EXPECT_EQ(memory_.Get(1056, 4), std::string(4, '\0')) << "not a byte more";
  EXPECT_EQ(response.outputs(0).parameters().at("shared_memory_region").string_param(), "r");
  EXPECT_THAT(response.raw_output_contents(), ElementsAre(""));
}

TEST_F(CudaSharedMemoryRpcTest, OneSideMayBeInARegionAndTheOtherInTheMessageOrOfTheOtherKind) {
  StartServer();
  PutInput(1);
  ASSERT_TRUE(Register("r", HandleOf(memory_)).ok());
  ModelInferRequest request = Shared(1, "r", 64);
  request.clear_outputs();
  ModelInferResponse response;
  ASSERT_TRUE(Infer(request, &response).ok());
  EXPECT_THAT(FloatsOf(response.raw_output_contents(0)), ElementsAre(0, 2, 4, 6));

  ClientMemory system(kRegionBytes, "system");
  inference::SystemSharedMemoryRegisterRequest other;
  other.set_name("s");
  other.set_key(system.key());
  other.set_byte_size(kRegionBytes);
  inference::SystemSharedMemoryRegisterResponse ignored;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->SystemSharedMemoryRegister(&context, other, &ignored).ok());
  request = Shared(1, "r", 0);
  Share(request.mutable_outputs(0), "s", 16, 128);
  ASSERT_TRUE(Infer(request).ok());
  EXPECT_THAT(FloatsOf(system.Get(128, 16)), ElementsAre(0, 2, 4, 6));
  EXPECT_EQ(Register("s", HandleOf(memory_)).error_code(), grpc::ALREADY_EXISTS);
  EXPECT_EQ(Unregister("s").error_code(), grpc::NOT_FOUND);
}

TEST_F(CudaSharedMemoryRpcTest, StatusListsWhatIsRegistered) {
  StartServer();
  ASSERT_TRUE(Register("a", HandleOf(memory_), 100).ok());
  ASSERT_TRUE(Register("b", HandleOf(memory_), 200).ok());
  inference::CudaSharedMemoryStatusRequest request;
  const auto ask = [&](inference::CudaSharedMemoryStatusResponse* response) {
    grpc::ClientContext context;
    return stub_->CudaSharedMemoryStatus(&context, request, response);
  };
  inference::CudaSharedMemoryStatusResponse all, one, none;
  ASSERT_TRUE(ask(&all).ok());
  EXPECT_EQ(all.regions_size(), 2);
  EXPECT_EQ(all.regions().at("b").name(), "b");
  EXPECT_EQ(all.regions().at("b").device_id(), 0u);
  EXPECT_EQ(all.regions().at("b").byte_size(), 200u);
  request.set_name("a");
  ASSERT_TRUE(ask(&one).ok());
  EXPECT_EQ(one.regions_size(), 1);
  ASSERT_TRUE(Unregister("").ok());
  EXPECT_EQ(ask(&none).error_code(), grpc::NOT_FOUND);
}

TEST_F(CudaSharedMemoryRpcTest, ARequestThatRunsKeepsItsRegionsWhenTheyAreUnregistered) {
  StartServer();
  PutInput(1);
  ASSERT_TRUE(Register("r", HandleOf(memory_)).ok());
  control_->run_gate.Close();
  grpc::Status status;
  std::thread client([&] { status = Infer(Shared(1, "r", 1024)); });
  control_->run_gate.AwaitWaiting(1);
  ASSERT_TRUE(Unregister("r").ok());
  ExpectRefused(Shared(1, "r", 0), grpc::NOT_FOUND, "unable to find shared memory region 'r'");
  control_->run_gate.Open();
  client.join();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(FloatsOf(memory_.Get(1024, 16)), ElementsAre(0, 2, 4, 6));
}

TEST_F(CudaSharedMemoryRpcTest, WrongRangesAreRefusedBeforeAnythingRuns) {
  StartServer();
  ASSERT_TRUE(Register("r", HandleOf(memory_)).ok());
  const auto refuse = [&](bool input, int64_t bytes, int64_t offset, const std::string& text) {
    ModelInferRequest request = Shared(1, "r", 0);
    if (input) {
      Share(request.mutable_inputs(0), "r", bytes, offset);
    } else {
      Share(request.mutable_outputs(0), "r", bytes, offset);
    }
    ExpectRefused(request, grpc::INVALID_ARGUMENT, text);
  };
  refuse(true, 16, kRegionBytes - 15, "has 4096 bytes, too few for 16 bytes at offset 4081");
  refuse(true, 16, INT64_MAX, "too few for 16 bytes");
  refuse(true, INT64_MAX, INT64_MAX, "too few");
  refuse(true, 15, 0, "takes 16 bytes, got 15");
  refuse(false, 16, kRegionBytes - 15, "too few for 16 bytes at offset 4081");
  refuse(false, INT64_MAX, 0, "too few");
  refuse(false, 15, 0, "takes 16 bytes, but shared_memory_byte_size is 15");
  EXPECT_EQ(control_->runs, 0);
}

TEST_F(CudaSharedMemoryRpcTest, WrongRegistrationsAreRefusedAndTheServerGoesOn) {
  StartServer();
  EXPECT_EQ(Register("r", std::string(64, '\xff')).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Register("r", "short").error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Register("r", HandleOf(memory_), kRegionBytes, 7).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Register("r", HandleOf(memory_, 0, getpid())).error_code(), grpc::INVALID_ARGUMENT);
  const grpc::Status large = Register("r", HandleOf(memory_), kRegionBytes + 1);
  EXPECT_EQ(large.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(large.error_message(), HasSubstr("byte_size is 4097, but its handle maps only 4096"));
  EXPECT_TRUE(Unregister("never there").ok());
  EXPECT_TRUE(Infer(RawRequest()).ok());
}

TEST_F(CudaSharedMemoryRpcTest, ItIsAnExtensionOnlyWhereItIsOffered) {
  const auto extensions = [&] {
    inference::ServerMetadataResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->ServerMetadata(&context, {}, &response).ok());
    return std::vector<std::string>(response.extensions().begin(), response.extensions().end());
  };
  StartServer();
  EXPECT_THAT(extensions(),
              ::testing::IsSupersetOf({"system_shared_memory", "cuda_shared_memory"}));
}

TEST_F(CudaSharedMemoryRpcTest, WithoutAGpuItIsRefusedWithTheReason) {
  options_.device = DeviceMode::kAuto;
  options_.cuda_module = "/nowhere.so";
  StartServer();
  for (const grpc::Status& status : {Register("r", HandleOf(memory_)), Unregister("")}) {
    EXPECT_EQ(status.error_code(), grpc::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(),
                AllOf(HasSubstr("it has no GPU"), HasSubstr("/nowhere.so")));
  }
}

}  // namespace
}  // namespace espalier::service
