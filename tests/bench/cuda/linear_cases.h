// linear_cases.h — the problems that linear_gpu measures, in suites.
#pragma once

#include <string>
#include <vector>

#include "tests/bench/cuda/layer_stack.h"

namespace espalier::bench {

struct Case {
  std::string name;
  std::vector<LayerSpec> layers;
  int64_t tokens = 0;
  bool cold = true;
};

// Of one suite (see linear_gpu.cc), or the one problem that LAYOUT/BLOCK/DENSITY/TOKENS/OUT/IN/ACTIVATION/STATE is; nothing
// for another name, exits on a malformed problem.
std::vector<Case> Suite(const std::string& name);

}  // namespace espalier::bench
