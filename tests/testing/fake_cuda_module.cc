// The fake device as a file for espalierd's --cuda_module. ESPALIER_FAKE_CUDA_LAUNCHES: the device breaks after so many
// graph launches; unset: never.
#include <cstdlib>

#include "tests/testing/fake_cuda.h"

extern "C" __attribute__((visibility("default"))) const espalier::kernels::cuda::CudaModule*
espalier_cuda_module(uint32_t abi) {
  using espalier::testing::FakeCuda;
  if (abi != espalier::kernels::cuda::kCudaModuleAbi) return nullptr;
  FakeCuda& fake = FakeCuda::Reset();
  fake.micros = espalier::testing::ProportionalMicros;
  if (const char* launches = std::getenv("ESPALIER_FAKE_CUDA_LAUNCHES"); launches != nullptr) {
    fake.breaks_after_launches = std::atoi(launches);
  }
  return &FakeCuda::Module();
}
