// json_writer.h — writes JSON in order: objects a line per key, arrays on one line. The
// caller's nesting is trusted.
//
//   JsonWriter json;
//   json.BeginObject().Key("model").String("mnist").Key("p50_us").Number(87.5).EndObject();
//   std::cout << json.text() << "\n";
//
// Numbers print shortest and exact; NaN and infinities, which JSON lacks, as strings ("nan",
// "-inf").
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace espalier::cli {

class JsonWriter {
 public:
  JsonWriter& BeginObject() { return Open('{'); }
  JsonWriter& EndObject() { return Close('}'); }
  JsonWriter& BeginArray() { return Open('['); }
  JsonWriter& EndArray() { return Close(']'); }
  JsonWriter& Key(absl::string_view key);
  JsonWriter& String(absl::string_view value);  // bytes that are no UTF-8 become U+FFFD
  JsonWriter& Number(double value);
  JsonWriter& Number(float value);
  JsonWriter& Int(int64_t value);
  JsonWriter& Uint(uint64_t value);
  JsonWriter& Bool(bool value);
  const std::string& text() const { return text_; }

 private:
  JsonWriter& Open(char bracket);
  JsonWriter& Close(char bracket);
  JsonWriter& Value(absl::string_view text);
  void Separate();
  void NewLine();
  void AppendQuoted(absl::string_view value);

  std::string text_;
  std::string open_;   // the brackets around the next value
  bool first_ = true;  // nothing yet in the innermost of them
  bool after_key_ = false;
};

}  // namespace espalier::cli
