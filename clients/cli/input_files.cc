#include "clients/cli/input_files.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "clients/cli/elements.h"
#include "clients/cli/file.h"
#include "clients/cli/npy.h"

namespace espalier::cli {
namespace {

std::string ListNames(const Tensors& tensors) {
  return absl::StrJoin(tensors, ", ",
                       [](std::string* out, const auto& tensor) { out->append(tensor.name()); });
}

// Splits "NAME=VALUE"; without a name it is the only one of `tensors`.
absl::StatusOr<std::pair<std::string, std::string>> NameAndValue(absl::string_view flag,
                                                                 const std::string& text,
                                                                 const Tensors& tensors) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) {
    if (tensors.size() == 1) return std::pair(tensors.begin()->name(), text);
    return WrongUsage(absl::StrCat("--", flag, " ", text, ": say which of ", ListNames(tensors),
                                   " it is: --", flag, " NAME=", text));
  }
  const std::string name = text.substr(0, equals);
  for (const auto& tensor : tensors) {
    if (tensor.name() == name) return std::pair(name, text.substr(equals + 1));
  }
  return WrongUsage(absl::StrCat("--", flag, " ", text, ": the model has no '", name, "'; it has ",
                                 ListNames(tensors)));
}

// The shape of raw bytes: as --shape says, else the model's, one unknown dimension from the size.
absl::StatusOr<std::vector<int64_t>> RawShape(const TensorMetadata& input, const std::string& flag,
                                              const std::string& path, size_t bytes) {
  std::vector<int64_t> shape(input.shape().begin(), input.shape().end());
  if (!flag.empty()) {
    shape.clear();
    for (absl::string_view text : absl::StrSplit(flag, ',')) {
      if (!absl::SimpleAtoi(text, &shape.emplace_back()) || shape.back() < 0) {
        return WrongUsage(absl::StrCat("--shape: expected sizes like 1,784, got '", flag, "'"));
      }
    }
    return shape;
  }
  absl::StatusOr<size_t> element_bytes = client::ElementBytes(input.datatype());
  if (!element_bytes.ok()) return element_bytes.status();
  int64_t known = 1, *unknown = nullptr;
  for (int64_t& dim : shape) {
    if (dim >= 0) known *= dim;
    if (dim < 0 && unknown != nullptr) known = 0;
    if (dim < 0) unknown = &dim;
  }
  if (unknown != nullptr && (known <= 0 || *element_bytes == 0)) {
    return WrongUsage(absl::StrCat("--shape is needed for ", Describe(input), ": --shape ",
                                   input.name(), "=1,784"));
  }
  if (unknown == nullptr) return shape;
  const size_t item_bytes = *element_bytes * static_cast<size_t>(known);
  if (bytes == 0 || bytes % item_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": expected items of ", item_bytes, " bytes for ", Describe(input), ", got ", bytes,
        " bytes; is it the right file? (.npy files say what they hold, others are taken as they "
        "are)"));
  }
  *unknown = static_cast<int64_t>(bytes / item_bytes);
  return shape;
}

void KeepFirst(client::Tensor& tensor, int64_t limit) {
  const Items items = Items::Of(tensor);
  if (tensor.shape.empty() || tensor.datatype == "BYTES" || items.count <= limit) return;
  tensor.bytes.resize(tensor.bytes.size() / items.count * limit);
  tensor.shape.front() = limit;
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> NamedValues(const Args& args,
                                                               absl::string_view flag,
                                                               const Tensors& tensors) {
  std::map<std::string, std::string> values;
  for (const std::string& text : args.All(flag)) {
    auto named = NameAndValue(flag, text, tensors);
    if (!named.ok()) return named.status();
    if (!values.insert(*named).second) {
      return WrongUsage(absl::StrCat("--", flag, ": '", named->first, "' is given twice"));
    }
  }
  return values;
}

absl::StatusOr<client::Tensor> ReadInput(const std::string& path, const TensorMetadata& input,
                                         const std::string& shape, int64_t limit) {
  if (shape.empty() && IsIdx(path)) {
    absl::StatusOr<IdxFile> images = ReadIdx(path);
    if (!images.ok()) return images.status();
    return ImageTensor(*images, 0, std::min(limit, images->items()), input);
  }
  absl::StatusOr<std::string> content = ReadFile(path);
  if (!content.ok()) return content.status();
  client::Tensor tensor;
  if (IsNpy(*content)) {
    absl::StatusOr<client::Tensor> parsed = ParseNpy(*content, path);
    if (!parsed.ok()) return parsed.status();
    tensor = *std::move(parsed);
    tensor.name = input.name();
  } else {
    absl::StatusOr<std::vector<int64_t>> raw_shape = RawShape(input, shape, path, content->size());
    if (!raw_shape.ok()) return raw_shape.status();
    tensor = {input.name(), input.datatype(), *std::move(raw_shape), *std::move(content)};
    if (absl::Status status = client::CheckTensor(tensor); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", status.message()));
    }
  }
  KeepFirst(tensor, limit);
  return tensor;
}

}  // namespace espalier::cli
