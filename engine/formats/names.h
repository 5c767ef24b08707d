// names.h — names that come out of files, checked and made fit for messages, logs, metric labels
// and protobuf strings.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace espalier::formats {

// Exporters write paths of modules ("/encoder/layers.11/ffn/MatMul_output_0"); 4 KiB is far above
// all seen.
inline constexpr size_t kMaxNameBytes = 4096;

// `text` for a message: what is not printable UTF-8 is escaped, and it is cut after `max_bytes`, so that a message fits
// into a log line and into a response whatever the file said. Quoted: in quotes.
inline constexpr size_t kShownNameBytes = 100;
inline constexpr size_t kShownPathBytes = 512;
std::string Shown(absl::string_view text, size_t max_bytes = kShownNameBytes);
std::string Quoted(absl::string_view text, size_t max_bytes = kShownNameBytes);

// Valid UTF-8 (no overlong forms, surrogates or values above U+10FFFF).
bool IsUtf8(absl::string_view text);

// InvalidArgument unless `name` has 1 to kMaxNameBytes bytes of UTF-8 without control characters.
// `what` names the role in the message: "an input", "a node".
absl::Status CheckName(absl::string_view what, absl::string_view name);

}  // namespace espalier::formats
