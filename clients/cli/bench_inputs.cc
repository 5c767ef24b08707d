#include "clients/cli/bench_inputs.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "clients/cli/input_files.h"

namespace espalier::cli {
namespace {

using absl::StrCat;

constexpr int64_t kMaxRequests = 1024;
constexpr int64_t kBytesElement = 8;  // letters in a random element of BYTES

// One input: its shape in a request, and the items to fill it from.
struct Pool {
  client::Tensor shape;   // name, datatype and shape of one request; no bytes
  bool batched = false;   // the first dimension counts items
  int64_t items = 0;      // 0: random
  std::string bytes;      // of all items, one after the other
  std::string described;  // where they are from
};

bool TakesBatch(const TensorMetadata& input) {
  return input.shape_size() > 0 && input.shape(0) == -1;
}

// The model's dimensions with what it leaves open filled in: the batch, and --shape.
absl::StatusOr<std::vector<int64_t>> RequestShape(const TensorMetadata& input, int64_t batch,
                                                  const std::string& flag) {
  std::vector<int64_t> shape(input.shape().begin(), input.shape().end());
  if (TakesBatch(input)) shape.front() = batch;
  if (!flag.empty()) {
    std::vector<int64_t> item;
    for (absl::string_view text : absl::StrSplit(flag, ',')) {
      if (!absl::SimpleAtoi(text, &item.emplace_back()) || item.back() < 0) {
        return WrongUsage(StrCat("--shape: expected sizes like 128,64, got '", flag, "'"));
      }
    }
    if (item.size() + (TakesBatch(input) ? 1 : 0) != shape.size()) {
      return WrongUsage(
          StrCat("--shape ", flag, ": expected ", shape.size() - (TakesBatch(input) ? 1 : 0),
                 " sizes, one for each dimension but the batch, for ", Describe(input)));
    }
    std::copy(item.begin(), item.end(), shape.end() - static_cast<int64_t>(item.size()));
  }
  if (std::any_of(shape.begin(), shape.end(), [](int64_t dim) { return dim < 0; })) {
    return WrongUsage(StrCat("--shape is needed for ", Describe(input), ": --shape ", input.name(),
                             "=SIZE,… says the dimensions behind the batch"));
  }
  return shape;
}

absl::StatusOr<std::vector<std::string>> FilesOf(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    if (entry.is_regular_file(error)) files.push_back(entry.path().string());
  }
  if (files.empty()) return absl::NotFoundError(StrCat(path, ": no files in this directory"));
  std::sort(files.begin(), files.end());
  return files;
}

// Appends the items of a file, which must be of the request's datatype and dimensions.
absl::Status AppendFile(const std::string& path, const TensorMetadata& input, Pool& pool) {
  absl::StatusOr<client::Tensor> tensor = ReadInput(path, input, "", INT64_MAX);
  if (!tensor.ok()) return tensor.status();
  std::vector<int64_t> item = pool.shape.shape;
  if (pool.batched) item.erase(item.begin());
  // A file may also hold one item, without the dimension that counts them.
  if (tensor->shape == item) tensor->shape.insert(tensor->shape.begin(), 1);
  const bool fits = tensor->shape.size() == item.size() + 1 &&
                    std::equal(item.begin(), item.end(), tensor->shape.begin() + 1);
  if (!fits || tensor->datatype != pool.shape.datatype || tensor->datatype == "BYTES") {
    return absl::InvalidArgumentError(StrCat(path, ": expected items ", pool.shape.datatype, " [",
                                             absl::StrJoin(item, ", "), "] for ", Describe(input),
                                             ", got ", tensor->datatype, " [",
                                             absl::StrJoin(tensor->shape, ", "), "]"));
  }
  pool.items += tensor->shape.front();
  pool.bytes += tensor->bytes;
  return absl::OkStatus();
}

absl::StatusOr<Pool> MakePool(const TensorMetadata& input, int64_t batch, const std::string& shape,
                              const std::string& path) {
  Pool pool;
  pool.batched = TakesBatch(input);
  if (!pool.batched && batch != 1) {
    return WrongUsage(StrCat("--batch ", batch, ": ", Describe(input), " has no batch dimension"));
  }
  absl::StatusOr<std::vector<int64_t>> request_shape = RequestShape(input, batch, shape);
  if (!request_shape.ok()) return request_shape.status();
  pool.shape = {input.name(), input.datatype(), *std::move(request_shape), ""};
  if (absl::StatusOr<size_t> size = client::ElementBytes(input.datatype()); !size.ok()) {
    return size.status();
  }
  if (path.empty()) return pool;
  absl::StatusOr<std::vector<std::string>> files = FilesOf(path);
  if (!files.ok()) return files.status();
  for (const std::string& file : *files) {
    if (absl::Status status = AppendFile(file, input, pool); !status.ok()) return status;
  }
  if (pool.items == 0) return absl::InvalidArgumentError(StrCat(path, ": holds no items"));
  pool.described = StrCat(pool.items, pool.items == 1 ? " item of " : " items of ", path);
  return pool;
}

template <typename T>
void Append(T value, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Floats in [0, 1), like pixels; integers from 0 to 99, which most models of token ids know.
std::string RandomElements(const std::string& datatype, int64_t count, std::mt19937_64& random) {
  std::uniform_real_distribution<double> unit(0, 1);
  const size_t width = client::ElementBytes(datatype).value();
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    if (datatype == "FP32") {
      Append(static_cast<float>(unit(random)), bytes);
    } else if (datatype == "FP64") {
      Append(unit(random), bytes);
    } else if (datatype == "FP16") {  // exponent of [0.5, 1), random fraction
      Append(static_cast<uint16_t>(0x3800 | (random() & 0x3FF)), bytes);
    } else if (datatype == "BF16") {
      Append(static_cast<uint16_t>(0x3F00 | (random() & 0x7F)), bytes);
    } else if (datatype == "BYTES") {
      Append(static_cast<uint32_t>(kBytesElement), bytes);
      for (int64_t j = 0; j < kBytesElement; ++j) {
        bytes.push_back(static_cast<char>('a' + random() % 26));
      }
    } else {
      const int64_t value = static_cast<int64_t>(random() % (datatype == "BOOL" ? 2 : 100));
      bytes.append(reinterpret_cast<const char*>(&value), width);  // little-endian: low bytes first
    }
  }
  return bytes;
}

// Items first, first + 1, … of the pool, around its end.
client::Tensor Cut(const Pool& pool, int64_t first, int64_t batch, std::mt19937_64& random) {
  client::Tensor tensor = pool.shape;
  if (pool.items == 0) {
    tensor.bytes = RandomElements(tensor.datatype, *client::ElementCount(tensor.shape), random);
    return tensor;
  }
  const size_t item_bytes = pool.bytes.size() / static_cast<size_t>(pool.items);
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t item = (first + i) % pool.items;
    tensor.bytes.append(pool.bytes, static_cast<size_t>(item) * item_bytes, item_bytes);
  }
  return tensor;
}

absl::StatusOr<int64_t> BytesOf(const std::vector<Pool>& pools) {
  int64_t bytes = 0;
  for (const Pool& pool : pools) {
    absl::StatusOr<int64_t> elements = client::ElementCount(pool.shape.shape);
    if (!elements.ok()) return elements.status();
    const size_t width = std::max<size_t>(*client::ElementBytes(pool.shape.datatype), 1);
    if (*elements > INT32_MAX / static_cast<int64_t>(width)) {
      return WrongUsage(StrCat("input '", pool.shape.name, "' would have ", *elements,
                               " elements, more than a message takes; use a smaller --batch"));
    }
    bytes += *elements * static_cast<int64_t>(width);
  }
  return std::max<int64_t>(bytes, 1);
}

absl::StatusOr<client::InferRequest> Template(const Args& args, const std::string& model) {
  client::InferRequest request{.model = model, .version = args.String("version", "")};
  for (const auto& [flag, parameter] :
       {std::pair("priority", "priority"), std::pair("queue_timeout", "timeout")}) {
    absl::StatusOr<int64_t> value = args.Int(flag, 0, 1, INT64_MAX);
    if (!value.ok()) return value.status();
    if (args.Has(flag)) request.parameters[parameter] = *value;
  }
  return request;
}

}  // namespace

absl::StatusOr<std::vector<bench::SharedTensors::Output>> OutputsOf(
    const inference::ModelMetadataResponse& metadata, int64_t batch) {
  std::vector<bench::SharedTensors::Output> outputs;
  for (const TensorMetadata& output : metadata.outputs()) {
    std::vector<int64_t> shape(output.shape().begin(), output.shape().end());
    if (TakesBatch(output)) shape.front() = batch;
    const auto elements = client::ElementCount(shape);  // none for what is open
    const auto width = client::ElementBytes(output.datatype());
    if (!elements.ok() || !width.ok() || *width == 0) {
      return absl::InvalidArgumentError(
          StrCat("--shared_memory needs outputs of a known size, got ", Describe(output)));
    }
    outputs.push_back({output.name(), static_cast<uint64_t>(*elements) * *width});
  }
  return outputs;
}

absl::StatusOr<BenchInputs> MakeBenchInputs(const Args& args,
                                            const inference::ModelMetadataResponse& metadata,
                                            int64_t batch) {
  auto files = NamedValues(args, "input", metadata.inputs());
  if (!files.ok()) return files.status();
  auto shapes = NamedValues(args, "shape", metadata.inputs());
  if (!shapes.ok()) return shapes.status();
  absl::StatusOr<client::InferRequest> request = Template(args, metadata.name());
  if (!request.ok()) return request.status();
  absl::StatusOr<int64_t> seed = args.Int("seed", 1, 0, INT64_MAX);
  if (!seed.ok()) return seed.status();
  std::vector<Pool> pools;
  std::vector<std::string> described;
  int64_t most_items = 0;
  for (const TensorMetadata& input : metadata.inputs()) {
    absl::StatusOr<Pool> pool =
        MakePool(input, batch, (*shapes)[input.name()], (*files)[input.name()]);
    if (!pool.ok()) return pool.status();
    described.push_back(pool->items == 0 ? "random" : pool->described);
    most_items = std::max(most_items, pool->items);
    pools.push_back(*std::move(pool));
  }
  absl::StatusOr<int64_t> bytes = BytesOf(pools);
  if (!bytes.ok()) return bytes.status();
  const int64_t wanted = most_items == 0 ? kMaxRequests : (most_items + batch - 1) / batch;
  const int64_t count =
      std::clamp<int64_t>(kMaxBenchBytes / *bytes, 1, std::min(wanted, kMaxRequests));
  std::mt19937_64 random(static_cast<uint64_t>(*seed));
  BenchInputs inputs{{}, absl::StrJoin(described, ", ")};
  for (int64_t r = 0; r < count; ++r) {
    client::InferRequest& next = inputs.requests.emplace_back(*request);
    for (const Pool& pool : pools) {
      next.inputs.push_back(Cut(pool, r * batch, pool.batched ? batch : 1, random));
    }
  }
  return inputs;
}

}  // namespace espalier::cli
