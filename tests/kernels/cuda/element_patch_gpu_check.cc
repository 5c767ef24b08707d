// element_patch_gpu_check — elements of device memory overwritten by the module, against the same on the host.
//
//   element_patch_gpu_check [--module libespalier_cuda.so]
//
// For both widths and counts up to 2,600,000 (1 % of what a 1 GB weight of 4 bytes holds, in as much memory): all patches
// land, nothing else moves; a patch with wrong old bits is found, the first of them, and nothing is written. The last
// line is the time of the largest case, upload and result included. Exits 0, 1 when something is wrong, 2 without a GPU.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/element_patch/element_patch.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/random_weight.h"

namespace espalier::kernels::testing {
namespace {

uint32_t BitsAt(const std::vector<char>& memory, int64_t offset, int32_t width) {
  uint32_t bits = 0;
  std::memcpy(&bits, &memory[offset], width);
  return bits;
}

class PatchCheck {
 public:
  PatchCheck(const cuda::CudaModule* module, void* stream, int32_t width, int64_t count,
             int64_t elements)
      : module_(module), stream_(stream), width_(width), host_(elements * width) {
    Random random(static_cast<uint64_t>(count) * width + 1);
    const auto some_bits = [&] {
      const float value = random.Unit();
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      return width == 2 ? bits >> 8 & 0xffff : bits;
    };
    for (int64_t i = 0; i < elements; ++i) {
      const uint32_t bits = some_bits();
      std::memcpy(&host_[i * width], &bits, width);
    }
    const int64_t gap = count == 0 ? 1 : elements / count;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t offset = (i * gap + i % gap) * width;
      patches_.push_back({offset, BitsAt(host_, offset, width), some_bits()});
    }
    device_ = DeviceBuffer(module, host_.data(), host_.size());
  }

  // Empty when all is well.
  std::string Run() {
    const auto count = static_cast<int64_t>(patches_.size());
    std::vector<ElementPatch> wrong = patches_;
    for (int64_t i = count / 3; i < count; i += 5) wrong[i].old_bits ^= 1;
    if (count > 0) {
      const PatchResult refused = Patch(wrong);
      if (refused.first_unexpected != count / 3)
        return "found patch " + std::to_string(refused.first_unexpected) + " instead of " +
               std::to_string(count / 3);
      if (Downloaded() != host_) return "wrote although a patch was wrong";
    }
    const auto begin = std::chrono::steady_clock::now();
    const PatchResult done = Patch(patches_);
    micros_ =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    if (done.first_unexpected != count || done.first_unwritten != count)
      return "did not find what is there";
    for (const ElementPatch& patch : patches_)
      std::memcpy(&host_[patch.offset], &patch.new_bits, width_);
    return Downloaded() == host_ ? "" : "memory is not what it should be";
  }
  double micros() const { return micros_; }

 private:
  PatchResult Patch(const std::vector<ElementPatch>& patches) {
    const DeviceBuffer on_device(module_, patches.data(), patches.size() * sizeof(ElementPatch));
    const PatchResult before = {-1, -1};
    const DeviceBuffer result(module_, &before, sizeof(before));
    KernelContext ctx;
    ctx.stream = stream_;
    OrDie(
        module_->ops->patch(ctx, {device_.as(), width_, on_device.as<ElementPatch>(),
                                  static_cast<int64_t>(patches.size()), result.as<PatchResult>()}),
        "patch");
    OrDie(module_->synchronize_stream(stream_), "patch");
    PatchResult found;
    result.Download(&found);
    return found;
  }
  std::vector<char> Downloaded() const {
    std::vector<char> bytes(host_.size());
    device_.Download(bytes.data());
    return bytes;
  }

  const cuda::CudaModule* module_;
  void* stream_;
  const int32_t width_;
  std::vector<char> host_;
  std::vector<ElementPatch> patches_;
  DeviceBuffer device_;
  double micros_ = 0;
};

int Main(const std::string& path) {
  const cuda::CudaModule* module = OpenModuleOrNull(path);
  if (module == nullptr) return 2;
  void* stream = nullptr;
  OrDie(module->create_stream(&stream), "stream");
  int failures = 0;
  for (const int32_t width : {2, 4}) {
    for (const int64_t count : {0, 1, 255, 256, 257, 10'007, 2'600'000}) {
      PatchCheck check(module, stream, width, count, count * 100 + 17);
      const std::string problem = check.Run();
      if (!problem.empty()) ++failures;
      std::printf("%s width %d, %lld patches: %s %.0f us\n", problem.empty() ? "ok" : "FAILED",
                  width, static_cast<long long>(count), problem.c_str(), check.micros());
    }
  }
  OrDie(module->destroy_stream(stream), "stream");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace espalier::kernels::testing

int main(int argc, char** argv) {
  const bool named = argc == 3 && std::string(argv[1]) == "--module";
  return espalier::kernels::testing::Main(named ? argv[2] : "libespalier_cuda.so");
}
