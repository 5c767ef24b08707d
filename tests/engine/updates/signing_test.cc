#include "engine/updates/signing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace espalier::updates {
namespace {

using ::testing::HasSubstr;

PublicKey PublicOf(const PrivateKey& key) { return key.Public().value(); }

TEST(SigningTest, KeysSurvivePemAndSignaturesVerify) {
  const PrivateKey key = PrivateKey::Generate().value();
  const PrivateKey again = PrivateKey::FromPem(key.ToPem().value()).value();
  const PublicKey known = PublicKey::FromPem(PublicOf(key).ToPem().value()).value();
  EXPECT_EQ(known.id(), PublicOf(again).id());
  const Signature signature = again.Sign("message").value();
  EXPECT_EQ(signature.key, TagOf(known.id()));
  EXPECT_TRUE(known.Verifies("message", signature));
  EXPECT_FALSE(known.Verifies("messagf", signature));
  EXPECT_FALSE(PublicOf(PrivateKey::Generate().value()).Verifies("message", signature));
}

TEST(SigningTest, WhatIsNoEd25519KeyIsRefused) {
  const PrivateKey key = PrivateKey::Generate().value();
  for (const std::string& pem :
       {std::string(), std::string("rubbish"), PublicOf(key).ToPem().value(),
        std::string(1 << 20, 'x'),
        // an RSA key's header over nothing
        std::string("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")}) {
    EXPECT_EQ(PrivateKey::FromPem(pem).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(PublicKey::FromPem(key.ToPem().value()).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::string x25519 =
      "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VuAyEAbX4P2bT8yqQK3kQDgGQbNnQx7j2dY0PZ8q5wJv2r3F4=\n"
      "-----END PUBLIC KEY-----\n";
  EXPECT_THAT(std::string(PublicKey::FromPem(x25519).status().message()), HasSubstr("Ed25519"));
}

TEST(SigningTest, AThresholdCountsEachKeyOnce) {
  const PrivateKey a = PrivateKey::Generate().value(), b = PrivateKey::Generate().value(),
                   stranger = PrivateKey::Generate().value();
  const TrustPolicy both{{PublicOf(a), PublicOf(b)}, 2}, either{{PublicOf(a), PublicOf(b)}, 1};
  const Signature by_a = a.Sign("m").value(), by_b = b.Sign("m").value(),
                  by_stranger = stranger.Sign("m").value();
  EXPECT_TRUE(CheckSignatures("m", {by_a, by_b}, both).ok());
  EXPECT_EQ(CheckSignatures("m", {by_b, by_stranger}, either)->size(), 1u);
  for (const auto& too_few :
       {std::vector<Signature>{}, {by_a}, {by_a, by_a}, {by_a, by_stranger}}) {
    const auto status = CheckSignatures("m", too_few, both).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected at least 2"));
  }
  EXPECT_EQ(CheckSignatures("m", {by_stranger}, either).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST(SigningTest, AWrongSignatureByATrustedKeyRefusesWhateverOthersSay) {
  const PrivateKey a = PrivateKey::Generate().value(), b = PrivateKey::Generate().value();
  Signature wrong = a.Sign("m").value();
  wrong.bytes[5] ^= 1;
  const TrustPolicy either{{PublicOf(a), PublicOf(b)}, 1};
  const auto status = CheckSignatures("m", {wrong, b.Sign("m").value()}, either).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is wrong"));
}

TEST(SigningTest, PoliciesThatCannotBeMeantAreRefused) {
  const PublicKey key = PublicOf(PrivateKey::Generate().value());
  EXPECT_FALSE(CheckPolicy({{key, key}, 2}).ok());
  EXPECT_FALSE(CheckPolicy({{key}, 2}).ok());
  EXPECT_FALSE(CheckPolicy({{key}, 0}).ok());
  EXPECT_FALSE(CheckPolicy({{}, 1}).ok());
  EXPECT_TRUE(CheckPolicy({{key}, 1}).ok());
}

}  // namespace
}  // namespace espalier::updates
