// thread_priority.h — threads that work in the background while others serve.
//
// A processor is left to whoever serves in two ways. Nice 10, a tenth of the weight of others: they get
// nearly all of a processor that they ask for, and a load still comes to its end on a machine that is
// busy for good (SCHED_IDLE did not see to that). But a kernel without full preemption may leave the
// processor to a thread that has it until the next tick, 4 ms at 250 Hz, and that is what a 99th
// percentile is made of. So as long as requests come and others want its processor a background thread
// naps after every kTurn, which leaves it about a third of a processor, or less where more of them are at
// work than half the processors: two would else have both of two at the same moment.
//
// TRAP  A thread hands its niceness down to the threads that it creates, and without
//       privileges the way back is closed. What serves (instances, the device's workers) must
//       therefore be created by a thread that never came here.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

namespace espalier::runtime {

// The calling thread gives way to the others. For good.
void EnterBackground();

// Says that a request came at `nanos` (of NowNanos). Any thread.
void NoteRequest(int64_t nanos);

// A piece of work of the calling thread. While it lives, and if the thread is in the background,
// the thread steps aside as said above: a timer of its own interrupts it (SIGURG, which is ignored
// where nobody handles it; system calls are restarted). Not nested.
class BackgroundWork {
 public:
  static constexpr std::chrono::microseconds kTurn{250};
  static constexpr std::chrono::microseconds kNap{
      500};  // and as long as a turn and a nap for each one too many
  static constexpr std::chrono::milliseconds kQuiet{10};  // since the last request: no more naps
  // On a processor: no more naps either. Until then others are taken to want it: most work of an update is over by then.
  static constexpr std::chrono::milliseconds kAlone{100};

  BackgroundWork();
  ~BackgroundWork();
  BackgroundWork(const BackgroundWork&) = delete;
  BackgroundWork& operator=(const BackgroundWork&) = delete;
};

// For threads that only work in the background and that others make: the calling one is such a thread from now on, and at
// work while what it gets lives.
std::shared_ptr<void> BeginBackgroundWork();

}  // namespace espalier::runtime
