#include "service/trace.h"

#include <pthread.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/log.h"

namespace espalier::service {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;
using runtime::Printable;

// That many traces are kept in memory until they are a file.
constexpr int64_t kMaxLogFrequency = 100'000;
constexpr int64_t kDefaultRate = 1000, kDefaultCount = -1, kDefaultLogFrequency = 0;

absl::Status ReadNumber(const std::string& name, const std::vector<std::string>& values,
                        int64_t low, int64_t high, std::optional<int64_t>& to) {
  int64_t value = 0;
  if (values.size() == 1 && absl::SimpleAtoi(values[0], &value) && value >= low && value <= high) {
    to = value;
    return absl::OkStatus();
  }
  return InvalidArgumentError(StrCat("trace setting '", name, "' is '",
                                     Printable(absl::StrJoin(values, ",")),
                                     "', expected one number from ", low, " to ", high));
}

// One trace as two members of the array, the way Triton's tools expect it.
std::string ToJson(const TraceRecord& record) {
  std::string json = StrCat("{\"id\":", record.id, ",\"model_name\":");
  runtime::AppendQuoted(json, record.model);
  absl::StrAppend(&json, ",\"model_version\":", record.version, ",\"request_id\":");
  runtime::AppendQuoted(json, record.request_id);
  absl::StrAppend(&json, ",\"status\":\"", record.code, "\"},\n{\"id\":", record.id,
                  ",\"timestamps\":[");
  for (const TraceStamp& stamp : record.stamps) {
    absl::StrAppend(&json, &stamp == record.stamps.data() ? "" : ",", "{\"name\":\"", stamp.name,
                    "\",\"ns\":", stamp.nanos, "}");
  }
  return json + "]}";
}

// Writes `text` at `offset` of the file and cuts it there off.
bool WriteAt(const std::string& path, int64_t offset, const std::string& text) {
  FILE* file = std::fopen(path.c_str(), offset == 0 ? "w" : "r+");
  if (file == nullptr) return false;
  bool good = std::fseek(file, static_cast<long>(offset), SEEK_SET) == 0 &&
              std::fwrite(text.data(), 1, text.size(), file) == text.size();
  good = std::fclose(file) == 0 && good;
  if (!good) {
    runtime::LogEvent(spdlog::level::warn, "trace file not written",
                      {{"file", path}, {"reason", std::strerror(errno)}});
  }
  return good;
}

}  // namespace

Tracer::Tracer(std::string file) : file_(std::move(file)) {
  if (file_.empty()) return;
  writer_ = std::thread([this] { WriteLoop(); });
  pthread_setname_np(writer_.native_handle(), "trace writer");
}

void Tracer::Finish() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  if (writer_.joinable()) writer_.join();
}

absl::Status Tracer::Apply(const std::string& name, const std::vector<std::string>& values,
                           Scope& scope) const {
  if (name == "trace_file" || name == "trace_mode") {
    if (values.empty()) return absl::OkStatus();
    return absl::UnimplementedError(
        StrCat("trace setting '", name,
               "' cannot be set by a client: the server writes where --trace_file says, in "
               "Triton's format"));
  }
  if (name == "trace_level") {
    if (values.empty()) {
      scope.timestamps.reset();
    } else if (values.size() == 1 && (values[0] == "OFF" || values[0] == "TIMESTAMPS")) {
      scope.timestamps = values[0] == "TIMESTAMPS";
      if (*scope.timestamps && file_.empty()) {
        return absl::UnimplementedError(
            "trace_level TIMESTAMPS: this server writes no traces; --trace_file names a file for "
            "them");
      }
    } else {
      return InvalidArgumentError(StrCat("trace setting 'trace_level' is '",
                                         Printable(absl::StrJoin(values, ",")),
                                         "', expected OFF or TIMESTAMPS"));
    }
    return absl::OkStatus();
  }
  const bool is_rate = name == "trace_rate", is_count = name == "trace_count";
  if (!is_rate && !is_count && name != "log_frequency") {
    return InvalidArgumentError(StrCat("unknown trace setting '", Printable(name),
                                       "', expected trace_level, trace_rate, trace_count or "
                                       "log_frequency"));
  }
  auto& to = is_rate ? scope.rate : is_count ? scope.count : scope.log_frequency;
  if (values.empty()) {
    to.reset();
    return absl::OkStatus();
  }
  return ReadNumber(name, values,
                    is_rate    ? 1
                    : is_count ? -1
                               : 0,
                    is_rate || is_count ? INT32_MAX : kMaxLogFrequency, to);
}

absl::Status Tracer::Update(absl::string_view model, const Settings& updates) {
  if (updates.empty()) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  Scope scope = ScopeOf(model);
  // A model's first setting of its own begins with none of those for all.
  if (!model.empty() && models_.find(model) == models_.end()) scope = {};
  for (const auto& [name, values] : updates) {
    if (absl::Status status = Apply(name, values, scope); !status.ok()) return status;
  }
  Scope& to = model.empty() ? all_ : models_[std::string(model)];
  to = scope;
  // A changed setting begins to count anew.
  to.seen = 0;
  to.left = Effective(to, &Scope::count, kDefaultCount);
  for (auto& [name, other] : models_) {
    if (model.empty() && !other.count) other.left = to.left;
  }
  active_.store(AnyActiveLocked(), std::memory_order_relaxed);
  return absl::OkStatus();
}

const Tracer::Scope& Tracer::ScopeOf(absl::string_view model) const {
  const auto found = models_.find(model);
  return found == models_.end() ? all_ : found->second;
}

template <typename T>
T Tracer::Effective(const Scope& scope, std::optional<T> Scope::*setting, T otherwise) const {
  if ((scope.*setting).has_value()) return *(scope.*setting);
  return (all_.*setting).value_or(otherwise);
}

bool Tracer::AnyActiveLocked() const {
  if (all_.timestamps.value_or(false)) return true;
  for (const auto& [model, scope] : models_) {
    if (scope.timestamps.value_or(false)) return true;
  }
  return false;
}

Tracer::Settings Tracer::Get(absl::string_view model) const {
  const std::lock_guard lock(mutex_);
  const Scope& scope = ScopeOf(model);
  return {
      {"trace_level", {Effective(scope, &Scope::timestamps, false) ? "TIMESTAMPS" : "OFF"}},
      {"trace_rate", {StrCat(Effective(scope, &Scope::rate, kDefaultRate))}},
      {"trace_count", {StrCat(Effective(scope, &Scope::count, kDefaultCount))}},
      {"log_frequency", {StrCat(Effective(scope, &Scope::log_frequency, kDefaultLogFrequency))}},
      {"trace_file", {file_}},
      {"trace_mode", {"triton"}}};
}

uint64_t Tracer::SampleActive(absl::string_view model) {
  const std::lock_guard lock(mutex_);
  Scope& scope = const_cast<Scope&>(ScopeOf(model));
  if (!Effective(scope, &Scope::timestamps, false)) return 0;
  const auto rate = static_cast<uint64_t>(Effective(scope, &Scope::rate, kDefaultRate));
  if (++scope.seen % rate != 0 || scope.left == 0) return 0;
  if (scope.left > 0) --scope.left;
  return next_id_++;
}

void Tracer::Record(TraceRecord record) {
  Written trace{.json = ToJson(record)};
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= kMaxQueued || stopping_) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    const auto found = models_.find(record.model);
    if (found != models_.end()) trace.scope = found->first;
    trace.log_frequency =
        Effective(ScopeOf(record.model), &Scope::log_frequency, kDefaultLogFrequency);
    queue_.push_back(std::move(trace));
  }
  queued_.notify_one();
}

void Tracer::WriteLoop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (queue_.empty() && !stopping_) queued_.wait(lock);
    if (queue_.empty()) break;
    Written trace = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Write(std::move(trace));
    lock.lock();
  }
  lock.unlock();
  for (auto& [scope, traces] : batches_) WriteNumbered(traces);
}

void Tracer::Write(Written trace) {
  if (trace.log_frequency == 0) return Append(trace.json);
  std::vector<std::string>& traces = batches_[trace.scope];
  traces.push_back(std::move(trace.json));
  if (static_cast<int64_t>(traces.size()) >= trace.log_frequency) WriteNumbered(traces);
}

void Tracer::WriteNumbered(std::vector<std::string>& traces) {
  if (traces.empty()) return;
  WriteAt(StrCat(file_, ".", next_index_++ % kMaxFiles), 0,
          StrCat("[", absl::StrJoin(traces, ",\n"), "\n]\n"));
  traces.clear();
}

// The array's end is written anew with every trace, over the one before.
void Tracer::Append(const std::string& json) {
  const std::string text = StrCat(end_ == 0 ? "[" : ",\n", json);
  if (WriteAt(file_, end_, text + "\n]\n")) end_ += static_cast<int64_t>(text.size());
}

}  // namespace espalier::service
