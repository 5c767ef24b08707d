// espalierd — the server. Flags in, exit code out:
//   0    drained after SIGTERM, SIGHUP or SIGINT
//   1    could not start; the last log line says why
//   2    bad flags
//   3    requests were cut off: --drain_timeout was too short
//   4    a GPU was lost to the process: start it again
//   130  second signal: stopped at once
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <set>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/runtime/log.h"
#include "engine/tensor/device.h"
#include "service/server.h"

ABSL_FLAG(std::vector<std::string>, model_repository, {},
          "Directories with models, comma-separated: <directory>/<model>/<version>/model.onnx. "
          "Only ever read.");
ABSL_FLAG(std::string, model_control_mode, "none",
          "Which models are served: none (all that the repository holds at start), poll (what it "
          "holds at any time) or explicit (what clients load).");
ABSL_FLAG(std::string, repository_poll_interval, "15s",
          "How often mode poll looks for changes, 100ms to 24h.");
ABSL_FLAG(std::vector<std::string>, load_model, {},
          "Models that mode explicit loads at start, comma-separated; * for all.");
ABSL_FLAG(std::string, address, "0.0.0.0:8001",
          "Where to listen for gRPC, host:port. Port 0 takes a free one.");
ABSL_FLAG(std::string, metrics_address, "0.0.0.0:8002",
          "Where to serve Prometheus metrics under /metrics, host:port. Port 0 takes a free one, "
          "empty serves none.");
ABSL_FLAG(
    std::string, state_dir, "",
    "Directory for what is worth keeping between runs (kernel plans, weight updates); belongs "
    "to one server. Empty keeps nothing, and takes no updates.");
ABSL_FLAG(int, threads, 0, "Threads that compute. 0 means one per CPU that the process may use.");
ABSL_FLAG(std::string, device, "auto",
          "Where models run: auto (on the GPUs if there are any, else on the CPU), cpu, or cuda "
          "(no GPU is "
          "an error). A model's instance_group may choose for itself.");
ABSL_FLAG(std::string, cuda_module, "",
          "File of the module with GPU kernels. Empty looks for libespalier_cuda.so beside the "
          "program, in "
          "../lib, and where the linker looks.");
ABSL_FLAG(int, loader_threads, 2, "Models that are loaded at the same time, 1 to 64.");
ABSL_FLAG(int64_t, max_message_bytes, int64_t{1} << 30,
          "Largest request in bytes, up to 2147483647.");
ABSL_FLAG(int64_t, max_requests_in_flight, 4096,
          "Inference requests in the server at once. 0 means no limit.");
ABSL_FLAG(int64_t, max_request_bytes_in_flight, int64_t{4} << 30,
          "Bytes of their messages. 0 means no limit.");
ABSL_FLAG(int64_t, max_streams, 1024,
          "ModelStreamInfer streams that are open at once. 0 means no limit.");
ABSL_FLAG(int64_t, max_queue_size, 0,
          "Requests that may wait per model whose config sets no max_queue_size. 0 means no limit "
          "of its own.");
ABSL_FLAG(
    std::string, queue_full_status, "unavailable",
    "What a request is answered with that finds too many waiting: unavailable, as Triton does, "
    "or resource_exhausted, which clients do not take for a reason to retry at once.");
ABSL_FLAG(std::string, max_connection_age, "0s",
          "How long a connection may last before its client is asked to make a new one, so that "
          "clients behind a load balancer find new servers. 0 means no limit.");
ABSL_FLAG(std::string, max_connection_age_grace, "30s",
          "How long RPCs of such a connection may still run.");
ABSL_FLAG(
    std::string, update_address, "",
    "Where to listen for weight updates (espalier delta push), host:port, commonly port 8003. "
    "Port 0 takes a free one, empty takes no updates. Plain text, without TLS: across hosts "
    "use a network that you trust.");
ABSL_FLAG(std::string, update_token_file, "",
          "File with the token that clients of --update_address must show. Empty needs none, and "
          "allows loopback addresses only.");
ABSL_FLAG(
    std::vector<std::string>, update_peers, {},
    "Update addresses of servers with the same models, comma-separated: before this server is "
    "ready it takes from the first that answers the versions that it lacks. Needs "
    "--update_address.");
ABSL_FLAG(std::vector<std::string>, update_keys, {},
          "Public keys (PEM files, or directories with *.pub and *.pem) whose signatures make an "
          "update trusted, comma-separated.");
ABSL_FLAG(int, update_threshold, 1, "So many of --update_keys must have signed an update.");
ABSL_FLAG(bool, allow_unsigned_updates, false,
          "Take updates without signatures, instead of --update_keys. For trying out.");
ABSL_FLAG(std::string, deltas_poll_interval, "0s",
          "How often to look for updates that were dropped into <model>/deltas/ of the "
          "repositories, up to 24h. 0 never does.");
ABSL_FLAG(std::string, trace_file, "",
          "File for traces of requests, once a client turns them on with TraceSetting. Empty: they "
          "cannot be turned on.");
ABSL_FLAG(
    std::string, drain_timeout, "30s",
    "How long requests in flight may take to finish after SIGTERM or SIGHUP. 0 cuts them off.");
ABSL_FLAG(
    bool, accept_compressed, false,
    "Take requests packed with gzip or deflate. Off, because they are unpacked before their size "
    "is checked: a few megabytes can become gigabytes. Turn it on for clients that you trust.");
ABSL_FLAG(
    bool, allow_system_shared_memory, false,
    "Let clients on this machine pass tensors in POSIX shared memory. Off, because whoever may "
    "connect can then have the server read and overwrite any shared memory that its user may "
    "open.");
ABSL_FLAG(
    bool, allow_cuda_shared_memory, false,
    "Let clients on this machine pass tensors in GPU memory of theirs (CUDA IPC handles). Off, "
    "because whoever may connect can then have the server read and overwrite what any process "
    "here has exported, and can cost it the GPU by freeing memory that is in use.");
ABSL_FLAG(std::string, ready_file, "",
          "File that is written when all models are loaded: {\"grpc_port\": …, \"metrics_port\": "
          "…}, with --update_address \"update_port\" too. Empty writes none.");
ABSL_FLAG(std::string, log_level, "info",
          "trace, debug (refused requests), info, warn, error or off.");
ABSL_FLAG(std::string, log_format, "text", "text or json, one line per event on stderr.");

namespace espalier::service {
namespace {

constexpr char kUsage[] = R"(serves sparse neural networks over the Open Inference Protocol (gRPC).

Serve a repository of models:
  espalierd --model_repository=/models
Keep the kernel plans, so that the next start is quick:
  espalierd --model_repository=/models --state_dir=/var/lib/espalier
Take signed weight updates while serving (espalier keygen, espalier delta):
  espalierd --model_repository=/models --state_dir=/var/lib/espalier
            --update_address=0.0.0.0:8003 --update_token_file=token --update_keys=trainer.pub
On a laptop, local clients only:
  espalierd --model_repository=models --address=127.0.0.1:8001 --metrics_address=127.0.0.1:8002

A model is a directory:  <repository>/<model>/<version>/model.onnx
                         and, if you like, <repository>/<model>/config.pbtxt
Ask it something:        espalier models; espalier infer MODEL; curl 127.0.0.1:8002/metrics
Stop it:                 SIGTERM, SIGHUP or Ctrl-C finishes what is in flight; a second one stops at once)";

constexpr rlim_t kFewFiles = 4096;
constexpr int kCannotStart = 1, kBadFlags = 2, kCutOff = 3, kGpuLost = 4, kStoppedAtOnce = 130;

std::atomic<bool> gpu_lost = false;

absl::Status ReadLogFlags() {
  const std::string level = absl::GetFlag(FLAGS_log_level),
                    format = absl::GetFlag(FLAGS_log_format);
  const auto parsed = spdlog::level::from_str(level);  // answers off for what it does not know
  if (parsed == spdlog::level::off && level != "off") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--log_level is '", level, "', expected trace, debug, info, warn, error or off"));
  }
  if (format != "text" && format != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("--log_format is '", format, "', expected text or json"));
  }
  runtime::ConfigureLogging(
      format == "json" ? runtime::LogFormat::kJson : runtime::LogFormat::kText, parsed);
  return absl::OkStatus();
}

absl::Status InRange(absl::string_view flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", value, ", expected ", low, " to ", high));
}

absl::Status ReadDuration(absl::string_view flag, const std::string& text, absl::Duration* to) {
  if (absl::ParseDuration(text, to) && *to >= absl::ZeroDuration() && *to <= absl::Hours(24))
    return absl::OkStatus();
  const bool lacks_unit = absl::ParseDuration(text + "s", to) && *to <= absl::Hours(24);
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " is '", text, "', expected a duration from 0 to 24h with its unit, like ",
      lacks_unit ? text : "30", "s"));
}

absl::Status ReadQueueFullStatus(absl::StatusCode* to) {
  const std::string text = absl::GetFlag(FLAGS_queue_full_status);
  *to =
      text == "unavailable" ? absl::StatusCode::kUnavailable : absl::StatusCode::kResourceExhausted;
  if (text == "unavailable" || text == "resource_exhausted") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--queue_full_status is '", text,
                                                 "', expected unavailable or resource_exhausted"));
}

absl::Status ReadControlFlags(ServerOptions& options) {
  const std::string mode = absl::GetFlag(FLAGS_model_control_mode);
  options.load_models = absl::GetFlag(FLAGS_load_model);
  if (mode == "poll") {
    options.model_control_mode = ModelControlMode::kPoll;
  } else if (mode == "explicit") {
    options.model_control_mode = ModelControlMode::kExplicit;
  } else if (mode != "none") {
    return absl::InvalidArgumentError(
        absl::StrCat("--model_control_mode is '", mode, "', expected none, poll or explicit"));
  }
  if (!options.load_models.empty() && mode != "explicit") {
    return absl::InvalidArgumentError(
        absl::StrCat("--load_model needs --model_control_mode=explicit, got ", mode,
                     ", which loads all models"));
  }
  absl::Duration& interval = options.repository_poll_interval;
  if (absl::Status status = ReadDuration("repository_poll_interval",
                                         absl::GetFlag(FLAGS_repository_poll_interval), &interval);
      !status.ok()) {
    return status;
  }
  if (interval < absl::Milliseconds(100)) {
    return absl::InvalidArgumentError(absl::StrCat("--repository_poll_interval is ",
                                                   absl::FormatDuration(interval),
                                                   ", expected 100ms to 24h"));
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceMode> ReadDevice() {
  const std::string device = absl::GetFlag(FLAGS_device);
  if (device == "auto") return DeviceMode::kAuto;
  if (device == "cpu") return DeviceMode::kCpu;
  if (device == "cuda") return DeviceMode::kCuda;
  return absl::InvalidArgumentError(
      absl::StrCat("--device is '", device, "', expected auto, cpu or cuda"));
}

absl::StatusOr<ServerOptions> ReadFlags() {
  ServerOptions options;
  options.model_repositories = absl::GetFlag(FLAGS_model_repository);
  options.address = absl::GetFlag(FLAGS_address);
  options.metrics_address = absl::GetFlag(FLAGS_metrics_address);
  options.commit = ESPALIER_COMMIT;
  options.state_dir = absl::GetFlag(FLAGS_state_dir);
  options.ready_file = absl::GetFlag(FLAGS_ready_file);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.loader_threads = absl::GetFlag(FLAGS_loader_threads);
  const auto device = ReadDevice();
  if (!device.ok()) return device.status();
  options.device = *device;
  options.cuda_module = absl::GetFlag(FLAGS_cuda_module);
  options.on_gpu_lost = [] {
    gpu_lost = true;
    kill(getpid(), SIGTERM);  // the main thread waits for it
  };
  options.max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes);
  options.max_requests_in_flight = absl::GetFlag(FLAGS_max_requests_in_flight);
  options.max_request_bytes_in_flight = absl::GetFlag(FLAGS_max_request_bytes_in_flight);
  options.allow_system_shared_memory = absl::GetFlag(FLAGS_allow_system_shared_memory);
  options.allow_cuda_shared_memory = absl::GetFlag(FLAGS_allow_cuda_shared_memory);
  options.trace_file = absl::GetFlag(FLAGS_trace_file);
  options.max_streams = absl::GetFlag(FLAGS_max_streams);
  options.max_queue_size = absl::GetFlag(FLAGS_max_queue_size);
  options.accept_compressed = absl::GetFlag(FLAGS_accept_compressed);
  options.updates.listener.address = absl::GetFlag(FLAGS_update_address);
  options.updates.token_file = absl::GetFlag(FLAGS_update_token_file);
  options.updates.listener.catch_up_from = absl::GetFlag(FLAGS_update_peers);
  options.updates.keys = absl::GetFlag(FLAGS_update_keys);
  options.updates.threshold = absl::GetFlag(FLAGS_update_threshold);
  options.updates.allow_unsigned = absl::GetFlag(FLAGS_allow_unsigned_updates);
  if (options.model_repositories.empty()) {
    return absl::InvalidArgumentError("--model_repository is missing; see espalierd --help");
  }
  if (absl::Status status = ReadControlFlags(options); !status.ok()) return status;
  for (const absl::Status& status :
       {ReadQueueFullStatus(&options.queue_full_status),
        ReadDuration("max_connection_age", absl::GetFlag(FLAGS_max_connection_age),
                     &options.max_connection_age),
        ReadDuration("max_connection_age_grace", absl::GetFlag(FLAGS_max_connection_age_grace),
                     &options.max_connection_age_grace),
        ReadDuration("deltas_poll_interval", absl::GetFlag(FLAGS_deltas_poll_interval),
                     &options.updates.deltas_poll_interval),
        InRange("update_threshold", options.updates.threshold, 1, 64),
        InRange("threads", options.threads, 0, 1024),
        InRange("loader_threads", options.loader_threads, 1, 64),
        InRange("max_message_bytes", options.max_message_bytes, 1, INT32_MAX),
        InRange("max_requests_in_flight", options.max_requests_in_flight, 0, INT64_MAX),
        InRange("max_request_bytes_in_flight", options.max_request_bytes_in_flight, 0, INT64_MAX),
        InRange("max_streams", options.max_streams, 0, INT64_MAX),
        InRange("max_queue_size", options.max_queue_size, 0, INT64_MAX)}) {
    if (!status.ok()) return status;
  }
  return options;
}

// SIGTERM, SIGINT, and SIGHUP of a terminal that closes, blocked in every thread and taken by the main
// one. Whoever starts the server under nohup has SIGHUP ignored, which stays so.
sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file above RLIMIT_FSIZE is an error of its write
  return signals;
}

// A supervisor may send its signal to the process and to its group: that is one request to stop,
// not two.
constexpr int64_t kSecondSignalNanos = 500'000'000;

// The last answers are in the kernel's hands then, and would be lost with a connection that is closed
// while something unread has come on it: a round trip to clients that are far away.
constexpr absl::Duration kAnswersArrive = absl::Milliseconds(200);

// Drains while watching for a second signal. Does not come back: models that are still loading
// cannot be interrupted, and nobody needs them any more.
[[noreturn]] void DrainAndExit(Server& server, absl::Duration timeout, const sigset_t& signals) {
  const int64_t began = runtime::NowNanos();
  std::atomic<int> outcome{-1};
  std::thread drain([&] {
    const bool finished = server.Quiesce(timeout);
    if (finished) absl::SleepFor(kAnswersArrive);
    outcome = finished ? 0 : kCutOff;
  });
  // What runs can be cancelled but not killed: somewhat after the timeout, the process goes anyway.
  const int64_t last_moment = began + absl::ToInt64Nanoseconds(timeout + absl::Seconds(1));
  while (outcome < 0 && runtime::NowNanos() < last_moment) {
    const timespec tick = {0, 10'000'000};
    if (sigtimedwait(&signals, nullptr, &tick) > 0 &&
        runtime::NowNanos() - began > kSecondSignalNanos) {
      runtime::LogEvent(spdlog::level::warn, "second signal: stopping at once", {});
      _exit(kStoppedAtOnce);
    }
  }
  const int code = gpu_lost ? kGpuLost : outcome < 0 ? kCutOff : outcome.load();
  runtime::LogEvent(spdlog::level::info, "stopped", {{"exit_code", code}});
  _exit(code);
}

int Fail(int code, const absl::Status& status) {
  runtime::LogEvent(spdlog::level::critical, "cannot start", {{"reason", status.message()}});
  return code;
}

// Every connection takes a descriptor, and this gRPC stops accepting for good when they run out.
void RaiseFileLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max;
  if (before < limit.rlim_max && setrlimit(RLIMIT_NOFILE, &limit) == 0) {
    runtime::LogEvent(spdlog::level::info, "open files limit raised",
                      {{"from", uint64_t{before}}, {"to", uint64_t{limit.rlim_max}}});
  }
  if (limit.rlim_max < kFewFiles) {
    runtime::LogEvent(spdlog::level::warn,
                      "few open files allowed: more connections than that stop the server",
                      {{"limit", uint64_t{limit.rlim_max}}, {"advised", uint64_t{kFewFiles}}});
  }
}

// By name; nothing of the libraries'.
std::map<std::string, absl::CommandLineFlag*> OurFlags() {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::StrContains(flag->Filename(), "service/main.cc")) flags[std::string(name)] = flag;
  }
  return flags;
}

// --name=value, --name value, --switch, --noswitch; dashes in names are underscores. abseil's parser
// would take the last value of a flag that is given twice, and leave with an exit code of its own.
absl::Status ParseFlags(const std::vector<std::string>& arguments) {
  const auto wrong = [](auto... text) {
    return absl::InvalidArgumentError(absl::StrCat(text..., "; see espalierd --help"));
  };
  const auto flags = OurFlags();
  std::set<std::string> given;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = std::min(argument.find('='), argument.size());
    absl::string_view typed = absl::string_view(argument).substr(0, equals);
    if (!absl::ConsumePrefix(&typed, "--") && !absl::ConsumePrefix(&typed, "-"))
      return wrong("unexpected argument '", argument, "'");
    std::string name = absl::StrReplaceAll(typed, {{"-", "_"}});
    const bool has_value = equals < argument.size();
    auto found = flags.find(name);
    const bool negated = found == flags.end() && !has_value && absl::StartsWith(name, "no");
    if (negated) found = flags.find(name = name.substr(2));
    const bool is_switch = found != flags.end() && found->second->IsOfType<bool>();
    if (found == flags.end() || (negated && !is_switch)) return wrong("unknown flag --", typed);
    if (!given.insert(name).second) {
      const bool is_list = found->second->IsOfType<std::vector<std::string>>();
      return wrong("--", name, " is given twice",
                   is_list ? "; it takes several, comma-separated" : "");
    }
    std::string value = has_value ? argument.substr(equals + 1) : negated ? "false" : "true";
    if (!has_value && !is_switch) {
      if (i + 1 == arguments.size()) return wrong("--", name, " needs a value");
      value = arguments[++i];
    }
    std::string error;
    if (!found->second->ParseFrom(value, &error))
      return wrong("--", name, " is '", value, "'", error.empty() ? "" : ": ", error);
  }
  return absl::OkStatus();
}

int PrintHelp() {
  std::printf("espalierd %s\n\nFlags:\n", kUsage);
  for (const auto& [name, flag] : OurFlags()) {
    std::printf("  --%s (default: %s)\n      %s\n", name.c_str(), flag->DefaultValue().c_str(),
                flag->Help().c_str());
  }
  return std::fflush(stdout) == 0 ? 0 : kCannotStart;
}

// Threads that load and update models come and go, and each leaves up to 10 MB in the heap that it allocated from. By
// default glibc makes 8 heaps for each CPU; two are enough for nobody to wait.
void LimitHeaps() { mallopt(M_ARENA_MAX, 2 * AvailableCpus()); }

int Main(int argc, char** argv) {
  LimitHeaps();
  const std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") return PrintHelp();
    if (argument == "--version") return std::printf("espalierd %s\n", ESPALIER_VERSION) < 0;
  }
  runtime::ConfigureLogging(runtime::LogFormat::kText, spdlog::level::info);
  if (absl::Status status = ParseFlags(arguments); !status.ok()) return Fail(kBadFlags, status);
  if (absl::Status status = ReadLogFlags(); !status.ok()) return Fail(kBadFlags, status);
  auto options = ReadFlags();
  if (!options.ok()) return Fail(kBadFlags, options.status());
  absl::Duration drain_timeout;
  if (absl::Status status =
          ReadDuration("drain_timeout", absl::GetFlag(FLAGS_drain_timeout), &drain_timeout);
      !status.ok()) {
    return Fail(kBadFlags, status);
  }
  RaiseFileLimit();
  const sigset_t signals = BlockStopSignals();
  auto server = Server::Start(*std::move(options));
  if (!server.ok()) return Fail(kCannotStart, server.status());
  int received = 0;
  sigwait(&signals, &received);
  runtime::LogEvent(spdlog::level::info, "draining",
                    {{"signal", gpu_lost             ? "GPU lost"
                                : received == SIGINT ? "SIGINT"
                                : received == SIGHUP ? "SIGHUP"
                                                     : "SIGTERM"}});
  DrainAndExit(**server, drain_timeout, signals);
}

}  // namespace
}  // namespace espalier::service

int main(int argc, char** argv) { return espalier::service::Main(argc, argv); }
