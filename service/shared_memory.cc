#include "service/shared_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {
namespace {

using absl::StrCat;
using runtime::Printable;

// In Triton's words.
absl::Status OfOtherKind(const SharedMemoryRegion& region, SharedMemoryKind wanted) {
  return absl::NotFoundError(StrCat("the region named '", Printable(region.name()),
                                    "' is registered as ", NameOf(region.kind()),
                                    " shared memory, not ", NameOf(wanted), " shared memory"));
}

absl::Status NotRegistered(absl::string_view name) {
  return absl::NotFoundError(
      StrCat("unable to find shared memory region '", Printable(name), "'; is it registered?"));
}

}  // namespace

absl::Status SharedMemoryRegions::CheckOffered(SharedMemoryKind kind) const {
  if (kind == SharedMemoryKind::kSystem) {
    if (allowed_.system) return absl::OkStatus();
    return absl::UnimplementedError(
        "this server takes no tensors from shared memory; --allow_system_shared_memory turns that "
        "on (for clients on the same machine that may see each other's tensors)");
  }
  if (!allowed_.cuda) {
    return absl::UnimplementedError(
        "this server takes no tensors from memory of its clients on a GPU; "
        "--allow_cuda_shared_memory turns that on (for clients on the same machine that may see "
        "each other's tensors)");
  }
  if (!devices_.gpus.empty()) return absl::OkStatus();
  return absl::UnimplementedError(
      StrCat("this server takes no tensors from memory of its clients on a GPU: it has no GPU (",
             devices_.why_no_gpu, ")"));
}

absl::Status SharedMemoryRegions::RegisterSystem(std::string name, std::string key, uint64_t offset,
                                                 uint64_t byte_size) {
  if (absl::Status status = CheckOffered(SharedMemoryKind::kSystem); !status.ok()) return status;
  auto region =
      SystemSharedMemory::Open(std::move(name), std::move(key), offset, byte_size, devices_);
  return region.ok() ? Add(*std::move(region)) : region.status();
}

absl::Status SharedMemoryRegions::RegisterCuda(std::string name, absl::string_view raw_handle,
                                               int64_t device_id, uint64_t byte_size) {
  if (absl::Status status = CheckOffered(SharedMemoryKind::kCuda); !status.ok()) return status;
  auto region = CudaSharedMemory::Open(std::move(name), raw_handle, device_id, byte_size, devices_);
  return region.ok() ? Add(*std::move(region)) : region.status();
}

absl::Status SharedMemoryRegions::Add(std::shared_ptr<const SharedMemoryRegion> region) {
  const std::lock_guard lock(mutex_);
  if (regions_.count(region->name()) > 0) {
    return absl::AlreadyExistsError(StrCat("shared memory region '", Printable(region->name()),
                                           "' is registered already; unregister it first"));
  }
  if (regions_.size() >= kMaxRegions) {
    return absl::ResourceExhaustedError(
        StrCat(regions_.size(), " shared memory regions are registered, at most ", kMaxRegions,
               " may be; unregister what is not used"));
  }
  uint64_t total = region->byte_size();
  for (const auto& [other, registered] : regions_) total += registered->byte_size();
  if (total > kMaxRegionBytes) {
    return absl::ResourceExhaustedError(StrCat("shared memory regions would have ", total,
                                               " bytes together, at most ", kMaxRegionBytes,
                                               " may be registered"));
  }
  std::string name = region->name();
  regions_.emplace(std::move(name), std::move(region));
  return absl::OkStatus();
}

absl::Status SharedMemoryRegions::Unregister(SharedMemoryKind kind, absl::string_view name) {
  if (absl::Status status = CheckOffered(kind); !status.ok()) return status;
  // Closed after the lock is gone: a GPU may take its time.
  std::vector<std::shared_ptr<const SharedMemoryRegion>> forgotten;
  const std::lock_guard lock(mutex_);
  if (!name.empty()) {
    const auto found = regions_.find(name);
    if (found == regions_.end()) return absl::OkStatus();
    if (found->second->kind() != kind) return OfOtherKind(*found->second, kind);
    forgotten.push_back(std::move(found->second));
    regions_.erase(found);
    return absl::OkStatus();
  }
  for (auto at = regions_.begin(); at != regions_.end();) {
    if (at->second->kind() != kind) {
      ++at;
      continue;
    }
    forgotten.push_back(std::move(at->second));
    at = regions_.erase(at);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const SharedMemoryRegion>> SharedMemoryRegions::Find(
    absl::string_view name) const {
  if (!allowed_.system && !allowed_.cuda) {
    return absl::UnimplementedError(
        "this server takes no tensors from shared memory; --allow_system_shared_memory turns that "
        "on, --allow_cuda_shared_memory for memory on a GPU (for clients on the same machine that "
        "may see each other's tensors)");
  }
  if (!allowed_.system) {
    if (absl::Status status = CheckOffered(SharedMemoryKind::kCuda); !status.ok()) return status;
  }
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(name);
  if (found != regions_.end()) return found->second;
  return NotRegistered(name);
}

template <typename Region>
absl::StatusOr<std::vector<std::shared_ptr<const Region>>> SharedMemoryRegions::List(
    absl::string_view name) const {
  if (absl::Status status = CheckOffered(Region::kKind); !status.ok()) return status;
  std::vector<std::shared_ptr<const Region>> listed;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, region] : regions_) {
    if (!name.empty() && key != name) continue;
    if (region->kind() == Region::kKind) {
      listed.push_back(std::static_pointer_cast<const Region>(region));
    } else if (!name.empty()) {
      return OfOtherKind(*region, Region::kKind);
    }
  }
  if (listed.empty() && !name.empty()) return NotRegistered(name);
  return listed;
}

template absl::StatusOr<std::vector<std::shared_ptr<const SystemSharedMemory>>>
    SharedMemoryRegions::List(absl::string_view) const;
template absl::StatusOr<std::vector<std::shared_ptr<const CudaSharedMemory>>>
    SharedMemoryRegions::List(absl::string_view) const;

}  // namespace espalier::service
