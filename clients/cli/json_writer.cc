#include "clients/cli/json_writer.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "clients/cli/table.h"

namespace espalier::cli {
namespace {

// Length of the valid UTF-8 sequence at the start of `text`, 0 if there is none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t length = lead < 0x80                   ? 1
                        : lead >= 0xC2 && lead < 0xE0 ? 2
                        : lead >= 0xE0 && lead < 0xF0 ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4
                                                      : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and code points above U+10FFFF.
  if (length > 1 && ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F) ||
                     (lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) > 0x8F))) {
    return 0;
  }
  return length;
}

}  // namespace

void JsonWriter::Separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (open_.empty()) return;
  if (!first_) text_.push_back(',');
  if (open_.back() == '{') {
    NewLine();
  } else if (!first_) {
    text_.push_back(' ');
  }
  first_ = false;
}

void JsonWriter::NewLine() {
  absl::StrAppend(&text_, "\n", std::string(2 * std::count(open_.begin(), open_.end(), '{'), ' '));
}

JsonWriter& JsonWriter::Open(char bracket) {
  Separate();
  text_.push_back(bracket);
  open_.push_back(bracket);
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::Close(char bracket) {
  open_.pop_back();
  if (bracket == '}' && !first_) NewLine();
  text_.push_back(bracket);
  first_ = false;
  return *this;
}

JsonWriter& JsonWriter::Value(absl::string_view text) {
  Separate();
  absl::StrAppend(&text_, text);
  return *this;
}

JsonWriter& JsonWriter::Key(absl::string_view key) {
  Separate();
  AppendQuoted(key);
  text_.append(": ");
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::String(absl::string_view value) {
  Separate();
  AppendQuoted(value);
  return *this;
}

JsonWriter& JsonWriter::Number(double value) {
  return std::isfinite(value) ? Value(FormatNumber(value)) : String(FormatNumber(value));
}

JsonWriter& JsonWriter::Number(float value) {
  return std::isfinite(value) ? Value(FormatNumber(value)) : String(FormatNumber(value));
}

JsonWriter& JsonWriter::Int(int64_t value) { return Value(absl::StrCat(value)); }
JsonWriter& JsonWriter::Uint(uint64_t value) { return Value(absl::StrCat(value)); }
JsonWriter& JsonWriter::Bool(bool value) { return Value(value ? "true" : "false"); }

void JsonWriter::AppendQuoted(absl::string_view value) {
  text_.push_back('"');
  while (!value.empty()) {
    const size_t length = Utf8Length(value);
    const char c = value.front();
    if (length == 0) {
      text_.append("\xEF\xBF\xBD");
    } else if (c == '"' || c == '\\') {
      absl::StrAppend(&text_, "\\", value.substr(0, 1));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&text_, "\\u%04x", c);
    } else {
      text_.append(value.data(), length);
    }
    value.remove_prefix(length == 0 ? 1 : length);
  }
  text_.push_back('"');
}

}  // namespace espalier::cli
