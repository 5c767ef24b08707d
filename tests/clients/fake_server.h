// fake_server.h — an in-process Open Inference Protocol server with one classifier, for client
// tests.
//
// Model "digits" version 3: input "input" FP32 [-1, 4], output "logits" FP32 [-1, 4], twice the
// input, so that the largest logit stands where the largest pixel does. "gone" is indexed, but
// unavailable.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "clients/cpp/tensor.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace espalier::testing {

class FakeService final : public inference::GRPCInferenceService::Service {
 public:
  inference::ModelInferRequest last_request;  // read it only when no call is in flight
  std::string last_header;                    // of "authorization"
  std::chrono::milliseconds delay{0};
  bool drop_raw_contents = false;
  bool shorten_output = false;

  grpc::Status ServerLive(grpc::ServerContext*, const inference::ServerLiveRequest*,
                          inference::ServerLiveResponse* response) override {
    response->set_live(true);
    return grpc::Status::OK;
  }

  grpc::Status ServerReady(grpc::ServerContext*, const inference::ServerReadyRequest*,
                           inference::ServerReadyResponse* response) override {
    response->set_ready(true);
    return grpc::Status::OK;
  }

  grpc::Status ModelReady(grpc::ServerContext*, const inference::ModelReadyRequest* request,
                          inference::ModelReadyResponse* response) override {
    response->set_ready(request->name() == "digits");
    return grpc::Status::OK;
  }

  grpc::Status ModelMetadata(grpc::ServerContext*, const inference::ModelMetadataRequest* request,
                             inference::ModelMetadataResponse* response) override {
    if (request->name() != "digits") return Unknown(request->name());
    response->set_name("digits");
    response->add_versions("3");
    Describe("input", response->add_inputs());
    Describe("logits", response->add_outputs());
    return grpc::Status::OK;
  }

  grpc::Status ModelConfig(grpc::ServerContext*, const inference::ModelConfigRequest* request,
                           inference::ModelConfigResponse* response) override {
    if (request->name() != "digits") return Unknown(request->name());
    auto* config = response->mutable_config();
    config->set_name("digits");
    auto& parameters = *config->mutable_parameters();
    parameters["layouts"].set_string_value("block_csr(16) x1");
    parameters["structures"].set_string_value("diagonal(16) x1");
    parameters["sparsity"].set_string_value("0.9");
    parameters["resident_weight_bytes"].set_string_value("2048");
    parameters["dense_weight_bytes"].set_string_value("20480");
    return grpc::Status::OK;
  }

  grpc::Status RepositoryIndex(grpc::ServerContext*,
                               const inference::RepositoryIndexRequest* request,
                               inference::RepositoryIndexResponse* response) override {
    auto* digits = response->add_models();
    digits->set_name("digits");
    digits->set_version("3");
    digits->set_state("READY");
    if (request->ready()) return grpc::Status::OK;
    auto* gone = response->add_models();
    gone->set_name("gone");
    gone->set_state("UNAVAILABLE");
    gone->set_reason("model.onnx: unknown op 'Foo' in node 'n1'");
    return grpc::Status::OK;
  }

  grpc::Status ModelInfer(grpc::ServerContext* context, const inference::ModelInferRequest* request,
                          inference::ModelInferResponse* response) override {
    std::this_thread::sleep_for(delay);
    const std::lock_guard<std::mutex> lock(mutex_);
    last_request = *request;
    const auto header = context->client_metadata().find("authorization");
    last_header = header == context->client_metadata().end()
                      ? ""
                      : std::string(header->second.data(), header->second.size());
    if (request->model_name() == "silent") return grpc::Status(grpc::StatusCode::INTERNAL, "");
    if (request->model_name() != "digits") return Unknown(request->model_name());
    response->set_model_name("digits");
    response->set_model_version("3");
    response->set_id(request->id());
    (*response->mutable_parameters())["batch"].set_int64_param(7);
    for (int i = 0; i < request->inputs_size(); ++i)
      Answer(request->inputs(i), request->raw_input_contents(i), response);
    return grpc::Status::OK;
  }

 private:
  static grpc::Status Unknown(const std::string& model) {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, absl::StrCat("unknown model '", model, "'"));
  }

  static void Describe(const std::string& name,
                       inference::ModelMetadataResponse::TensorMetadata* tensor) {
    tensor->set_name(name);
    tensor->set_datatype("FP32");
    tensor->add_shape(-1);
    tensor->add_shape(4);
  }

  void Answer(const inference::ModelInferRequest::InferInputTensor& input, std::string raw,
              inference::ModelInferResponse* response) const {
    auto* output = response->add_outputs();
    output->set_name("logits");
    output->set_datatype(input.datatype());
    *output->mutable_shape() = input.shape();
    if (input.datatype() == "FP32") {
      for (size_t i = 0; i + sizeof(float) <= raw.size(); i += sizeof(float)) {
        float value;
        std::memcpy(&value, raw.data() + i, sizeof(value));
        value *= 2;
        std::memcpy(raw.data() + i, &value, sizeof(value));
      }
    }
    if (shorten_output) raw.pop_back();
    if (!drop_raw_contents) response->add_raw_output_contents(std::move(raw));
  }

  std::mutex mutex_;  // of what ModelInfer records
};

// Serves a FakeService on a free port of the loopback interface.
class FakeServer {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(-1);
    builder.RegisterService(&service);
    server_ = builder.BuildAndStart();
    url = absl::StrCat("127.0.0.1:", port);
  }
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

  FakeService service;
  std::string url;

 private:
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace espalier::testing
