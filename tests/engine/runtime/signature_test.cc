#include "engine/runtime/signature.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::TestRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Signature TwoInputs(int64_t max_batch_size = 8) {
  const Shape a = max_batch_size > 0 ? Shape{kBatch, 4} : Shape{4};
  const Shape b = max_batch_size > 0 ? Shape{kBatch, 2} : Shape{2};
  return *Signature::Create("m", max_batch_size,
                            {{"a", DType::kFloat32, a}, {"b", DType::kInt64, b}},
                            {{"y", DType::kFloat32, a}, {"z", DType::kInt64, b}});
}

// A request that fits TwoInputs, with the inputs in the other order.
void Fill(TestRequest& request, int64_t batch_a = 2, int64_t batch_b = 2) {
  request.AddInput("b", "INT64", {batch_b, 2}, std::string(static_cast<size_t>(batch_b) * 16, 'b'));
  request.AddInput("a", "FP32", {batch_a, 4}, std::string(static_cast<size_t>(batch_a) * 16, 'a'));
}

void ExpectRefused(TestRequest& request, const std::string& text,
                   const Signature& signature = TwoInputs()) {
  const absl::Status status = BindRequest(signature, request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(SignatureTest, InputsAreBoundByNameAndOutputsDefaultToAll) {
  TestRequest request;
  Fill(request);
  ASSERT_TRUE(BindRequest(TwoInputs(), request).ok());
  EXPECT_THAT(request.input_of, ElementsAre(1, 0));
  EXPECT_EQ(request.batch, 2);
  ASSERT_EQ(request.outputs.size(), 2u);
  EXPECT_EQ(request.outputs[0].shape, (Shape{2, 4}));
  EXPECT_EQ(request.outputs[0].bytes, 32u);
  EXPECT_EQ(request.outputs[1].bytes, 32u);
}

TEST(SignatureTest, OutputsComeInTheOrderAskedFor) {
  TestRequest request;
  Fill(request);
  request.requested_outputs = {"z", "y"};
  ASSERT_TRUE(BindRequest(TwoInputs(), request).ok());
  EXPECT_EQ(request.outputs[0].index, 1);
  EXPECT_EQ(request.outputs[1].index, 0);
}

TEST(SignatureTest, UnknownOrRepeatedNamesAreRefused) {
  TestRequest unknown_input;
  Fill(unknown_input);
  unknown_input.AddInput("c\n", "FP32", {2, 4}, "");
  ExpectRefused(unknown_input,
                "unexpected inference input 'c\\n' for model 'm': its inputs are 'a', 'b'");
  TestRequest twice;
  Fill(twice);
  twice.AddInput("a", "FP32", {2, 4}, std::string(32, 'a'));
  ExpectRefused(twice, "input 'a' for model 'm' is given twice");
  TestRequest unknown_output;
  Fill(unknown_output);
  unknown_output.requested_outputs = {"w"};
  ExpectRefused(unknown_output,
                "unexpected inference output 'w' for model 'm': its outputs are 'y', 'z'");
  TestRequest output_twice;
  Fill(output_twice);
  output_twice.requested_outputs = {"y", "y"};
  ExpectRefused(output_twice, "output 'y' for model 'm' is requested twice");
}

TEST(SignatureTest, AMissingInputIsNamed) {
  TestRequest request;
  request.AddInput("a", "FP32", {2, 4}, std::string(32, 'a'));
  ExpectRefused(request, "expected 2 inputs but got 1 inputs for model 'm': 'b' is missing");
}

TEST(SignatureTest, ShapeTypeAndSizeSayExpectedAndGot) {
  TestRequest wrong_type;
  wrong_type.AddInput("a", "FP64", {2, 4}, std::string(64, 'a'));
  ExpectRefused(wrong_type,
                "inference input 'a' data-type is 'FP64', but model 'm' expects 'FP32'");
  TestRequest wrong_shape;
  wrong_shape.AddInput("a", "FP32", {2, 5}, std::string(40, 'a'));
  ExpectRefused(wrong_shape,
                "unexpected shape for input 'a' for model 'm': expected [-1, 4], got [2, 5]");
  TestRequest wrong_rank;
  wrong_rank.AddInput("a", "FP32", {4}, std::string(16, 'a'));
  ExpectRefused(wrong_rank, "expected [-1, 4], got [4]");
  TestRequest wrong_size;
  wrong_size.AddInput("a", "FP32", {2, 4}, std::string(31, 'a'));
  ExpectRefused(wrong_size, "shape [2, 4] of FP32 takes 32 bytes, got 31");
}

TEST(SignatureTest, TheBatchMustBeWithinBoundsAndTheSameForAllInputs) {
  TestRequest large;
  Fill(large, 9, 9);
  ExpectRefused(large, "inference request batch-size must be <= 8 for 'm', got shape [9, 2]");
  TestRequest empty;
  empty.AddInput("a", "FP32", {0, 4}, "");
  ExpectRefused(empty, "inference request batch-size must be >= 1 for 'm', got shape [0, 4]");
  TestRequest negative;
  negative.AddInput("a", "FP32", {-1, 4}, "");
  ExpectRefused(negative, "must be >= 1");
  TestRequest huge;
  huge.AddInput("a", "FP32", {INT64_MAX, 4}, "");
  ExpectRefused(huge, "must be <= 8");
  TestRequest uneven;
  Fill(uneven, 2, 3);
  ExpectRefused(uneven, "input 'a' batch size 2 does not match that of input 'b', 3");
}

TEST(SignatureTest, AModelWithoutBatchTakesExactlyItsShape) {
  const Signature signature = TwoInputs(0);
  TestRequest request;
  request.AddInput("a", "FP32", {4}, std::string(16, 'a'));
  request.AddInput("b", "INT64", {2}, std::string(16, 'b'));
  ASSERT_TRUE(BindRequest(signature, request).ok());
  EXPECT_EQ(request.batch, 1);
  EXPECT_EQ(request.outputs[0].shape, (Shape{4}));
  TestRequest batched;
  batched.AddInput("a", "FP32", {1, 4}, std::string(16, 'a'));
  ExpectRefused(batched, "expected [4], got [1, 4]", signature);
}

TEST(SignatureTest, ABatchSizeThatTheModelCannotHaveIsRefusedAtLoad) {
  const auto create = [](int64_t max_batch_size, Shape shape) {
    return Signature::Create("m", max_batch_size, {{"a", DType::kFloat32, shape}}, {}).status();
  };
  EXPECT_THAT(std::string(create(8, {4}).message()),
              HasSubstr("must have a batch dimension (-1) in front"));
  EXPECT_THAT(std::string(create(0, {kBatch, 4}).message()),
              HasSubstr("set max_batch_size above 0"));
  EXPECT_THAT(std::string(create(8, {kBatch, kBatch}).message()),
              HasSubstr("dimension of unknown size"));
}

TEST(PrintableTest, NamesOfClientsAreEscapedAndCut) {
  EXPECT_EQ(Printable("mlp"), "mlp");
  EXPECT_EQ(Printable(absl::string_view("a\0\"\n", 4)), "a\\x00\\\"\\n");
  EXPECT_EQ(Printable(std::string(500, 'x')).size(), 131u);
}

}  // namespace
}  // namespace espalier::runtime
