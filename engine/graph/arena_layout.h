// arena_layout.h — where every activation lives in the arena: offsets fixed before serving, memory
// reused as values die.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/graph/program.h"

namespace espalier::graph {

struct ArenaLayout {
  std::vector<size_t> offsets;  // per value; meaningful for activations only
  size_t bytes = 0;
};

// For batches of up to `batch` items. Values whose lives overlap never share bytes; a value dies at
// its last reader, and an op that works in place may give its output the memory of an input that
// dies with it and lies there in the same form.
ArenaLayout PlanArena(const Program& program, int64_t batch);

}  // namespace espalier::graph
