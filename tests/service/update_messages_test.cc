#include "service/update_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/time/clock.h"

namespace espalier::service {
namespace {

using ::testing::HasSubstr;

TEST(UpdateMessagesTest, StatesHaveTheSameNamesOnTheWireAsInTheEngine) {
  const auto* states = v1::VersionState_descriptor();
  EXPECT_EQ(states->value_count(), updates::kUpdateStates + 1);  // and UNSPECIFIED
  for (int i = 1; i <= updates::kUpdateStates; ++i) {
    const auto state = static_cast<updates::UpdateState>(i);
    EXPECT_EQ(v1::VersionState_Name(ToMessage(state)), NameOf(state));
  }
}

TEST(UpdateMessagesTest, AVersionTravelsWhole) {
  runtime::ModelVersions versions;
  versions.serving = 2;
  versions.staged = 3;
  versions.shadow = 1;
  versions.store.model = "m";
  versions.store.probation.emplace();
  versions.store.accepted_sequence = 40;
  updates::VersionRecord record;
  record.number = 2;
  record.weights.fill(7);
  record.state = updates::UpdateState::kLive;
  record.parent = 1;
  record.sequence = 40;
  record.replaced = 1;
  record.seconds = 1000;
  record.delta.fill(9);
  record.delta_bytes = 55;
  record.signers.push_back({1, 2, 3});
  record.reason = "why";
  versions.store.Add(record);
  const v1::ModelVersions message = ToMessage(versions);
  EXPECT_EQ(message.model(), "m");
  EXPECT_EQ(message.serving(), 2);
  EXPECT_EQ(message.staged(), 3);
  EXPECT_EQ(message.shadow(), 1);
  EXPECT_TRUE(message.on_probation());
  EXPECT_EQ(message.probation_ends(), 0) << "when it is confirmed";
  versions.store.probation->until_micros = 1'800'000'000'000'001;
  EXPECT_EQ(ToMessage(versions).probation_ends(), 1'800'000'001);
  EXPECT_EQ(message.accepted_sequence(), 40);
  ASSERT_EQ(message.versions_size(), 1);
  const v1::Version& version = message.versions(0);
  EXPECT_EQ(version.version(), 2);
  EXPECT_EQ(version.state(), v1::LIVE);
  EXPECT_EQ(version.weights(), std::string(32, '\7'));
  EXPECT_EQ(version.base(), 1);
  EXPECT_EQ(version.sequence(), 40);
  EXPECT_EQ(version.replaced(), 1);
  EXPECT_EQ(version.seconds(), 1000);
  EXPECT_EQ(version.delta_sha256(), std::string(32, '\11'));
  EXPECT_EQ(version.delta_bytes(), 55u);
  ASSERT_EQ(version.signers_size(), 1);
  EXPECT_EQ(version.signers(0).size(), 16u);
  EXPECT_EQ(version.reason(), "why");
}

TEST(UpdateMessagesTest, ARepositorysVersionHasNoDelta) {
  runtime::ModelVersions versions;
  updates::VersionRecord record;
  record.number = 1;
  record.repository = true;
  versions.store.Add(record);
  EXPECT_TRUE(ToMessage(versions).versions(0).delta_sha256().empty());
}

TEST(UpdateMessagesTest, AProbationIsReadAndChecked) {
  v1::Probation probation;
  const auto none = ReadProbation(probation);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->duration, absl::ZeroDuration());
  EXPECT_EQ(none->max_error_rate, 1) << "zero asks nothing";
  probation.set_seconds(std::numeric_limits<double>::infinity());
  probation.set_canary_share(0.5);
  probation.set_canary_seconds(2.5);
  probation.set_max_error_rate(0.25);
  probation.set_max_latency_ratio(3);
  probation.set_golden_requests(true);
  const auto all = ReadProbation(probation);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->duration, absl::InfiniteDuration());
  EXPECT_EQ(all->canary_share, 0.5);
  EXPECT_EQ(all->canary_duration, absl::Milliseconds(2500));
  EXPECT_EQ(all->max_error_rate, 0.25);
  EXPECT_EQ(all->max_latency_ratio, 3);
  EXPECT_TRUE(all->golden_requests);
  probation.set_canary_share(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(ReadProbation(probation).status().message(),
              HasSubstr("probation.canary_share is nan, expected 0 to 1"));
}

TEST(UpdateMessagesTest, WhatHasNoEffectByItselfIsRefusedWithWhatIsMissing) {
  const auto refused = [](void (v1::Probation::*set)(double), const char* text) {
    v1::Probation probation;
    (probation.*set)(0.5);
    EXPECT_TRUE(absl::IsInvalidArgument(ReadProbation(probation).status()));
    EXPECT_THAT(ReadProbation(probation).status().message(), HasSubstr(text));
  };
  refused(&v1::Probation::set_canary_share, "canary_share needs canary_seconds");
  refused(&v1::Probation::set_canary_seconds, "canary_seconds needs canary_share");
  refused(&v1::Probation::set_max_error_rate, "max_error_rate needs seconds, or a canary");
  refused(&v1::Probation::set_max_latency_ratio, "max_latency_ratio needs seconds, or a canary");
  v1::Probation judged;
  judged.set_max_error_rate(0.5);
  judged.set_seconds(1);
  EXPECT_TRUE(ReadProbation(judged).ok());
  judged.set_seconds(0);
  judged.set_canary_share(0.5);
  judged.set_canary_seconds(1);
  EXPECT_TRUE(ReadProbation(judged).ok());
}

v1::PrepareTransactionRequest Request() {
  v1::PrepareTransactionRequest request;
  request.mutable_transaction()->set_id("abc");
  request.mutable_transaction()->set_version(7);
  request.mutable_transaction()->add_participants("10.0.0.1:8003");
  request.mutable_transaction()->add_participants("[fd00::2]:8003");
  request.mutable_transaction()->set_expires_seconds(absl::ToUnixSeconds(absl::Now()) + 60);
  request.set_self(1);
  return request;
}

TEST(UpdateMessagesTest, ATransactionTravelsBothWays) {
  auto transaction = ReadTransaction(Request());
  ASSERT_TRUE(transaction.ok()) << transaction.status();
  EXPECT_EQ(transaction->id, "abc");
  EXPECT_EQ(transaction->version, 7);
  EXPECT_EQ(transaction->participants.size(), 2u);
  EXPECT_EQ(transaction->self, 1);
  EXPECT_EQ(transaction->probation, runtime::ProbationOptions());
  transaction->decision = updates::FleetDecision::kCommit;
  transaction->done = true;
  const v1::GetTransactionResponse message = ToMessage("m", *transaction);
  EXPECT_EQ(message.transaction().model(), "m");
  EXPECT_EQ(message.transaction().participants(1), "[fd00::2]:8003");
  EXPECT_EQ(message.state(), v1::COMMITTED);
  EXPECT_EQ(message.self(), 1);
  EXPECT_TRUE(message.done());
  EXPECT_FALSE(message.transaction().has_probation());
}

TEST(UpdateMessagesTest, ATransactionsProbationTravelsBothWays) {
  v1::PrepareTransactionRequest request = Request();
  v1::Probation& probation = *request.mutable_transaction()->mutable_probation();
  probation.set_seconds(600.5);
  probation.set_canary_share(0.25);
  probation.set_canary_seconds(2.5);
  probation.set_max_latency_ratio(3);
  probation.set_golden_requests(true);
  for (const double rate : {0.0, 0.25}) {
    probation.set_max_error_rate(rate);
    const auto transaction = ReadTransaction(request);
    ASSERT_TRUE(transaction.ok()) << transaction.status();
    EXPECT_EQ(transaction->probation, ReadProbation(probation).value());
    EXPECT_EQ(ToMessage("m", *transaction).transaction().probation().DebugString(),
              probation.DebugString());
  }
  probation.set_seconds(1e300);
  EXPECT_EQ(ReadTransaction(request)->probation.duration, absl::InfiniteDuration());
  probation.set_canary_share(2);
  EXPECT_THAT(ReadTransaction(request).status().message(), HasSubstr("probation.canary_share"));
}

TEST(UpdateMessagesTest, ParticipantsAreAddressesAndNothingElse) {
  for (const char* address : {"", "host", ":1", "host:0", "host:65536", "unix:/etc/passwd",
                              "dns:///host:1", "a b:1", "fd00::2:1", "h\n:1"}) {
    auto request = Request();
    request.mutable_transaction()->set_participants(0, address);
    EXPECT_THAT(ReadTransaction(request).status().message(), HasSubstr("expected host:port"))
        << address;
  }
  auto late = Request();
  late.mutable_transaction()->set_expires_seconds(absl::ToUnixSeconds(absl::Now()) + 90000);
  EXPECT_THAT(ReadTransaction(late).status().message(), HasSubstr("at most a day"));
}

TEST(UpdateMessagesTest, NamesDigestsAndNumbersAreCheckedByField) {
  EXPECT_TRUE(CheckModelName("digits").ok());
  EXPECT_THAT(CheckModelName("../digits").message(), HasSubstr("model is '../digits'"));
  EXPECT_TRUE(CheckVersion(1).ok());
  EXPECT_THAT(CheckVersion(0).message(), HasSubstr("above zero"));
  EXPECT_EQ(ReadDigest("sha256", std::string(32, 'a'))->front(), 'a');
  EXPECT_THAT(ReadDigest("sha256", "short").status().message(),
              HasSubstr("sha256 has 5 bytes, expected 32"));
}

}  // namespace
}  // namespace espalier::service
