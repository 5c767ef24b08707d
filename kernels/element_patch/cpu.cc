#include "kernels/cuda/op_table.h"
#include "kernels/element_patch/element_patch.h"

namespace espalier::kernels {
namespace {

// The first patch whose `bits` are not what memory holds.
template <typename Bits>
int64_t FirstOther(const PatchArgs& args, uint32_t ElementPatch::*bits) {
  const char* memory = static_cast<const char*>(args.memory);
  for (int64_t i = 0; i < args.count; ++i) {
    const ElementPatch& patch = args.patches[i];
    if (*reinterpret_cast<const Bits*>(memory + patch.offset) != static_cast<Bits>(patch.*bits))
      return i;
  }
  return args.count;
}

template <typename Bits>
void Patch(const PatchArgs& args) {
  *args.result = {FirstOther<Bits>(args, &ElementPatch::old_bits), args.count};
  if (args.result->first_unexpected < args.count) return;
  char* memory = static_cast<char*>(args.memory);
  for (int64_t i = 0; i < args.count; ++i) {
    const ElementPatch& patch = args.patches[i];
    *reinterpret_cast<Bits*>(memory + patch.offset) = static_cast<Bits>(patch.new_bits);
  }
  args.result->first_unwritten = FirstOther<Bits>(args, &ElementPatch::new_bits);
}

}  // namespace

KernelStatus PatchElements(const KernelContext& ctx, const PatchArgs& args) {
  if (args.width != 2 && args.width != 4)
    return {KernelCode::kInvalidArgument, "element patch: elements have 2 or 4 bytes"};
  if (ctx.ops != nullptr) return ctx.ops->patch(ctx, args);
  (args.width == 4 ? Patch<uint32_t> : Patch<uint16_t>)(args);
  return {};
}

}  // namespace espalier::kernels
