#include "engine/planner/patch_memory.h"

#include "absl/strings/str_cat.h"

namespace espalier::planner {
namespace {

// One upload, one result back, on a stream beside those that serve.
absl::StatusOr<kernels::PatchResult> PatchOnGpu(const CudaDevice& gpu, kernels::PatchArgs args) {
  auto stream = gpu.NewStream();
  if (!stream.ok()) return stream.status();
  auto patches = gpu.Upload(args.patches, args.count * sizeof(kernels::ElementPatch));
  if (!patches.ok()) return patches.status();
  kernels::PatchResult found;
  auto result = gpu.Allocate(sizeof(found));
  if (!result.ok()) return result.status();
  args.patches = static_cast<const kernels::ElementPatch*>(patches->get());
  args.result = static_cast<kernels::PatchResult*>(result->get());
  kernels::KernelContext context = gpu.MakeContext();
  context.stream = stream->get();
  kernels::KernelStatus status = kernels::PatchElements(context, args);
  if (status.ok()) status = gpu.module().copy(&found, args.result, sizeof(found), stream->get());
  if (status.ok()) status = gpu.module().synchronize_stream(stream->get());
  if (!status.ok()) return gpu.Explain(status, "changing weights in place");
  return found;
}

}  // namespace

absl::StatusOr<int64_t> PatchMemory(const CudaDevice* gpu, void* memory, int32_t width,
                                    absl::Span<const kernels::ElementPatch> patches) {
  if (patches.empty()) return -1;
  const auto count = static_cast<int64_t>(patches.size());
  kernels::PatchResult found;
  const kernels::PatchArgs args = {memory, width, patches.data(), count, &found};
  if (gpu != nullptr) {
    auto patched = PatchOnGpu(*gpu, args);
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
