// service_fixture.h — a whole server in the test's process, on fake models, with a real client over
// loopback.
#pragma once

#include <cstring>
#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "service/server.h"
#include "tests/engine/runtime/fake_model.h"

namespace espalier::service {

using espalier::testing::Eventually;
using espalier::testing::FakeControl;
using espalier::testing::FakeLoader;
using espalier::testing::FakeModelOptions;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

// A request for `model`: one FP32 input "x" of shape [batch, 4], 0 1 2 ….
inline ModelInferRequest RawRequest(int64_t batch = 1, const std::string& model = "m") {
  ModelInferRequest request;
  request.set_model_name(model);
  auto* input = request.add_inputs();
  input->set_name("x");
  input->set_datatype("FP32");
  input->add_shape(batch);
  input->add_shape(4);
  std::string raw;
  for (int i = 0; i < batch * 4; ++i) {
    const float value = static_cast<float>(i);
    raw.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  request.add_raw_input_contents(raw);
  return request;
}

inline std::vector<float> FloatsOf(const std::string& raw) {
  std::vector<float> values(raw.size() / sizeof(float));
  std::memcpy(values.data(), raw.data(), raw.size());
  return values;
}

class ServiceFixture : public ::testing::Test {
 protected:
  // A test that failed half-way ends as well: nothing stands at a closed gate any more.
  void TearDown() override {
    for (const auto& control : controls_) {
      control->load_gate.Open();
      control->run_gate.Open();
    }
  }

  // Before StartServer: a model in the repository, with one version.
  std::shared_ptr<FakeControl> AddModel(const std::string& name, FakeModelOptions model = {}) {
    repository_.MakeDirectory(name + "/1");
    loader_->models[name] = model;
    controls_.push_back(model.control);
    return model.control;
  }

  // Serves the models; waits until they are loaded unless told otherwise.
  void StartServer(bool wait = true) {
    options_.model_repositories = {repository_.path()};
    options_.address = "127.0.0.1:0";
    auto server = Server::Start(options_, std::move(loader_));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    // A channel of its own for every test: gRPC shares connections between equal ones.
    grpc::ChannelArguments arguments;
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    channel_ = grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                         grpc::InsecureChannelCredentials(), arguments);
    stub_ = inference::GRPCInferenceService::NewStub(channel_);
    if (wait) {
      ASSERT_TRUE(Eventually([&] { return server_->ready(); }));
    }
  }

  grpc::Status Infer(const ModelInferRequest& request, ModelInferResponse* response = nullptr,
                     absl::Duration deadline = absl::InfiniteDuration()) {
    grpc::ClientContext context;
    if (deadline != absl::InfiniteDuration())
      context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    ModelInferResponse ignored;
    return stub_->ModelInfer(&context, request, response != nullptr ? response : &ignored);
  }

  // Any unary method with any bytes.
  grpc::Status Call(const std::string& method, const std::string& bytes,
                    std::string* response = nullptr) {
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer answer;
    grpc::ClientContext context;
    grpc::GenericStub stub(channel_);
    std::latch done{1};
    grpc::Status status;
    stub.UnaryCall(&context, method, {}, &request, &answer, [&](grpc::Status s) {
      status = std::move(s);
      done.count_down();
    });
    done.wait();
    grpc::Slice whole;
    if (status.ok() && response != nullptr && answer.Valid() &&
        answer.DumpToSingleSlice(&whole).ok()) {
      response->assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
    }
    return status;
  }

  void ExpectRefused(const ModelInferRequest& request, grpc::StatusCode code,
                     const std::string& text) {
    const grpc::Status status = Infer(request);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr(text));
  }

  testing::TemporaryDirectory repository_;
  std::vector<std::shared_ptr<FakeControl>> controls_;
  std::unique_ptr<FakeLoader> loader_ = std::make_unique<FakeLoader>();
  // Without metrics: their web server takes up to two seconds to stop.
  ServerOptions options_ = {.metrics_address = ""};
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
};

}  // namespace espalier::service
