// bench_inputs.h — what `espalier bench` sends: requests cut from files, or made of random values.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/bench/shared_tensors.h"
#include "clients/cli/args.h"
#include "clients/cpp/client.h"

namespace espalier::cli {

struct BenchInputs {
  std::vector<client::InferRequest> requests;  // at least one; sent in turn
  std::string description;                     // "10000 items of digits.npy", "random"
};

// What one answer has, in order: for those who keep room for it. InvalidArgument for an output whose size the metadata
// leaves open.
absl::StatusOr<std::vector<bench::SharedTensors::Output>> OutputsOf(
    const inference::ModelMetadataResponse& metadata, int64_t batch);

// Flags: --input, --shape, --seed, --version, --priority, --queue_timeout. A leading dimension of −1
// is the batch. A file is a pool of items from which requests of `batch` are cut, a directory the
// pool of all its files; an input without a file is random.
// Limits   kMaxBenchBytes of distinct requests, but at least one.
absl::StatusOr<BenchInputs> MakeBenchInputs(const Args& args,
                                            const inference::ModelMetadataResponse& metadata,
                                            int64_t batch);

inline constexpr int64_t kMaxBenchBytes = int64_t{64} << 20;

}  // namespace espalier::cli
