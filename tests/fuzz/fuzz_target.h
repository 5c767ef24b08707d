// fuzz_target.h — what a fuzz target offers, to libFuzzer (clang) and to the replay driver (any compiler).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

// Reads one input; aborts when a promise is broken. Always 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace espalier::fuzz {

// Good inputs to start from, one for every feature of the format.
std::vector<std::string> Seeds();

// An input that is still well-formed, with something in it changed: random bytes rarely get past the parser. An input
// that is not well-formed comes back as it is.
std::string MutateStructure(const std::string& input, std::mt19937_64& random);

// A check that holds in every build type.
inline void Require(bool holds, const char* promise, const std::string& detail = "") {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n%s\n", promise, detail.c_str());
  std::abort();
}

}  // namespace espalier::fuzz
