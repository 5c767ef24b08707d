#include "engine/formats/safetensors_header.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/json_reader.h"
#include "engine/formats/model_graph.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

struct DtypeBits {
  const char* name;
  int bits;
};
constexpr DtypeBits kDtypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

// Below every limit on what can be allocated or addressed, so that sums do not overflow.
constexpr uint64_t kMaxBytes = uint64_t{1} << 60;

absl::Status InTensor(const std::string& name, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(name), ": ", problem));
}

class HeaderParser {
 public:
  HeaderParser(absl::string_view json, uint64_t data_begin, uint64_t file_bytes)
      : json_(json), data_begin_(data_begin), data_bytes_(file_bytes - data_begin) {}

  absl::StatusOr<SafetensorsHeader> Parse() {
    auto status = json_.Object(
        [&](const std::string& key) { return key == "__metadata__" ? Metadata() : Tensor(key); });
    if (!status.ok()) return status;
    if (status = json_.End(); !status.ok()) return status;
    if (status = CheckTiling(); !status.ok()) return status;
    for (SafetensorsTensor& tensor : header_.tensors) tensor.offset += data_begin_;
    return std::move(header_);
  }

 private:
  absl::Status Metadata() {
    return json_.Object([&](const std::string& key) {
      auto value = json_.String();
      if (value.ok()) header_.metadata.emplace(key, *value);
      return value.status();
    });
  }

  absl::Status Tensor(const std::string& name) {
    if (auto status = CheckName("a tensor", name); !status.ok()) return status;
    SafetensorsTensor tensor;
    tensor.name = name;
    uint64_t end = 0;
    int fields = 0;
    auto status = json_.Object([&](const std::string& key) -> absl::Status {
      ++fields;
      if (key == "dtype") {
        auto dtype = json_.String();
        if (dtype.ok()) tensor.dtype = *std::move(dtype);
        return dtype.status();
      }
      if (key == "shape") return Shape(tensor);
      if (key == "data_offsets") return Offsets(tensor, end);
      return InTensor(name, absl::StrCat("has the field ", Quoted(key),
                                         ", expected dtype, shape and data_offsets"));
    });
    if (!status.ok()) return status;
    // Keys are unique, so that three fields are the three.
    if (fields != 3) {
      return InTensor(
          name, absl::StrCat("has ", fields, " fields, expected dtype, shape and data_offsets"));
    }
    if (status = CheckSize(tensor, end); !status.ok()) return status;
    header_.tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status Shape(SafetensorsTensor& tensor) {
    return json_.Array([&]() -> absl::Status {
      const auto dim = json_.Count();
      if (!dim.ok()) return dim.status();
      if (*dim > kMaxBytes || tensor.shape.size() == kMaxRank) {
        return InTensor(tensor.name,
                        absl::StrCat("dim ", tensor.shape.size(), " is ", *dim,
                                     ", expected at most ", kMaxRank, " dims below 2^60"));
      }
      tensor.shape.push_back(static_cast<int64_t>(*dim));
      return absl::OkStatus();
    });
  }

  absl::Status Offsets(SafetensorsTensor& tensor, uint64_t& end) {
    std::vector<uint64_t> offsets;
    auto status = json_.Array([&]() -> absl::Status {
      const auto offset = json_.Count();
      if (!offset.ok()) return offset.status();
      if (offsets.size() == 2) return InTensor(tensor.name, "has more than two data_offsets");
      offsets.push_back(*offset);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes_) {
      return InTensor(tensor.name,
                      absl::StrCat("has the data_offsets [", absl::StrJoin(offsets, ", "),
                                   "], expected begin and end in data of ", data_bytes_, " bytes"));
    }
    tensor.offset = offsets[0];
    end = offsets[1];
    return absl::OkStatus();
  }

  static absl::Status CheckSize(SafetensorsTensor& tensor, uint64_t end) {
    const int bits = SafetensorsBits(tensor.dtype);
    if (bits == 0)
      return InTensor(tensor.name, absl::StrCat("has the unknown dtype ", Quoted(tensor.dtype)));
    uint64_t size = static_cast<uint64_t>(bits);
    for (const int64_t dim : tensor.shape) {
      if (__builtin_mul_overflow(size, static_cast<uint64_t>(dim), &size))
        return InTensor(tensor.name, "has a shape whose size overflows");
    }
    tensor.bytes = end - tensor.offset;
    if (size % 8 != 0 || size / 8 != tensor.bytes) {
      return InTensor(tensor.name,
                      absl::StrCat("has ", tensor.bytes, " bytes, expected ", size, " bits for ",
                                   tensor.dtype, " [", absl::StrJoin(tensor.shape, ", "), "]"));
    }
    return absl::OkStatus();
  }

  absl::Status CheckTiling() {
    std::sort(header_.tensors.begin(), header_.tensors.end(),
              [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
                return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
              });
    uint64_t end = 0;
    for (const SafetensorsTensor& tensor : header_.tensors) {
      if (tensor.offset != end) {
        return InTensor(tensor.name,
                        absl::StrCat(tensor.offset < end ? "overlaps the one before: it"
                                                         : "leaves a hole before it: it",
                                     " begins at ", tensor.offset, ", expected ", end));
      }
      end += tensor.bytes;
    }
    if (end == data_bytes_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", data_bytes_ - end, " bytes behind the last tensor"));
  }

  JsonReader json_;
  uint64_t data_begin_, data_bytes_;
  SafetensorsHeader header_;
};

}  // namespace

int SafetensorsBits(absl::string_view dtype) {
  for (const DtypeBits& known : kDtypes) {
    if (dtype == known.name) return known.bits;
  }
  return 0;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_begin, uint64_t file_bytes) {
  if (!absl::StartsWith(json, "{"))
    return absl::InvalidArgumentError("the header does not begin with '{'");
  if (!IsUtf8(json)) return absl::InvalidArgumentError("the header is not UTF-8");
  return HeaderParser(json, data_begin, file_bytes).Parse();
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const RegularFile& file) {
  const auto file_bytes = static_cast<uint64_t>(file.size());
  uint64_t size = 0;
  if (file_bytes < sizeof(size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", file_bytes, " bytes, expected at least 8"));
  }
  uint8_t head[8];
  if (auto status = file.ReadAt(0, head, sizeof(head)); !status.ok()) return status;
  for (int i = 7; i >= 0; --i) size = size << 8 | head[i];
  if (size > kMaxSafetensorsHeaderBytes || size > file_bytes - 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header has ", size, " bytes, expected at most ",
                     std::min(kMaxSafetensorsHeaderBytes, file_bytes - 8)));
  }
  std::string json(size, '\0');
  if (auto status = file.ReadAt(8, json.data(), static_cast<int64_t>(size)); !status.ok())
    return status;
  return ParseSafetensorsHeader(json, 8 + size, file_bytes);
}

absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(absl::string_view text) {
  if (!IsUtf8(text)) return absl::InvalidArgumentError("the index is not UTF-8");
  JsonReader json(text);
  std::map<std::string, std::string> files;
  bool found = false;
  auto status = json.Object([&](const std::string& key) -> absl::Status {
    if (key != "weight_map") return json.Skip();
    found = true;
    return json.Object([&](const std::string& tensor) -> absl::Status {
      const auto file = json.String();
      if (!file.ok()) return file.status();
      if (!IsPathBeneath(*file) || absl::StrContains(*file, '/')) {
        return InTensor(tensor, absl::StrCat("is in the file ", Quoted(*file),
                                             ", expected a name in the same folder"));
      }
      files.emplace(tensor, *file);
      return absl::OkStatus();
    });
  });
  if (status.ok()) status = json.End();
  if (!status.ok()) return status;
  if (!found) return absl::InvalidArgumentError("the index has no weight_map");
  return files;
}

}  // namespace espalier::formats
