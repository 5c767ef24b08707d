// weight_memory.h — how many copies of a weight, in different layouts, stay in memory.
#pragma once

namespace espalier::formats {

// A setting of the model's config.pbtxt; the planner gives it its meaning (engine/planner/choose.h).
//   kSmallest  the one with the fewest bytes, even where dense would be faster
//   kBalanced  one that is in no bucket noticeably slower than dense; a second only within the
//              dense bytes
//   kFastest   whatever is fastest in each bucket
enum class WeightMemory { kSmallest, kBalanced, kFastest };

}  // namespace espalier::formats
