// cuda_shared_memory_gpu_check — a client that passes tensors in GPU memory of its own to a server in another process.
//
//   cuda_shared_memory_gpu_check --url=127.0.0.1:8001 --model=mnist_block16 [--module=libespalier_cuda.so]
//       [--requests=300]
//
// The server needs --allow_cuda_shared_memory, --allow_system_shared_memory and a model with FP32 inputs and outputs. Allocates on GPU 0 through the
// module, exports handles, registers them and infers with inputs and outputs in regions; answers are compared with those to
// plain requests; the same with POSIX shared memory, which the server's GPU copies by itself. Then everything that must be refused, and regions that are unregistered while requests run. Prints a line
// PASS or FAIL for each check, and the time of a request with and without regions. Waits up to two minutes for
// server and model. Exits 0, 1 when something is wrong, 2 without a GPU or a server.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/tensor/devices.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/service/cuda_region_client.h"

namespace espalier::service {
namespace {

using absl::StrCat;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

constexpr int kNoGpuOrServer = 2;
constexpr size_t kAlignedTo = 256;
constexpr char kPoison = '\x5a';

struct Options {
  std::string url = "127.0.0.1:8001", model, module;
  int requests = 300;
};

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view rest = argv[i];
    if (absl::ConsumePrefix(&rest, "--url=")) {
      options.url = std::string(rest);
    } else if (absl::ConsumePrefix(&rest, "--model=")) {
      options.model = std::string(rest);
    } else if (absl::ConsumePrefix(&rest, "--module=")) {
      options.module = std::string(rest);
    } else if (!absl::ConsumePrefix(&rest, "--requests=") ||
               !absl::SimpleAtoi(rest, &options.requests) || options.requests < 1) {
      return false;
    }
  }
  return !options.model.empty();
}

// Memory of this process on the GPU, and the handle by which another one may open it.
class ExportedMemory {
 public:
  ExportedMemory(const CudaDevice& device, size_t bytes) : device_(device), handle_(64, '\0') {
    auto memory = device.Allocate(bytes);
    absl::Status status = memory.status();
    if (status.ok()) {
      memory_ = *std::move(memory);
      status = device.Explain(device.module().export_ipc_memory(memory_.get(), handle_.data()),
                              "export a handle");
    }
    if (status.ok()) status = Put(0, std::string(bytes, kPoison));
    if (!status.ok()) std::printf("FAIL allocate and export: %s\n", status.ToString().c_str());
  }

  const std::string& handle() const { return handle_; }
  size_t bytes() const { return memory_.bytes(); }
  absl::Status Put(size_t at, const std::string& bytes) {
    return device_.Copy(memory_.data() + at, bytes.data(), bytes.size(), nullptr);
  }
  std::string Get(size_t at, size_t bytes) const {
    std::string got(bytes, '\0');
    const absl::Status status = device_.Copy(got.data(), memory_.data() + at, bytes, nullptr);
    return status.ok() ? got : std::string(status.message());
  }

 private:
  const CudaDevice& device_;
  CudaHandle memory_;
  std::string handle_;
};

// Where a tensor lies.
struct Place {
  std::string region;  // empty: in the message
  size_t offset = 0;
};

class Check {
 public:
  Check(const Options& options, const CudaDevice& device)
      : options_(options),
        device_(device),
        stub_(GRPCInferenceService::NewStub(
            grpc::CreateChannel(options.url, grpc::InsecureChannelCredentials()))) {}

  // False without a server or a model to ask.
  bool Connect();
  void TensorsInRegions();
  void SmallAllocationsSideBySide();
  void WhatIsRefused();
  void OneHandleTwice();
  void UnregisteredUnderTraffic();
  void SystemMemory();
  void Times();
  int failed() const { return failed_; }

 private:
  void Expect(bool good, const std::string& what, const std::string& detail = "") {
    std::printf("%s %s%s%s\n", good ? "PASS" : "FAIL", what.c_str(), detail.empty() ? "" : ": ",
                detail.c_str());
    std::fflush(stdout);
    if (!good) ++failed_;
  }
  void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, const std::string& text,
                     const std::string& what) {
    Expect(status.error_code() == code && absl::StrContains(status.error_message(), text), what,
           StrCat("code ", status.error_code(), ", ", status.error_message()));
  }

  grpc::Status Register(const std::string& name, const std::string& handle, uint64_t byte_size,
                        int64_t device = 0) {
    return RegisterCudaRegion(*stub_, name, handle, byte_size, device);
  }
  grpc::Status Unregister(const std::string& name) { return UnregisterCudaRegion(*stub_, name); }

  // One item whose values depend on `seed`.
  std::string Item(uint32_t seed) const {
    std::string bytes(input_bytes_, '\0');
    for (size_t i = 0; i < input_bytes_; i += sizeof(float)) {
      seed = seed * 1664525 + 1013904223;
      const float value = static_cast<float>(seed >> 8) / static_cast<float>(1 << 24);
      std::memcpy(bytes.data() + i, &value, sizeof(value));
    }
    return bytes;
  }
  // Asks for the answer to one item; `answer` is what the message holds.
  grpc::Status Infer(const std::string& item, const Place& input, const Place& output,
                     std::string* answer = nullptr) const;
  std::string Plain(const std::string& item) const {
    std::string answer;
    const grpc::Status status = Infer(item, {}, {}, &answer);
    return status.ok() ? answer : status.error_message();
  }
  // Empty when they agree, else by how much they do not.
  static std::string Difference(const std::string& got, const std::string& expected);

  const Options options_;
  const CudaDevice& device_;
  const std::unique_ptr<GRPCInferenceService::Stub> stub_;
  inference::ModelMetadataResponse model_;
  std::vector<int64_t> input_shape_;
  size_t input_bytes_ = 0, output_bytes_ = 0;  // of one item
  int failed_ = 0;
};

template <typename Tensor>
size_t ItemBytes(const Tensor& tensor, std::vector<int64_t>* shape) {
  size_t bytes = sizeof(float);
  for (const int64_t dim : tensor.shape()) {
    shape->push_back(std::max<int64_t>(dim, 1));
    bytes *= static_cast<size_t>(shape->back());
  }
  return bytes;
}

bool Check::Connect() {
  inference::ModelMetadataRequest request;
  request.set_name(options_.model);
  const auto deadline = std::chrono::system_clock::now() + std::chrono::minutes(2);
  grpc::Status status;
  do {  // the server starts, or the model is still loading
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(deadline);
    status = stub_->ModelMetadata(&context, request, &model_);
    if (status.ok() || status.error_code() == grpc::NOT_FOUND) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (std::chrono::system_clock::now() < deadline);
  if (!status.ok() || model_.inputs_size() != 1 || model_.outputs_size() < 1 ||
      model_.inputs(0).datatype() != "FP32" || model_.outputs(0).datatype() != "FP32") {
    std::printf("no model '%s' with one FP32 input and an FP32 output at %s: %s\n",
                options_.model.c_str(), options_.url.c_str(), status.error_message().c_str());
    return false;
  }
  std::vector<int64_t> output_shape;
  input_bytes_ = ItemBytes(model_.inputs(0), &input_shape_);
  output_bytes_ = ItemBytes(model_.outputs(0), &output_shape);
  return true;
}

grpc::Status Check::Infer(const std::string& item, const Place& input, const Place& output,
                          std::string* answer) const {
  ModelInferRequest request;
  request.set_model_name(options_.model);
  auto* x = request.add_inputs();
  x->set_name(model_.inputs(0).name());
  x->set_datatype("FP32");
  x->mutable_shape()->Add(input_shape_.begin(), input_shape_.end());
  auto* y = request.add_outputs();
  y->set_name(model_.outputs(0).name());
  const auto place = [](const Place& at, size_t bytes, auto& parameters) {
    if (at.region.empty()) return;
    parameters["shared_memory_region"].set_string_param(at.region);
    parameters["shared_memory_byte_size"].set_int64_param(static_cast<int64_t>(bytes));
    parameters["shared_memory_offset"].set_int64_param(static_cast<int64_t>(at.offset));
  };
  place(input, input_bytes_, *x->mutable_parameters());
  place(output, output_bytes_, *y->mutable_parameters());
  if (input.region.empty()) request.add_raw_input_contents(item);
  ModelInferResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub_->ModelInfer(&context, request, &response);
  if (status.ok() && answer != nullptr) *answer = response.raw_output_contents(0);
  return status;
}

std::string Check::Difference(const std::string& got, const std::string& expected) {
  if (got.size() != expected.size())
    return StrCat(got.size(), " bytes, expected ", expected.size(), " (", expected, ")");
  std::vector<float> a(got.size() / sizeof(float)), b(a.size());
  std::memcpy(a.data(), got.data(), got.size());
  std::memcpy(b.data(), expected.data(), expected.size());
  float largest = 0, off = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
    // NaN, which poison is not but a wrong answer may be, must not pass for equal.
    off = std::isfinite(a[i]) ? std::max(off, std::abs(a[i] - b[i])) : INFINITY;
  }
  // The batcher may have joined requests, and another batch may have another kernel: rounding differs.
  return off <= 1e-4f * largest ? "" : StrCat("off by ", off, " of ", largest);
}

void Check::TensorsInRegions() {
  const size_t output_at = (input_bytes_ + kAlignedTo) / kAlignedTo * kAlignedTo;
  ExportedMemory memory(device_, output_at + output_bytes_ + kAlignedTo);
  const std::string item = Item(1), expected = Plain(item);
  Expect(memory.Put(0, item).ok(), "an item is put into memory of this process");
  const grpc::Status registered = Register("both", memory.handle(), memory.bytes());
  Expect(registered.ok(), "a handle is registered", registered.error_message());
  inference::CudaSharedMemoryStatusResponse listed;
  grpc::ClientContext context;
  const grpc::Status status = stub_->CudaSharedMemoryStatus(&context, {}, &listed);
  Expect(status.ok() && listed.regions_size() == 1 && listed.regions().count("both") == 1 &&
             listed.regions().at("both").byte_size() == memory.bytes() &&
             listed.regions().at("both").device_id() == 0,
         "the region is listed", status.error_message());

  grpc::Status done = Infer(item, {"both", 0}, {"both", output_at});
  std::string off =
      done.ok() ? Difference(memory.Get(output_at, output_bytes_), expected) : done.error_message();
  Expect(off.empty(), "input and output in a region", off);
  Expect(memory.Get(0, input_bytes_) == item, "the input is what it was");
  Expect(memory.Get(output_at + output_bytes_, kAlignedTo) == std::string(kAlignedTo, kPoison),
         "nothing behind the output was written");

  std::string answer;
  done = Infer(item, {"both", 0}, {}, &answer);
  off = done.ok() ? Difference(answer, expected) : done.error_message();
  Expect(off.empty(), "the input alone in a region", off);
  const std::string other = Item(2);
  done = Infer(other, {}, {"both", output_at});
  off = done.ok() ? Difference(memory.Get(output_at, output_bytes_), Plain(other))
                  : done.error_message();
  Expect(off.empty(), "the output alone in a region", off);
  Expect(Unregister("both").ok(), "the region is unregistered");
  ExpectRefused(Infer(item, {"both", 0}, {}), grpc::NOT_FOUND, "unable to find",
                "a request that names it then is refused");
}

// The driver puts small allocations into one block: each region must be its own part of it.
void Check::SmallAllocationsSideBySide() {
  std::vector<std::unique_ptr<ExportedMemory>> memories;
  for (uint32_t i = 0; i < 4; ++i) {
    memories.push_back(std::make_unique<ExportedMemory>(device_, input_bytes_));
    const bool put = memories[i]->Put(0, Item(10 + i)).ok();
    const grpc::Status status = Register(StrCat("small ", i), memories[i]->handle(), input_bytes_);
    if (!put || !status.ok()) Expect(false, "a small allocation", status.error_message());
  }
  std::string wrong;
  for (uint32_t i = 0; i < memories.size(); ++i) {
    std::string answer;
    const grpc::Status done = Infer("", {StrCat("small ", i), 0}, {}, &answer);
    absl::StrAppend(&wrong,
                    done.ok() ? Difference(answer, Plain(Item(10 + i))) : done.error_message());
  }
  Expect(wrong.empty(), "four small allocations are four regions", wrong);
  Expect(Unregister("").ok(), "all regions are unregistered at once");
}

void Check::WhatIsRefused() {
  ExportedMemory memory(device_, size_t{4} << 20);
  const size_t bytes = memory.bytes();
  ExpectRefused(Register("r", memory.handle(), bytes + (size_t{64} << 20)), grpc::INVALID_ARGUMENT,
                "but its handle maps only", "more bytes than the handle maps");
  ExpectRefused(Register("r", memory.handle(), UINT64_MAX), grpc::INVALID_ARGUMENT, "maps only",
                "2^64 - 1 bytes");
  ExpectRefused(Register("r", memory.handle(), 0), grpc::INVALID_ARGUMENT, "byte_size 0",
                "no bytes");
  ExpectRefused(Register("r", "short", bytes), grpc::INVALID_ARGUMENT, "expected the 64",
                "a handle that is too short");
  ExpectRefused(Register("r", std::string(64, '\0'), bytes), grpc::INVALID_ARGUMENT, "GPU 0",
                "a handle of zeros");
  ExpectRefused(Register("r", std::string(64, '\xff'), bytes), grpc::INVALID_ARGUMENT, "GPU 0",
                "a handle of ones");
  ExpectRefused(Register("r", memory.handle(), bytes, 99), grpc::INVALID_ARGUMENT,
                "device_id is 99", "a GPU that is not there");
  const grpc::Status registered = Register("r", memory.handle(), bytes);
  Expect(registered.ok(), "the right registration is still taken", registered.error_message());
  ExpectRefused(Register("r", memory.handle(), bytes), grpc::ALREADY_EXISTS, "registered already",
                "a name that is taken");
  ExpectRefused(Infer("", {"r", bytes - 4}, {}), grpc::INVALID_ARGUMENT, "too few",
                "an input that reaches behind the region");
  ExpectRefused(Infer(Item(1), {}, {"r", bytes - 4}), grpc::INVALID_ARGUMENT, "too few",
                "an output that reaches behind the region");
  ExpectRefused(Infer("", {"r", INT64_MAX}, {}), grpc::INVALID_ARGUMENT, "too few",
                "an offset whose sum overflows");
  Expect(Unregister("r").ok() && Unregister("r").ok(), "unregistering twice is no error");
  Expect(Plain(Item(1)).size() == output_bytes_, "the server answers after all that");
}

void Check::OneHandleTwice() {
  ExportedMemory memory(device_, input_bytes_ + kAlignedTo);
  const std::string item = Item(3);
  const bool ready = memory.Put(0, item).ok() &&
                     Register("first", memory.handle(), memory.bytes()).ok() &&
                     Register("second", memory.handle(), memory.bytes()).ok();
  Expect(ready, "one handle under two names");
  Expect(Unregister("first").ok(), "the first name is unregistered");
  std::string answer;
  const grpc::Status done = Infer("", {"second", 0}, {}, &answer);
  const std::string off = done.ok() ? Difference(answer, Plain(item)) : done.error_message();
  Expect(off.empty(), "the second name still reads the memory", off);
  Expect(Unregister("second").ok(), "the second name is unregistered");
}

void Check::UnregisteredUnderTraffic() {
  constexpr size_t kThreads = 8;
  const size_t stride = (input_bytes_ + output_bytes_ + 2 * kAlignedTo) / kAlignedTo * kAlignedTo;
  const size_t output_at = (input_bytes_ + kAlignedTo - 1) / kAlignedTo * kAlignedTo;
  ExportedMemory memory(device_, kThreads * (stride + kAlignedTo));
  std::atomic<bool> end{false};
  std::atomic<int> answered{0}, missed{0}, wrong{0};
  std::vector<std::thread> clients;
  Expect(Register("busy", memory.handle(), memory.bytes()).ok(), "a region for eight clients");
  for (size_t t = 0; t < kThreads; ++t) {
    clients.emplace_back([&, t] {
      const std::string item = Item(static_cast<uint32_t>(100 + t)), expected = Plain(item);
      const size_t at = t * stride;
      if (!memory.Put(at, item).ok()) ++wrong;
      while (!end) {
        if (!memory.Put(at + output_at, std::string(output_bytes_, kPoison)).ok()) ++wrong;
        const grpc::Status status = Infer("", {"busy", at}, {"busy", at + output_at});
        if (status.ok()) {
          if (!Difference(memory.Get(at + output_at, output_bytes_), expected).empty()) ++wrong;
          ++answered;
        } else {
          ++(status.error_code() == grpc::NOT_FOUND ? missed : wrong);
        }
      }
    });
  }
  bool registered = true;
  for (int i = 0; i < options_.requests; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    registered = registered && Unregister("busy").ok() &&
                 Register("busy", memory.handle(), memory.bytes()).ok();
  }
  end = true;
  for (std::thread& client : clients) client.join();
  Expect(registered && wrong == 0 && answered > 0,
         "a region that is unregistered again and again while requests run",
         StrCat(answered.load(), " answered, ", missed.load(), " without a region, ", wrong.load(),
                " wrong"));
  Expect(Unregister("").ok(), "the region is unregistered");
}

void Check::SystemMemory() {
  const size_t output_at = (input_bytes_ + kAlignedTo) / kAlignedTo * kAlignedTo;
  const size_t bytes = output_at + output_bytes_;
  const std::string key = StrCat("/espalier_check_", getpid()), item = Item(5);
  const int fd = shm_open(key.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  inference::SystemSharedMemoryRegisterRequest request;
  request.set_name("system");
  request.set_key(key);
  request.set_byte_size(bytes);
  inference::SystemSharedMemoryRegisterResponse response;
  grpc::ClientContext registering;
  bool ready = ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
               pwrite(fd, item.data(), item.size(), 0) == static_cast<ssize_t>(item.size());
  const grpc::Status registered =
      stub_->SystemSharedMemoryRegister(&registering, request, &response);
  Expect(ready && registered.ok(), "POSIX shared memory is registered", registered.error_message());
  const grpc::Status done = Infer("", {"system", 0}, {"system", output_at});
  std::string got(output_bytes_, '\0');
  ready = pread(fd, got.data(), got.size(), static_cast<off_t>(output_at)) ==
          static_cast<ssize_t>(got.size());
  const std::string off = done.ok() ? Difference(got, Plain(item)) : done.error_message();
  Expect(ready && off.empty(), "input and output in POSIX shared memory", off);
  ready = ftruncate(fd, 4) == 0;
  ExpectRefused(Infer("", {"system", 0}, {}), grpc::INVALID_ARGUMENT, "has only 4 bytes",
                "an input in a file that was cut short");
  ExpectRefused(Infer(item, {}, {"system", output_at}), grpc::INVALID_ARGUMENT, "has only 4 bytes",
                "an output in a file that was cut short");
  Expect(Plain(item).size() == output_bytes_, "the server answers after that");
  inference::SystemSharedMemoryUnregisterRequest forget;
  inference::SystemSharedMemoryUnregisterResponse forgotten;
  grpc::ClientContext context;
  Expect(stub_->SystemSharedMemoryUnregister(&context, forget, &forgotten).ok(),
         "it is unregistered");
  close(fd);
  shm_unlink(key.c_str());
}

void Check::Times() {
  const size_t output_at = (input_bytes_ + kAlignedTo) / kAlignedTo * kAlignedTo;
  ExportedMemory memory(device_, output_at + output_bytes_);
  Expect(Register("timed", memory.handle(), memory.bytes()).ok(), "a region to measure with");
  const std::string item = Item(4);
  const auto median = [&](const Place& input, const Place& output) {
    std::vector<double> micros;
    for (int i = 0; i < options_.requests; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      if (!Infer(item, input, output).ok()) Expect(false, "a request that is timed");
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - begin;
      micros.push_back(took.count());
    }
    std::nth_element(micros.begin(), micros.begin() + micros.size() / 2, micros.end());
    return micros[micros.size() / 2];
  };
  const double plain = median({}, {}), shared = median({"timed", 0}, {"timed", output_at});
  std::printf(
      "median of %d requests with %zu bytes in, %zu out: %.0f us plain, %.0f us in a region\n",
      options_.requests, input_bytes_, output_bytes_, plain, shared);
  Expect(Unregister("").ok(), "the region is unregistered");
}

int Main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, options)) {
    std::fprintf(stderr,
                 "usage: %s --model=NAME [--url=HOST:PORT] [--module=FILE] [--requests=N]\n",
                 argv[0]);
    return kNoGpuOrServer;
  }
  const auto devices = OpenDevices({.mode = DeviceMode::kCuda, .cuda_module = options.module});
  if (!devices.ok()) {
    std::printf("%s\n", std::string(devices.status().message()).c_str());
    return kNoGpuOrServer;
  }
  std::printf("on %s\n", devices->gpus[0]->Description().c_str());
  Check check(options, *devices->gpus[0]);
  if (!check.Connect()) return kNoGpuOrServer;
  check.TensorsInRegions();
  check.SmallAllocationsSideBySide();
  check.WhatIsRefused();
  check.OneHandleTwice();
  check.UnregisteredUnderTraffic();
  check.SystemMemory();
  check.Times();
  std::printf("%s: %d failed\n", check.failed() == 0 ? "PASS" : "FAIL", check.failed());
  return check.failed() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace espalier::service

int main(int argc, char** argv) { return espalier::service::Main(argc, argv); }
