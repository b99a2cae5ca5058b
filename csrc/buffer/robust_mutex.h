// A lock between processes whose owner's death is noticed. Blocking, not lock-free: a preempted
// holder stops the others; a dead one breaks the buffer, with an error instead of a hang.
#pragma once

#include <errno.h>
#include <pthread.h>

namespace asyncrl {

class RobustMutex {
 public:
  // Once, by the creator, before the segment has a second user. Returns an errno.
  int init() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    const int error = pthread_mutex_init(&mutex_, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return error;
  }

  // False once an owner died inside. What it guards may be half changed, so it is given up for
  // good: an unlock without pthread_mutex_consistent makes every later lock fail.
  [[nodiscard]] bool lock() {
    const int error = pthread_mutex_lock(&mutex_);
    if (error == EOWNERDEAD) pthread_mutex_unlock(&mutex_);
    return error == 0;
  }

  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_;
};

}  // namespace asyncrl
