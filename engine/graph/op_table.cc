#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/graph/lowering.h"
#include "engine/graph/patterns.h"

namespace espalier::graph {

#define ESPALIER_OP(type, first, last, function) absl::Status function(Lowering& lowering);
#include "engine/graph/ops.inc"
#undef ESPALIER_OP

namespace {

constexpr int64_t kNewest = std::numeric_limits<int64_t>::max();

struct OpEntry {
  const char* type;
  int64_t first_opset, last_opset;
  LowerFn lower;
};

constexpr OpEntry kOps[] = {
#define ESPALIER_OP(type, first, last, function) {type, first, last, function},
#include "engine/graph/ops.inc"
#undef ESPALIER_OP
};

}  // namespace

absl::StatusOr<LowerFn> FindOp(const std::string& domain, const std::string& op_type,
                               int64_t opset) {
  if (domain == kFusedDomain && op_type == "Gelu") return LowerGelu;
  std::string ranges;
  std::vector<std::string> supported;
  for (const OpEntry& entry : kOps) {
    if (domain.empty() && op_type == entry.type) {
      if (opset >= entry.first_opset && opset <= entry.last_opset) return entry.lower;
      absl::StrAppend(
          &ranges, ranges.empty() ? "" : ", ", entry.first_opset,
          entry.last_opset == kNewest ? " and newer" : absl::StrCat(" to ", entry.last_opset));
    }
    if (supported.empty() || supported.back() != entry.type) supported.push_back(entry.type);
  }
  if (!ranges.empty()) {
    return absl::UnimplementedError(
        absl::StrCat("opset ", opset, " of this op is not supported (only ", ranges,
                     "): convert the model with onnx.version_converter"));
  }
  return absl::UnimplementedError(
      absl::StrCat(domain.empty() ? "this op" : absl::StrCat("the op of domain '", domain, "'"),
                   " is not supported: export the model with the supported ones, ",
                   absl::StrJoin(supported, ", ")));
}

}  // namespace espalier::graph
