#include "engine/planner/patch_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::planner {

// One upload, one result back, on a stream beside those that serve.
absl::StatusOr<kernels::PatchResult> MemoryPatcher::PatchOnGpu(kernels::PatchArgs args) {
  const size_t bytes = args.count * sizeof(kernels::ElementPatch);
  if (result_.get() == nullptr) {
    auto stream = gpu_->NewStream();
    if (!stream.ok()) return stream.status();
    stream_ = *std::move(stream);
    auto result = gpu_->Allocate(sizeof(kernels::PatchResult));
    if (!result.ok()) return result.status();
    result_ = *std::move(result);
  }
  if (patches_.bytes() < bytes) {
    patches_ = CudaHandle();
    auto patches = gpu_->Allocate(bytes);
    if (!patches.ok()) return patches.status();
    patches_ = *std::move(patches);
  }
  absl::Status copied = gpu_->Copy(patches_.get(), args.patches, bytes, stream_.get());
  if (!copied.ok()) return copied;
  args.patches = static_cast<const kernels::ElementPatch*>(patches_.get());
  args.result = static_cast<kernels::PatchResult*>(result_.get());
  kernels::KernelContext context = gpu_->MakeContext();
  context.stream = stream_.get();
  const kernels::KernelStatus status = kernels::PatchElements(context, args);
  if (!status.ok()) return gpu_->Explain(status, "changing weights in place");
  kernels::PatchResult found;
  copied = gpu_->Copy(&found, args.result, sizeof(found), stream_.get());
  if (!copied.ok()) return copied;
  return found;
}

absl::StatusOr<int64_t> MemoryPatcher::Patch(void* memory, int32_t width,
                                             absl::Span<const kernels::ElementPatch> patches) {
  if (patches.empty()) return -1;
  const auto count = static_cast<int64_t>(patches.size());
  kernels::PatchResult found;
  const kernels::PatchArgs args = {memory, width, patches.data(), count, &found};
  if (gpu_ != nullptr) {
    auto patched = PatchOnGpu(args);
    if (!patched.ok()) return patched.status();
    found = *patched;
  } else if (const auto status = kernels::PatchElements({}, args); !status.ok()) {
    return absl::InternalError(status.message);
  }
  if (found.first_unexpected < count) return found.first_unexpected;
  if (found.first_unwritten == count) return -1;
  return absl::InternalError(absl::StrCat("an element at byte ",
                                          patches[found.first_unwritten].offset,
                                          " does not read back as it was written"));
}

}  // namespace espalier::planner
