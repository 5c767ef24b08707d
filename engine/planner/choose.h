// choose.h — from what every option costs to which one runs in which bucket. Pure: no clock, no
// weights, so that every rule is a unit test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/planner/cost_table.h"
#include "engine/planner/prepared_model.h"

namespace espalier::planner {

// Which option of the table runs in each bucket, under `mode`:
//
//   kFastest   the cheapest option of each bucket, however many layouts that keeps in memory.
//   kBalanced  one layout in one packing for all buckets, the fastest on (geometric) average of
//              those that no bucket rules out (TolerableMicros); or two, when together they take at
//              most `dense_bytes` and are at least kSecondCopyGain faster. Dense always qualifies.
//   kSmallest  the layout with the fewest bytes, whatever it costs in time; among those within
//              kSameBytes of the fewest, the fastest. This is the mode that may be slower than
//              dense: the plan's table shows where.
//
// For a weight of zeros only every mode is kBalanced among the layouts that store no value.
// `deterministic` restricts the choice to a single batch-invariant option for all buckets, by
// predicted costs: fewest bytes in kSmallest, else as kBalanced. Empty when nothing qualifies: then
// no kernel runs this weight in all buckets.
std::vector<int> ChooseOptions(const CostTable& table, WeightMemory mode, bool deterministic,
                               size_t dense_bytes);

// What a layout may cost in a bucket where dense costs `dense_micros`, without being ruled out for
// all buckets: 5 % more, or `slack_micros` more (CostTable::slack_micros).
double TolerableMicros(double dense_micros, double slack_micros);

// A measured cost that decides too much to rest on one measurement: it rules out a layout that is
// faster than dense on average, by less than kCloseCall.
struct CloseCall {
  size_t bucket = 0;
  int option = 0;
};
std::vector<CloseCall> CloseCalls(const CostTable& table);

// Why `chosen` runs in a bucket where `other` costs less, for people: "csr is 30 us, dense 10 us at
// batch 1; weight_memory=fastest keeps both". `batches` of the buckets.
std::string WhyNot(const CostTable& table, WeightMemory mode, bool deterministic,
                   const std::vector<int64_t>& batches, int chosen, int other);

// ChooseOptions' answer, for people: what runs in each bucket, what it costs, what it beat and why.
std::vector<BucketChoice> DescribeChoice(const CostTable& table, WeightMemory mode,
                                         bool deterministic, const std::vector<int64_t>& batches,
                                         const std::vector<int>& choice);
// One option of it.
Candidate DescribeOption(const CostTable& table, size_t bucket, int option);

inline constexpr double kSecondCopyGain = 1.05;
inline constexpr double kSameBytes = 1.01;
inline constexpr double kCloseCall = 1.25;

}  // namespace espalier::planner
