// thread_priority.h — threads that work in the background while others serve.
//
// TRAP  A thread hands its scheduling class down to the threads that it creates, and without
//       privileges the way back is closed. What serves (instances, the device's workers) must
//       therefore be created by a thread that never came here.
#pragma once

namespace espalier::runtime {

// The calling thread gets the processor when nobody else wants it: SCHED_IDLE, or nice 19 where
// that is refused. For good.
void EnterBackground();

}  // namespace espalier::runtime
