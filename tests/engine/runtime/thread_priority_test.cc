// Background threads step aside while requests come, and nothing else about them changes.
#include "engine/runtime/thread_priority.h"

#include <unistd.h>

#include <chrono>
#include <ctime>
#include <functional>
#include <thread>

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

TEST(ThreadPriorityTest, NapsWhileRequestsCome) {
  int pauses = 0;
  InBackground([&] {
    // In time of the processor, which a busy machine gives seldom.
    const auto used = [] {
      timespec time = {};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
    };
    const nanoseconds enough = 10 * BackgroundWork::kTurn;
    for (int64_t last = NowNanos(); used() < enough;) {
      const int64_t now = NowNanos();
      pauses += now - last >= nanoseconds(BackgroundWork::kNap).count();
      NoteRequest(now);
      last = now;
    }
  });
  EXPECT_GE(pauses, 5);
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
