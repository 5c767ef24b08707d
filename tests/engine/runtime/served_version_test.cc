#include "engine/runtime/served_version.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <list>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::Eventually;
using espalier::testing::FakeControl;
using espalier::testing::FakeModel;
using espalier::testing::FakeModelOptions;
using espalier::testing::TestRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ServedVersionTest : public ::testing::Test {
 protected:
  VersionHandle Serve(inference::ModelConfig config = {}, FakeModelOptions model = {}) {
    control_ = model.control;
    config.set_max_batch_size(static_cast<int>(model.max_batch_size));
    auto version = ServedVersion::Create({.name = "m",
                                          .version = 3,
                                          .config = std::move(config),
                                          .model = std::make_unique<FakeModel>(std::move(model)),
                                          .latency = latency_});
    EXPECT_TRUE(version.ok()) << version.status();
    return VersionHandle(std::move(*version));
  }

  std::shared_ptr<FakeControl> control_;
  std::shared_ptr<ModelLatency> latency_ = std::make_shared<ModelLatency>();
};

inference::ModelConfig WithQueue(uint32_t max_queue_size, uint64_t timeout_micros = 0,
                                 bool override_allowed = false) {
  inference::ModelConfig config;
  auto* policy = config.mutable_dynamic_batching()->mutable_default_queue_policy();
  policy->set_max_queue_size(max_queue_size);
  policy->set_default_timeout_microseconds(timeout_micros);
  policy->set_allow_timeout_override(override_allowed);
  return config;
}

TEST_F(ServedVersionTest, ARequestIsAnsweredWithItsOutputsAndReleasesItsPin) {
  VersionHandle version = Serve();
  TestRequest request(2, 1);
  request.Submit(version);
  ASSERT_TRUE(request.status().ok()) << request.status();
  EXPECT_THAT(request.Floats(), ElementsAre(2, 4, 6, 8, 10, 12, 14, 16));
  EXPECT_EQ(request.version, nullptr);
  EXPECT_EQ(version.use_count(), 1);
}

TEST_F(ServedVersionTest, InstancesRunRequestsSideBySide) {
  inference::ModelConfig config;
  config.add_instance_group()->set_count(2);
  config.add_instance_group()->set_kind(inference::ModelInstanceGroup::KIND_CPU);
  VersionHandle version = Serve(config);
  EXPECT_EQ(version->instances(), 3);
  control_->run_gate.Close();
  std::list<TestRequest> requests;
  for (int i = 0; i < 3; ++i) {
    requests.emplace_back(1, static_cast<float>(i)).Submit(version);
    control_->run_gate.AwaitWaiting(i + 1);
  }
  control_->run_gate.Open();
  for (TestRequest& request : requests) EXPECT_TRUE(request.status().ok());
}

TEST_F(ServedVersionTest, AFullQueueRefusesAtOnceAndExactlyWhatIsTooMuch) {
  VersionHandle version = Serve(WithQueue(4));
  control_->run_gate.Close();
  TestRequest running(1);
  running.Submit(version);
  control_->run_gate.AwaitWaiting(1);
  std::list<TestRequest> requests(20);
  std::vector<std::thread> clients;
  for (TestRequest& request : requests) {
    request.AddInput("x", "FP32", {1, 4}, std::string(16, '\0'));
    clients.emplace_back([&] { request.Submit(version); });
  }
  for (std::thread& client : clients) client.join();
  int refused = 0;
  for (TestRequest& request : requests) refused += request.answered();
  EXPECT_EQ(refused, 16);
  EXPECT_EQ(version->pending(), 4);
  control_->run_gate.Open();
  for (TestRequest& request : requests) {
    if (request.status().ok()) continue;
    EXPECT_EQ(request.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(request.status().message()), HasSubstr("Exceeds maximum queue size"));
  }
  EXPECT_TRUE(running.status().ok());
  EXPECT_THAT(control_->sizes(), ElementsAre(1, 4));
  EXPECT_EQ(version->statistics().by_code[static_cast<int>(absl::StatusCode::kUnavailable)], 16u);
}

TEST_F(ServedVersionTest, ACancelledRequestIsNeverExecuted) {
  VersionHandle version = Serve();
  control_->run_gate.Close();
  TestRequest running(1), waiting(1);
  running.Submit(version);
  control_->run_gate.AwaitWaiting(1);
  waiting.Submit(version);
  waiting.Cancel();
  control_->run_gate.Open();
  EXPECT_EQ(waiting.status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(running.status().ok());
  EXPECT_EQ(control_->runs, 1);
  EXPECT_EQ(version->statistics().inferences, 1u);
}

TEST_F(ServedVersionTest, ARequestPastItsDeadlineIsNeverExecuted) {
  VersionHandle version = Serve();
  control_->run_gate.Close();
  TestRequest running(1), waiting(1);
  running.Submit(version);
  control_->run_gate.AwaitWaiting(1);
  waiting.deadline_nanos = NowNanos() + 1'000'000;
  waiting.Submit(version);
  absl::SleepFor(absl::Milliseconds(2));
  control_->run_gate.Open();
  EXPECT_EQ(waiting.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(running.status().ok());
  EXPECT_EQ(control_->runs, 1);
}

TEST_F(ServedVersionTest, AQueueTimeoutAnswersUnavailable) {
  // {default, override allowed, asked for} → expires while the instance is busy?
  struct Case {
    uint64_t default_micros;
    bool allowed;
    int64_t asked_micros;
    bool expires;
  };
  for (const Case& c : {Case{50'000, false, 0, true}, Case{0, true, 50'000, true},
                        Case{0, false, 50'000, false}, Case{60'000'000, true, 50'000, true},
                        Case{50'000, true, 60'000'000, true}, Case{0, true, 0, false}}) {
    VersionHandle version = Serve(WithQueue(0, c.default_micros, c.allowed));
    std::list<TestRequest> requests;
    TestRequest& running = espalier::testing::Occupy(version, control_->run_gate, requests);
    TestRequest waiting(1);
    waiting.timeout_micros = c.asked_micros;
    waiting.Submit(version);
    if (c.expires) {
      waiting.status();
    } else {
      absl::SleepFor(absl::Milliseconds(80));
      EXPECT_FALSE(waiting.answered());
    }
    control_->run_gate.Open();
    EXPECT_EQ(waiting.status().code(),
              c.expires ? absl::StatusCode::kUnavailable : absl::StatusCode::kOk)
        << c.default_micros << " " << c.allowed << " " << c.asked_micros;
    EXPECT_TRUE(running.status().ok());
    if (c.expires) {
      EXPECT_THAT(std::string(waiting.status().message()), HasSubstr("Request timeout expired"));
    }
  }
}

TEST_F(ServedVersionTest, AFailingRunFailsItsRequestOnly) {
  VersionHandle version = Serve();
  control_->run_status = absl::InternalError("kernel 'x' failed");
  TestRequest bad(1);
  bad.Submit(version);
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInternal);
  control_->run_status = absl::OkStatus();
  TestRequest good(1);
  good.Submit(version);
  EXPECT_TRUE(good.status().ok());
  EXPECT_EQ(version->statistics().failure.count, 1u);
  EXPECT_EQ(version->statistics().success.count, 1u);
}

// A client's memory of 64 floats, which may be gone, and may have an address for GPUs.
class ClientsMemory final : public TensorMemory {
 public:
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) const override {
    ++accesses;
    if (gone) return absl::InvalidArgumentError("memory is gone");
    std::memcpy(to.data(), bytes() + offset, to.size());
    return absl::OkStatus();
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> from) const override {
    ++accesses;
    if (gone) return absl::InvalidArgumentError("memory is gone");
    std::memcpy(bytes() + offset, from.data(), from.size());
    return absl::OkStatus();
  }
  std::byte* DeviceAddress(uint64_t offset, uint64_t /*bytes*/) const override {
    return has_address ? bytes() + offset : nullptr;
  }

  bool gone = false, has_address = false;
  mutable std::atomic<int> accesses{0};  // by the host
  mutable std::vector<float> floats = std::vector<float>(64);

 private:
  std::byte* bytes() const { return reinterpret_cast<std::byte*>(floats.data()); }
};

// One item whose input is at float `from` of a memory, and whose output is wanted at `to`, unless that is negative.
class RequestInMemory : public TestRequest {
 public:
  RequestInMemory(std::shared_ptr<const ClientsMemory> memory, size_t from, int to)
      : memory_(std::move(memory)), to_(to) {
    inputs.push_back({.name = "x", .datatype = "FP32", .shape = {1, 4}});
    inputs.back().range = {memory_, from * sizeof(float), 16};
  }
  absl::Status PlaceOutputs() override {
    if (to_ >= 0) outputs[0].range = {memory_, static_cast<size_t>(to_) * sizeof(float), 16};
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<const ClientsMemory> memory_;
  const int to_;
};

class TensorMemoryTest : public ServedVersionTest, public ::testing::WithParamInterface<bool> {
 protected:
  TensorMemoryTest() {
    for (size_t i = 0; i < memory_->floats.size(); ++i) memory_->floats[i] = static_cast<float>(i);
  }
  std::shared_ptr<ClientsMemory> memory_ = std::make_shared<ClientsMemory>();
};

TEST_P(TensorMemoryTest, TensorsComeFromThereAndGoThereAndTheHostLooksAtNoneThatADeviceCopies) {
  const bool device = GetParam();
  memory_->has_address = device;
  VersionHandle version = Serve({}, {.copies_anywhere = device});
  RequestInMemory request(memory_, 8, 40), half(memory_, 12, -1);
  request.Submit(version);
  ASSERT_TRUE(request.status().ok()) << request.status();
  EXPECT_THAT(absl::MakeSpan(memory_->floats).subspan(39, 6), ElementsAre(39, 16, 18, 20, 22, 44));
  EXPECT_EQ(memory_->accesses, device ? 0 : 2);
  half.Submit(version);
  ASSERT_TRUE(half.status().ok()) << half.status();
  EXPECT_THAT(half.Floats(), ElementsAre(24, 26, 28, 30));
  EXPECT_EQ(memory_->accesses, device ? 0 : 3);
}

TEST_P(TensorMemoryTest, WhereOnlyOneSideKnowsAddressesTheHostCopies) {
  memory_->has_address = GetParam();
  VersionHandle version = Serve({}, {.copies_anywhere = !GetParam()});
  RequestInMemory request(memory_, 0, 16);
  request.Submit(version);
  ASSERT_TRUE(request.status().ok()) << request.status();
  EXPECT_THAT(absl::MakeSpan(memory_->floats).subspan(16, 4), ElementsAre(0, 2, 4, 6));
  EXPECT_EQ(memory_->accesses, 2);
}

TEST_P(TensorMemoryTest, InABatchAMemoryThatIsGoneFailsItsRequestAlone) {
  memory_->has_address = GetParam();
  const auto gone = std::make_shared<ClientsMemory>();
  gone->gone = true;
  inference::ModelConfig config;
  config.mutable_dynamic_batching();
  VersionHandle version = Serve(config, {.copies_anywhere = GetParam()});
  std::list<TestRequest> occupying;
  Occupy(version, control_->run_gate, occupying);
  RequestInMemory first(memory_, 0, 16), lost(gone, 0, -1), last(memory_, 8, -1);
  TestRequest plain(2, 5);
  for (TestRequest* request : {static_cast<TestRequest*>(&first), static_cast<TestRequest*>(&lost),
                               &plain, static_cast<TestRequest*>(&last)})
    request->Submit(version);
  control_->run_gate.Open();
  EXPECT_TRUE(absl::IsInvalidArgument(lost.status())) << lost.status();
  EXPECT_THAT(lost.status().message(), HasSubstr("input 'x': memory is gone, for model 'm'"));
  ASSERT_TRUE(first.status().ok() && plain.status().ok() && last.status().ok());
  EXPECT_THAT(absl::MakeSpan(memory_->floats).subspan(16, 4), ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(plain.Floats(), ElementsAre(10, 12, 14, 16, 18, 20, 22, 24));
  EXPECT_THAT(last.Floats(), ElementsAre(16, 18, 20, 22));
  EXPECT_EQ(control_->sizes().back(), 4) << "one batch, without the one that failed";
}

TEST_P(TensorMemoryTest, OutputsThatAreWatchedPassThroughTheHost) {
  memory_->has_address = true;
  VersionHandle version = Serve({}, {.copies_anywhere = true});
  version->WatchOutputs(GetParam());
  memory_->floats[0] = NAN;
  RequestInMemory request(memory_, 0, 16);
  request.Submit(version);
  ASSERT_TRUE(request.status().ok()) << request.status();
  EXPECT_EQ(memory_->floats[17], 2);
  EXPECT_EQ(memory_->accesses, GetParam() ? 2 : 0);
}

INSTANTIATE_TEST_SUITE_P(HostOrDevice, TensorMemoryTest, ::testing::Bool());

TEST_F(ServedVersionTest, StatisticsCountItemsExecutionsAndPhases) {
  FakeModelOptions model;
  model.control->run_delay = absl::Milliseconds(2);
  VersionHandle version = Serve({}, model);
  for (int64_t batch : {1, 3, 3}) {
    TestRequest request(batch);
    request.Submit(version);
    ASSERT_TRUE(request.status().ok());
  }
  TestRequest faulty(9);
  faulty.Submit(version);
  EXPECT_EQ(faulty.status().code(), absl::StatusCode::kInvalidArgument);
  const VersionStatistics& statistics = version->statistics();
  EXPECT_EQ(statistics.inferences, 7u);
  EXPECT_EQ(statistics.executions, 3u);
  EXPECT_EQ(statistics.by_batch_size()[3].count, 2u);
  EXPECT_EQ(statistics.by_batch_size()[1].count, 1u);
  EXPECT_EQ(statistics.by_code[0], 3u);
  EXPECT_EQ(statistics.by_code[static_cast<int>(absl::StatusCode::kInvalidArgument)], 1u);
  EXPECT_GE(statistics.phases[static_cast<int>(Phase::kComputeInfer)].nanos, 6'000'000u);
  uint64_t phases = 0;
  for (const DurationCounter& phase : statistics.phases) {
    EXPECT_EQ(phase.count, 3u);
    phases += phase.nanos;
  }
  EXPECT_LE(phases, statistics.success.nanos);
  EXPECT_EQ(latency_->request.Read().count, 4u);
  EXPECT_EQ(latency_->phases[0].Read().count, 3u);
}

TEST_F(ServedVersionTest, ExecutionsTakeAsMuchLongerAsTheConfigAsks) {
  inference::ModelConfig config;
  (*config.mutable_parameters())["execute_delay_ms"].set_string_value("20");
  VersionHandle version = Serve(config);
  for (int i = 0; i < 2; ++i) {
    TestRequest request(1);
    request.Submit(version);
    ASSERT_TRUE(request.status().ok());
  }
  EXPECT_GE(version->statistics().phases[static_cast<int>(Phase::kComputeInfer)].nanos,
            40'000'000u);
}

TEST_F(ServedVersionTest, EveryOfManySimultaneousRequestsIsAnsweredOnceWithItsOwnResult) {
  inference::ModelConfig config;
  config.add_instance_group()->set_count(3);
  VersionHandle version = Serve(config);
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 200; ++i) {
        TestRequest request(1 + i % 8, static_cast<float>(1000 * c + i));
        request.Submit(version);
        ASSERT_TRUE(request.status().ok());
        ASSERT_EQ(request.Floats()[3], 2 * static_cast<float>(1000 * c + i + 3));
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(version->statistics().success.count, 1600u);
}

}  // namespace
}  // namespace espalier::runtime
