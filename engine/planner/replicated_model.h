// replicated_model.h — one model on several GPUs, as one prepared model: states are handed out in the order of a list of
// placements, and a batch runs where its state is.
#pragma once

#include <memory>
#include <vector>

#include "engine/planner/prepared_model.h"

namespace espalier::planner {

// `placement[i]`: the replica of instance i. At least one replica; signatures are equal. plan() is the first one's, bytes
// are those of all.
std::unique_ptr<PreparedModel> MakeReplicatedModel(
    std::vector<std::unique_ptr<PreparedModel>> replicas, std::vector<int> placement);

}  // namespace espalier::planner
