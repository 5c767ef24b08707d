// digest.h — SHA-256 of texts and of a weight's pattern of zeros, and the identity of this build:
// what plan caches are named by.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "engine/tensor/tensor.h"

namespace espalier::planner {

// 64 lower-case hex digits.
std::string Sha256Hex(absl::string_view bytes);

// Digest of which elements of a weight [out, in] are non-zero (±0 both are zero), of its shape and
// dtype. Kernel times depend on nothing else of a weight. O(out · in), some 10 ms for 4096 × 4096.
std::string PatternDigest(const TensorView& weight);

// The linker's build id of the running program, or its version where the linker wrote none: another
// build may have other kernels, so it measures for itself.
std::string BuildId();

}  // namespace espalier::planner
