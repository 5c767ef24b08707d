#include "engine/runtime/update_statistics.h"

namespace espalier::runtime {

UpdateStatistics UpdateCounts::Read() const {
  const std::lock_guard lock(mutex_);
  UpdateStatistics read = counts_;
  read.refused.assign(refused_.begin(), refused_.end());
  return read;
}

}  // namespace espalier::runtime
