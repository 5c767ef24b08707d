#include "engine/formats/model_settings.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/names.h"
#include "engine/tensor/device.h"

namespace espalier::formats {
namespace {

template <typename T>
using Choices = std::vector<std::pair<const char*, T>>;

template <typename T>
absl::Status ReadChoice(const inference::ModelConfig& config, const char* key,
                        const Choices<T>& choices, T& value) {
  const auto parameter = config.parameters().find(key);
  if (parameter == config.parameters().end()) return absl::OkStatus();
  const std::string& text = parameter->second.string_value();
  for (const auto& [name, choice] : choices) {
    if (text != name) continue;
    value = choice;
    return absl::OkStatus();
  }
  const std::string good = absl::StrJoin(choices, ", ", [](std::string* out, const auto& choice) {
    absl::StrAppend(out, choice.first);
  });
  return absl::InvalidArgumentError(
      absl::StrCat("parameter '", key, "' is ", Quoted(text), ", expected one of ", good));
}

template <typename T>
absl::Status ReadCount(const inference::ModelConfig& config, const char* key, int64_t lowest,
                       int64_t highest, T& value) {
  const auto parameter = config.parameters().find(key);
  if (parameter == config.parameters().end()) return absl::OkStatus();
  const std::string& text = parameter->second.string_value();
  int64_t read = 0;
  if (!absl::SimpleAtoi(text, &read) || read < lowest || read > highest) {
    return absl::InvalidArgumentError(absl::StrCat("parameter '", key, "' is ", Quoted(text),
                                                   ", expected ", lowest, " to ", highest));
  }
  value = static_cast<T>(read);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelSettings> ReadModelSettings(const inference::ModelConfig& config) {
  ModelSettings settings;
  const Choices<bool> booleans = {{"true", true}, {"false", false}};
  for (const absl::Status& status :
       {ReadChoice<Precision>(config, "precision",
                              {{"as_stored", Precision::kAsStored},
                               {"fp32", Precision::kFloat32},
                               {"bf16", Precision::kBFloat16}},
                              settings.precision),
        ReadChoice<WeightMemory>(config, "weight_memory",
                                 {{"smallest", WeightMemory::kSmallest},
                                  {"balanced", WeightMemory::kBalanced},
                                  {"fastest", WeightMemory::kFastest}},
                                 settings.weight_memory),
        ReadChoice(config, "deterministic", booleans, settings.deterministic),
        ReadChoice(config, "flush_subnormals", booleans, settings.flush_subnormals),
        ReadChoice<bool>(config, "allowed_batch_sizes", {{"any", false}, {"preferred", true}},
                         settings.pads_to_preferred),
        ReadCount(config, "threads", 1, AvailableCpus(), settings.threads),
        ReadCount(config, "execute_delay_ms", 0, kMaxExecuteDelayMillis,
                  settings.execute_delay_millis)}) {
    if (!status.ok()) return status;
  }
  return settings;
}

}  // namespace espalier::formats
