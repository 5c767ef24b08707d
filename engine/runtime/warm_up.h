// warm_up.h — the samples of a config's model_warmup, run before a version serves: first runs touch
// memory and code for the first time, and are slower than those that follow.
//
// They go the way of every request (checked, queued, merged, run), but are not counted. Each sample
// is sent to as many instances as there are at once, `count` times.
//
//   data              what the input gets
//   zero_data         zeros
//   random_data       the same on every start: floats in [0.5, 1), integers in [0, 127], which are
//                     indices into most tables
//   input_data_file   bytes of <model>/warmup/<file>: those of one item, for each of the batch, or
//                     those of the whole batch
#pragma once

#include <string>

#include "absl/status/status.h"
#include "engine/runtime/served_version.h"

namespace espalier::runtime {

// Blocks until all are answered. `folder` is where data files are, empty: nowhere. InvalidArgument
// for a sample that does not fit the model and for a file that does not fit the sample; a sample
// that the model's own queue policy turns down is no error.
absl::Status WarmUp(const VersionHandle& version, const std::string& folder);

}  // namespace espalier::runtime
