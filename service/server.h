// server.h — the whole server in one object: models, gRPC service, health, reflection, metrics
// endpoint.
//
//   Start ──▶ listening, NOT_SERVING ──all models loaded──▶ SERVING ──Drain──▶ NOT_SERVING, closed
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/model_manager.h"
#include "engine/runtime/state_dir.h"
#include "engine/tensor/devices.h"
#include "service/service_state.h"
#include "service/update_options.h"

namespace grpc {
class CallbackGenericService;
class Server;
class Service;
}  // namespace grpc
namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace espalier::service {

// Who says which models are served: none is what the repository holds at start, poll what it holds
// at any time, explicit the clients.
enum class ModelControlMode : uint8_t { kNone, kPoll, kExplicit };

struct ServerOptions {
  std::vector<std::string> model_repositories;
  ModelControlMode model_control_mode = ModelControlMode::kNone;
  absl::Duration repository_poll_interval = absl::Seconds(15);  // in mode poll
  std::vector<std::string> load_models;          // in mode explicit, at start; "*": all
  std::string address = "0.0.0.0:8001";          // gRPC; port 0: a free one
  std::string metrics_address = "0.0.0.0:8002";  // Prometheus; empty: none
  std::string state_dir;                         // empty: nothing is kept between runs
  std::string ready_file;                        // empty: none
  int threads = 0;                               // that compute; 0: one per CPU
  DeviceMode device = DeviceMode::kCpu;
  std::string cuda_module;  // see DeviceOptions
  // Called once when a GPU is lost, after health went to NOT_SERVING: the process should end, and be
  // started again by its supervisor. From any thread.
  std::function<void()> on_gpu_lost;
  int loader_threads = 2;                                  // models that load at once
  int64_t max_message_bytes = int64_t{1} << 30;            // largest request
  int64_t max_requests_in_flight = 4096;                   // 0: no limit
  int64_t max_request_bytes_in_flight = int64_t{4} << 30;  // 0: no limit
  int64_t max_streams = 1024;                              // open at once; 0: no limit
  int64_t max_stream_requests_in_flight = 256;             // per stream, which then waits
  bool allow_system_shared_memory = false;                 // tensors in regions of clients
  bool allow_cuda_shared_memory = false;                   // the same on a GPU
  int64_t max_queue_size = 0;  // waiting requests per model whose config sets none; 0: no limit
  absl::StatusCode queue_full_status = absl::StatusCode::kUnavailable;  // or kResourceExhausted
  absl::Duration max_connection_age = absl::ZeroDuration();             // 0: no limit
  absl::Duration max_connection_age_grace = absl::Seconds(30);          // for RPCs that still run
  std::string trace_file;          // of traced requests; empty: none can be traced
  bool accept_compressed = false;  // requests packed with gzip or deflate
  int64_t measure_budget_millis = 3000;
  std::string commit = "unknown";  // of the build, for espalier_build_info
  UpdateOptions updates;           // of weights; needs a state_dir
};

class Server {
 public:
  // Locks the state directory, lists the repositories, listens, and begins to load. Errors say what
  // to change: an address in use, a repository that does not exist, a locked state directory.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  // The same with another loader, for tests; its models need no device, so none is opened for DeviceMode::kCpu.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      ServerOptions options, std::unique_ptr<runtime::ModelLoader> loader);
  // Drains without patience if Drain was not called.
  ~Server();

  int port() const { return port_; }                                               // gRPC
  int metrics_port() const { return metrics_port_; }                               // 0: none
  int update_port() const { return update_server_ ? update_server_->port() : 0; }  // 0: none
  bool ready() const { return state_->ready(); }
  runtime::ModelManager& models() { return *models_; }

  // Takes nothing new (UNAVAILABLE), lets what is in flight finish and ends the streams. Connections
  // stay, so that whatever still arrives is answered. False when something was still running after
  // `timeout`. A process that ends after it closes its connections, which clients take for UNAVAILABLE.
  bool Quiesce(absl::Duration timeout);
  // The same, then closes all connections from within: what is still running is cancelled, and so is,
  // by gRPC, what arrives meanwhile. Metrics stay up until the server is destroyed.
  bool Drain(absl::Duration timeout);

 private:
  explicit Server(ServerOptions options);
  absl::Status Listen();
  absl::Status ListenForMetrics();
  absl::Status ListenForUpdates();
  absl::Status OpenDevicesAsGiven();
  void OnModelsLoaded();
  void OnReady();
  void OnGpuLost(const absl::Status& status);
  void SetServing(bool serving);
  absl::Status WriteReadyFile() const;

  const ServerOptions options_;
  std::unique_ptr<runtime::StateDir> state_dir_;
  std::atomic<bool> gpu_lost_ = false;
  Devices devices_;
  AccessToken update_token_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<runtime::UpdateManager> updates_;  // null: weights stay as they are loaded
  std::unique_ptr<runtime::ModelManager> models_;
  std::unique_ptr<ServiceState> state_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::CallbackGenericService> unknown_methods_;
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<UpdateServer> update_server_;
  std::shared_ptr<prometheus::Collectable> collector_, triton_collector_, gpu_collector_;
  std::shared_ptr<prometheus::Collectable> update_collector_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;
  int metrics_port_ = 0;
};

}  // namespace espalier::service
