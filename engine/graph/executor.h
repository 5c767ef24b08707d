// executor.h — runs a program: per batch a bucket is picked and every step calls its kernel.
// Nothing else happens while serving: no allocation, no lock, no lookup by name.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/graph/arena_layout.h"
#include "engine/graph/program.h"
#include "engine/tensor/buffer.h"
#include "engine/tensor/device.h"

namespace espalier::graph {

// Memory of one running batch: input, output and activation buffers at the largest batch. One user
// at a time.
class ExecutorState {
 public:
  static constexpr bool kCopiesAnywhere = false;
  void* input(int i) { return inputs_[i].data(); }
  const void* output(int i) const { return outputs_[i].data(); }
  // Everything that is allocated for the state.
  size_t bytes() const;
  absl::Span<std::byte> arena() { return absl::MakeSpan(arena_.data(), arena_.size()); }

 private:
  friend class Executor;
  std::vector<Buffer> inputs_, outputs_;
  Buffer arena_, scratch_;
  std::vector<void*> values_;
  std::unique_ptr<Device> device_;  // where the instance's threads are its own
  kernels::KernelContext context_;
};

class Executor {
 public:
  // `buckets`: ascending batch sizes, the last one the largest batch; bindings[b][layer] is what
  // linear layer `layer` runs with for batches above buckets[b − 1] and up to buckets[b]. The
  // program, the device and what the bindings point to outlive the executor.
  Executor(const Program& program, const Device& device, std::vector<int64_t> buckets,
           std::vector<std::vector<LinearBinding>> bindings);

  // ResourceExhausted without memory.
  absl::StatusOr<std::unique_ptr<ExecutorState>> NewState() const;

  // Takes new bindings, as above, of weights that changed; the states stay valid. Unimplemented when a kernel does not
  // take its weight. Nothing runs meanwhile.
  absl::Status Rebind(std::vector<std::vector<LinearBinding>> bindings);

  // 1 <= batch <= the last bucket, else InvalidArgument. A kernel that refuses is Internal, with
  // node and kernel. The first run after a Rebind that needs more scratch allocates it: ResourceExhausted.
  absl::Status Run(ExecutorState& state, int64_t batch) const;

 private:
  const Program& program_;
  const Device& device_;
  const std::vector<int64_t> buckets_;
  std::vector<std::vector<LinearBinding>> bindings_;
  const ArenaLayout arena_;
  size_t scratch_bytes_ = 0;
};

}  // namespace espalier::graph
