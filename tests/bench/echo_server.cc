#include "tests/bench/echo_server.h"

#include <cstdio>
#include <fstream>

#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace espalier::bench {
namespace {

using Base = inference::GRPCInferenceService::WithRawCallbackMethod_ModelInfer<
    inference::GRPCInferenceService::Service>;

class EchoService final : public Base {
 public:
  explicit EchoService(size_t answer_bytes) : answer_bytes_(answer_bytes) {}

  using Base::ModelInfer;
  grpc::ServerUnaryReactor* ModelInfer(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override {
    if (answer_bytes_ > 0) {
      const grpc::Slice slice(answer_bytes_);
      *response = grpc::ByteBuffer(&slice, 1);
    } else {
      *response = *request;
    }
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  const size_t answer_bytes_;
};

}  // namespace

int RunEchoServer(size_t answer_bytes, const std::string& port_file) {
  EchoService service(answer_bytes);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const std::string draft = port_file + ".tmp";
  std::ofstream(draft) << "{\"grpc_port\": " << port << "}\n";
  if (server == nullptr || std::rename(draft.c_str(), port_file.c_str()) != 0) return 1;
  server->Wait();
  return 0;
}

}  // namespace espalier::bench
