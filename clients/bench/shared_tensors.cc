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

template <typename Tensor>
void Set(Tensor& tensor, const std::string& region, uint64_t offset, uint64_t bytes) {
  auto& parameters = *tensor.mutable_parameters();
  parameters["shared_memory_region"].set_string_param(region);
  parameters["shared_memory_offset"].set_int64_param(static_cast<int64_t>(offset));
  parameters["shared_memory_byte_size"].set_int64_param(static_cast<int64_t>(bytes));
}

}  // namespace

SharedTensors::SharedTensors(client::Client& client, std::vector<Output> outputs)
    : client_(client), outputs_(std::move(outputs)), name_(UniqueName()) {}

SharedTensors::~SharedTensors() {
  if (registered_) (void)client_.UnregisterSystemSharedMemory(name_);
  shm_unlink(absl::StrCat("/", name_).c_str());
}

absl::StatusOr<std::unique_ptr<SharedTensors>> SharedTensors::Create(
    client::Client& client, const std::vector<client::InferRequest>& requests,
    std::vector<Output> outputs) {
  std::unique_ptr<SharedTensors> shared(new SharedTensors(client, std::move(outputs)));
  if (absl::Status status = shared->Fill(requests); !status.ok()) return status;
  absl::Status status = client.RegisterSystemSharedMemory(
      shared->name_, absl::StrCat("/", shared->name_), shared->bytes_);
  if (!status.ok()) return status;
  shared->registered_ = true;
  return shared;
}

absl::Status SharedTensors::Fill(const std::vector<client::InferRequest>& requests) {
  for (const client::InferRequest& request : requests) {
    std::vector<uint64_t>& at = inputs_at_.emplace_back();
    for (const client::Tensor& input : request.inputs) {
      at.push_back(bytes_);
      bytes_ += AlignUp(input.bytes.size());
    }
    answer_at_.push_back(bytes_);
    for (const Output& output : outputs_) bytes_ += AlignUp(output.bytes);
  }
  const std::string key = absl::StrCat("/", name_);
  const int object = shm_open(key.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (object < 0) return absl::ErrnoToStatus(errno, absl::StrCat("shm_open ", key));
  // Room now, not a signal when it is first touched.
  const int refused = posix_fallocate(object, 0, static_cast<off_t>(bytes_));
  void* memory = refused == 0 ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, object, 0)
                              : MAP_FAILED;
  const int error = refused != 0 ? refused : errno;
  close(object);
  if (memory == MAP_FAILED) {
    return absl::ErrnoToStatus(
        error, absl::StrCat("cannot have ", bytes_, " bytes of shared memory (/dev/shm)"));
  }
  for (size_t r = 0; r < requests.size(); ++r) {
    for (size_t i = 0; i < inputs_at_[r].size(); ++i) {
      const std::string& bytes = requests[r].inputs[i].bytes;
      std::memcpy(static_cast<char*>(memory) + inputs_at_[r][i], bytes.data(), bytes.size());
    }
  }
  munmap(memory, bytes_);
  return absl::OkStatus();
}

void SharedTensors::Refer(size_t i, inference::ModelInferRequest& message) const {
  for (int t = 0; t < message.inputs_size(); ++t) {
    Set(*message.mutable_inputs(t), name_, inputs_at_[i][t], message.raw_input_contents(t).size());
  }
  message.clear_raw_input_contents();
  message.clear_outputs();
  uint64_t at = answer_at_[i];
  for (const Output& output : outputs_) {
    auto* wanted = message.add_outputs();
    wanted->set_name(output.name);
    Set(*wanted, name_, at, output.bytes);
    at += AlignUp(output.bytes);
  }
}

}  // namespace espalier::bench
