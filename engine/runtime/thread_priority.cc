#include "engine/runtime/thread_priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <thread>

#include "engine/runtime/statistics.h"

namespace espalier::runtime {
namespace {

constexpr int kNice = 10;
constexpr int64_t kNoteEveryNanos =
    1'000'000;  // a shared cache line is not written for each request

std::atomic<int64_t> last_request_nanos{INT64_MIN / 2};
std::atomic<int> at_work{0};  // background threads
const int at_once =
    std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 2);  // of them
static_assert(std::atomic<int64_t>::is_always_lock_free);  // read in a signal handler

timespec TimespecOf(std::chrono::nanoseconds time) {
  return {.tv_sec = time.count() / 1'000'000'000, .tv_nsec = time.count() % 1'000'000'000};
}

// Of the calling thread, for its signal handler; whether its turns are timed.
thread_local timer_t turn_timer = {};
thread_local volatile std::sig_atomic_t timed = 0;
// How often somebody else was given the processor instead, and when that was noticed last.
thread_local int64_t preemptions = 0, preempted_nanos = INT64_MIN / 2;

// The next turn. A timer that ran on while the thread is aside would end a turn before it begins: on a machine
// where it takes longer than kTurn to get a processor again the thread would never come back from its handler.
void BeginTurn() {
  const itimerspec times = {.it_interval = {}, .it_value = TimespecOf(BackgroundWork::kTurn)};
  timer_settime(turn_timer, 0, &times, nullptr);
}

bool Within(int64_t nanos, std::chrono::nanoseconds time, int64_t now) {
  return now - nanos < time.count();
}

// The signal handler: only system calls, as is safe in one.
void StepAside(int) {
  const int error = errno;
  const int64_t now = NowNanos();
  rusage usage = {};
  if (getrusage(RUSAGE_THREAD, &usage) == 0 && usage.ru_nivcsw != preemptions) {
    preemptions = usage.ru_nivcsw;
    preempted_nanos = now;
  }
  if (Within(last_request_nanos.load(std::memory_order_relaxed), BackgroundWork::kQuiet, now) &&
      Within(preempted_nanos, BackgroundWork::kAlone, now)) {
    const int excess = std::max(0, at_work.load(std::memory_order_relaxed) - at_once);
    const timespec nap =
        TimespecOf(BackgroundWork::kNap + excess * (BackgroundWork::kTurn + BackgroundWork::kNap));
    nanosleep(&nap, nullptr);
  }
  if (timed != 0) BeginTurn();
  errno = error;
}

// False where somebody else handles the signal.
bool HandlesTurns() {
  static const bool handles = [] {
    struct sigaction before = {};
    if (sigaction(SIGURG, nullptr, &before) != 0) return false;
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return false;
    struct sigaction action = {};
    action.sa_handler = StepAside;
    action.sa_flags = SA_RESTART;
    return sigaction(SIGURG, &action, nullptr) == 0;
  }();
  return handles;
}

// The timer of a background thread.
class TurnTimer {
 public:
  TurnTimer() = default;
  TurnTimer(const TurnTimer&) = delete;
  TurnTimer& operator=(const TurnTimer&) = delete;
  ~TurnTimer() {
    if (made_) timer_delete(turn_timer);
  }

  void Make() {
    if (made_ || !HandlesTurns()) return;
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGURG;
    event._sigev_un._tid =
        static_cast<pid_t>(syscall(SYS_gettid));  // glibc 2.36 has no name for it
    made_ = timer_create(CLOCK_MONOTONIC, &event, &turn_timer) == 0;
  }

  void Start() {
    if (!made_) return;
    timed = 1;
    at_work.fetch_add(1, std::memory_order_relaxed);
    preempted_nanos = NowNanos();
    BeginTurn();
  }
  void Stop() {
    if (!made_) return;
    timed = 0;
    at_work.fetch_sub(1, std::memory_order_relaxed);
    const itimerspec never = {};
    timer_settime(turn_timer, 0, &never, nullptr);
  }

 private:
  bool made_ = false;
};

thread_local TurnTimer turns;

}  // namespace

void EnterBackground() {
  turns.Make();
  // Linux keeps niceness per thread. Where this is refused, the thread stays what it is.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);
}

void NoteRequest(int64_t nanos) {
  if (nanos - last_request_nanos.load(std::memory_order_relaxed) >= kNoteEveryNanos)
    last_request_nanos.store(nanos, std::memory_order_relaxed);
}

BackgroundWork::BackgroundWork() { turns.Start(); }

BackgroundWork::~BackgroundWork() { turns.Stop(); }

std::shared_ptr<void> BeginBackgroundWork() {
  EnterBackground();
  return std::make_shared<BackgroundWork>();
}

}  // namespace espalier::runtime
