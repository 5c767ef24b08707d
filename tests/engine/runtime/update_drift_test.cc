// Updates that move non-zeros until another layout is the right one: the planner is asked again while they are staged.
#include <cstring>
#include <thread>

#include "tests/engine/runtime/update_fixture.h"

namespace espalier::runtime {
namespace {

using espalier::testing::LinearWeights;
using kernels::Layout;
using updates::UpdateState;

class UpdateDriftTest : public espalier::testing::UpdateFixture {
 protected:
  UpdateDriftTest() {
    // By bytes, so that what is chosen does not depend on the machine.
    config_ = R"(parameters { key: "weight_memory" value { string_value: "smallest" } })";
    publisher_.SetVersion(1, Diagonal(1));
  }

  // One diagonal, of 16 non-zeros.
  static LinearWeights Diagonal(int64_t version) {
    LinearWeights weights;
    for (int o = 0; o < LinearWeights::kOut; ++o) weights.w[o * LinearWeights::kIn + o] = 2;
    weights.b[0] = static_cast<float>(version);
    return weights;
  }
  // As many, anywhere: one in each row.
  static LinearWeights Scattered(int64_t version) {
    LinearWeights weights;
    for (int o = 0; o < LinearWeights::kOut; ++o)
      weights.w[o * LinearWeights::kIn + o * o * 5 % LinearWeights::kIn] = 3;
    weights.b[0] = static_cast<float>(version);
    return weights;
  }
  static LinearWeights Full(int64_t version) {
    LinearWeights weights;
    for (float& value : weights.w) value = 1;
    weights.b[0] = static_cast<float>(version);
    return weights;
  }
  void Publish(int64_t base, int64_t version, LinearWeights weights) {
    publisher_.SetVersion(version, std::move(weights));
    auto staged = Push(publisher_.Delta(base, version));
    ASSERT_TRUE(staged.ok()) << staged.status();
    const absl::Status activated = updates_->Activate("m", version);
    ASSERT_TRUE(activated.ok()) << activated;
    EXPECT_EQ(Ask(), version);
  }
  Layout ServedLayout() {
    const VersionHandle served = *manager_->Find("m", "");
    const auto& bucket = served->model().plan().layers[0].buckets[0];
    const auto& plan = served->config().parameters().at("layouts").string_value();
    EXPECT_EQ(plan, absl::StrCat(sparse::ToString(bucket.chosen.spec), " x1"));
    return bucket.chosen.spec.layout;
  }
};

TEST_F(UpdateDriftTest, ADiagonalThatScattersServesWithAnotherLayoutAndGoesBackWithItsOwn) {
  StartServer();
  ASSERT_EQ(ServedLayout(), Layout::kDiagonal);
  const auto digest = Versions().store.active_weights();
  publisher_.SetVersion(2, Scattered(2));
  ASSERT_TRUE(Push(publisher_.Delta(1, 2)).ok());
  EXPECT_EQ(ServedLayout(), Layout::kDiagonal) << "what serves is left alone";
  EXPECT_EQ(Counts().replans_changed, 1u);
  EXPECT_EQ(Ask(), 1);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
  EXPECT_EQ(Ask(), 2);
  // On the two copies that there are.
  const int edits = control_->edits;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(*updates_->Rollback("m", "as a test"), 1);
    EXPECT_EQ(Versions().store.active_weights(), digest);
    EXPECT_EQ(ServedLayout(), Layout::kDiagonal);
    EXPECT_EQ(Ask(), 1);
    ASSERT_TRUE(updates_->Activate("m", 2).ok());
    EXPECT_EQ(ServedLayout(), Layout::kCsr);
    EXPECT_EQ(Ask(), 2);
  }
  EXPECT_EQ(control_->edits, edits);
  EXPECT_EQ(control_->loads, 1);
  EXPECT_EQ(control_->most, 2);
  EXPECT_EQ(Counts().replans_changed, 1u);
}

TEST_F(UpdateDriftTest, EachOfTheTwoCopiesIsPlannedAnewOnce) {
  StartServer();
  Publish(1, 2, Scattered(2));
  Publish(2, 3, Scattered(3));
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
  EXPECT_EQ(Counts().replans_changed, 2u);
  for (int64_t version = 4; version < 10; ++version) {
    Publish(version - 1, version, Scattered(version));
    EXPECT_EQ(ServedLayout(), Layout::kCsr);
  }
  EXPECT_EQ(Counts().replans_changed, 2u);
  EXPECT_EQ(Counts().replans_kept, 0u);
  EXPECT_EQ(control_->most, 2);
  Publish(9, 10, Full(10));
  EXPECT_EQ(ServedLayout(), Layout::kDense);
  Publish(10, 11, Diagonal(11));
  EXPECT_EQ(ServedLayout(), Layout::kDiagonal);
  EXPECT_EQ(Counts().replans_changed, 4u);
  EXPECT_EQ(control_->loads, 1);
  EXPECT_EQ(control_->most, 2);
}

TEST_F(UpdateDriftTest, RequestsAreAnsweredWhileThePlannerIsAsked) {
  StartServer();
  publisher_.SetVersion(2, Scattered(2));
  control_->plan_gate.Close();
  std::thread push([&] { EXPECT_TRUE(Push(publisher_.Delta(1, 2)).ok()); });
  control_->plan_gate.AwaitWaiting(1);
  for (uint32_t i = 0; i < 20; ++i) EXPECT_EQ(Ask(i), 1);
  control_->plan_gate.Open();
  push.join();
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
  EXPECT_EQ(Ask(), 2);
}

TEST_F(UpdateDriftTest, AnUpdateThatComesMeanwhileGetsThePlanForItsOwnWeights) {
  StartServer();
  publisher_.SetVersion(2, Scattered(2));
  publisher_.SetVersion(3, Full(3));
  control_->plan_gate.Close();
  std::thread push([&] { EXPECT_TRUE(Push(publisher_.Delta(1, 2)).ok()); });
  control_->plan_gate.AwaitWaiting(1);
  std::thread next([&] { EXPECT_TRUE(Push(publisher_.Delta(2, 3)).ok()); });
  control_->plan_gate.Open();
  push.join();
  next.join();
  EXPECT_EQ(Ask(), 1);
  ASSERT_TRUE(updates_->Activate("m", 3).ok());
  EXPECT_EQ(ServedLayout(), Layout::kDense);
  EXPECT_EQ(Ask(), 3);
  EXPECT_EQ(*updates_->Rollback("m", "as a test"), 1);
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(control_->most, 2);
}

TEST_F(UpdateDriftTest, ChangedValuesAndAMoveOrTwoAreNoReasonToPlan) {
  publisher_.SetVersion(1, Full(1));
  AddRepositoryVersion(1);
  StartServer();
  LinearWeights weights = publisher_.weights(1);
  for (float& value : weights.w) value += 1;
  Publish(1, 2, weights);
  for (int i = 0; i < 10; ++i) weights.w[i] = 0;
  Publish(2, 3, weights);
  EXPECT_EQ(ServedLayout(), Layout::kDense);
  EXPECT_EQ(Counts().replans_changed + Counts().replans_kept + Counts().replans_failed, 0u);
}

TEST_F(UpdateDriftTest, APlanThatFailsLeavesTheUpdateToTheOldOne) {
  StartServer();
  control_->plans_fail = true;
  Publish(1, 2, Scattered(2));
  EXPECT_EQ(ServedLayout(), Layout::kDiagonal);
  EXPECT_EQ(Counts().replans_failed, 1u);
  EXPECT_EQ(Counts().edited, 1u);
  EXPECT_EQ(Counts().rebuilt, 0u);
  control_->plans_fail = false;
  // The other copy has not failed; the first one is asked for again when as much has moved once more.
  Publish(2, 3, Scattered(3));
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
  Publish(3, 4, Scattered(4));
  EXPECT_EQ(ServedLayout(), Layout::kDiagonal);
  Publish(4, 5, Full(5));
  Publish(5, 6, Full(6));
  EXPECT_EQ(ServedLayout(), Layout::kDense);
  EXPECT_EQ(Counts().replans_failed, 1u);
}

TEST_F(UpdateDriftTest, AVersionFarBackServesWithThePlanOfItsOwnWeights) {
  StartServer();
  Publish(1, 2, Scattered(2));
  Publish(2, 3, Scattered(3));
  ASSERT_EQ(ServedLayout(), Layout::kCsr);
  ASSERT_EQ(*updates_->Rollback("m", "far back", 1), 1);
  EXPECT_EQ(Ask(), 1);
  EXPECT_EQ(ServedLayout(), Layout::kDiagonal);
  ASSERT_TRUE(updates_->Activate("m", 3).ok());
  EXPECT_EQ(Ask(), 3);
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
}

TEST_F(UpdateDriftTest, ARestartServesTheSameVersion) {
  StartServer();
  Publish(1, 2, Scattered(2));
  RestartServer();
  EXPECT_EQ(Ask(), 2);
  EXPECT_EQ(ServedLayout(), Layout::kCsr);
  EXPECT_EQ(*updates_->Rollback("m", "as a test"), 1);
  EXPECT_EQ(Ask(), 1);
}

}  // namespace
}  // namespace espalier::runtime
