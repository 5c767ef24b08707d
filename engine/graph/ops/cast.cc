#include "engine/graph/ops/cast.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/graph/lowering.h"
#include "kernels/cuda/op_table.h"

namespace espalier::graph {

// By the types that the values really have: what computes in f32 on the CPU may do so in bf16 on a GPU.
kernels::KernelStatus CastOp::RunOnDevice(const RunContext& context, const Step& step) const {
  const Value& x = context.forms[step.inputs[0]];
  const Value& y = context.forms[step.output];
  kernels::cuda::ConvertArgs args;
  args.from = x.storage;
  args.to = y.storage;
  args.through = through_ == from_ || through_ == to_ ? y.storage : through_;
  args.x = step.In<void>(context, 0);
  args.y = step.Out<void>(context);
  const int64_t count = item_elements_ * context.batch;
  args.columns = x.width > 0 ? x.width : y.width > 0 ? y.width : count;
  args.rows = args.columns > 0 ? count / args.columns : 0;
  args.x_stride = x.width > 0 ? x.row_stride : args.columns;
  args.y_stride = y.width > 0 ? y.row_stride : args.columns;
  return context.kernel.ops->convert(context.kernel, args);
}

kernels::KernelStatus CastOp::Run(const RunContext& context, const Step& step) const {
  if (context.kernel.ops != nullptr) return RunOnDevice(context, step);
  const char* from = step.In<char>(context, 0);
  char* to = step.Out<char>(context);
  const int64_t count = item_elements_ * context.batch;
  if (through_ == from_ || through_ == to_) {
    ConvertElements(from, from_, to, to_, count);
    return {};
  }
  constexpr int64_t kChunk = 256;
  alignas(8) char rounded[kChunk * 8];
  for (int64_t i = 0; i < count; i += kChunk) {
    const int64_t n = std::min(kChunk, count - i);
    ConvertElements(from + i * static_cast<int64_t>(SizeOf(from_)), from_, rounded, through_, n);
    ConvertElements(rounded, through_, to + i * static_cast<int64_t>(SizeOf(to_)), to_, n);
  }
  return {};
}

namespace {

// ONNX TensorProto.DataType, as the attribute `to` has it.
std::optional<DType> DTypeOfOnnx(int64_t type) {
  switch (type) {
    case 1:
      return DType::kFloat32;
    case 2:
      return DType::kUint8;
    case 3:
      return DType::kInt8;
    case 4:
      return DType::kUint16;
    case 5:
      return DType::kInt16;
    case 6:
      return DType::kInt32;
    case 7:
      return DType::kInt64;
    case 9:
      return DType::kBool;
    case 10:
      return DType::kFloat16;
    case 11:
      return DType::kFloat64;
    case 12:
      return DType::kUint32;
    case 13:
      return DType::kUint64;
    case 16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace

absl::Status LowerCast(Lowering& lowering) {
  auto type = lowering.IntAttribute("to", 0);
  if (!type.ok()) return type.status();
  // Concerns FLOAT8 targets only, which are refused below.
  auto saturate = lowering.IntAttribute("saturate", 1);
  if (!saturate.ok()) return saturate.status();
  const std::optional<DType> to = DTypeOfOnnx(*type);
  if (!to) {
    return lowering.Unimplemented(
        absl::StrCat("attribute 'to' is ONNX data type ", *type,
                     "; booleans, integers and floats of 16 to 64 bits are supported"));
  }
  auto x = lowering.Input(0);
  if (!x.ok()) return x.status();
  const DType from = (*x)->dtype;
  if (from == DType::kBytes)
    return lowering.Unimplemented("strings cannot be cast: convert them before the model");
  const bool widens = *to == DType::kFloat32 && StorageOf(from) == DType::kFloat32;
  if (from == *to || widens) {
    Operand same = **x;
    same.dtype = *to;
    lowering.Define(0, std::move(same));
    return absl::OkStatus();
  }
  return lowering.EmitOutput(std::make_unique<CastOp>(StorageOf(from), *to, StorageOf(*to),
                                                      lowering.ItemElements((*x)->shape)),
                             {(*x)->value}, *to, (*x)->shape);
}

}  // namespace espalier::graph
