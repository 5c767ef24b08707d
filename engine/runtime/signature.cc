#include "engine/runtime/signature.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace espalier::runtime {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

std::string NamesOf(const std::vector<TensorSpec>& specs) {
  return absl::StrJoin(specs, ", ", [](std::string* out, const TensorSpec& spec) {
    absl::StrAppend(out, "'", spec.name, "'");
  });
}

int IndexOf(const std::vector<TensorSpec>& specs, absl::string_view name) {
  const auto found = std::find_if(specs.begin(), specs.end(),
                                  [&](const TensorSpec& spec) { return spec.name == name; });
  return found == specs.end() ? -1 : static_cast<int>(found - specs.begin());
}

absl::StatusOr<TensorSpec> SpecOf(const formats::ValueInfo& value, const std::string& model,
                                  int64_t max_batch_size) {
  const bool batches = max_batch_size > 0;
  Shape item = value.shape;
  if (batches) {
    if (item.empty() || item[0] != kBatch) {
      return InvalidArgumentError(
          StrCat("model '", model, "': max_batch_size is ", max_batch_size, ", so '", value.name,
                 "' must have a batch dimension (-1) in front, but its shape is ",
                 ToString(value.shape), "; set max_batch_size: 0"));
    }
    item.erase(item.begin());
  }
  if (std::find(item.begin(), item.end(), kBatch) != item.end()) {
    return InvalidArgumentError(
        StrCat("model '", model, "': '", value.name, "' has shape ", ToString(value.shape),
               " with a dimension of unknown size",
               batches ? "" : "; if that is the batch, set max_batch_size above 0"));
  }
  if (value.dtype == DType::kBytes) {
    return InvalidArgumentError(
        StrCat("model '", model, "': '", value.name, "' is BYTES; only numeric tensors run"));
  }
  auto elements = ElementCount(item);
  if (!elements.ok()) return elements.status();
  return TensorSpec{value.name, value.dtype, value.shape,
                    static_cast<size_t>(*elements) * SizeOf(value.dtype)};
}

// Whether `shape` is what the model expects, any batch counting as right.
bool ShapeFits(const Signature& signature, const TensorSpec& spec, const Shape& shape) {
  if (shape.size() != spec.shape.size()) return false;
  const size_t skip = signature.max_batch_size > 0 ? 1 : 0;
  return std::equal(shape.begin() + skip, shape.end(), spec.shape.begin() + skip);
}

absl::Status CheckInput(const Signature& signature, const TensorSpec& spec,
                        const InputTensor& input) {
  if (input.datatype != NameOf(spec.dtype)) {
    return InvalidArgumentError(StrCat("inference input '", spec.name, "' data-type is '",
                                       Printable(input.datatype), "', but model '", signature.model,
                                       "' expects '", NameOf(spec.dtype), "'"));
  }
  if (!ShapeFits(signature, spec, input.shape)) {
    return InvalidArgumentError(StrCat("unexpected shape for input '", spec.name, "' for model '",
                                       signature.model, "': expected ", ToString(spec.shape),
                                       ", got ", ToString(input.shape)));
  }
  if (signature.max_batch_size > 0 &&
      (input.shape[0] < 1 || input.shape[0] > signature.max_batch_size)) {
    return InvalidArgumentError(StrCat(
        "inference request batch-size must be ", input.shape[0] < 1 ? ">= 1" : "<= ",
        input.shape[0] < 1 ? "" : StrCat(signature.max_batch_size), " for '", signature.model,
        "', got shape ", ToString(input.shape), " for input '", spec.name, "'"));
  }
  const size_t items = signature.max_batch_size > 0 ? static_cast<size_t>(input.shape[0]) : 1;
  const size_t expected = items * spec.item_bytes, got = input.bytes();
  if (got != expected) {
    return InvalidArgumentError(StrCat("unexpected size for input '", spec.name, "' for model '",
                                       signature.model, "': shape ", ToString(input.shape), " of ",
                                       NameOf(spec.dtype), " takes ", expected, " bytes, got ",
                                       got));
  }
  return absl::OkStatus();
}

absl::Status BindInputs(const Signature& signature, InferRequest& request) {
  request.input_of.assign(signature.inputs.size(), -1);
  for (size_t k = 0; k < request.inputs.size(); ++k) {
    const InputTensor& input = request.inputs[k];
    const int i = IndexOf(signature.inputs, input.name);
    if (i < 0) {
      return InvalidArgumentError(StrCat("unexpected inference input '", Printable(input.name),
                                         "' for model '", signature.model, "': its inputs are ",
                                         NamesOf(signature.inputs)));
    }
    if (request.input_of[i] >= 0) {
      return InvalidArgumentError(
          StrCat("input '", input.name, "' for model '", signature.model, "' is given twice"));
    }
    if (absl::Status status = CheckInput(signature, signature.inputs[i], input); !status.ok())
      return status;
    request.input_of[i] = static_cast<int>(k);
  }
  const auto missing = std::find(request.input_of.begin(), request.input_of.end(), -1);
  if (missing != request.input_of.end()) {
    return InvalidArgumentError(
        StrCat("expected ", signature.inputs.size(), " inputs but got ", request.inputs.size(),
               " inputs for model '", signature.model, "': '",
               signature.inputs[missing - request.input_of.begin()].name, "' is missing"));
  }
  return absl::OkStatus();
}

absl::Status BindBatch(const Signature& signature, InferRequest& request) {
  request.batch = 1;
  if (signature.max_batch_size == 0 || request.inputs.empty()) return absl::OkStatus();
  request.batch = request.inputs[0].shape[0];
  for (const InputTensor& input : request.inputs) {
    if (input.shape[0] == request.batch) continue;
    return InvalidArgumentError(StrCat(
        "input '", input.name, "' batch size ", input.shape[0], " does not match that of input '",
        request.inputs[0].name, "', ", request.batch, ", for model '", signature.model, "'"));
  }
  return absl::OkStatus();
}

OutputTensor OutputOf(const Signature& signature, int index, int64_t batch) {
  const TensorSpec& spec = signature.outputs[index];
  OutputTensor output{index, spec.shape, spec.item_bytes * static_cast<size_t>(batch)};
  if (signature.max_batch_size > 0) output.shape[0] = batch;
  return output;
}

absl::Status BindOutputs(const Signature& signature, InferRequest& request) {
  request.outputs.clear();
  if (request.requested_outputs.empty()) {
    for (size_t i = 0; i < signature.outputs.size(); ++i) {
      request.outputs.push_back(OutputOf(signature, static_cast<int>(i), request.batch));
    }
    return absl::OkStatus();
  }
  std::vector<bool> taken(signature.outputs.size(), false);
  for (const std::string& name : request.requested_outputs) {
    const int index = IndexOf(signature.outputs, name);
    if (index < 0) {
      return InvalidArgumentError(StrCat("unexpected inference output '", Printable(name),
                                         "' for model '", signature.model, "': its outputs are ",
                                         NamesOf(signature.outputs)));
    }
    if (taken[index]) {
      return InvalidArgumentError(
          StrCat("output '", name, "' for model '", signature.model, "' is requested twice"));
    }
    taken[index] = true;
    request.outputs.push_back(OutputOf(signature, index, request.batch));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Signature> Signature::Create(std::string model, int64_t max_batch_size,
                                            const std::vector<formats::ValueInfo>& inputs,
                                            const std::vector<formats::ValueInfo>& outputs) {
  Signature signature{std::move(model), max_batch_size, {}, {}};
  for (auto [values, specs] :
       {std::pair(&inputs, &signature.inputs), std::pair(&outputs, &signature.outputs)}) {
    for (const formats::ValueInfo& value : *values) {
      auto spec = SpecOf(value, signature.model, max_batch_size);
      if (!spec.ok()) return spec.status();
      specs->push_back(*std::move(spec));
    }
  }
  return signature;
}

absl::Status BindRequest(const Signature& signature, InferRequest& request) {
  if (absl::Status status = BindInputs(signature, request); !status.ok()) return status;
  if (absl::Status status = BindBatch(signature, request); !status.ok()) return status;
  return BindOutputs(signature, request);
}

}  // namespace espalier::runtime
