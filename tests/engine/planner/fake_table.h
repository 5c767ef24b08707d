// fake_table.h — cost tables made by hand, for tests of what is decided from them.
#pragma once

#include <string>
#include <vector>

#include "engine/planner/cost_table.h"

namespace espalier::planner {

// A kernel that is never run.
kernels::LinearVariant FakeVariant(const char* name, kernels::Layout layout,
                                   const char* packing = nullptr, bool batch_invariant = true);

struct FakeOption {
  const kernels::LinearVariant* variant;
  size_t bytes;
  std::vector<double> micros;  // per bucket, as measured
};

// Buckets of 1, 2, 4, … tokens.
CostTable FakeTable(const std::vector<FakeOption>& options);

}  // namespace espalier::planner
