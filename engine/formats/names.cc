#include "engine/formats/names.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace espalier::formats {
namespace {

// Bytes of the UTF-8 sequence that `text` starts with; 0 when it is malformed. Ranges as in RFC
// 3629, section 4.
size_t SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  uint8_t low = 0x80, high = 0xbf;  // of the second byte
  if (first == 0xe0) low = 0xa0;    // overlong
  if (first == 0xed) high = 0x9f;   // surrogates
  if (first == 0xf0) low = 0x90;    // overlong
  if (first == 0xf4) high = 0x8f;   // above U+10FFFF
  if (byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return length;
}

// Quotes stay as they are, which absl's escapes would double in the messages of protobuf.
std::string Escaped(absl::string_view text) {
  const bool utf8 = IsUtf8(text);
  std::string escaped;
  for (char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == '\n') {
      escaped += "\\n";
    } else if (c == '\\') {
      escaped += "\\\\";
    } else if (byte < 0x20 || byte == 0x7f || (byte >= 0x80 && !utf8)) {
      absl::StrAppend(&escaped, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else {
      escaped += c;
    }
  }
  return escaped;
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string Shown(absl::string_view text, size_t max_bytes) {
  size_t shown = text.size();
  if (shown > max_bytes) {
    shown = max_bytes;
    while (shown > 0 && (static_cast<uint8_t>(text[shown]) & 0xc0) == 0x80)
      --shown;  // not within a character
  }
  return absl::StrCat(Escaped(text.substr(0, shown)),
                      shown < text.size() ? absl::StrCat("… (", text.size(), " bytes)") : "");
}

std::string Quoted(absl::string_view text, size_t max_bytes) {
  return absl::StrCat("'", Shown(text, max_bytes), "'");
}

absl::Status CheckName(absl::string_view what, absl::string_view name) {
  if (name.empty())
    return absl::InvalidArgumentError(absl::StrCat("the name of ", what, " is empty"));
  if (name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the name of ", what, " ", Quoted(name), " has ",
                                                   name.size(), " bytes, expected at most ",
                                                   kMaxNameBytes));
  }
  bool control = false;
  for (char c : name) control |= static_cast<uint8_t>(c) < 0x20 || c == 0x7f;
  if (control || !IsUtf8(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of ", what, " ", Quoted(name), " is not printable UTF-8"));
  }
  return absl::OkStatus();
}

}  // namespace espalier::formats
