#include "engine/runtime/log.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace espalier::runtime {
namespace {

std::atomic<LogFormat> log_format{LogFormat::kText};

// Bit i: lines of spdlog's level i are written. spdlog itself knows only a lowest level.
constexpr uint32_t BitOf(spdlog::level::level_enum level) { return uint32_t{1} << level; }
std::atomic<uint32_t> written_levels{BitOf(spdlog::level::info) | BitOf(spdlog::level::warn) |
                                     BitOf(spdlog::level::err) | BitOf(spdlog::level::critical)};

std::mutex settings_mutex;
LogSettings current_settings ABSL_GUARDED_BY(settings_mutex);

// In front of a payload that LogEvent has already rendered as JSON members.
constexpr char kRendered = '\x01';

bool NeedsQuotes(absl::string_view text) {
  return text.empty() || text.find_first_of(" =\"\\\t\n\r") != absl::string_view::npos;
}

std::string RenderText(absl::string_view event, std::initializer_list<LogField> fields) {
  std::string line(event);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    if (!field.is_number && NeedsQuotes(field.value)) {
      AppendQuoted(line, field.value);
    } else {
      line += field.value;
    }
  }
  return line;
}

std::string RenderJson(absl::string_view event, std::initializer_list<LogField> fields) {
  std::string line(1, kRendered);
  line += "\"event\":";
  AppendQuoted(line, event);
  for (const LogField& field : fields) {
    line += ',';
    AppendQuoted(line, field.key);
    line += ':';
    if (field.is_number) {
      line += field.value;
    } else {
      AppendQuoted(line, field.value);
    }
  }
  return line;
}

std::string Rfc3339(spdlog::log_clock::time_point time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromChrono(time), absl::UTCTimeZone());
}

class LineFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const absl::string_view payload(message.payload.data(), message.payload.size());
    const auto level_name = spdlog::level::to_string_view(message.level);
    const absl::string_view level(level_name.data(), level_name.size());
    std::string line;
    if (log_format.load(std::memory_order_relaxed) == LogFormat::kText) {
      line = absl::StrFormat("%s %-5s %s\n", Rfc3339(message.time), level, payload);
    } else {
      line = absl::StrCat("{\"time\":\"", Rfc3339(message.time), "\",\"level\":\"", level, "\",");
      if (!payload.empty() && payload[0] == kRendered) {
        absl::StrAppend(&line, payload.substr(1), "}\n");
      } else {
        line += "\"event\":";
        AppendQuoted(line, payload);
        line += "}\n";
      }
    }
    out.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>();
  }
};

// Writes to stderr what is of a level that is written: plain spdlog calls come here unasked.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if ((written_levels.load(std::memory_order_relaxed) & BitOf(message.level)) == 0) return;
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
  void flush_() override { std::fflush(stderr); }
};

uint32_t LevelsOf(const LogSettings& settings) {
  uint32_t levels = 0;
  if (settings.verbose_level >= 2) levels |= BitOf(spdlog::level::trace);
  if (settings.verbose_level >= 1) levels |= BitOf(spdlog::level::debug);
  if (settings.info) levels |= BitOf(spdlog::level::info);
  if (settings.warning) levels |= BitOf(spdlog::level::warn);
  if (settings.error) levels |= BitOf(spdlog::level::err) | BitOf(spdlog::level::critical);
  return levels;
}

spdlog::level::level_enum LowestOf(uint32_t levels) {
  int level = spdlog::level::trace;
  while (level < spdlog::level::off && (levels >> level & 1) == 0) ++level;
  return static_cast<spdlog::level::level_enum>(level);
}

}  // namespace

void SetLogSettings(const LogSettings& settings) {
  const std::lock_guard lock(settings_mutex);
  static const bool installed = [] {
    auto logger = std::make_shared<spdlog::logger>("espalier", std::make_shared<StderrSink>());
    logger->set_formatter(std::make_unique<LineFormatter>());
    spdlog::set_default_logger(std::move(logger));
    return true;
  }();
  (void)installed;
  current_settings = settings;
  const uint32_t levels = LevelsOf(settings);
  log_format.store(settings.format, std::memory_order_relaxed);
  written_levels.store(levels, std::memory_order_relaxed);
  spdlog::default_logger_raw()->set_level(LowestOf(levels));
}

LogSettings GetLogSettings() {
  const std::lock_guard lock(settings_mutex);
  return current_settings;
}

void ConfigureLogging(LogFormat format, spdlog::level::level_enum level) {
  LogSettings settings;
  settings.format = format;
  settings.verbose_level = level == spdlog::level::trace   ? 2
                           : level == spdlog::level::debug ? 1
                                                           : 0;
  settings.info = level <= spdlog::level::info;
  settings.warning = level <= spdlog::level::warn;
  settings.error = level <= spdlog::level::critical;
  SetLogSettings(settings);
}

LogField::LogField(absl::string_view k, absl::string_view text) : key(k), value(text) {}
LogField::LogField(absl::string_view k, int64_t number)
    : key(k), value(absl::StrCat(number)), is_number(true) {}
LogField::LogField(absl::string_view k, uint64_t number)
    : key(k), value(absl::StrCat(number)), is_number(true) {}
LogField::LogField(absl::string_view k, double number)
    : key(k), value(absl::StrFormat("%.6g", number)), is_number(true) {}

void AppendQuoted(std::string& out, absl::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  out += '"';
}

bool LogEnabled(spdlog::level::level_enum level) {
  return (written_levels.load(std::memory_order_relaxed) & BitOf(level)) != 0;
}

void LogEvent(spdlog::level::level_enum level, absl::string_view event,
              std::initializer_list<LogField> fields) {
  if (!LogEnabled(level)) return;
  const bool json = log_format.load(std::memory_order_relaxed) == LogFormat::kJson;
  const std::string line = json ? RenderJson(event, fields) : RenderText(event, fields);
  spdlog::default_logger_raw()->log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace espalier::runtime
