// element_patch.h — single elements of packed weights and constants overwritten, after a look at what is there.
//
//   for every patch: memory[offset] == old_bits?   all of them: memory[offset] = new_bits, and read back
//
// Shapes   memory: anything that holds `width` bytes at every offset; patches: [count]; result: [1]
// Types    width 2 or 4: the low bytes of the bits
// Memory   Everything is borrowed, and on the device with KernelContext::ops. No two patches have one offset.
// Limits   count >= 0
// Errors   kInvalidArgument for another width; what is found is in `result`, not a status.
// Async    CPU: returns when it is done. CUDA: enqueued on ctx.stream. Nothing else touches the memory meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/kernel_context.h"
#include "kernels/base/kernel_status.h"

namespace espalier::kernels {

struct ElementPatch {
  int64_t offset;  // in bytes, a multiple of the width
  uint32_t old_bits, new_bits;
};

struct PatchResult {
  int64_t
      first_unexpected;  // first patch that did not find its old bits: nothing was written; `count` for none
  int64_t first_unwritten;  // first patch whose new bits do not read back; `count` for none
};

struct PatchArgs {
  void* memory = nullptr;
  int32_t width = 4;
  const ElementPatch* patches = nullptr;
  int64_t count = 0;
  PatchResult* result = nullptr;
};

[[nodiscard]] KernelStatus PatchElements(const KernelContext& ctx, const PatchArgs& args);

}  // namespace espalier::kernels
