// log.h — one log line per event, with fields: logfmt for people, JSON for collectors.
//
//   2026-01-31T12:00:00.123Z info  model loaded model=mlp version=1 layouts="diagonal(1) x3"
//   {"time":"2026-01-31T12:00:00.123Z","level":"info","event":"model loaded","model":"mlp",…}
//
// Plain spdlog calls of other folders come out in the same two forms, as an event without fields.
#pragma once

#include <initializer_list>
#include <string>

#include "absl/strings/string_view.h"
#include "spdlog/common.h"

namespace espalier::runtime {

enum class LogFormat { kText, kJson };

// What the process's log, which goes to stderr, holds. May be changed at any time.
struct LogSettings {
  LogFormat format = LogFormat::kText;
  int verbose_level = 0;  // 1: debug too; 2 and above: trace too
  bool info = true;
  bool warning = true;
  bool error = true;  // and critical
};

void SetLogSettings(const LogSettings& settings);
LogSettings GetLogSettings();

// The same by the lowest level that is written. Before either is called: text, info.
void ConfigureLogging(LogFormat format, spdlog::level::level_enum level);

struct LogField {
  LogField(absl::string_view key, absl::string_view text);
  LogField(absl::string_view key, const std::string& text)
      : LogField(key, absl::string_view(text)) {}
  LogField(absl::string_view key, const char* text) : LogField(key, absl::string_view(text)) {}
  LogField(absl::string_view key, int64_t number);
  LogField(absl::string_view key, uint64_t number);
  LogField(absl::string_view key, int number) : LogField(key, static_cast<int64_t>(number)) {}
  LogField(absl::string_view key, double number);

  absl::string_view key;
  std::string value;
  bool is_number = false;
};

// `event` is a constant phrase; what varies goes into fields. Costs nothing but the fields when
// `level` is off.
void LogEvent(spdlog::level::level_enum level, absl::string_view event,
              std::initializer_list<LogField> fields);

// Appends `text` as a JSON string, in quotes.
void AppendQuoted(std::string& out, absl::string_view text);

// Whether a line of this level would be written.
bool LogEnabled(spdlog::level::level_enum level);

}  // namespace espalier::runtime
