#include "engine/runtime/warm_up.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/formats/regular_file.h"
#include "engine/runtime/log.h"

namespace espalier::runtime {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;
using Sample = inference::ModelWarmup;

// Warming up is a matter of a few runs; this many take seconds with a small model.
constexpr uint32_t kMaxCount = 10'000;

// Counts answers down.
class Answers {
 public:
  explicit Answers(int expected) : left_(expected) {}
  void Add(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    first_error_.Update(status);
    if (--left_ == 0) all_.notify_all();
  }
  absl::Status Wait() {
    std::unique_lock lock(mutex_);
    all_.wait(lock, [this] { return left_ == 0; });
    return first_error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int left_;
  absl::Status first_error_;
};

class WarmUpRequest final : public InferRequest {
 public:
  WarmUpRequest(const std::vector<InputTensor>& from, Answers& answers) : answers_(answers) {
    inputs = from;
    counted = false;
  }
  absl::Status TakeOutputs(absl::Span<const std::byte* const>) override {
    return absl::OkStatus();  // nobody wants them
  }
  void Answer(absl::Status status) override { answers_.Add(status); }

 private:
  Answers& answers_;
};

// Sets the exponent so that the value is in [0.5, 1) and leaves the fraction random.
template <typename Bits>
void FillFloats(std::string& bytes, Bits half, Bits fraction, std::mt19937_64& random) {
  for (size_t at = 0; at + sizeof(Bits) <= bytes.size(); at += sizeof(Bits)) {
    const Bits value = half | (static_cast<Bits>(random()) & fraction);
    std::memcpy(bytes.data() + at, &value, sizeof(Bits));
  }
}

void FillRandom(DType dtype, std::string& bytes) {
  std::mt19937_64 random(1);
  switch (dtype) {
    case DType::kFloat16:
      return FillFloats<uint16_t>(bytes, 0x3800, 0x03ff, random);
    case DType::kBFloat16:
      return FillFloats<uint16_t>(bytes, 0x3f00, 0x007f, random);
    case DType::kFloat32:
      return FillFloats<uint32_t>(bytes, 0x3f000000, 0x007fffff, random);
    case DType::kFloat64:
      return FillFloats<uint64_t>(bytes, 0x3fe0000000000000, 0x000fffffffffffff, random);
    default:  // little-endian integers: their lowest byte
      for (size_t at = 0; at < bytes.size(); at += SizeOf(dtype))
        bytes[at] = static_cast<char>(random() % (dtype == DType::kBool ? 2 : 128));
  }
}

absl::Status FillFromFile(const std::string& folder, const std::string& name, size_t item_bytes,
                          std::string& bytes) {
  if (folder.empty()) return absl::NotFoundError("the model was not read from a folder");
  auto file = formats::RegularFile::OpenBeneath(folder, name);
  if (!file.ok()) return file.status();
  auto content = file->ReadAll(static_cast<int64_t>(bytes.size()));
  if (!content.ok()) return content.status();
  if (content->size() != item_bytes && content->size() != bytes.size()) {
    return InvalidArgumentError(StrCat(file->path(), " has ", content->size(), " bytes, expected ",
                                       item_bytes, ", those of one item, or ", bytes.size(),
                                       ", those of the batch"));
  }
  for (size_t at = 0; at < bytes.size(); at += content->size())
    std::memcpy(bytes.data() + at, content->data(), content->size());
  return absl::OkStatus();
}

// One sample, with the memory of its inputs.
class SampleInputs {
 public:
  SampleInputs(const ServedVersion& version, const Sample& sample, std::string folder)
      : signature_(version.signature()),
        batch_(signature_.max_batch_size > 0 ? std::max(sample.batch_size(), 1u) : 1),
        folder_(std::move(folder)) {}

  absl::Status Add(const std::string& name, const Sample::Input& input) {
    const auto spec = std::find_if(signature_.inputs.begin(), signature_.inputs.end(),
                                   [&](const TensorSpec& s) { return s.name == name; });
    if (spec == signature_.inputs.end())
      return InvalidArgumentError("the model has no input of this name");
    Shape shape(input.dims().begin(), input.dims().end());
    if (signature_.max_batch_size > 0) shape.insert(shape.begin(), batch_);
    Shape expected = spec->shape;
    if (signature_.max_batch_size > 0) expected[0] = batch_;
    if (shape != expected || batch_ > std::max<int64_t>(signature_.max_batch_size, 1)) {
      return InvalidArgumentError(StrCat("batch_size and dims make ", ToString(shape),
                                         ", expected ", ToString(spec->shape),
                                         " with a batch of at most ", signature_.max_batch_size));
    }
    const std::string type(absl::StripPrefix(inference::DataType_Name(input.data_type()), "TYPE_"));
    if (type != NameOf(spec->dtype)) {
      return InvalidArgumentError(
          StrCat("data_type is ", type, ", expected ", NameOf(spec->dtype)));
    }
    std::string bytes(spec->item_bytes * static_cast<size_t>(batch_), '\0');
    if (input.random_data()) FillRandom(spec->dtype, bytes);
    if (input.input_data_type_case() == Sample::Input::kInputDataFile) {
      auto status = FillFromFile(folder_, input.input_data_file(), spec->item_bytes, bytes);
      if (!status.ok()) {
        return absl::Status(status.code(), StrCat("input_data_file '", input.input_data_file(),
                                                  "': ", status.message()));
      }
    }
    memory_.push_back(std::make_unique<std::string>(std::move(bytes)));
    inputs.push_back({.name = name,
                      .datatype = type,
                      .shape = std::move(shape),
                      .data = {{reinterpret_cast<const std::byte*>(memory_.back()->data()),
                                memory_.back()->size()}}});
    return absl::OkStatus();
  }

  std::vector<InputTensor> inputs;

 private:
  const Signature& signature_;
  const int64_t batch_;
  const std::string folder_;
  std::vector<std::unique_ptr<std::string>> memory_;
};

// To every instance at once.
absl::Status RunOnce(const VersionHandle& version, const std::vector<InputTensor>& inputs) {
  Answers answers(version->instances());
  std::vector<std::unique_ptr<WarmUpRequest>> requests;
  for (int i = 0; i < version->instances(); ++i)
    requests.push_back(std::make_unique<WarmUpRequest>(inputs, answers));
  for (auto& request : requests) {
    request->version = version;
    version->Submit(request.get());
  }
  return answers.Wait();
}

absl::Status Run(const VersionHandle& version, const Sample& sample, const std::string& folder) {
  if (sample.count() > kMaxCount) {
    return InvalidArgumentError(
        StrCat("count is ", sample.count(), ", expected at most ", kMaxCount));
  }
  SampleInputs made(*version, sample, folder);
  for (const auto& [name, input] : sample.inputs()) {
    if (absl::Status status = made.Add(name, input); !status.ok()) {
      return absl::Status(status.code(),
                          StrCat("input '", Printable(name), "': ", status.message()));
    }
  }
  for (uint32_t i = 0; i < std::max(sample.count(), 1u); ++i) {
    absl::Status status = RunOnce(version, made.inputs);
    if (absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) {
      LogEvent(spdlog::level::warn, "warm-up request refused by the model's queue policy",
               {{"model", version->name()}, {"reason", status.message()}});
    } else if (!status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WarmUp(const VersionHandle& version, const std::string& folder) {
  for (const Sample& sample : version->config().model_warmup()) {
    if (absl::Status status = Run(version, sample, folder); !status.ok()) {
      return absl::Status(status.code(), StrCat("model_warmup '", Printable(sample.name()),
                                                "': ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace espalier::runtime
