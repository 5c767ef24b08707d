// kernel_context.h — where and on what a kernel runs: architecture, stream, and threads that the engine owns.
#pragma once

#include <cstdint>
#include <type_traits>

namespace espalier::kernels {
namespace cuda {
struct OpTable;  // kernels/cuda/op_table.h
}

// The instruction set a variant is written for. CPU variants dispatch AVX-512 / AVX2 / scalar inside (Highway).
enum class Arch : uint8_t { kCpu, kSm80, kSm90 };

struct KernelContext {
  // Runs task(arg, i) for every i in [0, n), possibly concurrently; returns when all are done.
  using Task = void (*)(void* arg, int64_t i);

  Arch arch = Arch::kCpu;
  int threads = 1;  // that parallel_for spreads over
  void (*parallel_for)(void* pool, int64_t n, Task task, void* arg) = nullptr;  // null: run inline
  void* pool = nullptr;    // passed to parallel_for
  void* stream = nullptr;  // cudaStream_t on a GPU
  // The kernels of the GPU behind `stream` other than linear ones; null on the CPU.
  const cuda::OpTable* ops = nullptr;

  // Runs fn(i) for i in [0, n) through parallel_for, or inline when there is only one thread or one task.
  template <typename Fn>
  void ParallelFor(int64_t n, Fn&& fn) const {
    if (parallel_for == nullptr || threads <= 1 || n <= 1) {
      for (int64_t i = 0; i < n; ++i) fn(i);
      return;
    }
    parallel_for(
        pool, n, [](void* arg, int64_t i) { (*static_cast<std::remove_reference_t<Fn>*>(arg))(i); },
        &fn);
  }
};

}  // namespace espalier::kernels
