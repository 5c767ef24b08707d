// repository_control.h — RepositoryModelLoad and RepositoryModelUnload: models under the control of
// clients.
//
//   callback thread    Load ──▶ admit ──▶ (1) parse, check parameters ──▶ ModelManager::Load
//   (1) "repository" thread: a message may bring a gigabyte of files                │
//   control thread                                          Answer ◀── loaded, or not
//
// A client that goes away, or a server that stops, ends the RPC at once and the load when it ends.
// Two forms of requests are taken: Triton's, and the KServe SDK's, whose model name is field 1.
//
//   parameter                load  unload
//   config                   x             string, JSON: in place of config.pbtxt
//   file:<version>/<name>    x             bytes: in place of the model's folder; needs config
//   version                  x     x       string or int64: this version alone (Espalier's own)
//   unload_dependents              x       bool: accepted, no model depends on another
#pragma once

#include <memory>

#include "engine/runtime/worker_pool.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "service/service_state.h"

namespace espalier::service {

class RepositoryControl {
 public:
  // `state` must outlive it.
  explicit RepositoryControl(ServiceState& state);

  grpc::ServerUnaryReactor* RepositoryModelLoad(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response);
  grpc::ServerUnaryReactor* RepositoryModelUnload(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response);

 private:
  // Begins an RPC: `handle` is called on the worker with the model's name, the request, and a function that answers it,
  // now or later.
  template <typename Request, typename Handle>
  grpc::ServerUnaryReactor* Open(Rpc rpc, grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* message, grpc::ByteBuffer* response,
                                 Handle handle);

  ServiceState& state_;
  // Bytes of requests whose load has not ended; outlives this object in the loads' callbacks.
  const std::shared_ptr<InFlight> pending_;
  runtime::WorkerPool worker_;
};

}  // namespace espalier::service
