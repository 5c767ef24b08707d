// sanitized.h — whether this build checks every access, which makes tests several times slower. Suites that go through
// thousands of cases take a share of them then; all of them are run without a sanitizer.
#pragma once

namespace espalier::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace espalier::testing
