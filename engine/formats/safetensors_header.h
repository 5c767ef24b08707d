// safetensors_header.h — the header of a .safetensors file, read strictly: which tensors there are
// and where their bytes lie.
//
//   8 bytes N, little-endian · N bytes of JSON · data
//   {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {…}}
//
// Refuses  N above 10^8 or past the end; text that is not UTF-8 or does not begin with '{'; duplicate
//          keys, at any level, which the reference reader lets overwrite one another; unknown dtypes
//          and fields; shapes whose size overflows or is not end − begin; tensors that do not tile
//          the data from its first to its last byte: holes, overlaps, bytes behind the last one.
// Errors   InvalidArgument: what, expected and got; the caller puts the file's name in front.
// Element values are not looked at. Nothing is reserved that the header's own size does not pay for.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/regular_file.h"

namespace espalier::formats {

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t offset = 0, bytes = 0;  // in the file

  bool operator==(const SafetensorsTensor&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // ascending by offset; empty ones by name among equals
  std::map<std::string, std::string> metadata;
};

// Bits of an element; 0 for a dtype that the format has not.
int SafetensorsBits(absl::string_view dtype);

// `json`: the N bytes; `data_begin`: 8 + N; the file has `file_bytes`.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_begin, uint64_t file_bytes);

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const RegularFile& file);

// model.safetensors.index.json: which file has which tensor. File names are plain names: no path
// leads out of the folder.
absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(absl::string_view json);

}  // namespace espalier::formats
