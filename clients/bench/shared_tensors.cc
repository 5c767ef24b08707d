#include "clients/bench/shared_tensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace espalier::bench {
namespace {

constexpr uint64_t kAlignment = 64;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::string UniqueName() {
  static std::atomic<int> made{0};
  return absl::StrCat("espalier-bench-", getpid(), "-", ++made);
}

std::string KeyOf(const std::string& name) { return absl::StrCat("/", name); }

template <typename Tensor>
void Set(Tensor& tensor, const std::string& region, uint64_t offset, uint64_t bytes) {
  auto& parameters = *tensor.mutable_parameters();
  parameters["shared_memory_region"].set_string_param(region);
  parameters["shared_memory_offset"].set_int64_param(static_cast<int64_t>(offset));
  parameters["shared_memory_byte_size"].set_int64_param(static_cast<int64_t>(bytes));
}

}  // namespace

SharedTensors::~SharedTensors() {
  for (const Region& region : regions_) {
    if (region.registered) (void)client_.UnregisterSystemSharedMemory(region.name);
    shm_unlink(KeyOf(region.name).c_str());
  }
}

absl::StatusOr<std::unique_ptr<SharedTensors>> SharedTensors::Create(
    client::Client& client, const std::vector<client::InferRequest>& requests,
    std::vector<Output> outputs) {
  std::unique_ptr<SharedTensors> shared(new SharedTensors(client, std::move(outputs)));
  for (const client::InferRequest& request : requests) {
    if (absl::Status status = shared->Add(request); !status.ok()) return status;
  }
  return shared;
}

absl::Status SharedTensors::Add(const client::InferRequest& request) {
  Region& region = regions_.emplace_back(Region{.name = UniqueName()});
  for (const client::Tensor& input : request.inputs) {
    region.inputs_at.push_back(region.bytes);
    region.bytes += AlignUp(input.bytes.size());
  }
  for (const Output& output : outputs_) {
    region.outputs_at.push_back(region.bytes);
    region.bytes += AlignUp(output.bytes);
  }
  const int object = shm_open(KeyOf(region.name).c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (object < 0) return absl::ErrnoToStatus(errno, "shm_open");
  // Room now, not a signal when it is first touched.
  const int refused = posix_fallocate(object, 0, static_cast<off_t>(region.bytes));
  void* memory = refused == 0
                     ? mmap(nullptr, region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, object, 0)
                     : MAP_FAILED;
  const int error = refused != 0 ? refused : errno;
  close(object);
  if (memory == MAP_FAILED) {
    return absl::ErrnoToStatus(error, absl::StrCat("no room for ", region.bytes,
                                                   " more bytes of shared memory (/dev/shm)"));
  }
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    const std::string& bytes = request.inputs[i].bytes;
    std::memcpy(static_cast<char*>(memory) + region.inputs_at[i], bytes.data(), bytes.size());
  }
  munmap(memory, region.bytes);
  absl::Status status =
      client_.RegisterSystemSharedMemory(region.name, KeyOf(region.name), region.bytes);
  region.registered = status.ok();
  return status;
}

void SharedTensors::Refer(size_t i, inference::ModelInferRequest& message) const {
  const Region& region = regions_[i];
  for (int t = 0; t < message.inputs_size(); ++t) {
    Set(*message.mutable_inputs(t), region.name, region.inputs_at[t],
        message.raw_input_contents(t).size());
  }
  message.clear_raw_input_contents();
  message.clear_outputs();
  for (size_t t = 0; t < outputs_.size(); ++t) {
    auto* wanted = message.add_outputs();
    wanted->set_name(outputs_[t].name);
    Set(*wanted, region.name, region.outputs_at[t], outputs_[t].bytes);
  }
}

}  // namespace espalier::bench
