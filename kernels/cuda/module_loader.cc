#include "kernels/cuda/module_loader.h"

#include <dlfcn.h>

namespace espalier::kernels::cuda {

bool HasCudaDriver() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return false;
  dlclose(driver);
  return true;
}

const CudaModule* OpenCudaModule(const std::string& path, std::string* error) {
  const std::string file = path.empty() ? "libespalier_cuda.so" : path;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* text = dlerror();
    *error = text != nullptr ? text : file + ": dlopen failed";
    return nullptr;
  }
  const auto entry =
      reinterpret_cast<decltype(&espalier_cuda_module)>(dlsym(handle, "espalier_cuda_module"));
  if (entry == nullptr) {
    *error = file + ": has no espalier_cuda_module";
    return nullptr;
  }
  const CudaModule* module = entry(kCudaModuleAbi);
  if (module == nullptr || module->linear_args_bytes != sizeof(LinearArgs) ||
      module->linear_count != static_cast<int32_t>(CudaKernel::kCount)) {
    *error = file + ": built for another version, expected ABI " + std::to_string(kCudaModuleAbi);
    return nullptr;
  }
  return module;
}

}  // namespace espalier::kernels::cuda
