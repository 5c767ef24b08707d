#include <algorithm>
#include <atomic>
#include <cstring>
#include <dnnl.hpp>
#include <map>
#include <tuple>

#include "kernels/dense_linear/dense_linear.h"
#include "kernels/dense_linear/tiling.h"
#include "kernels/elementwise/elementwise.h"

extern "C" void omp_set_num_threads(int);  // of libgomp, which Debian's oneDNN threads with

namespace espalier::kernels {
namespace {

using dnnl::memory;

// What its kernel asks for whatever the shape, in user mode (queried over 8,550 shapes: always 640); checked again when
// a primitive is made.
constexpr size_t kLibraryScratchBytes = 4096;

// Rows of W that one primitive computes for some tokens. Its kernel takes contiguous x and y only.
struct Shape {
  int64_t tokens, rows, width, in;
  bool bias;
  auto operator<=>(const Shape&) const = default;
};

const dnnl::engine& Engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::format_tag TagOf(int64_t width) {
  switch (width) {
    case 16:
      return memory::format_tag::BA16a16b;
    case 32:
      return memory::format_tag::BA16a32b;
    case 48:
      return memory::format_tag::BA16a48b;
    default:
      return memory::format_tag::BA16a64b;
  }
}

dnnl::matmul::primitive_desc Describe(const Shape& shape) {
  const auto f32 = memory::data_type::f32;
  const memory::desc x({shape.tokens, shape.in}, f32, memory::format_tag::ab);
  const memory::desc y({shape.tokens, shape.rows}, f32, memory::format_tag::ab);
  const memory::desc w({shape.in, shape.rows}, f32, TagOf(shape.width));
  const memory::desc bias({1, shape.rows}, f32, memory::format_tag::ab);
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return {shape.bias ? dnnl::matmul::desc(x, w, bias, y) : dnnl::matmul::desc(x, w, y), attr,
          Engine()};
}

// The reference implementation takes any format, thousands of times slower.
bool IsReference(const dnnl::matmul::primitive_desc& desc) {
  return std::strncmp(desc.impl_info_str(), "brg", 3) != 0;
}

// A primitive and memory objects to set pointers in: they are mutable, so every thread has its own. The generated code
// is shared by oneDNN's global cache.
class Multiplication {
 public:
  explicit Multiplication(const Shape& shape) {
    const dnnl::matmul::primitive_desc desc = Describe(shape);
    usable_ = !IsReference(desc) && desc.scratchpad_desc().get_size() <= kLibraryScratchBytes;
    primitive_ = dnnl::matmul(desc);
    const auto add = [&](int name, const memory::desc& memory_desc) {
      args_[count_++] = {name, memory(memory_desc, Engine(), nullptr)};
    };
    add(DNNL_ARG_SRC, desc.src_desc());
    add(DNNL_ARG_WEIGHTS, desc.weights_desc());
    add(DNNL_ARG_DST, desc.dst_desc());
    add(DNNL_ARG_SCRATCHPAD, desc.scratchpad_desc());
    if (shape.bias) add(DNNL_ARG_BIAS, desc.bias_desc());
  }

  bool usable() const { return usable_; }

  void Run(const dnnl::stream& stream, const float* x, const float* w, float* y, void* scratch,
           const float* bias) {
    const void* pointers[] = {x, w, y, scratch, bias};
    dnnl_exec_arg_t args[5];
    for (int i = 0; i < count_; ++i) {
      args_[i].second.set_data_handle(const_cast<void*>(pointers[i]));
      args[i] = {args_[i].first, args_[i].second.get()};
    }
    dnnl::error::wrap_c_api(dnnl_primitive_execute(primitive_.get(), stream.get(), count_, args),
                            "could not execute a primitive");
  }

 private:
  dnnl::matmul primitive_;
  std::pair<int, memory> args_[5];
  int count_ = 0;
  bool usable_ = false;
};

// This thread's multiplications. A server sees any token count up to its largest batch, for every shape of its layers;
// beyond kMost it starts afresh, which costs some 200 µs a shape.
class Multiplications {
 public:
  static Multiplications& OfThisThread() {
    thread_local Multiplications instance;
    return instance;
  }

  Multiplication& For(const Shape& shape) {
    const auto found = made_.find(shape);
    if (found != made_.end()) return found->second;
    if (made_.size() >= kMost) made_.clear();
    return made_.emplace(shape, shape).first->second;
  }
  const dnnl::stream& stream() const { return stream_; }

 private:
  static constexpr size_t kMost = 1024;
  std::map<Shape, Multiplication> made_;
  dnnl::stream stream_{Engine()};
};

// Tokens [part.token, part.token_end) for the rows that start at `row`, all in tiles of one width.
bool RunRows(const LinearArgs& args, const DenseTasks::Part& part, int64_t row, int64_t rows,
             int64_t width, std::byte* scratch) {
  const WeightView& w = args.weight;
  Multiplications& multiplications = Multiplications::OfThisThread();
  const float* weights =
      static_cast<const float*>(w.packed) + row * DenseTiling(w.out, w.in).padded_in();
  // Rows of x that do not follow each other are taken one by one.
  const int64_t step = args.x_stride == w.in ? part.token_end - part.token : 1;
  Multiplication& multiplication =
      multiplications.For({step, rows, width, w.in, args.bias != nullptr});
  if (!multiplication.usable()) return false;
  for (int64_t token = part.token; token < part.token_end; token += step) {
    float* y = static_cast<float*>(args.y) + token * args.y_stride + row;
    // The library's own way to add (a post-op) takes more scratch than is known in advance. Where the residual is in the
    // way, in y, the product goes elsewhere.
    const bool direct = (step == 1 || args.y_stride == rows) && args.residual != args.y;
    float* to = direct ? y : reinterpret_cast<float*>(scratch + kLibraryScratchBytes);
    multiplication.Run(multiplications.stream(),
                       static_cast<const float*>(args.x) + token * args.x_stride, weights, to,
                       scratch, args.bias == nullptr ? nullptr : args.bias + row);
    for (int64_t t = 0; t < step; ++t) {
      const float* sums = to + t * rows;
      float* const row_of_y = y + t * args.y_stride;
      if (args.residual != nullptr) {
        const float* residual = static_cast<const float*>(args.residual) + row;
        residual += (token + t) * args.residual_stride;
        (void)Binary({}, {BinaryOp::kAdd, 1, {rows}, {1}, {1}, sums, residual, row_of_y});
        sums = row_of_y;
      }
      if (args.activation != Activation::kNone) {
        (void)Activate({}, {args.activation, sums, row_of_y, rows});
      } else if (sums != row_of_y) {
        std::copy_n(sums, rows, row_of_y);
      }
    }
  }
  return true;
}

bool RunPart(const LinearArgs& args, const DenseTasks::Part& part, std::byte* scratch) {
  omp_set_num_threads(1);  // of this thread: the parallelism is ours
  const DenseTiling tiling(args.weight.out, args.weight.in);
  const int64_t row = part.tile * kDenseTileRows;
  const int64_t end = std::min(args.weight.out, part.tile_end * kDenseTileRows);
  const int64_t last_width = tiling.Width(part.tile_end - 1);
  const int64_t whole_end =
      last_width == kDenseTileRows ? end : (part.tile_end - 1) * kDenseTileRows;
  return (whole_end == row || RunRows(args, part, row, whole_end - row, kDenseTileRows, scratch)) &&
         (whole_end == end || RunRows(args, part, whole_end, end - whole_end, last_width, scratch));
}

size_t TaskScratchBytes(const LinearDesc& desc, const DenseTasks& tasks) {
  const int64_t tokens = (desc.tokens + tasks.by_token - 1) / tasks.by_token;
  const int64_t rows = (tasks.tiles + tasks.by_tile - 1) / tasks.by_tile * kDenseTileRows;
  return kLibraryScratchBytes + tokens * rows * sizeof(float);
}

}  // namespace

bool DenseLinearOneDnn::Supports(const LinearDesc&) {
  static const bool available = [] {
    try {
      return !IsReference(Describe({1, kDenseTileRows, kDenseTileRows, 16, true}));
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return available;
}

size_t DenseLinearOneDnn::ScratchBytes(const LinearDesc& desc, int threads) {
  const DenseTasks tasks(desc, threads);
  return tasks.count() * TaskScratchBytes(desc, tasks);
}

KernelStatus DenseLinearOneDnn::Run(const KernelContext& ctx, const LinearArgs& args) {
  const LinearDesc desc = DescOf(args.weight, args.tokens);
  const DenseTasks tasks(desc, ctx.threads);
  const size_t task_bytes = TaskScratchBytes(desc, tasks);
  std::atomic<bool> failed = false;
  ctx.ParallelFor(tasks.count(), [&](int64_t task) {
    try {
      const bool done =
          RunPart(args, tasks.Of(task), static_cast<std::byte*>(args.scratch) + task * task_bytes);
      if (!done) failed = true;
    } catch (const std::exception&) {  // dnnl::error, bad_alloc
      failed = true;
    }
  });
  if (failed) return {KernelCode::kLaunchFailed, "linear: oneDNN refused the call"};
  return {};
}

}  // namespace espalier::kernels
