// json_reader.h — pulls values out of JSON text, strictly (RFC 8259): what headers of model files
// need, with nothing built that the caller does not ask for.
//
//   JsonReader json(text);
//   json.Object([&](const std::string& key) { return key == "n" ? ReadN(json) : json.Skip(); });
//   json.End();
//
// Refuses  Duplicate keys, numbers that are no counts where a count is asked for, lone surrogates,
//          control characters in strings, more than kMaxNesting levels, anything behind the value.
// Errors   InvalidArgument with the byte offset, expected and got. The text must be UTF-8 (the caller
//          has checked).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace espalier::formats {

class JsonReader {
 public:
  static constexpr int kMaxNesting = 32;

  explicit JsonReader(absl::string_view text) : begin_(text.data()), rest_(text) {}

  // Calls `member` with each key; it must read, or skip, the value.
  absl::Status Object(const std::function<absl::Status(const std::string& key)>& member);
  // Calls `element` before each element; it must read, or skip, it.
  absl::Status Array(const std::function<absl::Status()>& element);
  absl::StatusOr<std::string> String();
  absl::StatusOr<uint64_t> Count();  // digits only
  absl::Status Skip();               // any value
  // Only white space is left.
  absl::Status End();

 private:
  absl::Status Expected(absl::string_view what) const;
  void SkipSpace();
  bool Take(char c);
  absl::Status SkipNumber();
  absl::StatusOr<uint32_t> Hex4();
  absl::Status Escape(std::string& to);

  const char* begin_;
  absl::string_view rest_;
  int nesting_ = 0;
};

}  // namespace espalier::formats
