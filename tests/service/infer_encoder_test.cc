#include "service/infer_encoder.h"

#include <cstring>

#include "gtest/gtest.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::service {
namespace {

TEST(InferEncoderTest, ProtobufReadsWhatWasWritten) {
  const std::string long_name(300, 'n');
  const std::vector<int64_t> narrow = {300}, wide = {300, 10};
  std::vector<ResponseOutput> outputs = {{long_name, "INT64", narrow, 2400},
                                         {"scores", "FP32", wide, 12000}};
  InferResponse response("model", INT64_MAX, "id-7", absl::MakeSpan(outputs), Envelope::kUnary);
  std::string bytes(response.bytes(), '\xee');
  response.Write(reinterpret_cast<std::byte*>(bytes.data()));
  std::memset(outputs[0].data, 'b', 2400);
  std::memset(outputs[1].data, 'a', 12000);
  inference::ModelInferResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(bytes));
  EXPECT_EQ(parsed.model_name(), "model");
  EXPECT_EQ(parsed.model_version(), "9223372036854775807");
  EXPECT_EQ(parsed.id(), "id-7");
  ASSERT_EQ(parsed.outputs_size(), 2);
  EXPECT_EQ(parsed.outputs(0).name(), long_name);
  EXPECT_EQ(parsed.outputs(0).datatype(), "INT64");
  EXPECT_EQ(parsed.outputs(1).name(), "scores");
  ASSERT_EQ(parsed.outputs(1).shape_size(), 2);
  EXPECT_EQ(parsed.outputs(1).shape(0), 300);
  ASSERT_EQ(parsed.raw_output_contents_size(), 2);
  EXPECT_EQ(parsed.raw_output_contents(0), std::string(2400, 'b'));
  EXPECT_EQ(parsed.raw_output_contents(1), std::string(12000, 'a'));
}

TEST(InferEncoderTest, EmptyIdShapeAndTensorArePresentOrAbsentAsProtobufHasThem) {
  const std::vector<int64_t> empty = {0};
  std::vector<ResponseOutput> outputs = {{"y", "FP32", {}, 4}, {"z", "FP32", empty, 0}};
  InferResponse response("m", 1, "", absl::MakeSpan(outputs), Envelope::kUnary);
  std::string bytes(response.bytes(), '\0');
  response.Write(reinterpret_cast<std::byte*>(bytes.data()));
  inference::ModelInferResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(bytes));
  EXPECT_EQ(parsed.id(), "");
  EXPECT_EQ(parsed.outputs(0).shape_size(), 0);
  ASSERT_EQ(parsed.raw_output_contents_size(), 2);
  EXPECT_EQ(parsed.raw_output_contents(1), "");
}

TEST(InferEncoderTest, AStreamsResponseIsTheSameOneWithTheFinalMark) {
  const std::vector<int64_t> shape = {1, 100};
  std::vector<ResponseOutput> outputs = {{"y", "FP32", shape, 400}};
  InferResponse response("model", 3, "id-7", absl::MakeSpan(outputs), Envelope::kStream);
  std::string bytes(response.bytes(), '\xee');
  response.Write(reinterpret_cast<std::byte*>(bytes.data()));
  std::memset(outputs[0].data, 'a', 400);
  inference::ModelStreamInferResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(bytes));
  EXPECT_EQ(parsed.error_message(), "");
  EXPECT_EQ(parsed.infer_response().id(), "id-7");
  EXPECT_EQ(parsed.infer_response().raw_output_contents(0), std::string(400, 'a'));
  ASSERT_EQ(parsed.infer_response().parameters_size(), 1);
  EXPECT_TRUE(parsed.infer_response().parameters().at("triton_final_response").bool_param());
}

TEST(InferEncoderTest, AnOutputInSharedMemorySaysWhereAndHasAnEmptyPlace) {
  const std::vector<int64_t> shape = {1, 100};
  const SharedMemoryRange at_start{"results", 0, 400}, behind{std::string(200, 'r'), 1 << 20, 400};
  std::vector<ResponseOutput> outputs = {{"a", "FP32", shape, 0, &at_start},
                                         {"b", "FP32", shape, 4},
                                         {"c", "FP32", shape, 0, &behind}};
  InferResponse response("model", 3, "", absl::MakeSpan(outputs), Envelope::kUnary);
  std::string bytes(response.bytes(), '\xee');
  response.Write(reinterpret_cast<std::byte*>(bytes.data()));
  std::memset(outputs[1].data, 'b', 4);
  inference::ModelInferResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(bytes));
  ASSERT_EQ(parsed.raw_output_contents_size(), 3);
  EXPECT_EQ(parsed.raw_output_contents(0), "");
  EXPECT_EQ(parsed.raw_output_contents(1), "bbbb");
  EXPECT_EQ(parsed.raw_output_contents(2), "");
  EXPECT_EQ(parsed.outputs(0).parameters_size(), 2);
  EXPECT_EQ(parsed.outputs(0).parameters().at("shared_memory_region").string_param(), "results");
  EXPECT_EQ(parsed.outputs(0).parameters().at("shared_memory_byte_size").int64_param(), 400);
  EXPECT_EQ(parsed.outputs(1).parameters_size(), 0);
  EXPECT_EQ(parsed.outputs(2).parameters().at("shared_memory_region").string_param(),
            std::string(200, 'r'));
  EXPECT_EQ(parsed.outputs(2).parameters().at("shared_memory_offset").int64_param(), 1 << 20);
}

TEST(InferEncoderTest, AStreamsErrorNamesItsRequest) {
  for (const std::string& id : {std::string(), std::string(300, 'i')}) {
    inference::ModelStreamInferResponse parsed;
    ASSERT_TRUE(parsed.ParseFromString(StreamError(id, "no such model")));
    EXPECT_EQ(parsed.error_message(), "no such model");
    EXPECT_EQ(parsed.infer_response().id(), id);
    EXPECT_TRUE(parsed.infer_response().parameters().at("triton_final_response").bool_param());
  }
}

}  // namespace
}  // namespace espalier::service
