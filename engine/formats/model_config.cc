#include "engine/formats/model_config.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/formats/names.h"
#include "engine/formats/regular_file.h"

namespace espalier::formats {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Keeps the first error: what follows it is mostly its consequence.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (!message_.empty()) return;
    // The collector counts from 0, editors from 1; line -1 is an error without a place.
    message_ = line < 0 ? message : absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  void AddWarning(int, int, const std::string&) override {}
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

// Strings of protobuf 3 must be UTF-8: one that is not could be set by an escape in the text, and
// would make responses that carry the config undecodable.
absl::Status CheckStrings(const Message& message) {
  const auto* reflection = message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const int count = field->is_repeated() ? reflection->FieldSize(message, field) : 1;
    for (int i = 0; i < count; ++i) {
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        auto status =
            CheckStrings(field->is_repeated() ? reflection->GetRepeatedMessage(message, field, i)
                                              : reflection->GetMessage(message, field));
        if (!status.ok()) return status;
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        const std::string text = field->is_repeated()
                                     ? reflection->GetRepeatedString(message, field, i)
                                     : reflection->GetString(message, field);
        if (!IsUtf8(text) || text.find('\0') != std::string::npos) {
          return absl::InvalidArgumentError(absl::StrCat(field->full_name(), " is ", Quoted(text),
                                                         ", expected UTF-8 without NUL"));
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Annotated(const std::string& origin, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(origin, ": ", status.message()));
}

absl::Status CheckSize(const std::string& text, const std::string& origin) {
  if (static_cast<int64_t>(text.size()) <= kMaxConfigBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(origin, ": has ", text.size(), " bytes, the limit is ", kMaxConfigBytes));
}

// Protobuf says what is wrong, and below it the line in which, with a caret.
std::string JsonError(const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  std::string error = Shown(lines[0], kShownPathBytes);
  if (lines.size() > 1 && !absl::StripAsciiWhitespace(lines[1]).empty())
    absl::StrAppend(&error, " Near ", Quoted(lines[1], kShownPathBytes));
  return error;
}

}  // namespace

absl::StatusOr<inference::ModelConfig> ParseModelConfig(const std::string& text,
                                                        const std::string& origin) {
  if (auto status = CheckSize(text, origin); !status.ok()) return status;
  inference::ModelConfig config;
  FirstError errors;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  parser.SetRecursionLimit(32);  // the schema nests 8 deep
  if (!parser.ParseFromString(text, &config)) {
    return absl::InvalidArgumentError(absl::StrCat(origin, ":",
                                                   errors.message().empty()
                                                       ? " is not in text format"
                                                       : Shown(errors.message(), kShownPathBytes)));
  }
  if (auto status = CheckStrings(config); !status.ok()) return Annotated(origin, status);
  return config;
}

absl::StatusOr<inference::ModelConfig> ReadModelConfig(const std::string& model_dir) {
  const std::string path = absl::StrCat(model_dir, "/config.pbtxt");
  const auto file = RegularFile::Open(path);
  if (!file.ok()) return file.status();
  const auto bytes = file->ReadAll(kMaxConfigBytes);
  if (!bytes.ok()) return bytes.status();
  auto config = ParseModelConfig(
      std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()), path);
  if (!config.ok()) return config;
  if (auto status = CheckModelConfig(*config); !status.ok()) return Annotated(path, status);
  return config;
}

absl::StatusOr<inference::ModelConfig> ParseModelConfigJson(const std::string& json,
                                                            const std::string& origin) {
  if (auto status = CheckSize(json, origin); !status.ok()) return status;
  inference::ModelConfig config;
  // Strict about unknown fields, and its own limit on nesting is 100.
  const auto parsed = google::protobuf::util::JsonStringToMessage(json, &config);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": ", JsonError(parsed.message().ToString())));
  }
  auto status = CheckStrings(config);
  if (status.ok()) status = CheckModelConfig(config);
  if (!status.ok()) return Annotated(origin, status);
  return config;
}

std::string CanonicalBytes(const inference::ModelConfig& config) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);  // maps are written in the order of their keys
    config.SerializeToCodedStream(&coded);
  }
  return bytes;
}

inference::DataType ConfigDataType(DType dtype) {
  inference::DataType type = inference::TYPE_STRING;
  inference::DataType_Parse(absl::StrCat("TYPE_", NameOf(dtype)), &type);  // false for BYTES only
  return type;
}

}  // namespace espalier::formats
