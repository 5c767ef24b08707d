// What can be said about a config without its model.
#include <algorithm>
#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/model_config.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/names.h"
#include "engine/formats/regular_file.h"

namespace espalier::formats {
namespace {

using inference::ModelConfig;

absl::Status OneOf(const char* field, const std::string& value,
                   std::initializer_list<absl::string_view> good) {
  if (value.empty() || std::find(good.begin(), good.end(), value) != good.end())
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", Quoted(value), ", expected one of ",
                                                 absl::StrJoin(good, ", "),
                                                 ", or none: only ONNX models are served"));
}

absl::Status InRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", expected ", low, " to ", high));
}

// ---- settings that change what a model answers and that Espalier does not have

struct Unsupported {
  bool set;
  const char* what;
};

absl::Status CheckUnsupported(const ModelConfig& config) {
  const Unsupported list[] = {
      {config.has_ensemble_scheduling() || config.platform() == "ensemble",
       "ensemble_scheduling: ensembles are not supported, serve the steps as models of their own"},
      {config.has_sequence_batching(),
       "sequence_batching: models that keep state between requests are not supported"},
      {config.model_transaction_policy().decoupled(),
       "model_transaction_policy.decoupled: a request has exactly one response"},
      {config.batch_input_size() > 0, "batch_input: inputs made from the batch are not supported"},
      {config.batch_output_size() > 0, "batch_output: ragged outputs are not supported"},
      {config.model_operations().op_library_filename_size() > 0,
       "model_operations: libraries with operators are never loaded"},
      {config.model_repository_agents().agents_size() > 0,
       "model_repository_agents: agents are not supported, and what they check or decrypt would "
       "not be"},
  };
  for (const Unsupported& entry : list) {
    if (entry.set) return absl::UnimplementedError(entry.what);
  }
  return absl::OkStatus();
}

// ---- settings without an effect

struct Ignored {
  bool set;
  const char* field;
  const char* why;
};

void AddWarnings(const ModelConfig& config, std::vector<std::string>& warnings) {
  const auto any_group = [&](auto&& holds) {
    return std::any_of(config.instance_group().begin(), config.instance_group().end(), holds);
  };
  const Ignored list[] = {
      {config.metric_tags_size() > 0, "metric_tags", "metrics have fixed labels"},
      {config.has_optimization(), "optimization", "kernels and layouts are chosen by measuring"},
      {!config.runtime().empty(), "runtime", "there is one runtime"},
      {config.response_cache().enable(), "response_cache", "there is no response cache"},
      {config.has_model_metrics(), "model_metrics", "buckets of histograms are fixed"},
      {config.cc_model_filenames_size() > 0, "cc_model_filenames", "one file serves all devices"},
      {any_group([](const auto& group) { return group.has_rate_limiter(); }),
       "instance_group.rate_limiter", "instances are not rate-limited"},
      {any_group([](const auto& group) { return group.profile_size() > 0; }),
       "instance_group.profile", "there are no TensorRT profiles"},
      {any_group([](const auto& group) { return group.passive(); }), "instance_group.passive",
       "every instance takes requests"},
      {any_group([](const auto& group) { return !group.host_policy().empty(); }),
       "instance_group.host_policy", "threads follow the process's CPU affinity"},
      {any_group([](const auto& group) { return group.secondary_devices_size() > 0; }),
       "instance_group.secondary_devices", "there are no secondary devices"},
      {std::any_of(config.input().begin(), config.input().end(),
                   [](const auto& input) { return input.format() != 0; }),
       "input.format", "tensors are taken as the model declares them"},
  };
  for (const Ignored& entry : list) {
    if (entry.set) warnings.push_back(absl::StrCat(entry.field, " has no effect: ", entry.why));
  }
}

// ---- values in range

absl::Status CheckVersionPolicy(const inference::ModelVersionPolicy& policy) {
  if (!policy.has_specific()) return absl::OkStatus();
  if (policy.specific().versions().empty()) {
    return absl::InvalidArgumentError(
        "version_policy.specific names no version, expected at least one");
  }
  std::set<int64_t> seen;
  for (int64_t version : policy.specific().versions()) {
    if (auto status = InRange("version_policy.specific", version, 1, INT64_MAX); !status.ok())
      return status;
    if (!seen.insert(version).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("version_policy.specific names version ", version, " twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckInstanceGroups(const ModelConfig& config) {
  int64_t total = 0;
  for (const auto& group : config.instance_group()) {
    if (!inference::ModelInstanceGroup::Kind_IsValid(group.kind())) {
      return absl::InvalidArgumentError(
          absl::StrCat("instance_group.kind is ", group.kind(), ", expected 0 to 3"));
    }
    if (group.kind() == inference::ModelInstanceGroup::KIND_MODEL) {
      return absl::UnimplementedError(
          "instance_group.kind KIND_MODEL is not supported: an ONNX file names no device");
    }
    if (auto status = InRange("instance_group.count", group.count(), 0, kMaxInstances);
        !status.ok())
      return status;
    total += std::max(group.count(), 1) * std::max(group.gpus_size(), 1);
  }
  return InRange("the number of instances of all instance_groups", total, 0, kMaxInstances);
}

absl::Status CheckBatching(const ModelConfig& config) {
  if (!config.has_dynamic_batching()) return absl::OkStatus();
  const auto& batching = config.dynamic_batching();
  const int64_t max_batch_size =
      config.max_batch_size() > 0 ? config.max_batch_size() : kMaxMaxBatchSize;
  for (int64_t size : batching.preferred_batch_size()) {
    if (auto status = InRange("dynamic_batching.preferred_batch_size", size, 1, max_batch_size);
        !status.ok()) {
      return status;
    }
  }
  // Levels go from 1, the highest, to priority_levels; 0 is no level.
  const uint64_t levels = batching.priority_levels();
  if (batching.default_priority_level() > levels ||
      (levels > 0 && batching.default_priority_level() == 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dynamic_batching.default_priority_level is ", batching.default_priority_level(),
        ", expected ", levels > 0 ? 1 : 0, " to priority_levels ", levels));
  }
  for (const auto& [level, policy] : batching.priority_queue_policy()) {
    if (level >= 1 && level <= levels) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("dynamic_batching.priority_queue_policy has level ", level,
                     ", expected 1 to priority_levels ", levels));
  }
  return absl::OkStatus();
}

absl::Status CheckFilename(const char* field, const std::string& name, bool folders) {
  if (name.empty()) return absl::OkStatus();
  if (IsPathBeneath(name) && (folders || name.find('/') == std::string::npos))
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", Quoted(name), ", expected a file name",
                   folders ? " below the model's folder" : " without a folder"));
}

absl::Status CheckWarmup(const ModelConfig& config) {
  for (const auto& warmup : config.model_warmup()) {
    for (const auto& [name, input] : warmup.inputs()) {
      auto status =
          CheckFilename("model_warmup.inputs.input_data_file", input.input_data_file(), true);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

// ---- inputs and outputs

template <typename Value>
absl::Status CheckValue(const Value& value) {
  if (!inference::DataType_IsValid(value.data_type())) {
    return absl::InvalidArgumentError(
        absl::StrCat("data_type is ", value.data_type(), ", expected a DataType"));
  }
  if (value.dims_size() > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("dims has ", value.dims_size(), " entries, expected at most ", kMaxRank));
  }
  for (int64_t dim : value.dims()) {
    if (dim >= 1 || dim == -1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("dims has ", dim, ", expected positive numbers or -1"));
  }
  if (value.has_reshape()) return absl::UnimplementedError("reshape is not supported");
  if (value.is_shape_tensor()) return absl::UnimplementedError("is_shape_tensor is not supported");
  if (value.is_non_linear_format_io())
    return absl::UnimplementedError("is_non_linear_format_io is not supported");
  return absl::OkStatus();
}

absl::Status CheckInput(const inference::ModelInput& input) {
  if (input.allow_ragged_batch())
    return absl::UnimplementedError("allow_ragged_batch is not supported");
  if (input.optional()) return absl::UnimplementedError("optional inputs are not supported");
  return CheckValue(input);
}

absl::Status CheckOutput(const inference::ModelOutput& output) {
  auto status = CheckFilename("label_filename", output.label_filename(), true);
  return status.ok() ? CheckValue(output) : status;
}

template <typename Values, typename Check>
absl::Status CheckValues(const char* what, const Values& values, Check&& check) {
  std::set<std::string> names;
  for (const auto& value : values) {
    if (auto status = CheckName(absl::StrCat("an ", what), value.name()); !status.ok())
      return status;
    if (!names.insert(value.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " ", Quoted(value.name()), " is listed twice"));
    }
    if (auto status = check(value); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(what, " ", Quoted(value.name()), ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckModelConfig(const ModelConfig& config, std::vector<std::string>* warnings) {
  for (const absl::Status& status :
       {CheckUnsupported(config),
        OneOf("backend", config.backend(), {"espalier", "onnxruntime", "onnxrt"}),
        OneOf("platform", config.platform(),
              {"espalier", "onnxruntime", "onnxruntime_onnx", "onnxrt", "onnxrt_onnx"}),
        InRange("max_batch_size", config.max_batch_size(), 0, kMaxMaxBatchSize),
        CheckVersionPolicy(config.version_policy()), CheckInstanceGroups(config),
        CheckBatching(config),
        CheckFilename("default_model_filename", config.default_model_filename(), false),
        CheckWarmup(config), CheckValues("input", config.input(), CheckInput),
        CheckValues("output", config.output(), CheckOutput),
        ReadModelSettings(config, warnings).status()}) {
    if (!status.ok()) return status;
  }
  if (warnings != nullptr) AddWarnings(config, *warnings);
  return absl::OkStatus();
}

}  // namespace espalier::formats
