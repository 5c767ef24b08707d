// tensor_info.h — a tensor as a file has it (name, dtype, shape; row-major), and where its elements
// can be read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/updates/elements.h"

namespace espalier::updates {

struct TensorInfo {
  std::string name;
  std::string dtype;  // as safetensors names them: "F32", "BF16", "I64", …
  std::vector<int64_t> dims;
  int64_t bytes = 0;

  ElementKind kind() const { return ElementKindOf(dtype); }
  // In elements of kind(): bytes for a dtype without one of its own.
  int64_t elements() const { return bytes / SizeOf(kind()); }
  // Elements behind one index of the first dimension; a scalar or vector has 1 a row.
  int64_t row_elements() const;
  std::string ToString() const;  // "fc1.weight F32 [512, 784]"
  bool operator==(const TensorInfo&) const = default;
};

// Limits on what a file may describe.
inline constexpr int kMaxDims = 32;
inline constexpr size_t kMaxTensors = 1'000'000;
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 46;

// The weights of a model, in whatever way they are held. Implementations are thread-safe.
class TensorReader {
 public:
  virtual ~TensorReader() = default;
  virtual const std::vector<TensorInfo>& tensors() const = 0;  // ascending by name, names unique
  // Elements [first, first + count) of tensors()[tensor], which exist.
  virtual absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const = 0;
  // The same, in order and a window of at most kWindowElements at a time, which `visit` may change: what has to be looked
  // up for a range is looked up once. All windows but the last have that many.
  using Visit = absl::FunctionRef<void(int64_t first, void* elements, int64_t count)>;
  virtual absl::Status ReadWindows(size_t tensor, int64_t first, int64_t count, Visit visit) const;
  static constexpr int64_t kWindowElements = int64_t{1} << 16;
  // Where element `first` and all behind it are, aligned to their size, for weights that are held
  // dense in memory; null for others. Read gives the same elements.
  virtual const void* InMemory(size_t /*tensor*/, int64_t /*first*/) const { return nullptr; }
};

// Index in `tensors` (ascending by name); −1 when there is none.
int64_t FindTensor(const std::vector<TensorInfo>& tensors, absl::string_view name);

}  // namespace espalier::updates
