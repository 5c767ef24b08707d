// ModelStreamInfer: many requests on a stream, and every way in which a stream can end.
#include <set>
#include <thread>

#include "tests/service/http_get.h"
#include "tests/service/service_fixture.h"

namespace espalier::service {
namespace {

using inference::ModelStreamInferResponse;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Stream = grpc::ClientReaderWriter<ModelInferRequest, ModelStreamInferResponse>;

ModelInferRequest WithId(const std::string& id, const std::string& model = "m") {
  ModelInferRequest request = RawRequest(1, model);
  request.set_id(id);
  return request;
}

class ModelStreamInferTest : public ServiceFixture {
 protected:
  void SetUp() override { control_ = AddModel("m"); }

  std::unique_ptr<Stream> Open(absl::Duration deadline = absl::Seconds(120)) {
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    return stub_->ModelStreamInfer(context_.get());
  }

  static ModelStreamInferResponse Next(Stream& stream) {
    ModelStreamInferResponse response;
    EXPECT_TRUE(stream.Read(&response)) << "the stream has ended";
    return response;
  }

  // Answers that are left when the client has no more requests.
  static int CountRest(Stream& stream) {
    ModelStreamInferResponse response;
    int count = 0;
    while (stream.Read(&response)) ++count;
    return count;
  }

  int64_t Pending(const std::string& model = "m") {
    return (*server_->models().Find(model, ""))->pending();
  }
  uint64_t Failures(const std::string& model = "m") {
    return (*server_->models().Find(model, ""))->statistics().failure.count;
  }

  std::shared_ptr<FakeControl> control_;
  std::unique_ptr<grpc::ClientContext> context_;
};

TEST_F(ModelStreamInferTest, EveryRequestIsAnsweredWithItsIdAndTheFinalMark) {
  StartServer();
  const auto stream = Open();
  for (int i = 0; i < 50; ++i) {
    ModelInferRequest request = RawRequest(1 + i % 8);
    request.set_id(absl::StrCat("request ", i));
    if (i % 2 == 0)
      (*request.mutable_parameters())["triton_enable_empty_final_response"].set_bool_param(true);
    ASSERT_TRUE(stream->Write(request));
  }
  std::set<std::string> ids;
  for (int i = 0; i < 50; ++i) {
    const ModelStreamInferResponse response = Next(*stream);
    EXPECT_EQ(response.error_message(), "");
    const auto& answer = response.infer_response();
    ids.insert(answer.id());
    EXPECT_EQ(answer.model_name(), "m");
    EXPECT_EQ(answer.model_version(), "1");
    ASSERT_EQ(answer.parameters().count("triton_final_response"), 1u);
    EXPECT_TRUE(answer.parameters().at("triton_final_response").bool_param());
    ASSERT_EQ(answer.raw_output_contents_size(), 1);
    EXPECT_EQ(FloatsOf(answer.raw_output_contents(0)).back(),
              2.0f * static_cast<float>(4 * answer.outputs(0).shape(0) - 1));
  }
  EXPECT_EQ(ids.size(), 50u);
  stream->WritesDone();
  EXPECT_EQ(CountRest(*stream), 0);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ModelStreamInferTest, AStreamWithoutRequestsEndsWell) {
  StartServer();
  const auto stream = Open();
  stream->WritesDone();
  EXPECT_EQ(CountRest(*stream), 0);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ModelStreamInferTest, ARequestThatFailsIsAnsweredInItsMessageAndTheStreamGoesOn) {
  StartServer();
  const auto stream = Open();
  ModelInferRequest wrong = WithId("wrong");
  wrong.mutable_inputs(0)->set_datatype("FP64");
  ModelInferRequest unknown = WithId("unknown", "nothing");
  for (const auto& [request, text] :
       {std::pair(wrong, "data-type is 'FP64'"), std::pair(unknown, "unknown model: 'nothing'")}) {
    ASSERT_TRUE(stream->Write(request));
    const ModelStreamInferResponse refused = Next(*stream);
    EXPECT_THAT(refused.error_message(), HasSubstr(text));
    EXPECT_EQ(refused.infer_response().id(), request.id());
    EXPECT_TRUE(refused.infer_response().parameters().at("triton_final_response").bool_param());
    EXPECT_EQ(refused.infer_response().outputs_size(), 0);
  }
  ASSERT_TRUE(stream->Write(WithId("right")));
  EXPECT_EQ(Next(*stream).infer_response().id(), "right");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(Failures(), 1u);
}

TEST_F(ModelStreamInferTest, ALongErrorIsCutBetweenCharacters) {
  StartServer();
  for (const char* start : {"", "x"}) {
    std::string message = start;
    for (int i = 0; i < 2000; ++i) message += "é";
    control_->run_status = absl::InternalError(message);
    const auto stream = Open();
    ASSERT_TRUE(stream->Write(WithId("1")));
    EXPECT_THAT(Next(*stream).error_message(), ::testing::EndsWith("éé..."));
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST_F(ModelStreamInferTest, AMessageThatIsNoRequestIsAnsweredInItsMessage) {
  StartServer();
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel_);
  auto stream =
      stub.PrepareCall(&context, "/inference.GRPCInferenceService/ModelStreamInfer", &queue);
  const auto next = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  stream->StartCall(nullptr);
  ASSERT_TRUE(next());
  for (const std::string& bytes : {std::string("\x0a\xff"), WithId("7").SerializeAsString()}) {
    const grpc::Slice slice(bytes);
    stream->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    ASSERT_TRUE(next());
    grpc::ByteBuffer buffer;
    stream->Read(&buffer, nullptr);
    ASSERT_TRUE(next());
    grpc::Slice whole;
    ASSERT_TRUE(buffer.DumpToSingleSlice(&whole).ok());
    ModelStreamInferResponse response;
    ASSERT_TRUE(response.ParseFromArray(whole.begin(), static_cast<int>(whole.size())));
    const bool is_request = bytes.size() > 2;
    EXPECT_EQ(response.infer_response().id(), is_request ? "7" : "");
    EXPECT_THAT(response.error_message(), HasSubstr(is_request ? "" : "malformed ModelInfer"));
  }
  stream->WritesDone(nullptr);
  ASSERT_TRUE(next());
  grpc::Status status;
  stream->Finish(&status, nullptr);
  ASSERT_TRUE(next());
  EXPECT_TRUE(status.ok());
}

TEST_F(ModelStreamInferTest, WithTheHeaderForItAnErrorEndsTheStreamWithItsStatus) {
  StartServer();
  grpc::ClientContext context;
  context.AddMetadata("triton_grpc_error", "true");
  const auto stream = stub_->ModelStreamInfer(&context);
  ASSERT_TRUE(stream->Write(WithId("right")));
  EXPECT_EQ(Next(*stream).infer_response().id(), "right");
  ASSERT_TRUE(stream->Write(WithId("unknown", "nothing")));
  EXPECT_EQ(CountRest(*stream), 0);
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("unknown model: 'nothing'"));
}

TEST_F(ModelStreamInferTest, ASlowModelDoesNotHoldUpAnotherOfTheSameStream) {
  auto slow = AddModel("slow");
  StartServer();
  slow->run_gate.Close();
  const auto stream = Open();
  ASSERT_TRUE(stream->Write(WithId("slow", "slow")));
  for (const char* id : {"a", "b", "c"}) {
    ASSERT_TRUE(stream->Write(WithId(id)));
    EXPECT_EQ(Next(*stream).infer_response().id(), id);
  }
  slow->run_gate.Open();
  EXPECT_EQ(Next(*stream).infer_response().id(), "slow");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// Three instances overtake each other, but for a model that keeps the order.
TEST_F(ModelStreamInferTest, AnswersComeInOrderFromAModelThatKeepsIt) {
  auto& config = loader_->configs["m"];
  config.add_instance_group()->set_count(3);
  config.mutable_dynamic_batching()->set_preserve_ordering(true);
  control_->run_delay = absl::Milliseconds(1);
  StartServer();
  const auto stream = Open();
  for (int i = 0; i < 200; ++i) {
    ModelInferRequest request = RawRequest(8);  // a batch of its own
    request.set_id(absl::StrCat(i));
    ASSERT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  for (int i = 0; i < 200; ++i) ASSERT_EQ(Next(*stream).infer_response().id(), absl::StrCat(i));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ModelStreamInferTest, NoMoreIsReadThanMayBeInFlight) {
  options_.max_stream_requests_in_flight = 3;
  StartServer();
  control_->run_gate.Close();
  const auto stream = Open();
  ASSERT_TRUE(stream->Write(WithId("0")));
  control_->run_gate.AwaitWaiting(1);
  for (int i = 1; i < 10; ++i) ASSERT_TRUE(stream->Write(WithId(absl::StrCat(i))));
  ASSERT_TRUE(Eventually([&] { return Pending() == 2; }));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(Pending(), 2);
  control_->run_gate.Open();
  stream->WritesDone();
  EXPECT_EQ(CountRest(*stream), 10);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ((*server_->models().Find("m", ""))->statistics().inferences, 10u);
}

TEST_F(ModelStreamInferTest, ACancelledStreamsWaitingRequestsAreNeverExecuted) {
  StartServer();
  control_->run_gate.Close();
  auto stream = Open();
  ASSERT_TRUE(stream->Write(WithId("0")));
  control_->run_gate.AwaitWaiting(1);
  for (int i = 1; i < 5; ++i) ASSERT_TRUE(stream->Write(WithId(absl::StrCat(i))));
  ASSERT_TRUE(Eventually([&] { return Pending() == 4; }));
  context_->TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return Pending() == 0; }));  // the instance is still busy
  control_->run_gate.Open();
  const auto& codes = (*server_->models().Find("m", ""))->statistics().by_code;
  EXPECT_TRUE(Eventually([&] { return codes[grpc::CANCELLED] == 4; }));
  EXPECT_EQ(control_->runs, 1);
  EXPECT_TRUE(Infer(RawRequest()).ok());
}

TEST_F(ModelStreamInferTest, TheDeadlineOfTheStreamIsThatOfItsRequests) {
  StartServer();
  control_->run_gate.Close();
  const auto stream =
      Open(absl::Seconds(3));  // enough for all of them to get there on a busy machine
  ASSERT_TRUE(stream->Write(WithId("0")));
  control_->run_gate.AwaitWaiting(1);
  for (int i = 1; i < 3; ++i) ASSERT_TRUE(stream->Write(WithId(absl::StrCat(i))));
  ASSERT_TRUE(Eventually([&] { return Pending() == 2; }));
  EXPECT_EQ(stream->Finish().error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return Failures() == 2; }));  // the instance is still busy
  control_->run_gate.Open();
  EXPECT_EQ(control_->runs, 1);
}

TEST_F(ModelStreamInferTest, EveryMessageCountsAsARequestInFlight) {
  options_.max_requests_in_flight = 2;
  StartServer();
  control_->run_gate.Close();
  const auto stream = Open();
  for (const char* id : {"runs", "waits", "one too many"}) ASSERT_TRUE(stream->Write(WithId(id)));
  const ModelStreamInferResponse refused = Next(*stream);
  EXPECT_THAT(refused.error_message(), HasSubstr("2 requests in flight, at most 2 may be"));
  EXPECT_EQ(Infer(RawRequest()).error_code(), grpc::UNAVAILABLE);
  control_->run_gate.Open();
  EXPECT_EQ(Next(*stream).infer_response().id(), "runs");
  EXPECT_EQ(Next(*stream).infer_response().id(), "waits");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(Eventually([&] { return Infer(RawRequest()).ok(); }));
}

TEST_F(ModelStreamInferTest, AClientThatDoesNotReadLeavesRoomForOthers) {
  options_.max_requests_in_flight = 64;  // fewer than a stream may have in flight
  StartServer();
  const auto stream = Open();
  const std::string id(64 << 10, 'x');  // comes back with each answer
  std::thread writer([&] {
    for (int i = 0; i < 4000 && stream->Write(WithId(id)); ++i) {
    }
  });
  // Until nothing moves any more, for a second.
  for (int64_t still = 0, before = -1; still < 10; absl::SleepFor(absl::Milliseconds(100))) {
    still = before == control_->runs && before >= 16 ? still + 1 : 0;
    before = control_->runs;
  }
  EXPECT_LT(control_->runs, 4000);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(Infer(RawRequest()).ok());
  context_->TryCancel();
  writer.join();
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
}

TEST_F(ModelStreamInferTest, StreamsAreCapped) {
  options_.max_streams = 1;
  options_.metrics_address = "127.0.0.1:0";
  StartServer();
  const auto first = Open();
  ASSERT_TRUE(first->Write(WithId("1")));
  EXPECT_EQ(Next(*first).infer_response().id(), "1");
  grpc::ClientContext context;
  const grpc::Status refused = stub_->ModelStreamInfer(&context)->Finish();
  EXPECT_EQ(refused.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("as many streams are open as may be, 1"));
  EXPECT_THAT(testing::HttpGet(server_->metrics_port(), "/metrics"),
              HasSubstr("espalier_requests_refused_total{reason=\"streams\"} 1"));
  first->WritesDone();
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(Eventually([&] {
    const auto next = Open();
    next->WritesDone();
    return next->Finish().ok();
  }));
}

TEST_F(ModelStreamInferTest, DrainEndsStreamsAfterTheAnswersToWhatWasRead) {
  AddModel("n");
  StartServer();
  grpc::ClientContext context;
  const auto idle = stub_->ModelStreamInfer(&context);
  ASSERT_TRUE(idle->Write(WithId("first", "n")));
  EXPECT_EQ(Next(*idle).infer_response().id(), "first");
  control_->run_gate.Close();
  const auto busy = Open();
  ASSERT_TRUE(busy->Write(WithId("runs")));
  control_->run_gate.AwaitWaiting(1);
  ASSERT_TRUE(busy->Write(WithId("waits")));
  ASSERT_TRUE(Eventually([&] { return Pending() == 1; }));
  std::thread drain([&] { EXPECT_TRUE(server_->Drain(absl::Seconds(60))); });
  EXPECT_EQ(idle->Finish().error_code(), grpc::UNAVAILABLE);
  control_->run_gate.Open();
  EXPECT_EQ(Next(*busy).infer_response().id(), "runs");
  EXPECT_EQ(Next(*busy).infer_response().id(), "waits");
  EXPECT_EQ(CountRest(*busy), 0);
  const grpc::Status status = busy->Finish();
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), "server is shutting down");
  drain.join();
}

TEST_F(ModelStreamInferTest, ManyStreamsAtOnceEachGetTheirOwnAnswers) {
  AddModel("n");
  StartServer();
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      grpc::ClientContext context;
      const auto stream = stub_->ModelStreamInfer(&context);
      std::thread writer([&] {
        for (int i = 0; i < 200; ++i)
          stream->Write(WithId(absl::StrCat(c, "-", i), i % 3 == 0 ? "n" : "m"));
        stream->WritesDone();
      });
      std::set<std::string> ids;
      ModelStreamInferResponse response;
      while (stream->Read(&response)) {
        ids.insert(response.infer_response().id());
        ASSERT_THAT(FloatsOf(response.infer_response().raw_output_contents(0)),
                    ElementsAre(0, 2, 4, 6));
      }
      writer.join();
      EXPECT_TRUE(stream->Finish().ok());
      EXPECT_EQ(ids.size(), 200u);
      for (const std::string& id : ids) EXPECT_EQ(id.substr(0, 2), absl::StrCat(c, "-"));
    });
  }
  for (std::thread& client : clients) client.join();
}

// Streams that clients leave in the middle of everything, while others open: nothing may be lost,
// kept or touched after its end.
TEST_F(ModelStreamInferTest, StreamsThatAreLeftAtAnyMomentLeaveNothingBehind) {
  StartServer();
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 50; ++i) {
        grpc::ClientContext context;
        const auto stream = stub_->ModelStreamInfer(&context);
        const int requests = (i + c) % 7;
        for (int k = 0; k < requests; ++k) stream->Write(WithId(absl::StrCat(k)));
        ModelStreamInferResponse response;
        if (i % 3 == 0 && requests > 0) stream->Read(&response);
        context.TryCancel();
        stream->Finish();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(Eventually([&] { return Pending() == 0; }));
  EXPECT_TRUE(Infer(RawRequest()).ok());
  EXPECT_TRUE(server_->Drain(absl::Seconds(60)));
}

}  // namespace
}  // namespace espalier::service
