#include "clients/cpp/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "tests/clients/fake_server.h"

namespace espalier::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ClientTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(ClientOptions options = {}) {
    return Client::Create(server_.url, std::move(options)).value();
  }
  static InferRequest Digits(std::vector<float> values) {
    const int64_t items = static_cast<int64_t>(values.size()) / 4;
    return {.model = "digits", .inputs = {MakeTensor<float>("input", {items, 4}, values).value()}};
  }
  absl::StatusOr<InferResult> InferAsync(Client& client, const InferRequest& request,
                                         CallOptions options = {}, bool cancel = false) {
    std::promise<absl::StatusOr<InferResult>> promise;
    PendingInfer pending = client.InferAsync(
        request, [&](absl::StatusOr<InferResult> result) { promise.set_value(std::move(result)); },
        options);
    if (cancel) pending.Cancel();
    return promise.get_future().get();
  }

  testing::FakeServer server_;
};

TEST_F(ClientTest, InferReturnsOutputsVersionIdAndParameters) {
  InferRequest request = Digits({1, 2, 3, 4, 5, 6, 7, 8});
  request.id = "request-1";
  auto result = Connect()->Infer(request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->model, "digits");
  EXPECT_EQ(result->version, "3");
  EXPECT_EQ(result->id, "request-1");
  EXPECT_EQ(std::get<int64_t>(result->parameters.at("batch")), 7);
  ASSERT_EQ(result->outputs.size(), 1u);
  EXPECT_THAT(result->outputs[0].shape, ElementsAre(2, 4));
  EXPECT_THAT(*Values<float>(result->outputs[0]), ElementsAre(2, 4, 6, 8, 10, 12, 14, 16));
}

TEST_F(ClientTest, RequestCarriesVersionOutputsParametersAndHeaders) {
  InferRequest request = Digits({1, 2, 3, 4});
  request.version = "3";
  request.outputs = {"logits"};
  request.parameters = {{"flag", true},
                        {"count", int64_t{-5}},
                        {"big", uint64_t{1} << 63},
                        {"share", 0.5},
                        {"text", std::string("x")}};
  ASSERT_TRUE(Connect({.headers = {{"authorization", "Bearer t"}}})->Infer(request).ok());
  const auto& sent = server_.service.last_request;
  EXPECT_EQ(sent.model_version(), "3");
  EXPECT_EQ(sent.outputs(0).name(), "logits");
  EXPECT_TRUE(sent.parameters().at("flag").bool_param());
  EXPECT_EQ(sent.parameters().at("count").int64_param(), -5);
  EXPECT_EQ(sent.parameters().at("big").uint64_param(), uint64_t{1} << 63);
  EXPECT_EQ(sent.parameters().at("share").double_param(), 0.5);
  EXPECT_EQ(sent.parameters().at("text").string_param(), "x");
  EXPECT_EQ(server_.service.last_header, "Bearer t");
}

TEST_F(ClientTest, ServerErrorKeepsCodeAndMessage) {
  auto result = Connect()->Infer({.model = "nothing"});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(result.status().message(), "unknown model 'nothing'");
}

TEST_F(ClientTest, ServerErrorWithoutMessageStillHasText) {
  auto result = Connect()->Infer({.model = "silent"});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(result.status().message().empty());
}

TEST_F(ClientTest, AnswerWithoutRawContentsIsInternal) {
  server_.service.drop_raw_contents = true;
  auto result = Connect()->Infer(Digits({1, 2, 3, 4}));
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("1 outputs and 0 raw contents"));
}

TEST_F(ClientTest, AnswerWithTooFewBytesIsInternal) {
  server_.service.shorten_output = true;
  auto result = Connect()->Infer(Digits({1, 2, 3, 4}));
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("expected 4 elements of 4 bytes, got 15 bytes"));
}

TEST_F(ClientTest, InconsistentRequestIsNotSent) {
  InferRequest request{.model = "digits", .inputs = {Tensor{"input", "FP32", {1, 4}, "short"}}};
  EXPECT_EQ(Connect()->Infer(request).status().code(), absl::StatusCode::kInvalidArgument);
  auto client = Connect();
  EXPECT_EQ(InferAsync(*client, request).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(server_.service.last_request.model_name(), "");
}

TEST_F(ClientTest, DeadlineOfTheCallIsKept) {
  server_.service.delay = std::chrono::milliseconds(4000);
  auto client = Connect();
  const absl::Time start = absl::Now();
  auto result = client->Infer(Digits({1, 2, 3, 4}), {.deadline = absl::Milliseconds(50)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
}

TEST_F(ClientTest, DeadlineOfTheClientAppliesToCallsWithout) {
  server_.service.delay = std::chrono::milliseconds(2000);
  auto client = Connect({.deadline = absl::Milliseconds(50)});
  EXPECT_EQ(client->Infer(Digits({1, 2, 3, 4})).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ClientTest, AsyncInferAnswersLikeInfer) {
  auto client = Connect();
  auto result = InferAsync(*client, Digits({1, 2, 3, 4}));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(*Values<float>(result->outputs[0]), ElementsAre(2, 4, 6, 8));
}

TEST_F(ClientTest, AsyncInferReportsServerErrors) {
  auto client = Connect();
  EXPECT_EQ(InferAsync(*client, {.model = "nothing"}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientTest, CancelledAsyncInferStillRunsItsCallback) {
  server_.service.delay = std::chrono::milliseconds(2000);
  auto client = Connect();
  EXPECT_EQ(InferAsync(*client, Digits({1, 2, 3, 4}), {}, /*cancel=*/true).status().code(),
            absl::StatusCode::kCancelled);
}

TEST_F(ClientTest, DestructorWaitsForCallbacksInFlight) {
  server_.service.delay = std::chrono::milliseconds(20);
  for (int i = 0; i < 20; ++i) {
    std::atomic<int> answered = 0;
    auto client = Connect();
    for (int j = 0; j < 3; ++j) {
      client->InferAsync(Digits({1, 2, 3, 4}),
                         [&](absl::StatusOr<InferResult> r) { answered += r.ok(); });
    }
    client.reset();
    EXPECT_EQ(answered, 3);
  }
}

TEST_F(ClientTest, ManyCallsInFlightEachGetTheirOwnAnswer) {
  constexpr int kCalls = 64;
  auto client = Connect();
  std::vector<std::promise<absl::StatusOr<InferResult>>> promises(kCalls);
  for (int i = 0; i < kCalls; ++i) {
    InferRequest request = Digits({float(i), 0, 0, 0});
    request.id = absl::StrCat(i);
    client->InferAsync(
        request, [&, i](absl::StatusOr<InferResult> r) { promises[i].set_value(std::move(r)); });
  }
  for (int i = 0; i < kCalls; ++i) {
    auto result = promises[i].get_future().get();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->id, absl::StrCat(i));
    EXPECT_EQ(Values<float>(result->outputs[0])->front(), 2.0f * i);
  }
}

TEST_F(ClientTest, MessagesAboveGrpcsDefaultLimitPass) {
  std::vector<float> values(4 * 500'000, 1.0f);  // 8 MB each way; gRPC's default is 4 MiB
  auto result = Connect()->Infer(Digits(values));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->outputs[0].bytes.size(), values.size() * sizeof(float));
}

TEST_F(ClientTest, ReadinessMetadataConfigAndIndexAreRead) {
  auto client = Connect();
  EXPECT_TRUE(*client->ServerLive());
  EXPECT_TRUE(*client->ServerReady());
  EXPECT_TRUE(*client->ModelReady("digits"));
  EXPECT_FALSE(*client->ModelReady("nothing"));
  EXPECT_EQ(client->ModelMetadata("digits")->inputs(0).name(), "input");
  EXPECT_EQ(client->ModelConfig("digits")->parameters().at("sparsity").string_value(), "0.9");
  EXPECT_EQ(client->RepositoryIndex()->models_size(), 2);
  EXPECT_EQ(client->RepositoryIndex(/*ready_only=*/true)->models_size(), 1);
  // What the fake leaves out answers as a server without that method does.
  EXPECT_EQ(client->ModelStatistics().status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(client->ServerMetadata().status().code(), absl::StatusCode::kUnimplemented);
}

TEST(ClientCreateTest, TargetThatCanNeverWorkIsRefused) {
  for (const char* target : {"", "http://localhost:8000", "https://localhost"}) {
    EXPECT_EQ(Client::Create(target).status().code(), absl::StatusCode::kInvalidArgument) << target;
  }
}

TEST(ClientCreateTest, ServerThatIsNotThereIsUnavailable) {
  auto client = Client::Create("127.0.0.1:1").value();
  EXPECT_EQ(client->ServerLive().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->ServerLive({.deadline = absl::Milliseconds(50), .wait_for_ready = true})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(TensorTest, ValuesOfAnotherDatatypeAreRefused) {
  Tensor tensor = MakeTensor<float>("x", {2}, {1.0f, 2.0f}).value();
  EXPECT_THAT(std::string(Values<int32_t>(tensor).status().message()), HasSubstr("read as INT32"));
}

TEST(TensorTest, WrongNumberOfValuesIsRefused) {
  EXPECT_FALSE(MakeTensor<int64_t>("x", {3}, {1, 2}).ok());
  EXPECT_FALSE(MakeTensor<int64_t>("x", {-1}, {1, 2}).ok());
  EXPECT_TRUE(MakeTensor<int64_t>("x", {0, 5}, {}).ok());
  EXPECT_TRUE(MakeTensor<int64_t>("x", {}, {1}).ok());
}

TEST(TensorTest, ShapeThatOverflowsIsRefused) {
  EXPECT_FALSE(ElementCount({int64_t{1} << 40, int64_t{1} << 40}).ok());
  // A count that would wrap to the right size in 64 bits, and a byte count that would.
  EXPECT_FALSE(CheckTensor({"x", "FP32", {int64_t{1} << 62, 4}, ""}).ok());
  EXPECT_FALSE(CheckTensor({"x", "FP32", {int64_t{1} << 62}, ""}).ok());
}

TEST(TensorTest, BytesSurviveTheRoundTrip) {
  const std::vector<std::string> values = {"", "ab", std::string("\0\xFF", 2)};
  Tensor tensor = MakeBytesTensor("x", {3}, values).value();
  EXPECT_EQ(*BytesValues(tensor), values);
  EXPECT_FALSE(MakeBytesTensor("x", {2}, values).ok());
  tensor.bytes.pop_back();
  EXPECT_THAT(std::string(BytesValues(tensor).status().message()),
              HasSubstr("element 2 is cut off"));
}

TEST(TensorTest, UnknownDatatypeListsTheKnown) {
  EXPECT_THAT(std::string(CheckTensor({"x", "FP8", {1}, "a"}).message()), HasSubstr("BF16"));
}

}  // namespace
}  // namespace espalier::client
