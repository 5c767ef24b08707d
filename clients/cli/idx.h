// idx.h — IDX files of unsigned bytes, the format of the MNIST images and labels, plain or gzipped.
//
//   00 00 08 <rank> · rank big-endian 32-bit sizes · bytes, row-major
//
// Limits   Rank 1 to 4, ≤ kMaxIdxBytes, checked before memory is reserved. Fewer or more bytes than
//          announced are an error, and so is a damaged gzip stream.
// Errors   InvalidArgument, ResourceExhausted, NotFound; all name the file, expected and got.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace espalier::cli {

inline constexpr int64_t kMaxIdxBytes = int64_t{1} << 30;

struct IdxFile {
  std::vector<int64_t> shape;  // [items, …]
  std::string bytes;

  int64_t items() const { return shape.front(); }
  int64_t item_bytes() const {
    return items() == 0 ? 0 : static_cast<int64_t>(bytes.size()) / items();
  }
};

absl::StatusOr<IdxFile> ReadIdx(const std::string& path);

// True for a regular file that begins, after decompression, as an IDX file of bytes does.
bool IsIdx(const std::string& path);

}  // namespace espalier::cli
