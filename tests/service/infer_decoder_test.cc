#include "service/infer_decoder.h"

#include <random>

#include "gmock/gmock.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::service {
namespace {

using ::testing::HasSubstr;

std::vector<runtime::ByteSlice> Pieces(const std::string& bytes, const std::vector<size_t>& cuts) {
  std::vector<runtime::ByteSlice> pieces;
  size_t begin = 0;
  for (size_t cut : cuts) {
    pieces.push_back({reinterpret_cast<const std::byte*>(bytes.data()) + begin, cut - begin});
    begin = cut;
  }
  pieces.push_back(
      {reinterpret_cast<const std::byte*>(bytes.data()) + begin, bytes.size() - begin});
  return pieces;
}

absl::Status Decode(const std::string& bytes, DecodedRequest* request,
                    const std::vector<size_t>& cuts = {}) {
  return DecodeInferRequest(Pieces(bytes, cuts), request);
}

std::string Join(const runtime::ByteSlices& slices) {
  std::string bytes;
  for (const runtime::ByteSlice& slice : slices)
    bytes.append(reinterpret_cast<const char*>(slice.data), slice.size);
  return bytes;
}

// What both parsers say about a message, in one form.
std::string Describe(const DecodedRequest& request) {
  inference::ModelInferRequest out;
  out.set_model_name(request.model_name);
  out.set_model_version(request.model_version);
  out.set_id(request.id);
  if (request.timeout_micros != 0)
    (*out.mutable_parameters())["timeout"].set_int64_param(request.timeout_micros);
  for (const DecodedInput& input : request.inputs) {
    auto* to = out.add_inputs();
    to->set_name(input.name);
    to->set_datatype(input.datatype);
    to->mutable_shape()->Add(input.shape.begin(), input.shape.end());
    if (!input.has_contents) continue;
    EXPECT_TRUE(to->mutable_contents()->ParseFromString(Join(input.contents)));
  }
  for (const DecodedOutput& output : request.outputs) out.add_outputs()->set_name(output.name);
  for (const runtime::ByteSlices& raw : request.raw_inputs) out.add_raw_input_contents(Join(raw));
  return out.DebugString();
}

std::string Describe(inference::ModelInferRequest request) {
  int64_t timeout = 0;
  if (request.parameters().contains("timeout"))
    timeout = request.parameters().at("timeout").int64_param();
  request.clear_parameters();
  if (timeout != 0) (*request.mutable_parameters())["timeout"].set_int64_param(timeout);
  for (auto& input : *request.mutable_inputs()) input.clear_parameters();
  for (auto& output : *request.mutable_outputs()) output.clear_parameters();
  request.DiscardUnknownFields();
  return request.DebugString();
}

inference::ModelInferRequest RandomRequest(std::mt19937& random) {
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto text = [&] {
    return std::string(static_cast<size_t>(pick(4) == 0 ? 200 : pick(10)),
                       static_cast<char>('a' + pick(26)));
  };
  inference::ModelInferRequest request;
  request.set_model_name(text());
  if (pick(2)) request.set_model_version(text());
  if (pick(2)) request.set_id("id-\xc3\xa4\xe2\x82\xac\xf0\x9f\x8c\xb3");
  if (pick(2)) (*request.mutable_parameters())["timeout"].set_int64_param(pick(1000));
  if (pick(2)) (*request.mutable_parameters())[text()].set_string_param(text());
  for (int i = pick(4); i > 0; --i) {
    auto* input = request.add_inputs();
    input->set_name(text());
    input->set_datatype("FP32");
    for (int d = pick(5); d > 0; --d) input->add_shape(pick(3) ? pick(2000) : -1);
    if (pick(2)) (*input->mutable_parameters())[text()].set_bool_param(true);
    if (pick(3) == 0) {
      for (int e = pick(50); e > 0; --e)
        input->mutable_contents()->add_fp32_contents(static_cast<float>(e));
    }
  }
  for (int i = pick(3); i > 0; --i) request.add_outputs()->set_name(text());
  for (int i = pick(3); i > 0; --i)
    request.add_raw_input_contents(std::string(static_cast<size_t>(pick(300)), '\x7f'));
  return request;
}

TEST(InferDecoderTest, AgreesWithProtobufWhereverTheMessageIsCut) {
  std::mt19937 random(20260131);
  for (int round = 0; round < 40; ++round) {
    const inference::ModelInferRequest request = RandomRequest(random);
    const std::string bytes = request.SerializeAsString();
    const std::string expected = Describe(request);
    for (size_t cut = 0; cut <= bytes.size(); ++cut) {
      DecodedRequest decoded;
      ASSERT_TRUE(Decode(bytes, &decoded, {cut}).ok()) << "round " << round << " cut " << cut;
      ASSERT_EQ(Describe(decoded), expected) << "round " << round << " cut " << cut;
    }
    std::vector<size_t> every;
    for (size_t cut = 0; cut < bytes.size(); ++cut)
      every.push_back(cut);  // one byte each, and an empty one in front
    DecodedRequest decoded;
    ASSERT_TRUE(Decode(bytes, &decoded, every).ok());
    ASSERT_EQ(Describe(decoded), expected);
  }
}

TEST(InferDecoderTest, ATruncatedMessageIsRefusedOrAgreesWithProtobuf) {
  google::protobuf::LogSilencer silence;  // it reports every string that is not UTF-8
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    const std::string bytes = RandomRequest(random).SerializeAsString();
    for (size_t length = 0; length < bytes.size(); ++length) {
      const std::string prefix = bytes.substr(0, length);
      inference::ModelInferRequest parsed;
      const bool valid = parsed.ParseFromString(prefix);
      DecodedRequest decoded;
      const absl::Status status = Decode(prefix, &decoded, {length / 2});
      ASSERT_EQ(status.ok(), valid) << "round " << round << " length " << length << " " << status;
      if (!valid) continue;
      ASSERT_EQ(Describe(decoded), Describe(parsed));
    }
  }
}

TEST(InferDecoderTest, ADamagedMessageNeverDisagreesOnWhatBothAccept) {
  google::protobuf::LogSilencer silence;
  std::mt19937 random(11);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = RandomRequest(random).SerializeAsString();
    if (bytes.empty()) continue;
    for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    inference::ModelInferRequest parsed;
    DecodedRequest decoded;
    if (!Decode(bytes, &decoded, {bytes.size() / 3}).ok() || !parsed.ParseFromString(bytes))
      continue;
    // Contents stay unread here, and an int64 in another field of the oneof is no timeout to
    // either.
    for (DecodedInput& input : decoded.inputs) input.has_contents = false;
    for (auto& input : *parsed.mutable_inputs()) input.clear_contents();
    decoded.timeout_micros = 0;
    parsed.clear_parameters();
    ASSERT_EQ(Describe(decoded), Describe(parsed)) << "round " << round;
    ++accepted;
  }
  EXPECT_GT(accepted, 1000);
}

TEST(InferDecoderTest, MalformedBytesAreRefusedWithTheirPlace) {
  const std::pair<std::string, const char*> cases[] = {
      {"\x0a", "ends in the middle of a field"},
      {"\x0a\x05"
       "abc",
       "a length exceeds what is left"},
      {"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a length exceeds what is left"},
      {"\x0a\xff\xff\xff\xff\x0f", "a length exceeds what is left"},
      {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a varint has more than 10 bytes"},
      {std::string("\x00\x00", 2), "a tag is no field number"},
      {"\x0f\x01", "a tag is no field number"},
      {"\x2a\x04\x1a\x08\x01\x01",
       "a length exceeds what is left"},  // inner length beyond the inner message
      {"\x0c", "a group ends that did not begin"},
      {"\x7b\x08\x01", "ends in the middle of a group"},
      {"\x7b\x84\x01", "a group ends that did not begin"},
      {"\x0a\x02\xc3\x28", "not UTF-8"},
      {"\x0a\x03\xed\xa0\x80", "not UTF-8"},  // a surrogate
      {"\x0a\x02\xc0\x80", "not UTF-8"},      // an overlong zero
      {"\x0a\x04\xf4\x90\x80\x80", "not UTF-8"},
      {"\x0a\x01\xe2", "not UTF-8"},
  };
  for (const auto& [bytes, text] : cases) {
    DecodedRequest request;
    const absl::Status status = Decode(bytes, &request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_THAT(std::string(status.message()), HasSubstr("malformed ModelInferRequest"));
  }
}

TEST(InferDecoderTest, UnknownFieldsAndGroupsAreSkipped) {
  std::string bytes =
      "\x7b\x08\x01\x12\x02hi\x7b\x0d\x01\x02\x03\x04\x7c\x7c";  // group 15 with a group in it
  bytes += "\x0a\x01m";
  bytes += "\x82\x7d\x03xyz";                            // field 2000, bytes
  bytes += std::string("\x81\x7d\1\2\3\4\5\6\7\0", 10);  // field 2000, fixed64
  bytes += "\x08\x05";  // field 1 as a number: not the model's name
  DecodedRequest request;
  ASSERT_TRUE(Decode(bytes, &request, {5, 9}).ok());
  EXPECT_EQ(request.model_name, "m");
  inference::ModelInferRequest parsed;
  EXPECT_TRUE(parsed.ParseFromString(bytes));
}

TEST(InferDecoderTest, NestedGroupsEndSomewhere) {
  DecodedRequest request;
  EXPECT_THAT(std::string(Decode(std::string(1'000'000, '\x7b'), &request).message()),
              HasSubstr("nested too deep"));
}

TEST(InferDecoderTest, TheLastOfARepeatedScalarWinsAndContentsMerge) {
  inference::ModelInferRequest first, second;
  first.set_model_name("old");
  second.set_model_name("new");
  DecodedRequest request;
  ASSERT_TRUE(Decode(first.SerializeAsString() + second.SerializeAsString(), &request).ok());
  EXPECT_EQ(request.model_name, "new");

  inference::InferTensorContents one, two;
  one.add_fp32_contents(1);
  two.add_fp32_contents(2);
  const std::string a = one.SerializeAsString(), b = two.SerializeAsString();
  std::string input = "\x2a" + std::string(1, static_cast<char>(a.size())) + a + "\x2a" +
                      std::string(1, static_cast<char>(b.size())) + b;
  const std::string message = "\x2a" + std::string(1, static_cast<char>(input.size())) + input;
  request = {};
  ASSERT_TRUE(Decode(message, &request).ok());
  EXPECT_EQ(Join(request.inputs[0].contents), a + b);
}

TEST(InferDecoderTest, AShapeMayBePackedOrNot) {
  DecodedRequest request;
  ASSERT_TRUE(Decode("\x2a\x08\x18\x02\x18\x03\x1a\x02\x04\x05", &request).ok());
  EXPECT_EQ(request.inputs[0].shape, (Shape{2, 3, 4, 5}));
}

TEST(InferDecoderTest, CountsAreCappedBeforeTheyCostMemory) {
  std::string inputs, outputs, raws, rank;
  for (size_t i = 0; i <= kMaxTensors; ++i) {
    inputs += std::string("\x2a\x00", 2);
    outputs += std::string("\x32\x00", 2);
    raws += std::string("\x3a\x00", 2);
  }
  for (size_t i = 0; i <= kMaxRank; ++i) rank += "\x18\x01";
  for (const std::string& bytes : {inputs, outputs, raws}) {
    DecodedRequest request;
    EXPECT_THAT(std::string(Decode(bytes, &request).message()), HasSubstr("more than 1024"));
  }
  DecodedRequest request;
  EXPECT_THAT(
      std::string(Decode("\x2a" + std::string(1, static_cast<char>(rank.size())) + rank, &request)
                      .message()),
      HasSubstr("more than 32 dimensions"));
}

TEST(InferDecoderTest, ParametersThatMatterAreNoticed) {
  inference::ModelInferRequest request;
  (*request.mutable_parameters())["triton_enable_empty_final_response"].set_bool_param(true);
  (*request.mutable_parameters())["anything"].set_double_param(1);
  auto* input = request.add_inputs();
  auto& at = *input->mutable_parameters();
  at["shared_memory_region"].set_string_param("r");
  at["shared_memory_offset"].set_int64_param(64);
  at["shared_memory_byte_size"].set_uint64_param(128);
  auto* output = request.add_outputs();
  (*output->mutable_parameters())["classification"].set_int64_param(3);
  auto& to = *request.add_outputs()->mutable_parameters();
  to["shared_memory_region"].set_string_param("s");
  to["shared_memory_byte_size"].set_int64_param(0);
  to["anything"].set_bool_param(true);
  DecodedRequest decoded;
  ASSERT_TRUE(Decode(request.SerializeAsString(), &decoded).ok());
  EXPECT_EQ(decoded.parameter_error, "");
  EXPECT_EQ(decoded.inputs[0].shared_memory.region, "r");
  EXPECT_EQ(decoded.inputs[0].shared_memory.offset, 64);
  EXPECT_EQ(decoded.inputs[0].shared_memory.byte_size, 128);
  EXPECT_EQ(decoded.outputs[0].classification, 3);
  EXPECT_EQ(decoded.outputs[0].shared_memory.region, "");
  EXPECT_EQ(decoded.outputs[1].classification, 0);
  EXPECT_EQ(decoded.outputs[1].shared_memory.region, "s");
  EXPECT_EQ(decoded.outputs[1].shared_memory.offset, 0);
  EXPECT_EQ(decoded.outputs[1].shared_memory.byte_size, 0);
  (*request.mutable_parameters())["triton_secret"].set_bool_param(true);
  decoded = {};
  ASSERT_TRUE(Decode(request.SerializeAsString(), &decoded).ok());
  EXPECT_THAT(decoded.parameter_error, HasSubstr("parameter 'triton_secret' is reserved"));
}

TEST(InferDecoderTest, KnownParametersOfTheWrongKindOrSignAreRefused) {
  const auto error_of = [](const std::string& key, auto set) {
    inference::ModelInferRequest request;
    set((*request.mutable_parameters())[key]);
    DecodedRequest decoded;
    EXPECT_TRUE(Decode(request.SerializeAsString(), &decoded).ok());
    return decoded.parameter_error;
  };
  using Parameter = inference::InferParameter;
  const auto minus_one = [](Parameter& p) { p.set_int64_param(-1); };
  const auto text = [](Parameter& p) { p.set_string_param("7"); };
  const auto flag = [](Parameter& p) { p.set_bool_param(true); };
  const auto seven = [](Parameter& p) { p.set_uint64_param(7); };
  const auto nothing = [](Parameter&) {};
  EXPECT_EQ(error_of("timeout", minus_one),
            "parameter 'timeout': expected int64_param or uint64_param of at least 0, got "
            "int64_param -1");
  EXPECT_THAT(error_of("timeout", text), HasSubstr("got string_param"));
  EXPECT_THAT(error_of("timeout", nothing), HasSubstr("got nothing"));
  EXPECT_THAT(error_of("priority", flag), HasSubstr("got bool_param"));
  EXPECT_THAT(error_of("sequence_id", flag), HasSubstr("got bool_param"));
  EXPECT_THAT(error_of("sequence_start", seven),
              HasSubstr("expected bool_param, got uint64_param 7"));
  for (const char* key : {"timeout", "priority", "sequence_id"})
    EXPECT_EQ(error_of(key, seven), "");
  EXPECT_EQ(error_of("sequence_id", text), "");
  EXPECT_EQ(error_of("sequence_end", flag), "");
  EXPECT_EQ(error_of("mine", minus_one), "");
}

TEST(InferDecoderTest, APriorityMayUseAllBitsOfAnUnsignedInteger) {
  inference::ModelInferRequest request;
  (*request.mutable_parameters())["priority"].set_uint64_param(UINT64_MAX);
  DecodedRequest decoded;
  ASSERT_TRUE(Decode(request.SerializeAsString(), &decoded).ok());
  EXPECT_EQ(decoded.parameter_error, "");
  EXPECT_EQ(decoded.priority, UINT64_MAX);
  (*request.mutable_parameters())["timeout"].set_uint64_param(uint64_t{1} << 63);
  decoded = {};
  ASSERT_TRUE(Decode(request.SerializeAsString(), &decoded).ok());
  EXPECT_THAT(decoded.parameter_error, HasSubstr("got uint64_param 9223372036854775808"));
}

TEST(InferDecoderTest, ParametersOfTensorsThatCannotBeMeantAreRefusedByName) {
  using Parameters = google::protobuf::Map<std::string, inference::InferParameter>;
  const auto error_of = [](auto set, bool of_output) {
    inference::ModelInferRequest request;
    if (of_output) {
      request.add_outputs()->set_name("t");
      set(*request.mutable_outputs(0)->mutable_parameters());
    } else {
      request.add_inputs()->set_name("t");
      set(*request.mutable_inputs(0)->mutable_parameters());
    }
    DecodedRequest decoded;
    EXPECT_TRUE(Decode(request.SerializeAsString(), &decoded).ok());
    return decoded.parameter_error;
  };
  for (const bool of_output : {false, true}) {
    const std::string where = of_output ? "output 't': " : "input 't': ";
    const auto with = [&](auto set) {
      return error_of(
          [&](Parameters& p) {
            p["shared_memory_region"].set_string_param("r");
            p["shared_memory_byte_size"].set_int64_param(8);
            set(p);
          },
          of_output);
    };
    EXPECT_EQ(with([](Parameters&) {}), "");
    EXPECT_EQ(with([](Parameters& p) { p["shared_memory_region"].set_int64_param(1); }),
              where +
                  "parameter 'shared_memory_region': expected string_param with the name of a "
                  "region, got int64_param 1");
    EXPECT_THAT(with([](Parameters& p) { p["shared_memory_region"].set_string_param(""); }),
                HasSubstr("got string_param ''"));
    EXPECT_EQ(with([](Parameters& p) { p["shared_memory_offset"].set_int64_param(-1); }),
              where +
                  "parameter 'shared_memory_offset': expected int64_param of at least 0, got "
                  "int64_param -1");
    EXPECT_THAT(with([](Parameters& p) { p["shared_memory_offset"].set_uint64_param(~0ull); }),
                HasSubstr("got uint64_param 18446744073709551615"));
    EXPECT_THAT(with([](Parameters& p) { p["shared_memory_byte_size"].set_string_param("8"); }),
                HasSubstr("expected int64_param of at least 0, got string_param '8'"));
    EXPECT_EQ(with([](Parameters& p) { p.erase("shared_memory_byte_size"); }),
              where + "parameter 'shared_memory_region' needs 'shared_memory_byte_size'");
    EXPECT_EQ(with([](Parameters& p) { p.erase("shared_memory_region"); }),
              where + "parameter 'shared_memory_byte_size' needs 'shared_memory_region'");
  }
  EXPECT_EQ(error_of([](Parameters& p) { p["classification"].set_int64_param(0); }, true),
            "output 't': parameter 'classification': expected int64_param of at least 1, got "
            "int64_param 0");
  EXPECT_THAT(error_of([](Parameters& p) { p["classification"].set_string_param("x"); }, true),
              HasSubstr("got string_param 'x'"));
  EXPECT_EQ(error_of(
                [](Parameters& p) {
                  p["classification"].set_int64_param(1);
                  p["shared_memory_region"].set_string_param("r");
                  p["shared_memory_byte_size"].set_int64_param(8);
                },
                true),
            "output 't': parameter 'classification' cannot be joined with shared memory");
}

}  // namespace
}  // namespace espalier::service
