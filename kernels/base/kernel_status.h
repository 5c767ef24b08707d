// kernel_status.h — what a kernel returns. Kernels return, the engine explains, the service translates.
#pragma once

#include <cstdint>

namespace espalier::kernels {

enum class KernelCode : uint8_t {
  kOk,
  kUnsupported,  // no variant matches; the caller tries the next candidate
  kInvalidArgument,  // a broken contract of the header (null pointer, negative size, stride below width)
  kOutOfMemory,
  kLaunchFailed,  // the device or a library refused the call
};

// `message` is a string with static storage duration: kernels never allocate to report.
struct [[nodiscard]] KernelStatus {
  KernelCode code = KernelCode::kOk;
  const char* message = "";
  bool ok() const { return code == KernelCode::kOk; }
};

}  // namespace espalier::kernels
