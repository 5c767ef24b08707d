#include "engine/runtime/thread_priority.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace espalier::runtime {

void EnterBackground() {
  const sched_param none = {};
  if (pthread_setschedparam(pthread_self(), SCHED_IDLE, &none) == 0) return;
  // Linux keeps niceness per thread. Where this is refused too, the thread stays what it is.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
}

}  // namespace espalier::runtime
