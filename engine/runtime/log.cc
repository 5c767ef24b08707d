#include "engine/runtime/log.h"

#include <atomic>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace espalier::runtime {
namespace {

std::atomic<LogFormat> log_format{LogFormat::kText};

// In front of a payload that LogEvent has already rendered as JSON members.
constexpr char kRendered = '\x01';

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

}  // namespace

void ConfigureLogging(LogFormat format, spdlog::level::level_enum level) {
  log_format.store(format, std::memory_order_relaxed);
  auto logger = std::make_shared<spdlog::logger>("espalier",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::make_unique<LineFormatter>());
  logger->set_level(level);
  spdlog::set_default_logger(std::move(logger));
}

LogField::LogField(absl::string_view k, absl::string_view text) : key(k), value(text) {}
LogField::LogField(absl::string_view k, int64_t number)
    : key(k), value(absl::StrCat(number)), is_number(true) {}
LogField::LogField(absl::string_view k, uint64_t number)
    : key(k), value(absl::StrCat(number)), is_number(true) {}
LogField::LogField(absl::string_view k, double number)
    : key(k), value(absl::StrFormat("%.6g", number)), is_number(true) {}

bool LogEnabled(spdlog::level::level_enum level) { return spdlog::should_log(level); }

void LogEvent(spdlog::level::level_enum level, absl::string_view event,
              std::initializer_list<LogField> fields) {
  if (!LogEnabled(level)) return;
  const bool json = log_format.load(std::memory_order_relaxed) == LogFormat::kJson;
  const std::string line = json ? RenderJson(event, fields) : RenderText(event, fields);
  spdlog::default_logger_raw()->log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace espalier::runtime
