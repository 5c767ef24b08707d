// Whatever fails, what served serves on, with the digest that it had.
#include "gmock/gmock.h"
#include "tests/engine/runtime/update_fixture.h"

namespace espalier::runtime {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using updates::UpdateState;

class UpdateRefusalTest : public espalier::testing::UpdateFixture {
 protected:
  // Stages `delta`, which must fail; what serves must not have changed.
  void ExpectRefused(const std::string& delta, StatusCode code, const std::string& part,
                     const std::string& word) {
    const updates::Digest before = Versions().store.active_weights();
    const uint64_t refused = Refused(word);
    const auto staged = Push(delta);
    EXPECT_EQ(staged.status().code(), code) << staged.status();
    EXPECT_THAT(std::string(staged.status().message()), HasSubstr(part));
    EXPECT_EQ(Refused(word), refused + 1);
    EXPECT_EQ(Versions().store.active_weights(), before);
    EXPECT_EQ(Ask(), Versions().store.active);
  }
  uint64_t Refused(const std::string& word) {
    for (const auto& [reason, count] : Counts().refused) {
      if (reason == word) return count;
    }
    return 0;
  }
};

TEST_F(UpdateRefusalTest, WhatDoesNotFitIsRefusedAndChangesNothing) {
  StartServer();
  Publish(1, 2);
  publisher_.MakeVersion(1, 3);
  publisher_.MakeVersion(2, 4);
  publisher_.MakeVersion(4, 5);
  // Another base: made for a version that is not here.
  ExpectRefused(publisher_.Delta(4, 5), StatusCode::kFailedPrecondition, "not kept here",
                "other_base");
  // Sent before, or made before what is active.
  ExpectRefused(publisher_.Delta(2, 4, {.sequence = 2}), StatusCode::kFailedPrecondition,
                "was active already", "old_sequence");
  ExpectRefused(publisher_.Delta(2, 4, {.expires_seconds = 1'700'000'001}),
                StatusCode::kFailedPrecondition, "expired", "expired");
  ExpectRefused(publisher_.Delta(2, 4, {.model = "another"}), StatusCode::kFailedPrecondition,
                "another", "other_model");
  std::string damaged = publisher_.Delta(2, 4);
  damaged[damaged.size() - 3] ^= 1;
  ExpectRefused(damaged, StatusCode::kInvalidArgument, "", "damaged");
  // A number that is taken, with other bytes.
  const espalier::testing::LinearWeights two = publisher_.weights(2);
  publisher_.MakeVersion(4, 2);
  const std::string other_bytes = publisher_.Delta(4, 2, {.sequence = 9});
  publisher_.SetVersion(2, two);
  ExpectRefused(other_bytes, StatusCode::kFailedPrecondition, "one set of bytes for ever",
                "known_number");
}

TEST_F(UpdateRefusalTest, WhatIsNotSignedByATrustedKeyIsRefused) {
  const auto trusted = *updates::PrivateKey::Generate(), other = *updates::PrivateKey::Generate();
  options_.trust = updates::TrustPolicy{{*trusted.Public()}, 1};
  StartServer();
  publisher_.MakeVersion(1, 2);
  ExpectRefused(publisher_.Delta(1, 2), StatusCode::kPermissionDenied, "", "not_signed");
  ExpectRefused(publisher_.Delta(1, 2, {.keys = {other}}), StatusCode::kPermissionDenied, "",
                "not_signed");
  EXPECT_EQ(*Push(publisher_.Delta(1, 2, {.keys = {trusted}})), 2);
}

TEST_F(UpdateRefusalTest, ADeltaAboveTheLimitIsRefusedBeforeItIsSent) {
  options_.max_delta_bytes = 10;
  StartServer();
  publisher_.MakeVersion(1, 2);
  ExpectRefused(publisher_.Delta(1, 2), StatusCode::kResourceExhausted, "expected 1 to 10",
                "too_large");
}

TEST_F(UpdateRefusalTest, AModelThatWasNeverLoadedTakesNoUpdates) {
  StartServer();
  EXPECT_EQ(Push("x", "nobody").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(updates_->Rollback("nobody", "").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(updates_->List("nobody").status().code(), StatusCode::kNotFound);
}

TEST_F(UpdateRefusalTest, OnlyWhatIsStagedOrServedBeforeCanBeActivated) {
  StartServer();
  Publish(1, 2);
  publisher_.MakeVersion(2, 3);
  ASSERT_TRUE(Push(publisher_.Delta(2, 3)).ok());
  ASSERT_TRUE(updates_->Refuse("m", 3, "not wanted").ok());
  EXPECT_EQ(updates_->Activate("m", 3).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(updates_->Activate("m", 9).code(), StatusCode::kNotFound);
  EXPECT_EQ(updates_->Rollback("m", "", 3).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(updates_->Rollback("m", "", 9).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Ask(), 2);
  ASSERT_TRUE(updates_->Rollback("m", "").ok());
  EXPECT_EQ(updates_->Rollback("m", "").status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Ask(), 1);
}

TEST_F(UpdateRefusalTest, AVersionThatCannotBePreparedStaysStagedAndCanBeTriedAgain) {
  control_->edits_unimplemented = true;
  StartServer();
  publisher_.MakeVersion(1, 2);
  const std::string delta = publisher_.Delta(1, 2);
  control_->loads_fail = true;
  EXPECT_EQ(Push(delta).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  EXPECT_EQ(updates_->Activate("m", 2).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(StateOf(2), UpdateState::kStaged);
  EXPECT_EQ(Ask(), 1);
  control_->loads_fail = false;
  ASSERT_TRUE(updates_->Activate("m", 2).ok());
  EXPECT_EQ(Ask(), 2);
  EXPECT_LE(control_->most, 2);
}

}  // namespace
}  // namespace espalier::runtime
