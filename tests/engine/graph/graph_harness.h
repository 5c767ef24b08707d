// graph_harness.h — lowers a model, runs it at several batches and compares every output with the
// oracle.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/graph/executor.h"
#include "engine/graph/lower.h"
#include "tests/engine/graph/onnx_reference.h"

namespace espalier::testing {

// Lowering consumes a graph, so tests hand over how to build it.
using Build = std::function<formats::ModelGraph()>;

// A lowered program with every linear layer bound to the oracle kernel, ready to run.
class Runner {
 public:
  Runner(graph::Program program, int64_t max_batch);

  // Runs `batch` items; the arena is filled with NaN patterns before, so that a value that is read
  // before it is written (or lost to a wrong reuse of memory) shows.
  std::map<std::string, Values> Run(const std::map<std::string, Values>& inputs, int64_t batch);
  const graph::Program& program() const { return program_; }
  graph::ExecutorState& state() { return *state_; }

 private:
  graph::Program program_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<graph::Executor> executor_;
  std::unique_ptr<graph::ExecutorState> state_;
};

// Inputs of a graph at a batch: floats uniform in [-1, 1), integers small.
std::map<std::string, Values> RandomInputs(const formats::ModelGraph& graph, int64_t batch,
                                           uint32_t seed);

// Lowers with and without fusion and compares with the oracle, at batches 1, 2, 3, 7 (only once
// when max_batch is 0). |error| <= tolerance · max(1, |expected|).
void ExpectMatchesReference(const Build& build, int64_t max_batch = 7, double tolerance = 2e-6);

// The status of lowering.
absl::Status LowerStatus(formats::ModelGraph graph, int64_t max_batch);

}  // namespace espalier::testing
