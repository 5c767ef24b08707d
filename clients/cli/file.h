// file.h — whole files in and out, with a cap that is checked before memory is reserved.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace espalier::cli {

// What fits into one request (protobuf's limit), so the most that an input file can usefully have.
inline constexpr int64_t kMaxInputBytes = (int64_t{1} << 31) - 1;

// Errors name the path: NotFound, ResourceExhausted above `max_bytes`, Unknown for a failed read.
// Pipes work.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes = kMaxInputBytes);
// Replaces the file. A failed write (a full disk) is an error, not a short file that looks whole.
absl::Status WriteFile(const std::string& path, absl::string_view content);
// Whether WriteFile could: for what takes long to compute. Leaves the file as it is, or empty if there
// was none.
absl::Status CheckWritable(const std::string& path);
// Whether a rename over `path` replaces a file and nothing else: AlreadyExists for a device, a folder, a
// symbolic link.
absl::Status CheckReplaceable(const std::string& path);

}  // namespace espalier::cli
