// Many threads submit, cancel and let expire at once: every request is answered exactly once, and what was
// refused was never executed. For ThreadSanitizer as much as for its assertions.
#include <list>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::FakeModel;
using espalier::testing::FakeModelOptions;
using espalier::testing::TestRequest;

constexpr int kClients = 6, kRounds = 40, kInFlight = 12;
constexpr int64_t kMilli = 1'000'000;

// Of the requests of one client: what they were answered with.
struct Ledger {
  int64_t served_items = 0, served = 0, refused = 0;
};

// Submits kInFlight requests at a time, each with a fate drawn from `random`, while a second thread cancels
// some of them at moments that nobody chose.
void Client(const VersionHandle& version, uint32_t seed, Ledger& ledger) {
  std::mt19937 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    std::list<TestRequest> requests;
    std::vector<TestRequest*> to_cancel;
    for (int i = 0; i < kInFlight; ++i) {
      TestRequest& request = requests.emplace_back(1 + random() % 3, static_cast<float>(i));
      request.priority = random() % 5;
      const uint32_t fate = random() % 8;
      if (fate == 0) request.timeout_micros = 1 + random() % 2000;
      if (fate == 1) request.deadline_nanos = NowNanos() + random() % (2 * kMilli);
      if (fate <= 3) to_cancel.push_back(&request);
    }
    std::thread canceller([&] {
      for (TestRequest* request : to_cancel) {
        std::this_thread::yield();
        request->Cancel();
      }
    });
    for (TestRequest& request : requests) request.Submit(version);
    canceller.join();
    int i = 0;
    for (TestRequest& request : requests) {
      if (request.status().ok()) {
        EXPECT_EQ(request.Floats()[0], 2.0f * static_cast<float>(i));
        ledger.served_items += request.batch;
        ++ledger.served;
      } else {
        EXPECT_FALSE(request.executed);
        ++ledger.refused;
      }
      EXPECT_EQ(request.answers(), 1);
      ++i;
    }
  }
}

class BatcherLedgerTest : public ::testing::TestWithParam<bool> {};

TEST_P(BatcherLedgerTest, EveryRequestIsAnsweredExactlyOnce) {
  inference::ModelConfig config;
  config.set_max_batch_size(8);
  config.add_instance_group()->set_count(2);
  auto* batching = config.mutable_dynamic_batching();
  batching->set_max_queue_delay_microseconds(200);
  batching->set_preserve_ordering(GetParam());
  batching->set_priority_levels(4);
  batching->set_default_priority_level(2);
  batching->mutable_default_queue_policy()->set_allow_timeout_override(true);
  batching->mutable_default_queue_policy()->set_max_queue_size(40);
  auto& delays = (*batching->mutable_priority_queue_policy())[3];
  delays.set_timeout_action(inference::ModelQueuePolicy::DELAY);
  delays.set_default_timeout_microseconds(300);
  FakeModelOptions model;
  model.control->run_delay = absl::Microseconds(100);
  auto created = ServedVersion::Create({.name = "m",
                                        .version = 1,
                                        .config = config,
                                        .model = std::make_unique<FakeModel>(model),
                                        .latency = std::make_shared<ModelLatency>()});
  ASSERT_TRUE(created.ok()) << created.status();
  VersionHandle version(std::move(*created));
  std::vector<Ledger> ledgers(kClients);
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c)
    clients.emplace_back([&, c] { Client(version, static_cast<uint32_t>(c), ledgers[c]); });
  for (std::thread& client : clients) client.join();

  Ledger all;
  for (const Ledger& ledger : ledgers) {
    all.served_items += ledger.served_items;
    all.served += ledger.served;
    all.refused += ledger.refused;
  }
  EXPECT_EQ(all.served + all.refused, kClients * kRounds * kInFlight);
  EXPECT_GT(all.served, 0);
  EXPECT_GT(all.refused, 0);
  const VersionStatistics& statistics = version->statistics();
  EXPECT_EQ(statistics.success.count, static_cast<uint64_t>(all.served));
  EXPECT_EQ(statistics.failure.count, static_cast<uint64_t>(all.refused));
  uint64_t reasons = 0;
  for (const auto& count : statistics.by_reason) reasons += count;
  EXPECT_EQ(reasons, static_cast<uint64_t>(all.refused));
  int64_t executed = 0;
  for (int64_t size : model.control->sizes()) executed += size;
  EXPECT_EQ(executed, all.served_items);
  EXPECT_EQ(version->pending(), 0);
  EXPECT_EQ(version.use_count(), 1);
}

INSTANTIATE_TEST_SUITE_P(Ordering, BatcherLedgerTest, ::testing::Bool());

}  // namespace
}  // namespace espalier::runtime
