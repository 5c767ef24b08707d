#include "engine/formats/model_settings.h"

#include <set>
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

// Reads parameters one by one; knows in the end which others there are.
class ParameterReader {
 public:
  explicit ParameterReader(const inference::ModelConfig& config) : config_(config) {}

  template <typename T>
  void Choice(const char* key, const Choices<T>& choices, T& value) {
    const std::string* text = Find(key);
    if (text == nullptr) return;
    for (const auto& [name, choice] : choices) {
      if (*text != name) continue;
      value = choice;
      return;
    }
    Fail(key, *text,
         absl::StrCat("one of ",
                      absl::StrJoin(choices, ", ", [](std::string* out, const auto& choice) {
                        absl::StrAppend(out, choice.first);
                      })));
  }

  template <typename T>
  void Count(const char* key, int64_t lowest, int64_t highest, T& value) {
    const std::string* text = Find(key);
    if (text == nullptr) return;
    int64_t read = 0;
    if (!absl::SimpleAtoi(*text, &read) || read < lowest || read > highest)
      return Fail(key, *text, absl::StrCat(lowest, " to ", highest));
    value = static_cast<T>(read);
  }

  const absl::Status& status() const { return status_; }

  void WarnOfOthers(std::vector<std::string>& warnings) const {
    std::set<std::string> keys;
    for (const auto& [key, value] : config_.parameters()) keys.insert(key);
    for (const std::string& known : known_) keys.erase(known);
    for (const std::string& key : keys) {
      warnings.push_back(
          absl::StrCat("parameters ", Quoted(key), ": known are ", absl::StrJoin(known_, ", ")));
    }
  }

 private:
  const std::string* Find(const char* key) {
    known_.push_back(key);
    const auto parameter = config_.parameters().find(key);
    return parameter == config_.parameters().end() ? nullptr : &parameter->second.string_value();
  }
  void Fail(const char* key, const std::string& text, const std::string& expected) {
    status_.Update(absl::InvalidArgumentError(
        absl::StrCat("parameter '", key, "' is ", Quoted(text), ", expected ", expected)));
  }

  const inference::ModelConfig& config_;
  std::vector<std::string> known_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<ModelSettings> ReadModelSettings(const inference::ModelConfig& config,
                                                std::vector<std::string>* warnings) {
  ModelSettings settings;
  const Choices<bool> booleans = {{"true", true}, {"false", false}};
  ParameterReader reader(config);
  reader.Choice<Precision>("precision",
                           {{"as_stored", Precision::kAsStored},
                            {"fp32", Precision::kFloat32},
                            {"bf16", Precision::kBFloat16}},
                           settings.precision);
  reader.Choice<WeightMemory>("weight_memory",
                              {{"smallest", WeightMemory::kSmallest},
                               {"balanced", WeightMemory::kBalanced},
                               {"fastest", WeightMemory::kFastest}},
                              settings.weight_memory);
  reader.Choice("deterministic", booleans, settings.deterministic);
  reader.Choice("flush_subnormals", booleans, settings.flush_subnormals);
  reader.Choice<bool>("allowed_batch_sizes", {{"any", false}, {"preferred", true}},
                      settings.pads_to_preferred);
  reader.Count("threads", 1, AvailableCpus(), settings.threads);
  reader.Count("execute_delay_ms", 0, kMaxExecuteDelayMillis, settings.execute_delay_millis);
  if (!reader.status().ok()) return reader.status();
  if (warnings != nullptr) reader.WarnOfOthers(*warnings);
  return settings;
}

}  // namespace espalier::formats
