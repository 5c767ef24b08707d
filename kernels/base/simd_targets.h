// simd_targets.h — which instruction sets CPU kernels are compiled for: AVX-512, AVX2, and one-lane code for anything
// older. SSE is left out: no machine that serves lacks AVX2, and every set costs build time and binary size.
// Include before hwy/foreach_target.h and hwy/highway.h.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#endif
