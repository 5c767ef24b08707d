// Every RPC but ModelInfer, health, reflection and metrics.
#include <cstdlib>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "service/rpcs.h"
#include "tests/service/http_get.h"
#include "tests/service/service_fixture.h"

namespace espalier::service {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kService[] = "/inference.GRPCInferenceService/";

class ServiceRpcTest : public ServiceFixture {
 protected:
  // Response of a unary method with these request fields.
  template <typename Response, typename Request>
  Response Ask(const std::string& method, const Request& request) {
    std::string bytes;
    const grpc::Status status = Call(kService + method, request.SerializeAsString(), &bytes);
    EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
    Response response;
    EXPECT_TRUE(response.ParseFromString(bytes));
    return response;
  }
  bool ModelReady(const std::string& name, const std::string& version = "") {
    inference::ModelReadyRequest request;
    request.set_name(name);
    request.set_version(version);
    return Ask<inference::ModelReadyResponse>("ModelReady", request).ready();
  }
  bool ServerReady() {
    return Ask<inference::ServerReadyResponse>("ServerReady", inference::ServerReadyRequest())
        .ready();
  }

  std::string Metrics() { return testing::HttpGet(server_->metrics_port(), "/metrics"); }
};

TEST_F(ServiceRpcTest, LivenessAndMetadataNameTheServer) {
  StartServer();
  EXPECT_TRUE(
      Ask<inference::ServerLiveResponse>("ServerLive", inference::ServerLiveRequest()).live());
  const auto metadata =
      Ask<inference::ServerMetadataResponse>("ServerMetadata", inference::ServerMetadataRequest());
  EXPECT_EQ(metadata.name(), "espalier");
  EXPECT_FALSE(metadata.version().empty());
  EXPECT_THAT(metadata.extensions(),
              ElementsAre("binary_tensor_data", "classification", "logging", "model_configuration",
                          "model_repository", "model_repository(unload_dependents)", "statistics"));
}

TEST_F(ServiceRpcTest, ReadinessFollowsLoadingAndHealthFollowsReadiness) {
  auto control = AddModel("m");
  control->load_gate.Close();
  StartServer(/*wait=*/false);
  control->load_gate.AwaitWaiting(1);
  EXPECT_FALSE(ServerReady());
  EXPECT_FALSE(ModelReady("m"));
  // HealthCheckRequest {1: service}, HealthCheckResponse {1: status}, SERVING = 1, NOT_SERVING = 2.
  const auto health = [&](const std::string& service) {
    std::string response;
    const std::string request =
        service.empty()
            ? ""
            : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
    EXPECT_TRUE(Call("/grpc.health.v1.Health/Check", request, &response).ok());
    return response;
  };
  EXPECT_EQ(health(""), "\x08\x02");
  EXPECT_EQ(health("inference.GRPCInferenceService"), "\x08\x02");
  control->load_gate.Open();
  EXPECT_TRUE(Eventually([&] { return server_->ready(); }));
  EXPECT_TRUE(ServerReady());
  // One after the other, and after the server is ready.
  for (const char* service : {"", "inference.GRPCInferenceService"})
    EXPECT_TRUE(Eventually([&] { return health(service) == "\x08\x01"; })) << service;
  std::string ignored;
  EXPECT_EQ(Call("/grpc.health.v1.Health/Check", "\x0a\x01x", &ignored).error_code(),
            grpc::NOT_FOUND);
}

TEST_F(ServiceRpcTest, HealthWatchReportsEveryChangeAndDoesNotDelayTheDrain) {
  auto control = AddModel("m");
  control->load_gate.Close();
  StartServer(/*wait=*/false);
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto watch = stub.PrepareCall(&context, "/grpc.health.v1.Health/Watch", &queue);
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto read = [&] {
    grpc::ByteBuffer message;
    watch->Read(&message, nullptr);
    grpc::Slice slice;
    if (!next() || !message.DumpToSingleSlice(&slice).ok()) return std::string("ended");
    return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
  };
  watch->StartCall(nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice nothing;
  watch->Write(grpc::ByteBuffer(&nothing, 1), nullptr);
  ASSERT_TRUE(next());
  watch->WritesDone(nullptr);
  ASSERT_TRUE(next());
  EXPECT_EQ(read(), "\x08\x02");
  control->load_gate.Open();
  EXPECT_EQ(read(), "\x08\x01");
  const absl::Time began = absl::Now();
  EXPECT_TRUE(server_->Drain(absl::Minutes(10)));
  EXPECT_LT(absl::Now() - began, absl::Minutes(1));
  EXPECT_EQ(read(), "\x08\x02");
  EXPECT_EQ(read(), "ended");
}

TEST_F(ServiceRpcTest, ModelReadyOfAnUnknownModelIsFalseAndNoError) {
  AddModel("m");
  StartServer();
  EXPECT_TRUE(ModelReady("m"));
  EXPECT_TRUE(ModelReady("m", "1"));
  EXPECT_FALSE(ModelReady("m", "2"));
  EXPECT_FALSE(ModelReady("nothing"));
  EXPECT_EQ(Call(absl::StrCat(kService, "ModelReady"), "\x0a\x01m\x12\x01x").error_code(),
            grpc::INVALID_ARGUMENT);
}

TEST_F(ServiceRpcTest, MetadataAndConfigAgreeOnTheBatch) {
  AddModel("batching");
  FakeModelOptions fixed;
  fixed.max_batch_size = 0;
  fixed.inputs = fixed.outputs = {{"t", DType::kInt64, {3}}};
  AddModel("fixed", fixed);
  StartServer();
  inference::ModelMetadataRequest request;
  request.set_name("batching");
  auto metadata = Ask<inference::ModelMetadataResponse>("ModelMetadata", request);
  EXPECT_EQ(metadata.platform(), "espalier");
  EXPECT_THAT(metadata.versions(), ElementsAre("1"));
  EXPECT_EQ(metadata.inputs(0).name(), "x");
  EXPECT_EQ(metadata.inputs(0).datatype(), "FP32");
  EXPECT_THAT(metadata.inputs(0).shape(), ElementsAre(-1, 4));
  inference::ModelConfigRequest config_request;
  config_request.set_name("batching");
  const auto config = Ask<inference::ModelConfigResponse>("ModelConfig", config_request).config();
  EXPECT_EQ(config.max_batch_size(), 8);
  for (const char* key : {"plan", "plan_source", "device", "layouts", "structures", "sparsity",
                          "resident_weight_bytes", "dense_weight_bytes"}) {
    EXPECT_TRUE(config.parameters().contains(key)) << key;
  }
  EXPECT_EQ(config.parameters().at("sparsity").string_value(), "0.7500");
  request.set_name("fixed");
  metadata = Ask<inference::ModelMetadataResponse>("ModelMetadata", request);
  EXPECT_THAT(metadata.outputs(0).shape(), ElementsAre(3));
  EXPECT_EQ(metadata.outputs(0).datatype(), "INT64");
  for (const char* method : {"ModelMetadata", "ModelConfig"}) {
    const grpc::Status status = Call(absl::StrCat(kService, method), "\x0a\x01z");
    EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
    EXPECT_THAT(status.error_message(), HasSubstr("Request for unknown model: 'z' is not found"));
  }
}

TEST_F(ServiceRpcTest, StatisticsMoveWithRequests) {
  AddModel("m");
  AddModel("other");
  StartServer();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Infer(RawRequest(2)).ok());
  EXPECT_FALSE(Infer(RawRequest(9)).ok());
  inference::ModelStatisticsRequest request;
  EXPECT_EQ(Ask<inference::ModelStatisticsResponse>("ModelStatistics", request).model_stats_size(),
            2);
  request.set_name("m");
  const auto response = Ask<inference::ModelStatisticsResponse>("ModelStatistics", request);
  ASSERT_EQ(response.model_stats_size(), 1);
  const auto& statistics = response.model_stats(0);
  EXPECT_EQ(statistics.version(), "1");
  EXPECT_EQ(statistics.inference_count(), 6u);
  EXPECT_EQ(statistics.execution_count(), 3u);
  EXPECT_GT(statistics.last_inference(), 0u);
  const auto& sums = statistics.inference_stats();
  EXPECT_EQ(sums.success().count(), 3u);
  EXPECT_EQ(sums.fail().count(), 1u);
  EXPECT_EQ(sums.queue().count(), 3u);
  EXPECT_LE(sums.queue().ns() + sums.compute_input().ns() + sums.compute_infer().ns() +
                sums.compute_output().ns(),
            sums.success().ns());
  ASSERT_EQ(statistics.batch_stats_size(), 1);
  EXPECT_EQ(statistics.batch_stats(0).batch_size(), 2u);
  EXPECT_EQ(statistics.batch_stats(0).compute_infer().count(), 3u);
  const grpc::Status unknown = Call(absl::StrCat(kService, "ModelStatistics"), "\x0a\x01z");
  EXPECT_EQ(unknown.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(unknown.error_message(), HasSubstr("'z' is not found"));
}

TEST_F(ServiceRpcTest, TheIndexListsStatesAndReasons) {
  AddModel("good");
  AddModel("bad")->load_status = absl::InvalidArgumentError("node 'fc1': expected rank 2, got 3");
  repository_.MakeDirectory("good/007");
  repository_.MakeDirectory("empty");
  StartServer();
  inference::RepositoryIndexRequest request;
  auto index = Ask<inference::RepositoryIndexResponse>("RepositoryIndex", request);
  ASSERT_EQ(index.models_size(), 3);
  EXPECT_EQ(index.models(0).name(), "bad");
  EXPECT_EQ(index.models(0).version(), "1");
  EXPECT_EQ(index.models(0).state(), "UNAVAILABLE");
  EXPECT_EQ(index.models(0).reason(), "node 'fc1': expected rank 2, got 3");
  EXPECT_EQ(index.models(1).name(), "empty");
  EXPECT_EQ(index.models(1).version(), "");
  EXPECT_EQ(index.models(2).state(), "READY");
  request.set_ready(true);
  index = Ask<inference::RepositoryIndexResponse>("RepositoryIndex", request);
  ASSERT_EQ(index.models_size(), 1);
  EXPECT_EQ(index.models(0).name(), "good");
  EXPECT_EQ(Call(absl::StrCat(kService, "RepositoryIndex"), "\x0a\x01r").error_code(),
            grpc::UNIMPLEMENTED);
}

TEST_F(ServiceRpcTest, WhatTheOperatorHasToAllowIsUnimplementedWithTheFlagsName) {
  StartServer();
  for (const char* kind : {"System", "Cuda"}) {
    for (const char* what : {"Status", "Register", "Unregister"}) {
      const grpc::Status status =
          Call(absl::StrCat(kService, kind, "SharedMemory", what), std::string());
      EXPECT_EQ(status.error_code(), grpc::UNIMPLEMENTED) << kind << what;
      EXPECT_THAT(
          status.error_message(),
          HasSubstr(absl::StrCat("--allow_", absl::AsciiStrToLower(kind), "_shared_memory")));
    }
  }
}

TEST_F(ServiceRpcTest, MalformedBytesAreInvalidForEveryRpcThatIsOffered) {
  AddModel("m");
  StartServer();
  int asked = 0;
#define ESPALIER_EXPECT_MALFORMED(name)                                                       \
  {                                                                                           \
    const grpc::Status status = Call(absl::StrCat(kService, #name), std::string("\x0a\xff")); \
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << #name;                          \
    EXPECT_EQ(status.error_message(), "malformed " #name "Request");                          \
    ++asked;                                                                                  \
  }
  ESPALIER_OFFERED_RPCS(ESPALIER_EXPECT_MALFORMED)
#undef ESPALIER_EXPECT_MALFORMED
  EXPECT_EQ(asked, 16);
}

TEST_F(ServiceRpcTest, ACallWhoseMessageNeverCameIsNotCalledMalformed) {
  options_.metrics_address = "127.0.0.1:0";
  AddModel("m");
  StartServer();
  grpc::GenericStub stub(channel_);
  for (const char* rpc : {"ModelInfer", "ModelReady"}) {
    for (const bool closes : {true, false}) {  // or the deadline passes first
      grpc::ClientContext context;
      if (!closes) context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(500)));
      grpc::CompletionQueue queue;
      const auto call = stub.PrepareCall(&context, absl::StrCat(kService, rpc), &queue);
      void* tag = nullptr;
      bool ok = false;
      call->StartCall(&queue);
      ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
      if (closes) {
        call->WritesDone(&queue);
        ASSERT_TRUE(queue.Next(&tag, &ok));
      }
      grpc::Status status;
      call->Finish(&status, &queue);
      ASSERT_TRUE(queue.Next(&tag, &ok));
      EXPECT_EQ(status.error_code(), closes ? grpc::CANCELLED : grpc::DEADLINE_EXCEEDED) << rpc;
    }
    // Which of the two the server hears first, the deadline or the client that goes away, is chance.
    const std::string both =
        absl::StrCat("espalier_rpc_duration_seconds_count{rpc=\"", rpc, "\"} 2");
    EXPECT_TRUE(Eventually([&] { return absl::StrContains(Metrics(), both); })) << rpc;
    EXPECT_THAT(Metrics(), HasSubstr(absl::StrCat("{rpc=\"", rpc, "\",code=\"CANCELLED\"}")));
    const std::string invalid = absl::StrCat("{rpc=\"", rpc, "\",code=\"INVALID_ARGUMENT\"}");
    EXPECT_THAT(Metrics(), Not(HasSubstr(invalid)));
  }
}

TEST_F(ServiceRpcTest, AClientThatSendsNoUtf8WritesNothingIntoTheLog) {
  StartServer();
  ::testing::internal::CaptureStderr();
  const grpc::Status status = Call(absl::StrCat(kService, "ModelReady"), "\x0a\x02\xff\xfe");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(ServiceRpcTest, AnUnknownMethodIsUnimplementedWithItsName) {
  StartServer();
  for (const char* method : {"/inference.GRPCInferenceService/Made", "/x/y"}) {
    const grpc::Status status = Call(method, "");
    EXPECT_EQ(status.error_code(), grpc::UNIMPLEMENTED);
    EXPECT_EQ(status.error_message(),
              absl::StrCat("method '", method, "' is not offered by this server"));
  }
}

TEST_F(ServiceRpcTest, IdleConnectionsDoNotKeepScrapesOut) {
  options_.metrics_address = "127.0.0.1:0";
  StartServer();
  std::vector<int> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(testing::Connect(server_->metrics_port()));
  const absl::Time began = absl::Now();
  EXPECT_THAT(Metrics(), HasSubstr("espalier_ready 1"));
  EXPECT_LT(absl::Now() - began, absl::Seconds(25)) << "they would be kept for 30 s";
  for (int fd : idle) close(fd);
}

TEST_F(ServiceRpcTest, ReflectionListsTheService) {
  StartServer();
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice slice(std::string("\x3a\x01*"));  // ServerReflectionRequest {7: list_services}
  call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
  ASSERT_TRUE(next());
  grpc::ByteBuffer message;
  call->Read(&message, nullptr);
  ASSERT_TRUE(next());
  grpc::Slice answer;
  ASSERT_TRUE(message.DumpToSingleSlice(&answer).ok());
  EXPECT_THAT(std::string(reinterpret_cast<const char*>(answer.begin()), answer.size()),
              HasSubstr("inference.GRPCInferenceService"));
}

TEST_F(ServiceRpcTest, MetricsCountRequestsPhasesAndBytes) {
  AddModel("m");
  AddModel("bad")->load_status = absl::InvalidArgumentError("no");
  options_.metrics_address = "127.0.0.1:0";
  StartServer();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Infer(RawRequest(2)).ok());
  EXPECT_FALSE(Infer(RawRequest(9)).ok());
  EXPECT_FALSE(Infer(RawRequest(1, "made-up-by-a-client")).ok());
  std::string metrics;
  EXPECT_TRUE(Eventually([&] {
    metrics = Metrics();
    return absl::StrContains(metrics, "espalier_requests_in_flight 0\n") &&
           absl::StrContains(metrics, "espalier_request_bytes_in_flight 0\n");
  }));
  for (const char* line : {
           "espalier_build_info{version=\"",
           "espalier_ready 1\n",
           "espalier_requests_total{model=\"m\",version=\"1\",code=\"OK\"} 3\n",
           "espalier_requests_total{model=\"m\",version=\"1\",code=\"INVALID_ARGUMENT\"} 1\n",
           "espalier_inferences_total{model=\"m\",version=\"1\"} 6\n",
           "espalier_executions_total{model=\"m\",version=\"1\"} 3\n",
           "espalier_request_duration_seconds_count{model=\"m\"} 4\n",
           "espalier_request_duration_seconds_bucket{model=\"m\",le=\"+Inf\"} 4\n",
           "espalier_phase_duration_seconds_count{model=\"m\",phase=\"queue\"} 3\n",
           "espalier_phase_duration_seconds_count{model=\"m\",phase=\"compute_input\"} 3\n",
           "espalier_phase_duration_seconds_count{model=\"m\",phase=\"compute_infer\"} 3\n",
           "espalier_phase_duration_seconds_count{model=\"m\",phase=\"compute_output\"} 3\n",
           "espalier_rpcs_total{rpc=\"ModelInfer\",code=\"NOT_FOUND\"} 1\n",
           "espalier_rpc_duration_seconds_count{rpc=\"ModelInfer\"} 5\n",
           "espalier_request_bytes_in_flight 0\n",
           "espalier_queue_pending{model=\"m\",version=\"1\"} 0\n",
           "espalier_model_resident_weight_bytes{model=\"m\",version=\"1\"} 16\n",
           "espalier_model_dense_weight_bytes{model=\"m\",version=\"1\"} 64\n",
           "espalier_model_load_seconds{model=\"m\",version=\"1\"}",
           "espalier_model_loads_total{code=\"OK\"} 1\n",
           "espalier_model_loads_total{code=\"INVALID_ARGUMENT\"} 1\n",
       }) {
    EXPECT_THAT(metrics, HasSubstr(line));
  }
  EXPECT_THAT(metrics, Not(HasSubstr("made-up-by-a-client")));
}

TEST_F(ServiceRpcTest, SeriesOfAVersionEndWithIt) {
  AddModel("m");
  options_.metrics_address = "127.0.0.1:0";
  StartServer();
  ASSERT_TRUE(Infer(RawRequest()).ok());
  EXPECT_THAT(Metrics(), HasSubstr("version=\"1\",code=\"OK\"} 1"));
  ASSERT_TRUE(server_->models().Unload("m").ok());
  EXPECT_TRUE(Eventually([&] { return !absl::StrContains(Metrics(), "version=\"1\""); }));
  EXPECT_THAT(Metrics(), HasSubstr("espalier_request_duration_seconds_count{model=\"m\"} 1"));
}

}  // namespace
}  // namespace espalier::service
