#include "service/infer_encoder.h"

#include <cstring>

#include "gtest/gtest.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::service {
namespace {

TEST(InferEncoderTest, ProtobufReadsWhatWasWritten) {
  const std::string long_name(300, 'n');
  const auto signature = *runtime::Signature::Create(
      "model", 8, {},
      {{"scores", DType::kFloat32, {kBatch, 10}}, {long_name, DType::kInt64, {kBatch}}});
  std::vector<runtime::OutputTensor> outputs = {{1, {300}, 2400, nullptr},
                                                {0, {300, 10}, 12000, nullptr}};
  InferResponse response(signature, INT64_MAX, "id-7", outputs);
  std::string bytes(response.bytes(), '\xee');
  response.Write(reinterpret_cast<std::byte*>(bytes.data()));
  for (runtime::OutputTensor& output : outputs)
    std::memset(output.data, 'a' + output.index, output.bytes);
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
  const auto signature = *runtime::Signature::Create(
      "m", 0, {}, {{"y", DType::kFloat32, {}}, {"z", DType::kFloat32, {0}}});
  std::vector<runtime::OutputTensor> outputs = {{0, {}, 4, nullptr}, {1, {0}, 0, nullptr}};
  InferResponse response(signature, 1, "", outputs);
  std::string bytes(response.bytes(), '\0');
  response.Write(reinterpret_cast<std::byte*>(bytes.data()));
  inference::ModelInferResponse parsed;
  ASSERT_TRUE(parsed.ParseFromString(bytes));
  EXPECT_EQ(parsed.id(), "");
  EXPECT_EQ(parsed.outputs(0).shape_size(), 0);
  ASSERT_EQ(parsed.raw_output_contents_size(), 2);
  EXPECT_EQ(parsed.raw_output_contents(1), "");
}

}  // namespace
}  // namespace espalier::service
