#include "service/infer_decoder.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/wire_reader.h"

namespace espalier::service {
namespace {

// Field numbers of proto/inference/grpc_service.proto.
enum RequestField {
  kModelName = 1,
  kModelVersion = 2,
  kId = 3,
  kParameters = 4,
  kInputs = 5,
  kOutputs = 6,
  kRawInputs = 7
};
enum InputField { kInputName = 1, kDatatype = 2, kShape = 3, kInputParameters = 4, kContents = 5 };
enum OutputField { kOutputName = 1, kOutputParameters = 2 };
enum MapField { kKey = 1, kValue = 2 };
enum ParameterField { kBoolParam = 1, kInt64Param = 2, kStringParam = 3, kUint64Param = 5 };

bool Is(const WireTag& tag, uint32_t field, WireType type) {
  return tag.field == field && tag.type == type;
}

// Well-formed UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsUtf8(absl::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const uint8_t lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xc2 && lead <= 0xdf   ? 1
                     : (lead & 0xf0) == 0xe0        ? 2
                     : lead >= 0xf0 && lead <= 0xf4 ? 3
                                                    : 0;
    if (more == 0 || text.size() - i < static_cast<size_t>(more)) return false;
    const uint8_t second = static_cast<uint8_t>(text[i]);
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
        (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) {
      return false;
    }
    for (int k = 0; k < more; ++k, ++i) {
      if ((static_cast<uint8_t>(text[i]) & 0xc0) != 0x80) return false;
    }
  }
  return true;
}

std::string ReadUtf8(WireReader& reader) {
  std::string text = reader.ReadString();
  if (!IsUtf8(text)) reader.Fail("a string is not UTF-8");
  return text;
}

struct Parameter {
  std::string key;
  uint32_t kind = 0;  // field of the oneof that is set; 0: none
  uint64_t bits = 0;  // of an int64_param or uint64_param
  std::string text;   // of a string_param

  bool is_count() const {
    return kind == kUint64Param || (kind == kInt64Param && static_cast<int64_t>(bits) >= 0);
  }
  bool is_int64_count() const { return is_count() && bits <= INT64_MAX; }
  // Of an int64 count.
  int64_t count() const { return static_cast<int64_t>(bits); }
};

void ReadParameterValue(WireReader& reader, Parameter& parameter) {
  const size_t outer = reader.Enter();
  WireTag tag;
  while (reader.ReadTag(&tag)) {
    if (tag.field <= kUint64Param) parameter.kind = tag.field;
    if (Is(tag, kInt64Param, WireType::kVarint) || Is(tag, kUint64Param, WireType::kVarint)) {
      parameter.bits = reader.ReadVarint();
    } else if (Is(tag, kStringParam, WireType::kBytes)) {
      parameter.text = reader.ReadString();
    } else {
      reader.Skip(tag);
    }
  }
  reader.Leave(outer);
}

Parameter ReadParameter(WireReader& reader) {
  Parameter parameter;
  const size_t outer = reader.Enter();
  WireTag tag;
  while (reader.ReadTag(&tag)) {
    if (Is(tag, kKey, WireType::kBytes)) {
      parameter.key = ReadUtf8(reader);
    } else if (Is(tag, kValue, WireType::kBytes)) {
      ReadParameterValue(reader, parameter);
    } else {
      reader.Skip(tag);
    }
  }
  reader.Leave(outer);
  return parameter;
}

const char* KindName(uint32_t kind) {
  constexpr const char* kNames[] = {"nothing",      "bool_param",   "int64_param",
                                    "string_param", "double_param", "uint64_param"};
  return kNames[kind];
}

std::string Unexpected(const Parameter& parameter, absl::string_view expected) {
  std::string got = KindName(parameter.kind);
  if (parameter.kind == kInt64Param)
    absl::StrAppend(&got, " ", static_cast<int64_t>(parameter.bits));
  if (parameter.kind == kUint64Param) absl::StrAppend(&got, " ", parameter.bits);
  if (parameter.kind == kStringParam) {
    absl::StrAppend(&got, " '", runtime::Printable(parameter.text), "'");
  }
  return absl::StrCat("parameter '", parameter.key, "': expected ", expected, ", got ", got);
}

// What is wrong with a parameter of the request that means something; empty: nothing.
std::string CheckParameter(const Parameter& parameter) {
  const std::string& key = parameter.key;
  if ((key == "timeout" && !parameter.is_int64_count()) ||
      (key == "priority" && !parameter.is_count()))
    return Unexpected(parameter, "int64_param or uint64_param of at least 0");
  if (key == "sequence_id" && !parameter.is_count() && parameter.kind != kStringParam) {
    return Unexpected(parameter, "int64_param or uint64_param of at least 0, or string_param");
  }
  if ((key == "sequence_start" || key == "sequence_end") && parameter.kind != kBoolParam)
    return Unexpected(parameter, "bool_param");
  if (absl::StartsWith(key, "triton_") && key != "triton_enable_empty_final_response") {
    return absl::StrCat("parameter '", runtime::Printable(key),
                        "' is reserved: the prefix 'triton_' is not for parameters of clients");
  }
  return "";
}

void ReadRequestParameter(WireReader& reader, DecodedRequest& request) {
  const Parameter parameter = ReadParameter(reader);
  if (std::string error = CheckParameter(parameter); !error.empty()) {
    request.parameter_error = std::move(error);
  } else if (parameter.key == "timeout") {
    request.timeout_micros = parameter.count();
  } else if (parameter.key == "priority") {
    request.priority = parameter.bits;
  }
}

// Takes a parameter of a tensor that says where the tensor lies, and what is wrong with it; any
// other parameter says nothing.
std::string TakeParameter(const Parameter& parameter, SharedMemoryRange& range) {
  constexpr char kCount[] = "int64_param of at least 0";
  if (parameter.key == "shared_memory_region") {
    if (parameter.kind != kStringParam || parameter.text.empty())
      return Unexpected(parameter, "string_param with the name of a region");
    range.region = parameter.text;
  } else if (parameter.key == "shared_memory_byte_size") {
    if (!parameter.is_int64_count()) return Unexpected(parameter, kCount);
    range.byte_size = parameter.count();
  } else if (parameter.key == "shared_memory_offset") {
    if (!parameter.is_int64_count()) return Unexpected(parameter, kCount);
    range.offset = parameter.count();
  }
  return "";
}

std::string TakeParameter(const Parameter& parameter, DecodedOutput& output) {
  if (parameter.key != "classification") return TakeParameter(parameter, output.shared_memory);
  if (!parameter.is_int64_count() || parameter.count() == 0)
    return Unexpected(parameter, "int64_param of at least 1");
  output.classification = parameter.count();
  return "";
}

// What is wrong with the parameters of a tensor together.
std::string CheckRange(const SharedMemoryRange& range) {
  if (range.region.empty()) {
    return range.byte_size < 0 ? ""
                               : "parameter 'shared_memory_byte_size' needs 'shared_memory_region'";
  }
  return range.byte_size >= 0 ? ""
                              : "parameter 'shared_memory_region' needs 'shared_memory_byte_size'";
}

// Remembers the first error of a tensor's parameters.
void NoteError(const char* what, const std::string& name, const std::string& error,
               DecodedRequest& request) {
  if (error.empty() || !request.parameter_error.empty()) return;
  request.parameter_error = absl::StrCat(what, " '", runtime::Printable(name), "': ", error);
}

void PushDimension(WireReader& reader, Shape& shape, uint64_t value) {
  if (shape.size() >= kMaxRank) return reader.Fail("a shape has more than 32 dimensions");
  shape.push_back(static_cast<int64_t>(value));
}

void ReadInput(WireReader& reader, DecodedInput& input, DecodedRequest& request) {
  std::string error;
  const size_t outer = reader.Enter();
  WireTag tag;
  while (reader.ReadTag(&tag)) {
    if (Is(tag, kInputName, WireType::kBytes)) {
      input.name = ReadUtf8(reader);
    } else if (Is(tag, kDatatype, WireType::kBytes)) {
      input.datatype = ReadUtf8(reader);
    } else if (Is(tag, kShape, WireType::kBytes)) {
      const size_t message = reader.Enter();
      while (reader.left() > 0) PushDimension(reader, input.shape, reader.ReadVarint());
      reader.Leave(message);
    } else if (Is(tag, kShape, WireType::kVarint)) {
      PushDimension(reader, input.shape, reader.ReadVarint());
    } else if (Is(tag, kContents, WireType::kBytes)) {
      input.has_contents = true;
      // Pieces of several occurrences follow each other: that is how messages merge.
      reader.ReadBytes(&input.contents);
    } else if (Is(tag, kInputParameters, WireType::kBytes)) {
      std::string wrong = TakeParameter(ReadParameter(reader), input.shared_memory);
      if (error.empty()) error = std::move(wrong);
    } else {
      reader.Skip(tag);
    }
  }
  reader.Leave(outer);
  if (error.empty()) error = CheckRange(input.shared_memory);
  NoteError("input", input.name, error, request);
}

void ReadOutput(WireReader& reader, DecodedOutput& output, DecodedRequest& request) {
  std::string error;
  const size_t outer = reader.Enter();
  WireTag tag;
  while (reader.ReadTag(&tag)) {
    if (Is(tag, kOutputName, WireType::kBytes)) {
      output.name = ReadUtf8(reader);
    } else if (Is(tag, kOutputParameters, WireType::kBytes)) {
      std::string wrong = TakeParameter(ReadParameter(reader), output);
      if (error.empty()) error = std::move(wrong);
    } else {
      reader.Skip(tag);
    }
  }
  reader.Leave(outer);
  if (error.empty()) error = CheckRange(output.shared_memory);
  if (error.empty() && output.classification > 0 && !output.shared_memory.region.empty())
    error = "parameter 'classification' cannot be joined with shared memory";
  NoteError("output", output.name, error, request);
}

// One more element, unless there are too many already.
template <typename T>
T* Grow(WireReader& reader, std::vector<T>& elements) {
  if (elements.size() >= kMaxTensors) {
    reader.Fail("more than 1024 inputs, outputs or raw_input_contents");
    return nullptr;
  }
  return &elements.emplace_back();
}

void ReadField(WireReader& reader, const WireTag& tag, DecodedRequest& request) {
  if (tag.type != WireType::kBytes) return reader.Skip(tag);
  switch (tag.field) {
    case kModelName:
      request.model_name = ReadUtf8(reader);
      return;
    case kModelVersion:
      request.model_version = ReadUtf8(reader);
      return;
    case kId:
      request.id = ReadUtf8(reader);
      return;
    case kParameters:
      return ReadRequestParameter(reader, request);
    case kInputs:
      if (DecodedInput* input = Grow(reader, request.inputs)) ReadInput(reader, *input, request);
      return;
    case kOutputs:
      if (DecodedOutput* output = Grow(reader, request.outputs))
        ReadOutput(reader, *output, request);
      return;
    case kRawInputs:
      if (runtime::ByteSlices* raw = Grow(reader, request.raw_inputs)) reader.ReadBytes(raw);
      return;
    default:
      return reader.Skip(tag);
  }
}

}  // namespace

absl::Status DecodeInferRequest(absl::Span<const runtime::ByteSlice> slices,
                                DecodedRequest* request) {
  WireReader reader(slices);
  WireTag tag;
  while (reader.ReadTag(&tag)) ReadField(reader, tag, *request);
  if (reader.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("malformed ModelInferRequest: ", reader.error(),
                                                 " (at byte ", reader.position(), ")"));
}

}  // namespace espalier::service
