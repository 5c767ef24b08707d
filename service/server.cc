#include "service/server.h"

#include <grpc/support/log.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "engine/runtime/log.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "prometheus/exposer.h"
#include "service/gpu_metrics.h"
#include "service/inference_service.h"
#include "service/listen_address.h"
#include "service/metrics.h"
#include "service/update_metrics.h"

namespace espalier::service {
namespace {

constexpr char kServiceName[] = "inference.GRPCInferenceService";
// On one connection; unary calls and streams.
constexpr int kMaxCallsPerConnection = 4096;
// How often Drain looks whether the last request is gone.
constexpr absl::Duration kDrainPoll = absl::Milliseconds(5);

// gRPC's own lines, in our format. Its errors are ours to report with more sense, so they are
// warnings.
void LogFromGrpc(gpr_log_func_args* args) {
  const auto level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::debug;
  runtime::LogEvent(level, "grpc", {{"message", args->message}});
}

// Protobuf's own lines, one for each message with a malformed string. They are written in a client's
// name, who is answered, so nobody else needs to know.
void LogFromProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  runtime::LogEvent(spdlog::level::debug, "protobuf", {{"message", message}});
}

// Process-wide settings of gRPC and protobuf, before the first server.
void ConfigureGrpcOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(LogFromGrpc);
    google::protobuf::SetLogHandler(LogFromProtobuf);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

void SetChannelArguments(grpc::ServerBuilder& builder, const ServerOptions& options) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  // gRPC unpacks before it checks the size: 4 MB of gzip can become gigabytes.
  for (auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, options.accept_compressed);
  }
  // By default two servers may share a port, and half of the requests would go to the wrong one.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // More at once would only be refused; so they wait at their client.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsPerConnection);
  // A client that vanished without a word is noticed, and what it waits for is cancelled.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  if (options.max_connection_age > absl::ZeroDuration()) {
    builder.AddChannelArgument(
        GRPC_ARG_MAX_CONNECTION_AGE_MS,
        static_cast<int>(absl::ToInt64Milliseconds(options.max_connection_age)));
    builder.AddChannelArgument(
        GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
        static_cast<int>(absl::ToInt64Milliseconds(options.max_connection_age_grace)));
  }
  // Clients that ping, also while idle, are no attackers.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
}

// The path without links and dots; what does not exist yet is taken as written.
std::string Canonical(const std::string& path) {
  std::error_code error;
  return std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error).string();
}

// Plans and journals are written; a repository is only ever read.
absl::Status CheckStateDir(const ServerOptions& options) {
  const std::string state = Canonical(options.state_dir);
  for (const std::string& repository : options.model_repositories) {
    const std::string root = Canonical(repository);
    if (!absl::StartsWith(state + "/", root + "/")) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--state_dir ", options.state_dir, " lies in the model repository ",
                     repository, ", which is only ever read; choose a directory outside"));
  }
  return absl::OkStatus();
}

// Files that are written later are tried at the start: a supervisor that waits for a ready file which cannot be written
// would wait for ever.
absl::Status CheckWritable(absl::string_view flag, const std::string& path,
                           const std::string& written) {
  if (path.empty()) return absl::OkStatus();
  std::FILE* file = std::fopen(written.c_str(), "a");
  const bool opened = file != nullptr && std::fclose(file) == 0;
  int reason = errno;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    reason = EISDIR;
  } else if (opened) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " ", path, " cannot be written: ", std::strerror(reason)));
}

std::string DraftOf(const std::string& ready_file) { return ready_file + ".tmp"; }

absl::Status CheckFiles(const ServerOptions& options) {
  absl::Status status = CheckWritable("trace_file", options.trace_file, options.trace_file);
  const std::string draft = DraftOf(options.ready_file);
  if (status.ok()) status = CheckWritable("ready_file", options.ready_file, draft);
  std::error_code error;
  const auto there = std::filesystem::symlink_status(options.ready_file, error);
  if (status.ok() && std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "--ready_file ", options.ready_file, " is no regular file, and would be replaced by one"));
  }
  if (!options.ready_file.empty()) std::remove(draft.c_str());
  return status;
}

// The same directory twice would have every model in two repositories.
absl::Status CheckRepositories(const std::vector<std::string>& repositories) {
  std::map<std::string, std::string> seen;
  for (const std::string& repository : repositories) {
    const auto [earlier, is_new] = seen.emplace(Canonical(repository), repository);
    if (is_new) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--model_repository names one directory twice: ", earlier->second, " and ", repository));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  return Start(std::move(options), nullptr);
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(
    ServerOptions options, std::unique_ptr<runtime::ModelLoader> loader) {
  ConfigureGrpcOnce();
  std::unique_ptr<Server> server(new Server(std::move(options)));
  const ServerOptions& given = server->options_;
  if (absl::Status status = CheckFiles(given); !status.ok()) return status;
  if (absl::Status status = CheckRepositories(given.model_repositories); !status.ok())
    return status;
  if (absl::Status status = CheckUpdateOptions(given.updates, given.state_dir); !status.ok())
    return status;
  if (!given.state_dir.empty()) {
    if (absl::Status status = CheckStateDir(given); !status.ok()) return status;
    auto state_dir = runtime::StateDir::Open(given.state_dir);
    if (!state_dir.ok()) return state_dir.status();
    server->state_dir_ = *std::move(state_dir);
  }
  if (loader == nullptr || given.device != DeviceMode::kCpu) {
    if (absl::Status status = server->OpenDevicesAsGiven(); !status.ok()) return status;
  }
  if (loader == nullptr) {
    loader = runtime::MakeFileModelLoader(server->devices_,
                                          server->state_dir_ ? server->state_dir_->plans() : "");
  }
  runtime::ModelManager::Options manager;
  manager.repositories = given.model_repositories;
  manager.loader_threads = given.loader_threads;
  manager.default_max_pending = given.max_queue_size;
  manager.overload_code = given.queue_full_status;
  manager.measure_budget_millis = given.measure_budget_millis;
  const bool loads_all = absl::c_linear_search(given.load_models, "*");
  if (given.model_control_mode == ModelControlMode::kExplicit && !loads_all)
    manager.load_at_start = given.load_models;
  if (given.model_control_mode == ModelControlMode::kPoll)
    manager.poll_interval = given.repository_poll_interval;
  if (given.updates.enabled()) {
    auto token = ReadToken(given.updates);
    if (!token.ok()) return token.status();
    server->update_token_ = *std::move(token);
    server->peers_ = std::make_unique<Peers>(server->update_token_.authorization());
    auto updates = MakeUpdateManager(given.updates, given.state_dir, *server->peers_);
    if (!updates.ok()) return updates.status();
    server->updates_ = *std::move(updates);
    manager.updates = server->updates_.get();
  }
  manager.on_started = [server = server.get()] { server->OnModelsLoaded(); };
  server->models_ = std::make_unique<runtime::ModelManager>(std::move(manager), std::move(loader));
  server->state_ = std::unique_ptr<ServiceState>(new ServiceState{
      *server->models_,
      Telemetry({given.max_requests_in_flight, given.max_request_bytes_in_flight}),
      StreamRegistry({given.max_streams, given.max_stream_requests_in_flight}),
      SharedMemoryRegions({given.allow_system_shared_memory, given.allow_cuda_shared_memory},
                          server->devices_),
      Tracer(given.trace_file), given.queue_full_status,
      given.model_control_mode == ModelControlMode::kExplicit});
  // Metrics first: it is the cheaper one to undo.
  if (absl::Status status = server->ListenForMetrics(); !status.ok()) return status;
  if (absl::Status status = server->Listen(); !status.ok()) return status;
  if (absl::Status status = server->ListenForUpdates(); !status.ok()) return status;
  runtime::LogEvent(spdlog::level::info, "listening",
                    {{"grpc_port", server->port_},
                     {"metrics_port", server->metrics_port_},
                     {"update_port", server->update_port()},
                     {"device", server->devices_.cpu ? server->devices_.Description() : "none"},
                     {"version", ESPALIER_VERSION}});
  // One of an earlier run must not pass for ours.
  if (!given.ready_file.empty()) std::remove(given.ready_file.c_str());
  if (absl::Status status = server->models_->Start(); !status.ok()) return status;
  return server;
}

Server::Server(ServerOptions options) : options_(std::move(options)) {}

absl::Status Server::Listen() {
  if (absl::Status status = CheckAddress(options_.address, "address"); !status.ok()) return status;
  service_ = MakeInferenceService(*state_);
  unknown_methods_ = MakeUnknownMethods();
  grpc::ServerBuilder builder;
  SetChannelArguments(builder, options_);
  builder.AddListeningPort(options_.address, grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(service_.get());
  builder.RegisterCallbackGenericService(unknown_methods_.get());
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr || port_ <= 0) return CannotListen("gRPC", options_.address, "address");
  SetServing(false);
  return absl::OkStatus();
}

absl::Status Server::ListenForMetrics() {
  if (options_.metrics_address.empty()) return absl::OkStatus();
  if (absl::Status status = CheckAddress(options_.metrics_address, "metrics_address");
      !status.ok()) {
    return status;
  }
  // A connection holds a thread until it has sent its request or this time is over: with civetweb's defaults (2 threads,
  // 30 s) two idle ones keep Prometheus out for 30 s. Thirty of them now leave two threads, and are gone in a second.
  const std::vector<std::string> web = {"listening_ports",    options_.metrics_address,
                                        "num_threads",        "32",
                                        "request_timeout_ms", "1000"};
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(web);
  } catch (const std::exception&) {  // its text says nothing about the address
    return CannotListen("metrics", options_.metrics_address, "metrics_address");
  }
  metrics_port_ = exposer_->GetListeningPorts().front();
  collector_ = MakeMetricsCollector(*state_, options_.commit);
  exposer_->RegisterCollectable(collector_);
  if (!devices_.gpus.empty()) {
    gpu_collector_ = MakeGpuMetricsCollector(devices_, OpenGpuUsageReader());
    exposer_->RegisterCollectable(gpu_collector_);
  }
  if (updates_ != nullptr) {
    update_collector_ = MakeUpdateMetricsCollector(*updates_);
    exposer_->RegisterCollectable(update_collector_);
  }
  triton_collector_ = MakeTritonMetricsCollector(*state_);
  exposer_->RegisterCollectable(triton_collector_, "/metrics/triton");
  return absl::OkStatus();
}

absl::Status Server::ListenForUpdates() {
  if (updates_ == nullptr) return absl::OkStatus();
  updates_->Attach(*models_);
  if (options_.updates.listener.address.empty()) return absl::OkStatus();
  auto server = UpdateServer::Start(options_.updates.listener, update_token_, *peers_, *updates_,
                                    state_->telemetry);
  if (!server.ok()) return server.status();
  update_server_ = *std::move(server);
  return absl::OkStatus();
}

void Server::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = grpc_->GetHealthCheckService();
  health->SetServingStatus("", serving);
  health->SetServingStatus(kServiceName, serving);
}

absl::Status Server::OpenDevicesAsGiven() {
  DeviceOptions options;
  options.mode = options_.device;
  options.threads = options_.threads;
  options.cuda_module = options_.cuda_module;
  options.on_gpu_lost = [this](const absl::Status& status) { OnGpuLost(status); };
  auto devices = OpenDevices(std::move(options));
  if (!devices.ok()) {
    return absl::Status(devices.status().code(),
                        absl::StrCat("--device=cuda: ", devices.status().message()));
  }
  devices_ = *std::move(devices);
  if (options_.device == DeviceMode::kAuto && devices_.gpus.empty()) {
    runtime::LogEvent(spdlog::level::info, "serving on the CPU", {{"reason", devices_.why_no_gpu}});
  }
  return absl::OkStatus();
}

// What runs on the GPU fails by itself, each request with the text of the error.
void Server::OnGpuLost(const absl::Status& status) {
  gpu_lost_ = true;
  runtime::LogEvent(spdlog::level::critical, "GPU lost", {{"reason", status.message()}});
  if (grpc_ != nullptr) SetServing(false);
  if (options_.on_gpu_lost) options_.on_gpu_lost();
}

void Server::OnModelsLoaded() {
  if (update_server_ == nullptr) return OnReady();
  update_server_->CatchUp([this] { OnReady(); });
}

void Server::OnReady() {
  if (state_->draining || gpu_lost_) return;
  state_->caught_up = true;
  SetServing(true);
  size_t ready = 0, failed = 0;
  for (const auto& entry : models_->Index()) {
    if (entry.state == runtime::VersionState::kReady) ++ready;
    if (entry.state == runtime::VersionState::kUnavailable) ++failed;
  }
  runtime::LogEvent(spdlog::level::info, "ready",
                    {{"versions_ready", ready}, {"versions_unavailable", failed}});
  if (absl::Status status = WriteReadyFile(); !status.ok()) {
    runtime::LogEvent(spdlog::level::err, "ready file not written", {{"reason", status.message()}});
  }
}

absl::Status Server::WriteReadyFile() const {
  if (options_.ready_file.empty()) return absl::OkStatus();
  // Written beside and renamed, so that whoever waits for the file never reads half of it.
  const std::string draft = DraftOf(options_.ready_file);
  std::ofstream file(draft);
  file << absl::StrCat("{\"grpc_port\": ", port_, ", \"metrics_port\": ", metrics_port_);
  if (update_port() != 0) file << ", \"update_port\": " << update_port();
  file << "}\n";
  file.close();
  if (file.fail() || std::rename(draft.c_str(), options_.ready_file.c_str()) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(options_.ready_file, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

bool Server::Quiesce(absl::Duration timeout) {
  if (grpc_ == nullptr) return true;
  const absl::Time deadline = absl::Now() + timeout;
  state_->draining = true;
  state_->streams.EndAll(absl::UnavailableError("server is shutting down"));
  grpc_->GetHealthCheckService()->Shutdown();
  if (updates_ != nullptr) updates_->Stop();
  if (update_server_ != nullptr) update_server_->Stop();
  // New requests are refused by their handlers while those in flight finish. Shutting gRPC down would
  // do the same less well: what arrives on an open connection then is answered CANCELLED, which no
  // client retries (gRPC 1.51 drops it before any handler, and cannot announce the end without that).
  const auto busy = [this] {
    return state_->telemetry.in_flight.requests() > 0 || state_->streams.open() > 0;
  };
  while (busy() && absl::Now() < deadline) absl::SleepFor(kDrainPoll);
  const int64_t left = state_->telemetry.in_flight.requests();
  if (left > 0) runtime::LogEvent(spdlog::level::warn, "requests cut off", {{"requests", left}});
  state_->tracer.Finish();
  return left == 0;
}

bool Server::Drain(absl::Duration timeout) {
  if (grpc_ == nullptr) return true;
  const bool finished = Quiesce(timeout);
  // What is still open now are streams that end only when their client wants (Watch of the health
  // service), and what was not done in time.
  std::thread shutdown([&] { grpc_->Shutdown(absl::ToChronoTime(absl::Now() + kDrainPoll)); });
  shutdown.join();
  grpc_->Wait();
  return finished;
}

Server::~Server() {
  // Long enough for answers that are on their way.
  if (grpc_ != nullptr && !state_->draining) Drain(absl::Milliseconds(100));
  exposer_.reset();
  grpc_.reset();
  service_.reset();  // before models_, which its thread uses
  models_.reset();   // before state_, which its callback uses
}

}  // namespace espalier::service
