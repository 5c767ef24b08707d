#include "clients/cpp/infer_message.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::client {
namespace {

constexpr int kMaxTensorBytes = std::numeric_limits<int>::max();

void SetParameter(const Parameter& from, inference::InferParameter* to) {
  struct Setter {
    inference::InferParameter* to;
    void operator()(bool value) const { to->set_bool_param(value); }
    void operator()(int64_t value) const { to->set_int64_param(value); }
    void operator()(uint64_t value) const { to->set_uint64_param(value); }
    void operator()(double value) const { to->set_double_param(value); }
    void operator()(const std::string& value) const { to->set_string_param(value); }
  };
  std::visit(Setter{to}, from);
}

Parameter GetParameter(const inference::InferParameter& from) {
  switch (from.parameter_choice_case()) {
    case inference::InferParameter::kInt64Param:
      return from.int64_param();
    case inference::InferParameter::kUint64Param:
      return from.uint64_param();
    case inference::InferParameter::kDoubleParam:
      return from.double_param();
    case inference::InferParameter::kStringParam:
      return from.string_param();
    default:
      return from.bool_param();
  }
}

}  // namespace

absl::Status ToMessage(const InferRequest& from, inference::ModelInferRequest* to) {
  to->set_model_name(from.model);
  to->set_model_version(from.version);
  to->set_id(from.id);
  for (const auto& [key, value] : from.parameters)
    SetParameter(value, &(*to->mutable_parameters())[key]);
  for (const std::string& name : from.outputs) to->add_outputs()->set_name(name);
  uint64_t total_bytes = 0;
  for (const Tensor& tensor : from.inputs) {
    if (absl::Status status = CheckTensor(tensor); !status.ok()) return status;
    total_bytes += tensor.bytes.size();
    if (total_bytes >= kMaxTensorBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("the request has more than ", kMaxTensorBytes,
                       " bytes of tensors; send fewer items in one request"));
    }
    auto* input = to->add_inputs();
    input->set_name(tensor.name);
    input->set_datatype(tensor.datatype);
    for (int64_t dim : tensor.shape) input->add_shape(dim);
    to->add_raw_input_contents(tensor.bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<InferResult> FromMessage(inference::ModelInferResponse& from) {
  if (from.raw_output_contents_size() != from.outputs_size()) {
    return absl::InternalError(absl::StrCat("the server answered with ", from.outputs_size(),
                                            " outputs and ", from.raw_output_contents_size(),
                                            " raw contents"));
  }
  InferResult result{from.model_name(), from.model_version(), from.id(), {}, {}};
  for (const auto& [key, value] : from.parameters()) result.parameters[key] = GetParameter(value);
  for (int i = 0; i < from.outputs_size(); ++i) {
    auto& output = *from.mutable_outputs(i);
    Tensor tensor{std::move(*output.mutable_name()),
                  std::move(*output.mutable_datatype()),
                  {output.shape().begin(), output.shape().end()},
                  std::move(*from.mutable_raw_output_contents(i))};
    if (absl::Status status = CheckTensor(tensor); !status.ok()) {
      return absl::InternalError(
          absl::StrCat("the server answered with a bad output: ", status.message()));
    }
    result.outputs.push_back(std::move(tensor));
  }
  return result;
}

}  // namespace espalier::client
