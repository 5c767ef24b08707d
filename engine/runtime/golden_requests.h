// golden_requests.h — requests with known answers that a version must give before it serves.
//
//   <model>/golden/<case>/inputs/<input>.npy     every input, with the batch dimension
//   <model>/golden/<case>/outputs/<output>.npy   what is expected of one or more outputs
//   <model>/golden/<case>/tolerance              "1e-3 1e-5" when it is left out
//
//   numpy.save("golden/seven/inputs/image.npy", image)
//
// Floats agree when |got − expected| ≤ relative · |expected| + absolute, a NaN agrees with a NaN;
// everything else must be equal. Hidden files are left out.
// Limits   kMaxCases cases, kMaxFileBytes a file. Case names are those of folders.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/runtime/served_version.h"

namespace espalier::runtime {

inline constexpr int kMaxGoldenCases = 1000;
inline constexpr int64_t kMaxGoldenFileBytes = int64_t{64} << 20;

// Asks them all, one after the other; how many there were. FailedPrecondition when an answer is not
// as expected, naming case, output, element, expected and got; NotFound when there is none to ask;
// InvalidArgument for a case that is none.
absl::StatusOr<int> AskGoldenRequests(const VersionHandle& version,
                                      const std::string& model_directory);

}  // namespace espalier::runtime
