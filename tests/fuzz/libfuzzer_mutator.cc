// Gives libFuzzer the mutations that keep an input well-formed, beside its own.
#include <algorithm>
#include <cstring>

#include "tests/fuzz/fuzz_target.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  std::mt19937_64 random(seed);
  const std::string mutant =
      espalier::fuzz::MutateStructure({reinterpret_cast<const char*>(data), size}, random);
  if (mutant.size() > max_size) return size;
  std::memcpy(data, mutant.data(), mutant.size());
  return mutant.size();
}
