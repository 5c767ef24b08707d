#include "engine/formats/json_reader.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

void AppendUtf8(uint32_t point, std::string& to) {
  const auto byte = [&](uint32_t bits) { to.push_back(static_cast<char>(bits)); };
  if (point < 0x80) {
    byte(point);
  } else if (point < 0x800) {
    byte(0xc0 | point >> 6);
    byte(0x80 | (point & 0x3f));
  } else if (point < 0x10000) {
    byte(0xe0 | point >> 12);
    byte(0x80 | (point >> 6 & 0x3f));
    byte(0x80 | (point & 0x3f));
  } else {
    byte(0xf0 | point >> 18);
    byte(0x80 | (point >> 12 & 0x3f));
    byte(0x80 | (point >> 6 & 0x3f));
    byte(0x80 | (point & 0x3f));
  }
}

}  // namespace

absl::Status JsonReader::Expected(absl::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrCat("JSON at byte ", rest_.data() - begin_, ": expected ", what, ", got ",
                   rest_.empty() ? std::string("the end") : Quoted(rest_.substr(0, 12))));
}

void JsonReader::SkipSpace() {
  while (!rest_.empty() &&
         (rest_[0] == ' ' || rest_[0] == '\n' || rest_[0] == '\r' || rest_[0] == '\t'))
    rest_.remove_prefix(1);
}

bool JsonReader::Take(char c) {
  SkipSpace();
  if (rest_.empty() || rest_[0] != c) return false;
  rest_.remove_prefix(1);
  return true;
}

absl::Status JsonReader::Object(const std::function<absl::Status(const std::string& key)>& member) {
  if (!Take('{')) return Expected("an object");
  if (++nesting_ > kMaxNesting) return Expected("fewer levels of nesting");
  absl::flat_hash_set<std::string> keys;
  if (!Take('}')) {
    do {
      SkipSpace();
      const auto key = String();
      if (!key.ok()) return key.status();
      if (!keys.insert(*key).second)
        return Expected(absl::StrCat("the key ", Quoted(*key), " once"));
      if (!Take(':')) return Expected("':'");
      if (auto status = member(*key); !status.ok()) return status;
    } while (Take(','));
    if (!Take('}')) return Expected("',' or '}'");
  }
  --nesting_;
  return absl::OkStatus();
}

absl::Status JsonReader::Array(const std::function<absl::Status()>& element) {
  if (!Take('[')) return Expected("an array");
  if (++nesting_ > kMaxNesting) return Expected("fewer levels of nesting");
  if (!Take(']')) {
    do {
      if (auto status = element(); !status.ok()) return status;
    } while (Take(','));
    if (!Take(']')) return Expected("',' or ']'");
  }
  --nesting_;
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> JsonReader::Hex4() {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    if (rest_.empty() || !absl::ascii_isxdigit(static_cast<unsigned char>(rest_[0])))
      return Expected("four hexadecimal digits");
    const auto c = static_cast<uint32_t>(absl::ascii_tolower(static_cast<unsigned char>(rest_[0])));
    value = value << 4 | (c <= '9' ? c - '0' : c - 'a' + 10);
    rest_.remove_prefix(1);
  }
  return value;
}

absl::Status JsonReader::Escape(std::string& to) {
  static constexpr absl::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
  if (rest_.empty()) return Expected("an escape");
  const char kind = rest_[0];
  const size_t plain = kFrom.find(kind);
  if (plain == absl::string_view::npos && kind != 'u') return Expected("an escape");
  rest_.remove_prefix(1);
  if (plain != absl::string_view::npos) {
    to.push_back(kTo[plain]);
    return absl::OkStatus();
  }
  auto point = Hex4();
  if (!point.ok()) return point.status();
  if (*point >= 0xdc00 && *point < 0xe000) return Expected("a high surrogate first");
  if (*point >= 0xd800 && *point < 0xdc00) {
    if (!absl::StartsWith(rest_, "\\u")) return Expected("a low surrogate");
    rest_.remove_prefix(2);
    const auto low = Hex4();
    if (!low.ok()) return low.status();
    if (*low < 0xdc00 || *low >= 0xe000) return Expected("a low surrogate");
    point = 0x10000 + ((*point - 0xd800) << 10) + (*low - 0xdc00);
  }
  AppendUtf8(*point, to);
  return absl::OkStatus();
}

absl::StatusOr<std::string> JsonReader::String() {
  if (!Take('"')) return Expected("a string");
  std::string text;
  for (;;) {
    if (rest_.empty()) return Expected("'\"'");
    const char c = rest_[0];
    if (static_cast<unsigned char>(c) < 0x20) return Expected("no control character in a string");
    rest_.remove_prefix(1);
    if (c == '"') return text;
    if (c != '\\') {
      text.push_back(c);
    } else if (auto status = Escape(text); !status.ok()) {
      return status;
    }
  }
}

absl::StatusOr<uint64_t> JsonReader::Count() {
  SkipSpace();
  const auto is_digit = [&] {
    return !rest_.empty() && absl::ascii_isdigit(static_cast<unsigned char>(rest_[0]));
  };
  if (!is_digit()) return Expected("a count");
  const bool leading_zero = rest_[0] == '0';
  uint64_t value = 0;
  int digits = 0;
  for (; is_digit(); ++digits) {
    const auto digit = static_cast<uint64_t>(rest_[0] - '0');
    if (value > (UINT64_MAX - digit) / 10) return Expected("a count below 2^64");
    value = 10 * value + digit;
    rest_.remove_prefix(1);
  }
  if (leading_zero && digits > 1) return Expected("a count without leading zeros");
  if (!rest_.empty() && absl::StrContains(".eE", rest_[0])) return Expected("a whole number");
  return value;
}

absl::Status JsonReader::SkipNumber() {
  absl::ConsumePrefix(&rest_, "-");
  const auto digits = [&] {
    size_t n = 0;
    while (n < rest_.size() && absl::ascii_isdigit(static_cast<unsigned char>(rest_[n]))) ++n;
    return n;
  };
  size_t whole = digits();
  if (whole == 0 || (whole > 1 && rest_[0] == '0')) return Expected("a value");
  rest_.remove_prefix(whole);
  if (absl::ConsumePrefix(&rest_, ".")) {
    const size_t fraction = digits();
    if (fraction == 0) return Expected("digits behind the point");
    rest_.remove_prefix(fraction);
  }
  if (absl::ConsumePrefix(&rest_, "e") || absl::ConsumePrefix(&rest_, "E")) {
    if (!absl::ConsumePrefix(&rest_, "-")) absl::ConsumePrefix(&rest_, "+");
    const size_t exponent = digits();
    if (exponent == 0) return Expected("digits of an exponent");
    rest_.remove_prefix(exponent);
  }
  return absl::OkStatus();
}

absl::Status JsonReader::Skip() {
  SkipSpace();
  if (rest_.empty()) return Expected("a value");
  switch (rest_[0]) {
    case '{':
      return Object([this](const std::string&) { return Skip(); });
    case '[':
      return Array([this] { return Skip(); });
    case '"':
      return String().status();
    default:
      break;
  }
  for (const absl::string_view word : {"true", "false", "null"}) {
    if (absl::ConsumePrefix(&rest_, word)) return absl::OkStatus();
  }
  return SkipNumber();
}

absl::Status JsonReader::End() {
  SkipSpace();
  return rest_.empty() ? absl::OkStatus() : Expected("the end");
}

}  // namespace espalier::formats
