// The load generator against servers that answer late, badly, twice, or not at all.
#include "clients/bench/load.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace espalier::bench {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;
using inference::ModelStreamInferResponse;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

struct Behaviour {
  std::atomic<int> delay_millis{0};
  // From this request on, one after the other, the server sleeps so long, once.
  std::atomic<int> stall_at{-1}, stall_millis{0};
  std::atomic<int> fail_every{0};  // every nth answer is an error
  std::atomic<bool> wrong_id{false}, no_id{false}, twice{false}, stop_stream{false};
};

class Service final : public inference::GRPCInferenceService::Service {
 public:
  Behaviour behaviour;
  std::mutex mutex;
  std::multiset<std::string> ids;         // of requests
  std::map<std::string, int> seen_bytes;  // requests by content of their first input

  grpc::Status ModelInfer(grpc::ServerContext*, const ModelInferRequest* request,
                          ModelInferResponse* response) override {
    const std::lock_guard<std::mutex> one_at_a_time(instance_);
    return Answer(*request, response);
  }

  grpc::Status ModelStreamInfer(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<ModelStreamInferResponse, ModelInferRequest>* stream) override {
    ModelInferRequest request;
    while (stream->Read(&request)) {
      ModelStreamInferResponse response;
      const grpc::Status status = Answer(request, response.mutable_infer_response());
      if (!status.ok()) response.set_error_message(status.error_message());
      stream->Write(response);
      if (behaviour.twice) stream->Write(response);
      if (behaviour.stop_stream) return grpc::Status(grpc::StatusCode::INTERNAL, "lost my way");
    }
    return grpc::Status::OK;
  }

 private:
  grpc::Status Answer(const ModelInferRequest& request, ModelInferResponse* response) {
    int nth = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ids.insert(request.id());
      ++seen_bytes[request.raw_input_contents(0)];
      nth = count_++;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(behaviour.delay_millis));
    if (nth == behaviour.stall_at) {
      std::this_thread::sleep_for(std::chrono::milliseconds(behaviour.stall_millis));
    }
    response->set_model_name("m");
    if (!behaviour.no_id) response->set_id(behaviour.wrong_id ? "987654321" : request.id());
    response->add_raw_output_contents(std::string(1000, 'x'));
    if (behaviour.fail_every > 0 && nth % behaviour.fail_every == 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "Exceeds maximum queue size");
    }
    return grpc::Status::OK;
  }

  std::mutex instance_;
  int count_ = 0;
};

class LoadTest : public ::testing::Test {
 protected:
  LoadTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    options_.url = absl::StrCat("127.0.0.1:", port);
    options_.warmup_seconds = 0.05;
    options_.duration_seconds = 0.3;
    options_.timeout_seconds = 5;
  }
  ~LoadTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  static RequestSource Source(int requests = 3) {
    std::vector<client::InferRequest> all;
    for (int i = 0; i < requests; ++i) {
      client::InferRequest& request = all.emplace_back(client::InferRequest{.model = "m"});
      request.id = "this id is replaced";
      request.inputs.push_back(*client::MakeTensor<int32_t>("x", {1}, {i}));
    }
    return *RequestSource::Create(all);
  }

  LoadResult Run(int requests = 3) {
    absl::StatusOr<LoadResult> result = RunLoad(options_, Source(requests));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : LoadResult();
  }

  // The server saw what the ledger says was sent, each id once.
  void ExpectSeenOnce(const LoadResult& result) {
    EXPECT_EQ(service_.ids.size(), result.ledger.sent);
    EXPECT_EQ(std::set<std::string>(service_.ids.begin(), service_.ids.end()).size(),
              result.ledger.sent);
  }

  Service service_;
  std::unique_ptr<grpc::Server> server_;
  LoadOptions options_;
};

TEST_F(LoadTest, ClosedLoopKeepsItsConcurrencyAndBalancesItsLedger) {
  service_.behaviour.delay_millis = 2;  // one at a time: 500 a second
  options_.concurrency = 8;
  options_.channels = 3;
  options_.threads = 2;
  const LoadResult result = Run();
  EXPECT_TRUE(result.ledger.Balances());
  ExpectSeenOnce(result);
  EXPECT_GT(result.latency.count(), 0u);
  EXPECT_LE(result.throughput(), 550);
  // Each waits for the seven before it: 16 ms.
  EXPECT_GE(result.latency.Percentile(50), 14'000'000);
  EXPECT_EQ(result.failure.count(), 0u);
  EXPECT_EQ(service_.seen_bytes.size(), 3u) << "the requests are sent in turn";
}

TEST_F(LoadTest, OpenLoopOffersItsRateAtRandomTimes) {
  options_.rate = 400;
  options_.duration_seconds = 1;
  const LoadResult result = Run();
  EXPECT_TRUE(result.ledger.Balances());
  ExpectSeenOnce(result);
  // Poisson: 400 ± 20 a second; five standard deviations.
  EXPECT_NEAR(static_cast<double>(result.answered()), 400, 100);
}

// A closed loop would send one request during the stall and see one slow answer.
TEST_F(LoadTest, OpenLoopChargesAStallToEveryRequestThatWasDueMeanwhile) {
  options_.rate = 500;
  options_.duration_seconds = 0.6;
  service_.behaviour.stall_at = 100;
  service_.behaviour.stall_millis = 200;
  const LoadResult result = Run();
  uint64_t slow = 0;
  for (const HdrHistogram::Bucket& bucket : result.latency.Buckets()) {
    if (bucket.highest > 50'000'000) slow += bucket.count;
  }
  EXPECT_GT(slow, 40u) << "some 75 were due in the first 150 ms of the stall";
  EXPECT_TRUE(result.ledger.Balances());
}

TEST_F(LoadTest, OpenLoopWithholdsAndCountsWhatIsBeyondItsCap) {
  service_.behaviour.delay_millis = 20;  // 50 a second
  options_.rate = 1000;
  options_.max_outstanding = 5;
  const LoadResult result = Run();
  EXPECT_GT(result.withheld, 100u);
  EXPECT_TRUE(result.ledger.Balances());
  EXPECT_LT(result.ledger.sent, 60u);
}

TEST_F(LoadTest, ErrorsAreCountedByCodeWithAnExampleAndStayOutOfTheLatency) {
  service_.behaviour.fail_every = 2;
  options_.concurrency = 2;
  const LoadResult result = Run();
  ASSERT_EQ(result.errors.size(), 1u);
  const auto& [code, error] = *result.errors.begin();
  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(error.example, "Exceeds maximum queue size");
  EXPECT_EQ(error.count, result.failure.count());
  EXPECT_NEAR(static_cast<double>(result.failure.count()),
              static_cast<double>(result.latency.count()), 2);
  EXPECT_TRUE(result.ledger.Balances()) << "an error is an answer";
}

TEST_F(LoadTest, RequestsBeyondTheTimeoutAreAnsweredByTheirDeadline) {
  service_.behaviour.delay_millis = 200;
  options_.timeout_seconds = 0.05;
  const LoadResult result = Run();
  EXPECT_EQ(result.latency.count(), 0u);
  EXPECT_EQ(result.errors.begin()->first, grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(result.ledger.Balances());
}

TEST_F(LoadTest, AnswersWithTheIdOfAnotherRequestUnbalanceTheLedger) {
  service_.behaviour.wrong_id = true;
  const LoadResult result = Run();
  EXPECT_FALSE(result.ledger.Balances());
  EXPECT_EQ(result.ledger.unasked, result.ledger.answered);
}

TEST_F(LoadTest, AnswersWithoutAnIdUnbalanceTheLedger) {
  service_.behaviour.no_id = true;
  const LoadResult result = Run();
  EXPECT_FALSE(result.ledger.Balances());
  EXPECT_EQ(result.ledger.without_id, result.ledger.answered);
}

TEST_F(LoadTest, NobodyListeningIsUnavailable) {
  options_.url = "127.0.0.1:1";
  const auto result = RunLoad(options_, Source());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(result.status().message(), HasSubstr("127.0.0.1:1"));
}

TEST_F(LoadTest, CallbacksFrameTheMeasurement) {
  std::vector<std::string> calls;
  uint64_t before = 0, after = 0;
  options_.measure_begins = [&] {
    const std::lock_guard<std::mutex> lock(service_.mutex);
    before = service_.ids.size();
  };
  options_.measure_ends = [&] {
    const std::lock_guard<std::mutex> lock(service_.mutex);
    after = service_.ids.size();
  };
  const LoadResult result = Run();
  EXPECT_GT(before, 0u) << "the warm-up came first";
  // The callbacks run in a thread of their own, which may be late when the machine is busy.
  const double measured = static_cast<double>(result.latency.count());
  EXPECT_NEAR(static_cast<double>(after - before), measured, 20 + 0.5 * measured);
  EXPECT_LT(result.latency.count(), result.ledger.sent);
}

TEST_F(LoadTest, StreamsAnswerEveryRequestOnce) {
  options_.streaming = true;
  options_.concurrency = 6;
  options_.channels = 2;
  const LoadResult result = Run();
  EXPECT_TRUE(result.ledger.Balances());
  ExpectSeenOnce(result);
  EXPECT_GT(result.latency.count(), 10u);
}

TEST_F(LoadTest, ErrorsInAStreamDoNotEndIt) {
  options_.streaming = true;
  service_.behaviour.fail_every = 3;
  const LoadResult result = Run();
  EXPECT_TRUE(result.ledger.Balances());
  EXPECT_GT(result.latency.count(), 10u);
  EXPECT_EQ(result.errors.at(grpc::StatusCode::UNKNOWN).example, "Exceeds maximum queue size");
}

TEST_F(LoadTest, AnswersThatComeTwiceInAStreamUnbalanceTheLedger) {
  options_.streaming = true;
  service_.behaviour.twice = true;
  const LoadResult result = Run();
  EXPECT_FALSE(result.ledger.Balances());
  EXPECT_GT(result.ledger.unasked, 10u);
}

TEST_F(LoadTest, AStreamThatStaysSilentLosesItsRequests) {
  options_.streaming = true;
  options_.timeout_seconds = 0.1;
  service_.behaviour.delay_millis = 3000;
  const LoadResult result = Run();
  EXPECT_FALSE(result.ledger.Balances());
  EXPECT_EQ(result.ledger.unanswered, 1u);
}

TEST_F(LoadTest, AStreamThatBreaksEndsTheRunWithItsStatus) {
  options_.streaming = true;
  options_.concurrency = 4;
  service_.behaviour.stop_stream = true;
  const auto result = RunLoad(options_, Source());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(result.status().message(), HasSubstr("lost my way"));
}

}  // namespace
}  // namespace espalier::bench
