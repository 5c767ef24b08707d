#include "engine/planner/plan.h"

#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

namespace espalier::planner {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

ModelPlan Example() {
  ModelPlan plan;
  plan.source = "measured";
  plan.device = "cpu \"x\"\n1 thread";
  LayerPlan layer;
  layer.name = "fc1";
  layer.out = 512;
  layer.in = 784;
  layer.sparsity = 0.9;
  layer.structure = "diagonal(16)";
  layer.weight_bytes = 160563;
  layer.dense_bytes = 1605632;
  const Candidate sparse = {
      {sparse::Layout::kDiagonal, 16, 16}, "diagonal_kernel", 2.5, true, 160563};
  const Candidate dense = {{}, "dense_kernel", 25, true, 1605632};
  layer.buckets.push_back({1, 1, sparse, dense, 25, ""});
  layer.buckets.push_back({8, 8, dense, {}, 25, ""});
  plan.layers.push_back(layer);
  plan.weight_bytes = 160563;
  plan.dense_bytes = 1605632;
  return plan;
}

TEST(PlanTest, TheTableSaysWhatWasChosenAndWhatItBought) {
  const std::string table = ToTable(Example());
  EXPECT_THAT(
      table, HasSubstr("fc1  [512, 784]  90.0 % zeros, diagonal(16)  156.8 KiB (10.0 % of dense)"));
  EXPECT_THAT(table, HasSubstr("diagonal_kernel"));
  EXPECT_THAT(table, HasSubstr("10.00x  dense 25.0 us (dense_kernel)"));
  EXPECT_THAT(table, HasSubstr("none"));
  EXPECT_THAT(table, HasSubstr("weights: 156.8 KiB, dense: 1.5 MiB (10.0 %)"));
  EXPECT_THAT(table, Not(HasSubstr("?")));
}

TEST(PlanTest, TheTableMarksWhatWasNotMeasured) {
  ModelPlan plan = Example();
  plan.layers[0].buckets[0].chosen.measured = false;
  EXPECT_THAT(ToTable(plan), HasSubstr("2.50?"));
  EXPECT_THAT(ToTable(plan), HasSubstr("predicted by the cost model"));
}

TEST(PlanTest, TableAndJsonSayWhyAFasterRunnerUpWasNotChosen) {
  ModelPlan plan = Example();
  plan.layers[0].buckets[0].note = "csr does not run at every batch";
  EXPECT_THAT(ToTable(plan), HasSubstr("(dense_kernel): csr does not run at every batch\n"));
  EXPECT_THAT(ToJson(plan), HasSubstr("\"note\": \"csr does not run at every batch\""));
  EXPECT_THAT(ToJson(Example()), Not(HasSubstr("note")));
}

TEST(PlanTest, TheJsonParsesAndCarriesEveryNumber) {
  google::protobuf::Struct json;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(ToJson(Example()), &json).ok())
      << ToJson(Example());
  EXPECT_EQ(json.fields().at("device").string_value(), "cpu \"x\"\n1 thread");
  const auto& layer = json.fields().at("layers").list_value().values(0).struct_value().fields();
  EXPECT_EQ(layer.at("bytes").number_value(), 160563);
  const auto& bucket = layer.at("buckets").list_value().values(0).struct_value().fields();
  EXPECT_EQ(bucket.at("speedup").number_value(), 10);
  EXPECT_EQ(bucket.at("chosen").struct_value().fields().at("layout").string_value(),
            "diagonal(16)");
  EXPECT_EQ(bucket.at("runner_up").struct_value().fields().at("kernel").string_value(),
            "dense_kernel");
  EXPECT_FALSE(
      layer.at("buckets").list_value().values(1).struct_value().fields().contains("runner_up"));
}

TEST(PlanTest, AnEmptyPlanPrints) {
  EXPECT_THAT(ToTable(ModelPlan()), HasSubstr("weights: 0 B"));
  EXPECT_THAT(ToJson(ModelPlan()), HasSubstr("\"layers\": []"));
}

}  // namespace
}  // namespace espalier::planner
