// ModelInfer: every row of the protocol's table of errors, and what a good answer holds.
#include <list>
#include <thread>

#include "tests/service/service_fixture.h"

namespace espalier::service {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class ModelInferTest : public ServiceFixture {
 protected:
  void SetUp() override {
    control_ = AddModel("m");
    FakeModelOptions fixed;
    fixed.max_batch_size = 0;
    fixed.inputs = {{"a", DType::kFloat32, {4}}, {"b", DType::kInt64, {2}}};
    fixed.outputs = {{"y", DType::kFloat32, {4}}, {"z", DType::kInt64, {2}}};
    AddModel("two", fixed);
    AddModel("broken")->load_status = absl::InvalidArgumentError("model.onnx: truncated");
    auto* policy = loader_->configs["m"].mutable_dynamic_batching()->mutable_default_queue_policy();
    policy->set_max_queue_size(2);
    policy->set_allow_timeout_override(true);
  }

  std::shared_ptr<FakeControl> control_;
};

// A request for "two".
ModelInferRequest TwoInputs() {
  ModelInferRequest request;
  request.set_model_name("two");
  auto* a = request.add_inputs();
  a->set_name("a");
  a->set_datatype("FP32");
  a->add_shape(4);
  auto* b = request.add_inputs();
  b->set_name("b");
  b->set_datatype("INT64");
  b->add_shape(2);
  request.add_raw_input_contents(std::string(16, '\0'));
  request.add_raw_input_contents(std::string(16, '\1'));
  return request;
}

TEST_F(ModelInferTest, AnswersRawWithModelVersionAndId) {
  StartServer();
  ModelInferRequest request = RawRequest(2);
  request.set_id("request-7");
  request.set_model_version("1");
  ModelInferResponse response;
  const grpc::Status status = Infer(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.model_name(), "m");
  EXPECT_EQ(response.model_version(), "1");
  EXPECT_EQ(response.id(), "request-7");
  ASSERT_EQ(response.outputs_size(), 1);
  EXPECT_EQ(response.outputs(0).name(), "y");
  EXPECT_EQ(response.outputs(0).datatype(), "FP32");
  EXPECT_THAT(response.outputs(0).shape(), ElementsAre(2, 4));
  ASSERT_EQ(response.raw_output_contents_size(), 1);
  EXPECT_THAT(FloatsOf(response.raw_output_contents(0)), ElementsAre(0, 2, 4, 6, 8, 10, 12, 14));
}

TEST_F(ModelInferTest, TakesTypedContentsAndRequestedOutputs) {
  StartServer();
  ModelInferRequest request = TwoInputs();
  request.clear_raw_input_contents();
  for (float value : {1.f, 2.f, 3.f, 4.f})
    request.mutable_inputs(0)->mutable_contents()->add_fp32_contents(value);
  for (int64_t value : {-5, 6})
    request.mutable_inputs(1)->mutable_contents()->add_int64_contents(value);
  request.add_outputs()->set_name("z");
  request.add_outputs()->set_name("y");
  ModelInferResponse response;
  ASSERT_TRUE(Infer(request, &response).ok());
  ASSERT_EQ(response.raw_output_contents_size(), 2);
  EXPECT_EQ(response.outputs(0).name(), "z");
  EXPECT_EQ(*reinterpret_cast<const int64_t*>(response.raw_output_contents(0).data()), -5);
  EXPECT_THAT(FloatsOf(response.raw_output_contents(1)), ElementsAre(2, 4, 6, 8));
}

TEST_F(ModelInferTest, UnknownParametersAreAccepted) {
  StartServer();
  ModelInferRequest request = RawRequest();
  (*request.mutable_parameters())["triton_enable_empty_final_response"].set_bool_param(true);
  (*request.mutable_parameters())["sequence_id"].set_int64_param(0);
  (*request.mutable_parameters())["mine"].set_string_param("x");
  (*request.mutable_inputs(0)->mutable_parameters())["mine"].set_double_param(1);
  EXPECT_TRUE(Infer(request).ok());
  (*request.mutable_parameters())["triton_made_up"].set_bool_param(true);
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "parameter 'triton_made_up' is reserved");
}

TEST_F(ModelInferTest, UnknownModelsAndVersionsAreNotFound) {
  StartServer();
  ExpectRefused(RawRequest(1, "nothing"), grpc::NOT_FOUND,
                "Request for unknown model: 'nothing' is not found");
  ExpectRefused(RawRequest(1, "../etc/passwd"), grpc::NOT_FOUND, "is not found");
  ExpectRefused(RawRequest(1, ""), grpc::NOT_FOUND, "is not found");
  ExpectRefused(RawRequest(1, "broken"), grpc::NOT_FOUND, "'broken' has no available versions");
  ModelInferRequest request = RawRequest();
  request.set_model_version("9");
  ExpectRefused(request, grpc::NOT_FOUND, "'m' version 9 is not found");
  request.set_model_version("one");
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "version string 'one'");
  request.set_model_version("-1");
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "version string '-1'");
}

TEST_F(ModelInferTest, AModelThatIsNotReadyIsUnavailable) {
  auto slow = AddModel("slow");
  slow->load_gate.Close();
  StartServer(/*wait=*/false);
  slow->load_gate.AwaitWaiting(1);
  ExpectRefused(RawRequest(1, "slow"), grpc::UNAVAILABLE, "is not at ready state");
  slow->load_gate.Open();
  EXPECT_TRUE(Eventually([&] { return server_->ready(); }));
  EXPECT_TRUE(Infer(RawRequest(1, "slow")).ok());
  ModelInferRequest broken = RawRequest(1, "broken");
  broken.set_model_version("1");
  ExpectRefused(broken, grpc::UNAVAILABLE, "is not at ready state");
}

TEST_F(ModelInferTest, ShapesTypesAndNamesThatDoNotFitAreInvalid) {
  StartServer();
  ExpectRefused(RawRequest(9), grpc::INVALID_ARGUMENT,
                "inference request batch-size must be <= 8 for 'm'");
  ModelInferRequest request = RawRequest();
  request.mutable_inputs(0)->set_shape(1, 5);
  ExpectRefused(request, grpc::INVALID_ARGUMENT,
                "unexpected shape for input 'x' for model 'm': expected [-1, 4], got [1, 5]");
  request = RawRequest();
  request.mutable_inputs(0)->add_shape(1);
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "got [1, 4, 1]");
  request = RawRequest();
  request.mutable_inputs(0)->set_shape(0, int64_t{1} << 62);
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "must be <= 8");
  request = RawRequest();
  request.mutable_inputs(0)->set_datatype("INT32");
  ExpectRefused(request, grpc::INVALID_ARGUMENT,
                "data-type is 'INT32', but model 'm' expects 'FP32'");
  request = RawRequest();
  request.mutable_inputs(0)->set_name("w");
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "unexpected inference input 'w' for model 'm'");
  request = RawRequest();
  request.add_outputs()->set_name("w");
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "unexpected inference output 'w' for model 'm'");
  request.mutable_outputs(0)->set_name("y");
  request.add_outputs()->set_name("y");
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "requested twice");
  ModelInferRequest one = TwoInputs();
  one.mutable_inputs()->RemoveLast();
  one.mutable_raw_input_contents()->RemoveLast();
  ExpectRefused(one, grpc::INVALID_ARGUMENT,
                "expected 2 inputs but got 1 inputs for model 'two': 'b' is missing");
  ModelInferRequest none;
  none.set_model_name("m");
  ExpectRefused(none, grpc::INVALID_ARGUMENT, "expected 1 inputs but got 0");
}

TEST_F(ModelInferTest, DataInTheWrongFormOrSizeIsInvalid) {
  StartServer();
  ModelInferRequest request = RawRequest();
  request.mutable_raw_input_contents(0)->resize(15);
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "shape [1, 4] of FP32 takes 16 bytes, got 15");
  request = TwoInputs();
  request.mutable_raw_input_contents()->RemoveLast();
  ExpectRefused(request, grpc::INVALID_ARGUMENT,
                "expected 2 raw_input_contents, one per input, got 1");
  request = RawRequest();
  request.add_raw_input_contents("");
  ExpectRefused(request, grpc::INVALID_ARGUMENT,
                "expected 1 raw_input_contents, one per input, got 2");
  request = RawRequest();
  request.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1);
  ExpectRefused(request, grpc::INVALID_ARGUMENT,
                "contents field must not be specified when using raw_input_contents");
  request.clear_raw_input_contents();
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "expected 4 elements for shape [1, 4], got 1");
  request.mutable_inputs(0)->mutable_contents()->add_int_contents(1);
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "travels in fp32_contents, got int_contents");
  request.mutable_inputs(0)->clear_contents();
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "unable to find data for input tensor 'x'");
  request = RawRequest();
  request.clear_raw_input_contents();
  request.mutable_inputs(0)->set_datatype("FP16");
  request.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1);
  ExpectRefused(request, grpc::INVALID_ARGUMENT, "no typed form");
}

TEST_F(ModelInferTest, SharedMemoryIsUnimplementedWithTheFlagsNameUnlessItIsAllowed) {
  StartServer();
  const auto share = [](auto* tensor) {
    (*tensor->mutable_parameters())["shared_memory_region"].set_string_param("r");
    (*tensor->mutable_parameters())["shared_memory_byte_size"].set_int64_param(16);
  };
  ModelInferRequest request = RawRequest();
  request.clear_raw_input_contents();
  share(request.mutable_inputs(0));
  ExpectRefused(request, grpc::UNIMPLEMENTED, "--allow_system_shared_memory");
  request = RawRequest();
  request.add_outputs()->set_name("y");
  share(request.mutable_outputs(0));
  ExpectRefused(request, grpc::UNIMPLEMENTED, "--allow_system_shared_memory");
}

TEST_F(ModelInferTest, TheBestClassesComeInPlaceOfTheNumbers) {
  loader_->labels["m"]["y"] = {"zero", "one", "two"};
  StartServer();
  ModelInferRequest request = RawRequest(2);
  auto* output = request.add_outputs();
  output->set_name("y");
  (*output->mutable_parameters())["classification"].set_int64_param(2);
  ModelInferResponse response;
  const grpc::Status status = Infer(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.outputs(0).datatype(), "BYTES");
  EXPECT_THAT(response.outputs(0).shape(), ElementsAre(2, 2));
  std::string expected;
  for (const std::string& element :
       {"6.000000:3", "4.000000:2:two", "14.000000:3", "12.000000:2:two"}) {
    const uint32_t length = static_cast<uint32_t>(element.size());
    expected.append(reinterpret_cast<const char*>(&length), 4).append(element);
  }
  EXPECT_EQ(response.raw_output_contents(0), expected);
}

TEST_F(ModelInferTest, MalformedBytesAreInvalid) {
  StartServer();
  for (const std::string& bytes :
       {std::string("\x0a"), std::string("\x0a\xff\xff\xff\xff\x0f"), std::string(100, '\xff'),
        RawRequest().SerializeAsString().substr(0, 20)}) {
    const grpc::Status status = Call("/inference.GRPCInferenceService/ModelInfer", bytes);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("malformed ModelInferRequest"));
  }
  EXPECT_TRUE(Infer(RawRequest()).ok());
}

TEST_F(ModelInferTest, AFullQueueIsUnavailable) {
  StartServer();
  control_->run_gate.Close();
  std::vector<std::thread> clients;
  std::atomic<int> full{0}, served{0};
  for (int i = 0; i < 6; ++i) {
    clients.emplace_back([&] {
      const grpc::Status status = Infer(RawRequest());
      if (status.ok()) {
        ++served;
      } else {
        EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
        EXPECT_THAT(status.error_message(), HasSubstr("Exceeds maximum queue size"));
        ++full;
      }
    });
    // The first one runs before the others queue up.
    if (i == 0) control_->run_gate.AwaitWaiting(1);
  }
  EXPECT_TRUE(Eventually([&] { return full == 3; }));
  control_->run_gate.Open();
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(served, 3);
}

// A server that is busy with one request and has no place for another.
TEST_F(ModelInferTest, AnOverloadSaysWhenToComeBackWithTheCodeThatTheOperatorChose) {
  for (const auto code : {absl::StatusCode::kUnavailable, absl::StatusCode::kResourceExhausted}) {
    server_.reset();
    if (loader_ == nullptr) {
      loader_ = std::make_unique<FakeLoader>();
      control_ = AddModel("m");
    }
    auto* queue = loader_->configs["m"].mutable_dynamic_batching()->mutable_default_queue_policy();
    queue->set_max_queue_size(1);
    options_.queue_full_status = code;
    StartServer();
    control_->run_gate.Close();
    std::vector<std::thread> clients;
    clients.emplace_back([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
    control_->run_gate.AwaitWaiting(1);
    clients.emplace_back([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
    EXPECT_TRUE(Eventually([&] { return (*server_->models().Find("m", ""))->pending() == 1; }));
    grpc::ClientContext context;
    ModelInferResponse response;
    const grpc::Status status = stub_->ModelInfer(&context, RawRequest(), &response);
    EXPECT_EQ(status.error_code(), static_cast<grpc::StatusCode>(code));
    EXPECT_THAT(status.error_message(), HasSubstr("Exceeds maximum queue size"));
    const auto& trailers = context.GetServerTrailingMetadata();
    ASSERT_EQ(trailers.count("retry-after-ms"), 1u);
    ASSERT_EQ(trailers.count("grpc-retry-pushback-ms"), 1u);
    const auto value = trailers.find("retry-after-ms")->second;
    const std::string millis(value.data(), value.size());
    EXPECT_EQ(millis, "100") << "nothing is known yet";
    if (code == absl::StatusCode::kResourceExhausted) {
      EXPECT_THAT(status.error_message(), HasSubstr("; retry after " + millis + " ms"));
    }
    // Counted as it was answered.
    const auto& by_code = (*server_->models().Find("m", ""))->statistics().by_code;
    EXPECT_EQ(by_code[static_cast<int>(code)].load(), 1u);
    control_->run_gate.Open();
    for (std::thread& client : clients) client.join();
    grpc::ClientContext other;
    EXPECT_TRUE(stub_->ModelInfer(&other, RawRequest(), &response).ok());
    EXPECT_EQ(other.GetServerTrailingMetadata().count("retry-after-ms"), 0u);
  }
}

TEST_F(ModelInferTest, TheTimeToComeBackIsWhatThePastTells) {
  control_->run_delay = absl::Milliseconds(60);
  StartServer();
  absl::Duration slowest;
  for (int i = 0; i < 2; ++i) {
    const absl::Time began = absl::Now();
    ASSERT_TRUE(Infer(RawRequest()).ok());
    slowest = std::max(slowest, absl::Now() - began);
  }
  control_->run_gate.Close();
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
    if (i == 0) control_->run_gate.AwaitWaiting(1);
  }
  EXPECT_TRUE(Eventually([&] { return (*server_->models().Find("m", ""))->pending() == 2; }));
  grpc::ClientContext context;
  ModelInferResponse response;
  EXPECT_EQ(stub_->ModelInfer(&context, RawRequest(), &response).error_code(), grpc::UNAVAILABLE);
  const auto& trailers = context.GetServerTrailingMetadata();
  ASSERT_EQ(trailers.count("retry-after-ms"), 1u);
  const auto value = trailers.find("retry-after-ms")->second;
  const int millis = std::stoi(std::string(value.data(), value.size()));
  EXPECT_GE(millis, 110) << "two wait, 60 ms each";
  EXPECT_LE(millis, absl::ToInt64Milliseconds(2 * slowest));
  control_->run_gate.Open();
  for (std::thread& client : clients) client.join();
}

TEST_F(ModelInferTest, AQueueTimeoutOfTheRequestIsUnavailable) {
  StartServer();
  control_->run_gate.Close();
  std::thread running([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
  control_->run_gate.AwaitWaiting(1);
  ModelInferRequest request = RawRequest();
  (*request.mutable_parameters())["timeout"].set_int64_param(1000);
  ExpectRefused(request, grpc::UNAVAILABLE, "Request timeout expired");  // the instance is busy
  control_->run_gate.Open();
  running.join();
}

TEST_F(ModelInferTest, ADeadlineOrCancellationInTheQueueIsNeverExecuted) {
  StartServer();
  control_->run_gate.Close();
  std::thread running([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
  control_->run_gate.AwaitWaiting(1);
  // Enough to get there on a busy machine.
  EXPECT_EQ(Infer(RawRequest(), nullptr, absl::Seconds(2)).error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return (*server_->models().Find("m", ""))->pending() == 0; }));
  grpc::ClientContext context;
  std::thread cancelled([&] {
    ModelInferResponse response;
    EXPECT_EQ(stub_->ModelInfer(&context, RawRequest(), &response).error_code(), grpc::CANCELLED);
  });
  EXPECT_TRUE(Eventually([&] { return (*server_->models().Find("m", ""))->pending() == 1; }));
  context.TryCancel();
  cancelled.join();
  EXPECT_TRUE(Eventually([&] { return (*server_->models().Find("m", ""))->pending() == 0; }));
  control_->run_gate.Open();
  running.join();
  const runtime::VersionHandle model = *server_->models().Find("m", "");
  const auto& codes = model->statistics().by_code;
  EXPECT_TRUE(
      Eventually([&] { return codes[grpc::CANCELLED] + codes[grpc::DEADLINE_EXCEEDED] == 2; }));
  EXPECT_EQ(control_->runs, 1);
}

TEST_F(ModelInferTest, AMessageAboveTheLimitIsRefusedAndTheChannelStaysUsable) {
  options_.max_message_bytes = 1 << 20;
  StartServer();
  ModelInferRequest request = RawRequest();
  request.mutable_raw_input_contents(0)->resize(2 << 20);
  ExpectRefused(request, grpc::RESOURCE_EXHAUSTED, "larger than max");
  EXPECT_TRUE(Infer(RawRequest()).ok());
}

TEST_F(ModelInferTest, PackedRequestsAreRefusedUnlessTheServerTakesThem) {
  for (const bool accept : {false, true}) {
    server_.reset();
    if (loader_ == nullptr) {
      loader_ = std::make_unique<FakeLoader>();
      AddModel("m");
    }
    options_.accept_compressed = accept;
    StartServer();
    grpc::ClientContext context;
    context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    ModelInferRequest request = RawRequest(8);
    ModelInferResponse response;
    const grpc::Status status = stub_->ModelInfer(&context, request, &response);
    EXPECT_EQ(status.error_code(), accept ? grpc::OK : grpc::UNIMPLEMENTED);
    if (!accept) {
      EXPECT_THAT(status.error_message(), HasSubstr("gzip"));
    }
    EXPECT_TRUE(Infer(RawRequest()).ok());
  }
}

TEST_F(ModelInferTest, RequestsInFlightAreCapped) {
  options_.max_requests_in_flight = 1;
  StartServer();
  control_->run_gate.Close();
  std::thread running([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
  control_->run_gate.AwaitWaiting(1);
  ExpectRefused(RawRequest(), grpc::UNAVAILABLE,
                "server is busy: 1 requests in flight, at most 1 may be");
  control_->run_gate.Open();
  running.join();
  EXPECT_TRUE(Eventually([&] { return Infer(RawRequest()).ok(); }));
}

TEST_F(ModelInferTest, BytesInFlightAreCappedButOneRequestAlwaysGoes) {
  options_.max_request_bytes_in_flight = 50;
  StartServer();
  control_->run_gate.Close();
  std::thread running([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
  control_->run_gate.AwaitWaiting(1);
  ExpectRefused(RawRequest(), grpc::UNAVAILABLE, "bytes of requests in flight, at most 50 may be");
  control_->run_gate.Open();
  running.join();
  EXPECT_TRUE(Eventually([&] { return Infer(RawRequest(8)).ok(); }));  // above the cap all alone
}

TEST_F(ModelInferTest, AFailingModelAnswersItsError) {
  StartServer();
  control_->run_status = absl::InternalError("linear 'fc1' failed: launch refused");
  ExpectRefused(RawRequest(), grpc::INTERNAL, "linear 'fc1' failed");
  control_->run_status = absl::Status(absl::StatusCode::kInternal, "");
  ExpectRefused(RawRequest(), grpc::INTERNAL, "failed with INTERNAL");
  control_->run_status = absl::InternalError(std::string(100'000, 'x'));
  ExpectRefused(RawRequest(), grpc::INTERNAL, "xxx...");
}

TEST_F(ModelInferTest, LargeTensorsArriveWhole) {
  FakeModelOptions large;
  large.max_batch_size = 4;
  large.inputs = {{"x", DType::kFloat32, {kBatch, 1 << 20}}};
  large.outputs = {{"y", DType::kFloat32, {kBatch, 1 << 20}}};
  AddModel("large", large);
  StartServer();
  ModelInferRequest request;
  request.set_model_name("large");
  auto* input = request.add_inputs();
  input->set_name("x");
  input->set_datatype("FP32");
  input->add_shape(4);
  input->add_shape(1 << 20);
  std::vector<float> values(4 << 20);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 100'003);
  request.add_raw_input_contents(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  ModelInferResponse response;
  const grpc::Status status = Infer(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const std::vector<float> doubled = FloatsOf(response.raw_output_contents(0));
  ASSERT_EQ(doubled.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(doubled[i], 2 * values[i]) << i;
}

TEST_F(ModelInferTest, ManyClientsEachGetTheirOwnAnswer) {
  loader_->configs["m"].clear_dynamic_batching();
  StartServer();
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 100; ++i) {
        ModelInferRequest request = RawRequest(1 + (c + i) % 8);
        request.set_id(absl::StrCat(c, "-", i));
        ModelInferResponse response;
        ASSERT_TRUE(Infer(request, &response).ok());
        ASSERT_EQ(response.id(), request.id());
        ASSERT_EQ(response.outputs(0).shape(0), request.inputs(0).shape(0));
        ASSERT_EQ(FloatsOf(response.raw_output_contents(0)).back(),
                  2.0f * static_cast<float>(4 * (1 + (c + i) % 8) - 1));
      }
    });
  }
  for (std::thread& client : clients) client.join();
}

}  // namespace
}  // namespace espalier::service
