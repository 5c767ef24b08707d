#include "engine/planner/measure.h"

#include <atomic>
#include <future>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/planner/fake_table.h"

namespace espalier::planner {
namespace {

std::atomic<int> running, most_running;
std::atomic<bool> called;
std::promise<void> first_call;

// Counts the threads inside; the first call stays long beyond any deadline below.
kernels::KernelStatus CountThreads(const kernels::KernelContext&, const kernels::LinearArgs&) {
  const int now = ++running;
  int most = most_running;
  while (now > most && !most_running.compare_exchange_weak(most, now)) {
  }
  if (!called.exchange(true)) {
    first_call.set_value();
    absl::SleepFor(absl::Seconds(4));
  }
  --running;
  return {};
}

size_t NoScratch(const kernels::LinearDesc&, int) { return 0; }

TEST(MeasureTest, LoadsMeasureOneAtATimeAndWaitingIsNotTakenFromTheBudget) {
  kernels::LinearVariant variant = FakeVariant("counts_threads", kernels::Layout::kDense);
  variant.run = CountThreads;
  variant.scratch_bytes = NoScratch;
  Tensor dense = *Tensor::Allocate(DType::kFloat32, {8, 8});
  std::fill_n(dense.As<float>(), 64, 1.0f);
  const auto structure = sparse::AnalyzeStructure(dense.view());
  ASSERT_TRUE(structure.ok());
  const auto device = MakeCpuDevice(1);
  const auto measure = [&](absl::Duration budget) {
    CostTable table = FakeTable({{&variant, 256, {1, 1, 1, 1}}});
    for (auto& bucket : table.costs) bucket[0].measured = 0;
    WeightCopies copies(dense.view());
    auto measured = Measure(table, *structure, copies, *device, absl::Now() + budget);
    EXPECT_TRUE(measured.ok()) << measured.status();
    EXPECT_EQ(measured->buckets, 4);
    return measured->waited;
  };
  std::thread other([&] { measure(absl::InfiniteDuration()); });
  first_call.get_future().wait();
  EXPECT_GE(measure(absl::Seconds(2)), absl::Milliseconds(2500));
  other.join();
  EXPECT_EQ(most_running, 1);
}

}  // namespace
}  // namespace espalier::planner
