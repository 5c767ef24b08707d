// choose.h — from what every option costs to which one runs in which bucket. Pure: no clock, no
// weights, so that every rule is a unit test.
#pragma once

#include <vector>

#include "engine/planner/cost_table.h"
#include "engine/planner/prepared_model.h"

namespace espalier::planner {

// Which option of the table runs in each bucket, under `mode`:
//
//   kFastest   the cheapest option of each bucket, however many layouts that keeps in memory.
//   kBalanced  one layout in one packing for all buckets, in no bucket slower than dense; or two,
//              when together they take at most `dense_bytes` and are at least kSecondCopyGain
//              faster on (geometric) average. Dense itself always qualifies.
//   kSmallest  the layout with the fewest bytes, whatever it costs in time; among those within
//              kSameBytes of the fewest, the fastest. This is the mode that may be slower than
//              dense: the plan's table shows where.
//
// `deterministic` restricts this to a single batch-invariant option for all buckets, by predicted
// costs: fewest bytes in kSmallest, else the fastest that is in no bucket slower than dense.
// Empty when nothing qualifies: then no kernel runs this weight in all buckets.
std::vector<int> ChooseOptions(const CostTable& table, WeightMemory mode, bool deterministic,
                               size_t dense_bytes);

inline constexpr double kSecondCopyGain = 1.05;
inline constexpr double kSameBytes = 1.01;

}  // namespace espalier::planner
