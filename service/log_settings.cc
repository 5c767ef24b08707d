#include "service/log_settings.h"

#include <mutex>

#include "absl/strings/str_cat.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/log.h"

namespace espalier::service {
namespace {

using Value = inference::LogSettingsRequest::SettingValue;

std::string Shown(const Value& value) {
  switch (value.parameter_choice_case()) {
    case Value::kBoolParam:
      return value.bool_param() ? "bool_param true" : "bool_param false";
    case Value::kUint32Param:
      return absl::StrCat("uint32_param ", value.uint32_param());
    case Value::kStringParam:
      return absl::StrCat("string_param '", runtime::Printable(value.string_param()), "'");
    case Value::PARAMETER_CHOICE_NOT_SET:
      return "nothing";
  }
  return "nothing";
}

absl::Status Unexpected(const std::string& name, absl::string_view expected, const Value& value) {
  return absl::InvalidArgumentError(
      absl::StrCat("log setting '", name, "': expected ", expected, ", got ", Shown(value)));
}

absl::Status Apply(const std::string& name, const Value& value, runtime::LogSettings& settings) {
  if (name == "log_file") {
    if (value.string_param().empty()) return absl::OkStatus();
    return absl::UnimplementedError(
        "log_file cannot be set by a client: the log goes to stderr, wherever whoever started the "
        "server sent that");
  }
  if (name == "log_verbose_level") {
    if (!value.has_uint32_param()) return Unexpected(name, "uint32_param", value);
    settings.verbose_level = static_cast<int>(std::min(value.uint32_param(), 2u));
    return absl::OkStatus();
  }
  if (name == "log_format") {
    const std::string& format = value.string_param();
    if (format != "default" && format != "ISO8601" && format != "json")
      return Unexpected(name, "string_param default, ISO8601 or json", value);
    settings.format = format == "json" ? runtime::LogFormat::kJson : runtime::LogFormat::kText;
    return absl::OkStatus();
  }
  bool* const flag = name == "log_info"      ? &settings.info
                     : name == "log_warning" ? &settings.warning
                     : name == "log_error"   ? &settings.error
                                             : nullptr;
  if (flag == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown log setting '", runtime::Printable(name),
        "', expected log_verbose_level, log_info, ", "log_warning, log_error or log_format"));
  }
  if (!value.has_bool_param()) return Unexpected(name, "bool_param", value);
  *flag = value.bool_param();
  return absl::OkStatus();
}

}  // namespace

absl::Status UpdateLogSettings(const inference::LogSettingsRequest& request) {
  if (request.settings().empty()) return absl::OkStatus();
  static std::mutex mutex;  // two updates at once must not undo each other
  const std::lock_guard lock(mutex);
  runtime::LogSettings settings = runtime::GetLogSettings();
  for (const auto& [name, value] : request.settings()) {
    if (absl::Status status = Apply(name, value, settings); !status.ok()) return status;
  }
  runtime::SetLogSettings(settings);
  return absl::OkStatus();
}

void FillLogSettings(inference::LogSettingsResponse* response) {
  const runtime::LogSettings settings = runtime::GetLogSettings();
  auto& all = *response->mutable_settings();
  all["log_file"].set_string_param("");
  all["log_info"].set_bool_param(settings.info);
  all["log_warning"].set_bool_param(settings.warning);
  all["log_error"].set_bool_param(settings.error);
  all["log_verbose_level"].set_uint32_param(static_cast<uint32_t>(settings.verbose_level));
  // Times in text lines are as ISO 8601 has them.
  all["log_format"].set_string_param(settings.format == runtime::LogFormat::kJson ? "json"
                                                                                  : "ISO8601");
}

}  // namespace espalier::service
