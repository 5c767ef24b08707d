// shared_memory.h — the regions of shared memory that clients registered for their tensors.
//
// Whoever may register can make the server read and overwrite memory of others: any POSIX shared memory that the server's
// user may open, and what is behind any handle that a process on this machine exported. So each kind is off unless the
// server was told otherwise. Both kinds share one space of names, since a tensor names a region and not its kind.
//
// Limits   kMaxRegions, since each holds a file descriptor or a mapping of the GPU, and kMaxRegionBytes in all.
// Errors   Unimplemented while off, and for CUDA without a GPU; InvalidArgument for a name or range that cannot be meant;
//          NotFound for what does not exist, or is of the other kind; AlreadyExists; ResourceExhausted above the limits.
// Threads  All functions from any thread. A region stays usable by those that hold it after it was unregistered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/devices.h"
#include "service/cuda_shared_memory.h"
#include "service/shared_memory_region.h"
#include "service/system_shared_memory.h"

namespace espalier::service {

class SharedMemoryRegions {
 public:
  static constexpr size_t kMaxRegions = 1024;
  // Nothing is allocated for a region, but sums of sizes must not overflow: far above any machine.
  static constexpr uint64_t kMaxRegionBytes = uint64_t{1} << 44;

  struct Allowed {
    bool system = false;
    bool cuda = false;
  };
  // `devices` outlives the regions, and everybody who holds one.
  SharedMemoryRegions(Allowed allowed, const Devices& devices)
      : allowed_(allowed), devices_(devices) {}

  // Whether regions of this kind can be registered; else why not.
  absl::Status CheckOffered(SharedMemoryKind kind) const;

  absl::Status RegisterSystem(std::string name, std::string key, uint64_t offset,
                              uint64_t byte_size);
  absl::Status RegisterCuda(std::string name, absl::string_view raw_handle, int64_t device_id,
                            uint64_t byte_size);
  // Forgets a region, or all of the kind for an empty name. OK also for a region that is not there.
  absl::Status Unregister(SharedMemoryKind kind, absl::string_view name);
  // Of either kind.
  absl::StatusOr<std::shared_ptr<const SharedMemoryRegion>> Find(absl::string_view name) const;
  // The region of this name and kind, or all of the kind for an empty name, by name.
  template <typename Region>
  absl::StatusOr<std::vector<std::shared_ptr<const Region>>> List(absl::string_view name) const;

 private:
  absl::Status Add(std::shared_ptr<const SharedMemoryRegion> region);

  const Allowed allowed_;
  const Devices& devices_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const SharedMemoryRegion>, std::less<>> regions_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace espalier::service
