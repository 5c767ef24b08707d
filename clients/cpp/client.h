// client.h — a client of the Open Inference Protocol over gRPC.
//
//   auto client = espalier::client::Client::Create("127.0.0.1:8001");
//   if (!client.ok()) return client.status();
//   auto input = MakeTensor<float>("input", {1, 784}, pixels);
//   if (!input.ok()) return input.status();
//   absl::StatusOr<InferResult> result = (*client)->Infer({.model = "mnist", .inputs = {*input}});
//   if (!result.ok()) return result.status();  // the server's code and message, e.g. NotFound
//   absl::StatusOr<std::vector<float>> logits = Values<float>(result->outputs[0]);
//
//   (*client)->InferAsync(request, [](absl::StatusOr<InferResult> result) { … });
//
// Memory   Requests are copied into the message before a call returns; results belong to the
// caller. Limits   Messages up to 2 GiB − 1 each way (protobuf's limit); a larger request is
// refused here. Errors   The server's status code and text, unchanged. DeadlineExceeded and
// Unavailable may also
//          come from the transport. InvalidArgument: the request contradicts itself and was not
//          sent. Internal: the answer does (bytes against shape, no raw contents).
// Async    InferAsync returns at once; the callback runs exactly once, on a thread of gRPC, and must
//          neither block nor destroy the client. For a request that cannot be sent it runs before
//          InferAsync returns. The destructor waits for callbacks that have yet to run.
// Thread-safe: all methods, from any thread. Calls share one connection.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "clients/cpp/tensor.h"
#include "proto/inference/grpc_service.pb.h"

namespace grpc {
class ChannelCredentials;
class ClientContext;
}  // namespace grpc

namespace espalier::client {

struct ClientOptions {
  // Of every call that sets none itself; absl::InfiniteDuration() for none at all.
  absl::Duration deadline = absl::Seconds(60);
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // null: plain text
  std::map<std::string, std::string> headers;  // sent with every call; keys in lower case
};

struct CallOptions {
  absl::Duration deadline = absl::ZeroDuration();  // zero: the client's
  // Waits, within the deadline, for a server that is not up yet (else Unavailable at once).
  bool wait_for_ready = false;
};

using Parameter = std::variant<bool, int64_t, uint64_t, double, std::string>;

struct InferRequest {
  std::string model;
  std::string version;  // "": the one that the server serves by default
  std::string id;       // echoed in the result
  std::vector<Tensor> inputs;
  std::vector<std::string> outputs;  // empty: all of them
  std::map<std::string, Parameter> parameters;
};

struct InferResult {
  std::string model, version, id;
  std::vector<Tensor> outputs;
  std::map<std::string, Parameter> parameters;

  // NotFound, listing what there is, when no output has this name. Valid as long as the result.
  absl::StatusOr<const Tensor*> output(absl::string_view name) const;
};

using InferCallback = std::function<void(absl::StatusOr<InferResult>)>;

// A call in flight. Dropping it leaves the call running.
class PendingInfer {
 public:
  // The callback still runs, with Cancelled unless the answer was already there.
  void Cancel();

 private:
  friend class Client;
  explicit PendingInfer(std::shared_ptr<grpc::ClientContext> context)
      : context_(std::move(context)) {}
  std::shared_ptr<grpc::ClientContext> context_;
};

class Client {
 public:
  // `target` is "host:port" or any gRPC target ("unix:/path", "dns:///host:port"). The connection
  // is made by the first call, so only a target that can never work is an error here.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const std::string& target,
                                                        ClientOptions options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  absl::StatusOr<InferResult> Infer(const InferRequest& request, const CallOptions& options = {});
  PendingInfer InferAsync(const InferRequest& request, InferCallback callback,
                          const CallOptions& options = {});

  absl::StatusOr<bool> ServerLive(const CallOptions& options = {});
  absl::StatusOr<bool> ServerReady(const CallOptions& options = {});
  absl::StatusOr<bool> ModelReady(const std::string& model, const std::string& version = "",
                                  const CallOptions& options = {});
  absl::StatusOr<inference::ServerMetadataResponse> ServerMetadata(const CallOptions& options = {});
  absl::StatusOr<inference::ModelMetadataResponse> ModelMetadata(const std::string& model,
                                                                 const std::string& version = "",
                                                                 const CallOptions& options = {});
  absl::StatusOr<inference::ModelConfig> ModelConfig(const std::string& model,
                                                     const std::string& version = "",
                                                     const CallOptions& options = {});
  // An empty model: the statistics of all.
  absl::StatusOr<inference::ModelStatisticsResponse> ModelStatistics(
      const std::string& model = "", const std::string& version = "",
      const CallOptions& options = {});
  absl::StatusOr<inference::RepositoryIndexResponse> RepositoryIndex(
      bool ready_only = false, const CallOptions& options = {});
  // A POSIX shared memory object of this machine, `key` as shm_open knows it, for requests to name as `name`.
  absl::Status RegisterSystemSharedMemory(const std::string& name, const std::string& key,
                                          uint64_t byte_size, const CallOptions& options = {});
  absl::Status UnregisterSystemSharedMemory(const std::string& name,
                                            const CallOptions& options = {});

 private:
  struct Connection;
  class CallsInFlight;
  explicit Client(std::unique_ptr<Connection> connection);
  std::unique_ptr<Connection> connection_;
  std::shared_ptr<CallsInFlight> calls_;
};

}  // namespace espalier::client
