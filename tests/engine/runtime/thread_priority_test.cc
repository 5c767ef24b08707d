// Background threads step aside while requests come, and nothing else about them changes.
#include "engine/runtime/thread_priority.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

#include "engine/runtime/statistics.h"
#include "gtest/gtest.h"

namespace espalier::runtime {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

void InBackground(const std::function<void()>& work) {
  std::thread([&] {
    EnterBackground();
    const BackgroundWork scope;
    work();
  }).join();
}

// While it lives, this thread and those that it makes have one processor, and `others` that want it too.
class BusyProcessor {
 public:
  explicit BusyProcessor(int others) {
    EXPECT_EQ(sched_getaffinity(0, sizeof(before_), &before_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &one);
    }
    EXPECT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    for (int i = 0; i < others; ++i) {
      others_.emplace_back([this] {
        while (!done_) {
        }
      });
    }
  }
  ~BusyProcessor() {
    done_ = true;
    for (std::thread& other : others_) other.join();
    EXPECT_EQ(sched_setaffinity(0, sizeof(before_), &before_), 0);
  }

 private:
  cpu_set_t before_;
  std::atomic<bool> done_{false};
  std::vector<std::thread> others_;
};

TEST(ThreadPriorityTest, NapsWhileRequestsComeAndOthersWantTheProcessor) {
  const BusyProcessor busy(1);
  int pauses = 0;
  InBackground([&] {
    // In time of the processor, which a busy machine gives seldom.
    const auto used = [] {
      timespec time = {};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
    };
    const nanoseconds enough = 40 * BackgroundWork::kTurn;
    for (int64_t last = NowNanos(); used() < enough;) {
      const int64_t now = NowNanos();
      pauses += now - last >= nanoseconds(BackgroundWork::kNap).count();
      NoteRequest(now);
      last = now;
    }
  });
  EXPECT_GE(pauses, 10);  // a tick of 4 ms without naps would leave 3
}

// A processor that comes back later than the next turn would have begun.
TEST(ThreadPriorityTest, ComesToItsEndOnAProcessorThatIsBusyForGood) {
  const BusyProcessor busy(8);
  const int64_t began = NowNanos();
  volatile int64_t steps = 0;
  InBackground([&] {
    while (steps < 300'000 && NowNanos() - began < 30'000'000'000) {
      NoteRequest(NowNanos());
      steps = steps + 1;
    }
  });
  EXPECT_EQ(steps, 300'000);
}

TEST(ThreadPriorityTest, SystemCallsAreRestarted) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ssize_t got = 0;
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(20));
    EXPECT_EQ(write(ends[1], "x", 1), 1);
  });
  InBackground([&] {
    char byte = 0;
    got = read(ends[0], &byte, 1);
  });
  writer.join();
  EXPECT_EQ(got, 1);
  close(ends[0]);
  close(ends[1]);
}

TEST(ThreadPriorityTest, ManyThreadsComeAndGo) {
  for (int i = 0; i < 200; ++i) InBackground([] {});
}

}  // namespace
}  // namespace espalier::runtime
