// Any bytes at all, decoded as a ModelInferRequest and, where typed, turned into raw elements.
// Where protobuf's own parser accepts the message too, both must have read the same; ours refuses
// no valid message but above its caps.
#include <google/protobuf/stubs/logging.h>

#include "proto/inference/grpc_service.pb.h"
#include "service/infer_decoder.h"
#include "service/infer_encoder.h"
#include "service/typed_contents.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/proto_mutator.h"

namespace espalier::fuzz {
namespace {

using inference::ModelInferRequest;
using service::DecodedInput;
using service::DecodedRequest;

// The input in three pieces, each in memory of its own: reading past one is seen by the sanitizer.
class Pieces {
 public:
  Pieces(const uint8_t* data, size_t size) {
    const size_t first = size > 0 ? data[0] % (size + 1) : 0, second = first + (size - first) / 2;
    Add(data, 0, first);
    Add(data, first, second);
    Add(data, second, size);
  }
  absl::Span<const runtime::ByteSlice> slices() const { return slices_; }

 private:
  void Add(const uint8_t* data, size_t begin, size_t end) {
    memory_.push_back(std::make_unique<std::byte[]>(end - begin));
    std::copy(data + begin, data + end, reinterpret_cast<uint8_t*>(memory_.back().get()));
    slices_.push_back({memory_.back().get(), end - begin});
  }

  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<runtime::ByteSlice> slices_;
};

std::string Join(const runtime::ByteSlices& slices) {
  std::string bytes;
  for (const runtime::ByteSlice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.data), slice.size);
  }
  return bytes;
}

void CheckRefusal(const absl::Status& status) {
  Require(status.code() == absl::StatusCode::kInvalidArgument, "a bad request is InvalidArgument",
          status.ToString());
  Require(status.message().size() > 8 && status.message().size() < 2048,
          "an error has a short message", status.ToString());
}

void CheckContents(const DecodedInput& input) {
  const auto count = ElementCount(input.shape);
  if (!input.has_contents || !count.ok()) return;
  const auto raw = service::RawElements(input, *count);
  if (!raw.ok()) return CheckRefusal(raw.status());
  const auto dtype = service::ParseDType(input.datatype);
  Require(dtype.has_value(), "only known datatypes have elements", input.datatype);
  Require(*dtype == DType::kBytes || raw->size() == static_cast<size_t>(*count) * SizeOf(*dtype),
          "elements have the size of their shape", input.datatype);
}

// What a stream answers to a request that it refuses, whatever its id is.
void CheckStreamError(const std::string& id) {
  inference::ModelStreamInferResponse answer;
  Require(answer.ParseFromString(service::StreamError(id, "refused")) &&
              answer.infer_response().id() == id,
          "an error of a stream is a message with the id of its request", id);
}

int64_t Count(const inference::InferParameter& parameter) {
  return parameter.has_int64_param() ? parameter.int64_param()
                                     : static_cast<int64_t>(parameter.uint64_param());
}

// Without an error in any parameter, those of a tensor in shared memory are as protobuf has them.
template <typename Tensor>
void CheckRange(const service::SharedMemoryRange& range, const Tensor& tensor,
                const DecodedRequest& ours, const std::string& text) {
  if (!ours.parameter_error.empty()) return;
  const auto& parameters = tensor.parameters();
  const auto region = parameters.find("shared_memory_region");
  const auto bytes = parameters.find("shared_memory_byte_size");
  const auto offset = parameters.find("shared_memory_offset");
  Require(range.offset >= 0 && range.region.empty() == (range.byte_size < 0),
          "a range is whole or absent", text);
  Require(range.region == (region == parameters.end() ? "" : region->second.string_param()),
          "regions agree", text);
  Require(range.byte_size == (bytes == parameters.end() ? -1 : Count(bytes->second)),
          "sizes of regions agree", text);
  Require(range.offset == (offset == parameters.end() ? 0 : Count(offset->second)), "offsets agree",
          text);
}

void CheckAgreement(const DecodedRequest& ours, const ModelInferRequest& theirs) {
  const std::string text = theirs.DebugString();
  Require(ours.model_name == theirs.model_name() && ours.model_version == theirs.model_version() &&
              ours.id == theirs.id(),
          "strings agree", text);
  Require(static_cast<int>(ours.inputs.size()) == theirs.inputs_size() &&
              static_cast<int>(ours.outputs.size()) == theirs.outputs_size() &&
              static_cast<int>(ours.raw_inputs.size()) == theirs.raw_input_contents_size(),
          "counts agree", text);
  for (size_t i = 0; i < ours.inputs.size(); ++i) {
    const auto& input = theirs.inputs(static_cast<int>(i));
    Require(ours.inputs[i].name == input.name() && ours.inputs[i].datatype == input.datatype(),
            "inputs agree", text);
    Require(std::equal(ours.inputs[i].shape.begin(), ours.inputs[i].shape.end(),
                       input.shape().begin(), input.shape().end()),
            "shapes agree", text);
    Require(ours.inputs[i].has_contents == input.has_contents(), "contents agree", text);
  }
  for (size_t i = 0; i < ours.inputs.size(); ++i)
    CheckRange(ours.inputs[i].shared_memory, theirs.inputs(static_cast<int>(i)), ours, text);
  for (size_t i = 0; i < ours.outputs.size(); ++i) {
    const auto& output = theirs.outputs(static_cast<int>(i));
    CheckRange(ours.outputs[i].shared_memory, output, ours, text);
    if (!ours.parameter_error.empty()) continue;
    const auto found = output.parameters().find("classification");
    const int64_t expected = found == output.parameters().end() ? 0 : Count(found->second);
    Require(ours.outputs[i].classification == expected, "classification agrees", text);
  }
  for (size_t i = 0; i < ours.raw_inputs.size(); ++i) {
    Require(Join(ours.raw_inputs[i]) == theirs.raw_input_contents(static_cast<int>(i)),
            "tensors agree", text);
  }
}

// Above a cap that protobuf does not have.
bool AboveCaps(const ModelInferRequest& request) {
  const auto many = [](int count) { return count > static_cast<int>(service::kMaxTensors); };
  if (many(request.inputs_size()) || many(request.outputs_size()) ||
      many(request.raw_input_contents_size()))
    return true;
  for (const auto& input : request.inputs()) {
    if (input.shape_size() > static_cast<int>(service::kMaxRank)) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> Seeds() {
  ModelInferRequest raw;
  raw.set_model_name("mnist");
  raw.set_model_version("1");
  raw.set_id("7");
  auto* input = raw.add_inputs();
  input->set_name("x");
  input->set_datatype("FP32");
  input->add_shape(1);
  input->add_shape(4);
  raw.add_outputs()->set_name("y");
  raw.add_raw_input_contents(std::string(16, '\x3f'));
  (*raw.mutable_parameters())["timeout"].set_int64_param(1000);
  (*raw.mutable_parameters())["triton_enable_empty_final_response"].set_bool_param(true);
  (*raw.mutable_outputs(0)->mutable_parameters())["classification"].set_int64_param(3);

  ModelInferRequest shared = raw;
  shared.clear_raw_input_contents();
  shared.mutable_outputs(0)->clear_parameters();
  const auto share = [](auto* tensor) {
    auto& parameters = *tensor->mutable_parameters();
    parameters["shared_memory_region"].set_string_param("region");
    parameters["shared_memory_byte_size"].set_int64_param(16);
    parameters["shared_memory_offset"].set_uint64_param(64);
  };
  share(shared.mutable_inputs(0));
  share(shared.mutable_outputs(0));

  ModelInferRequest typed;
  typed.set_model_name("m");
  for (const char* datatype :
       {"BOOL", "INT8", "INT64", "UINT16", "UINT64", "FP32", "FP64", "BYTES", "FP16"}) {
    auto* tensor = typed.add_inputs();
    tensor->set_name(datatype);
    tensor->set_datatype(datatype);
    tensor->add_shape(2);
    auto* contents = tensor->mutable_contents();
    for (int i = 0; i < 2; ++i) {
      switch (typed.inputs_size()) {
        case 1:
          contents->add_bool_contents(true);
          break;
        case 2:
          contents->add_int_contents(-1);
          break;
        case 3:
          contents->add_int64_contents(-1);
          break;
        case 4:
          contents->add_uint_contents(1);
          break;
        case 5:
          contents->add_uint64_contents(1);
          break;
        case 6:
          contents->add_fp32_contents(1);
          break;
        case 7:
          contents->add_fp64_contents(1);
          break;
        default:
          contents->add_bytes_contents("ab");
          break;
      }
    }
  }
  return {"", raw.SerializeAsString(), typed.SerializeAsString(), shared.SerializeAsString()};
}

std::string MutateStructure(const std::string& input, std::mt19937_64& random) {
  static const std::vector<std::string> kWords = {"x",
                                                  "y",
                                                  "mnist",
                                                  "FP32",
                                                  "INT8",
                                                  "BYTES",
                                                  "timeout",
                                                  "",
                                                  "shared_memory_region",
                                                  "shared_memory_byte_size",
                                                  "shared_memory_offset",
                                                  "classification",
                                                  "triton_x",
                                                  "\xff"};
  ModelInferRequest request;
  google::protobuf::LogSilencer silence;
  if (!request.ParseFromString(input)) return input;
  for (uint64_t changes = 1 + random() % 3; changes > 0; --changes)
    MutateMessage(request, kWords, random);
  return request.SerializeAsString();
}

}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;  // NOLINT(google-build-using-namespace): an extern "C" function
  google::protobuf::LogSilencer silence;
  const fuzz::Pieces pieces(data, size);
  service::DecodedRequest decoded;
  const absl::Status status = service::DecodeInferRequest(pieces.slices(), &decoded);
  inference::ModelInferRequest parsed;
  const bool valid = parsed.ParseFromArray(data, static_cast<int>(size));
  if (status.ok()) {
    fuzz::CheckStreamError(decoded.id);
    for (const service::DecodedInput& input : decoded.inputs) fuzz::CheckContents(input);
    if (valid) fuzz::CheckAgreement(decoded, parsed);
  } else {
    fuzz::CheckRefusal(status);
    fuzz::Require(!valid || fuzz::AboveCaps(parsed), "a valid request below the caps is read",
                  status.ToString() + "\n" + parsed.DebugString());
  }
  return 0;
}
