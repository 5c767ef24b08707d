// A config against its model.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/model_config.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

using inference::ModelConfig;

bool IsBatched(const ValueInfo& value) { return !value.shape.empty() && value.shape[0] == kBatch; }

// Whether the model has a batch dimension: every input and output has it, or none.
absl::StatusOr<bool> IsBatched(const ModelGraph& graph) {
  const ValueInfo* with = nullptr;
  const ValueInfo* without = nullptr;
  for (const auto* values : {&graph.inputs, &graph.outputs}) {
    for (const ValueInfo& value : *values) (IsBatched(value) ? with : without) = &value;
  }
  if (with != nullptr && without != nullptr) {
    return absl::UnimplementedError(absl::StrCat(
        "the model has a batch dimension in ", Quoted(with->name), " ", ToString(with->shape),
        " and none in ", Quoted(without->name), " ", ToString(without->shape),
        ", expected one in every input and output, or in none"));
  }
  return with != nullptr;
}

// How the dims of inputs and outputs are to be read.
struct BatchRule {
  bool batched = false;    // dims leave out the batch dimension
  bool completed = false;  // max_batch_size was not given
  int max_batch_size = 0;
};

absl::StatusOr<BatchRule> CompleteBatchSize(ModelConfig& config, const ModelGraph& graph,
                                            std::vector<std::string>* warnings) {
  const auto batched = IsBatched(graph);
  if (!batched.ok()) return batched.status();
  BatchRule rule{*batched, config.max_batch_size() == 0, config.max_batch_size()};
  if (!rule.batched && rule.max_batch_size > 0) {
    const ValueInfo& value = graph.inputs.empty() ? graph.outputs[0] : graph.inputs[0];
    return absl::InvalidArgumentError(
        absl::StrCat("max_batch_size is ", rule.max_batch_size,
                     ", expected 0: the model has no batch dimension, ", Quoted(value.name), " is ",
                     ToString(value.shape)));
  }
  if (rule.batched && rule.completed) rule.max_batch_size = kDefaultMaxBatchSize;
  config.set_max_batch_size(rule.max_batch_size);
  if (!rule.batched && config.has_dynamic_batching() && warnings != nullptr) {
    warnings->push_back("dynamic_batching has no effect: the model has no batch dimension");
  }
  for (int size : config.dynamic_batching().preferred_batch_size()) {
    if (!rule.batched || size <= rule.max_batch_size) continue;
    return absl::InvalidArgumentError(absl::StrCat("dynamic_batching.preferred_batch_size is ",
                                                   size, ", expected 1 to max_batch_size ",
                                                   rule.max_batch_size));
  }
  return rule;
}

template <typename Value>
absl::Status CompleteDims(Value& value, const ValueInfo& info, const BatchRule& rule,
                          std::vector<std::string>* warnings) {
  const auto expected = absl::MakeConstSpan(info.shape).subspan(rule.batched ? 1 : 0);
  const absl::Span<const int64_t> given(value.dims().data(),
                                        static_cast<size_t>(value.dims_size()));
  if (given == expected) return absl::OkStatus();
  // Triton's way to say "any batch size, not batched by the server": [-1, …] with max_batch_size 0.
  // A request looks the same on the wire either way.
  const bool spelled_out =
      rule.batched && rule.completed && given == absl::MakeConstSpan(info.shape);
  if (!given.empty() && !spelled_out) {
    const std::string note = rule.batched
                                 ? absl::StrCat(": with max_batch_size ", rule.max_batch_size,
                                                " dims leave out the batch dimension")
                                 : "";
    return absl::InvalidArgumentError(absl::StrCat("dims are ", ToString(given), ", expected ",
                                                   ToString(expected), " as the model has ",
                                                   ToString(info.shape), note));
  }
  if (spelled_out && warnings != nullptr) {
    warnings->push_back(absl::StrCat(Quoted(info.name), ": dims ", ToString(given),
                                     " with max_batch_size 0 are served with max_batch_size ",
                                     rule.max_batch_size));
  }
  value.mutable_dims()->Assign(expected.begin(), expected.end());
  return absl::OkStatus();
}

template <typename Value>
absl::Status CompleteValue(Value& value, const ValueInfo& info, const BatchRule& rule,
                           std::vector<std::string>* warnings) {
  const inference::DataType type = ConfigDataType(info.dtype);
  if (value.data_type() != inference::TYPE_INVALID && value.data_type() != type) {
    return absl::InvalidArgumentError(
        absl::StrCat("data_type is ", inference::DataType_Name(value.data_type()), ", expected ",
                     inference::DataType_Name(type), " as in the model"));
  }
  value.set_name(info.name);
  value.set_data_type(type);
  return CompleteDims(value, info, rule, warnings);
}

std::string Names(const std::vector<ValueInfo>& values) {
  constexpr size_t kShown = 8;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(values.size(), kShown); ++i)
    names.push_back(Quoted(values[i].name));
  if (values.size() > kShown)
    names.push_back(absl::StrCat("and ", values.size() - kShown, " more"));
  return names.empty() ? "none" : absl::StrJoin(names, ", ");
}

// Puts the entries of `list` in the order of the model's values and adds those that are missing.
template <typename Value>
absl::Status CompleteValues(const char* what, google::protobuf::RepeatedPtrField<Value>& list,
                            const std::vector<ValueInfo>& infos, const BatchRule& rule,
                            std::vector<std::string>* warnings) {
  absl::flat_hash_map<std::string, Value> given;
  for (Value& value : list) {
    const std::string name = value.name();
    given.emplace(name, std::move(value));
  }
  list.Clear();
  for (const ValueInfo& info : infos) {
    Value& value = *list.Add();
    if (auto entry = given.find(info.name); entry != given.end()) {
      value = std::move(entry->second);
      given.erase(entry);
    }
    if (auto status = CompleteValue(value, info, rule, warnings); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(what, " ", Quoted(info.name), ": ", status.message()));
    }
  }
  if (given.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " ", Quoted(given.begin()->first),
                                                 " is not in the model, expected ", Names(infos)));
}

absl::Status Complete(ModelConfig& config, const std::string& name, const ModelGraph& graph,
                      std::vector<std::string>* warnings) {
  if (auto status = CheckModelConfig(config, warnings); !status.ok()) return status;
  if (!config.name().empty() && config.name() != name) {
    return absl::InvalidArgumentError(absl::StrCat("name is ", Quoted(config.name()), ", expected ",
                                                   Quoted(name), " as the directory"));
  }
  config.set_name(name);
  config.set_backend("espalier");
  config.set_platform("espalier");
  const auto rule = CompleteBatchSize(config, graph, warnings);
  if (!rule.ok()) return rule.status();
  auto status = CompleteValues("input", *config.mutable_input(), graph.inputs, *rule, warnings);
  if (!status.ok()) return status;
  status = CompleteValues("output", *config.mutable_output(), graph.outputs, *rule, warnings);
  if (!status.ok()) return status;

  auto& policy = *config.mutable_version_policy();
  if (policy.policy_choice_case() == inference::ModelVersionPolicy::POLICY_CHOICE_NOT_SET ||
      (policy.has_latest() && policy.latest().num_versions() == 0)) {
    policy.mutable_latest()->set_num_versions(1);
  }
  if (config.instance_group().empty())
    config.add_instance_group()->set_kind(inference::ModelInstanceGroup::KIND_CPU);
  for (int i = 0; i < config.instance_group_size(); ++i) {
    auto& group = *config.mutable_instance_group(i);
    if (group.count() == 0) group.set_count(1);
    if (group.name().empty()) group.set_name(absl::StrCat(name, "_", i));
  }
  if (config.default_model_filename().empty())
    config.set_default_model_filename(kDefaultModelFilename);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> CompleteModelConfig(ModelConfig config, const std::string& name,
                                                const ModelGraph& graph,
                                                std::vector<std::string>* warnings) {
  if (auto status = Complete(config, name, graph, warnings); !status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("config of model ", Quoted(name), ": ", status.message()));
  }
  return config;
}

}  // namespace espalier::formats
