// gpu_reference.h — the oracle for shapes at which the host's would take minutes, and random fills, on the device.
//
// The obvious sum in double, one thread an output, over the arrays of weight_view.h in device memory: it shares nothing
// with the kernels' images. The suite checks it against ReferenceLinear on small problems.
#pragma once

#include <cstdint>

#include "kernels/linear/linear.h"

namespace espalier::kernels::testing {

// expected[i · out + row] and magnitude (Σ|x·w| + |b| + |residual|) of tokens[i], i in [0, count); every pointer in device memory but
// those of `args` itself; synchronous. Returns a static error text, or null.
const char* GpuReferenceLinear(const LinearArgs& args, const int64_t* tokens, int64_t count,
                               double* expected, double* magnitude);

// Uniform in [-1, 1), in device memory, from a hash of seed and index.
const char* GpuFillRandom(void* to, DType dtype, int64_t count, uint64_t seed);

// How many of the values of y [tokens, out] are NaN: what poison leaves where a kernel forgot to write.
const char* GpuCountNan(const void* y, DType dtype, int64_t tokens, int64_t out, int64_t stride,
                        int64_t* found);

}  // namespace espalier::kernels::testing
