// attacks.h — a publisher, its model and its delta, and what it means to refuse what is made of them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "engine/updates/receive.h"
#include "engine/updates/weight_digest.h"
#include "tests/engine/updates/journals.h"
#include "tests/engine/updates/memory_weights.h"
#include "tests/engine/updates/random_weights.h"

namespace espalier::updates::testing {

inline constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
inline constexpr absl::StatusCode kDenied = absl::StatusCode::kPermissionDenied;
inline constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

inline const PrivateKey& Publisher() {
  static const auto* const key = new PrivateKey(PrivateKey::Generate().value());
  return *key;
}

// b: 2 tensors; v F32 [4] = {1, 0, 2, −0} and w BF16 [100, 10].
struct World {
  World() {
    const auto pair = MakePair<BFloat16Element>(1000, 21);
    const std::vector<uint32_t> v = {0x3f800000, 0, 0x40000000, 0x80000000};
    base.Add("v", "F32", {4}, v);
    base.Add("w", "BF16", {100, 10}, pair.before);
    target.Add("v", "F32", {4}, std::vector<uint32_t>{0x3f800001, 0x3f000000, 0, 0});
    target.Add("w", "BF16", {100, 10}, pair.after);
    digest = *DigestOf(base);
  }
  MemoryWeights base, target;
  Digest digest;
};

inline const World& TheWorld() {
  static const auto* const world = new World;
  return *world;
}

inline ReceivePolicy Policy() {
  ReceivePolicy policy;
  policy.trust = TrustPolicy{{Publisher().Public().value()}, 1};
  policy.model = "digits";
  policy.now_seconds = 1'800'000'100;
  return policy;
}

inline absl::StatusOr<Journal> ReceiveBytes(std::string bytes,
                                            const ReceivePolicy& policy = Policy(),
                                            const MemoryWeights& base = TheWorld().base) {
  const auto delta = OpenBytes(std::move(bytes));
  if (!delta.ok()) return delta.status();
  return ReceiveJournal(*delta, base, policy);
}

inline Draft Good() { return MakeDraft(TheWorld().base, TheWorld().target); }
inline std::string Signed(const Draft& draft) { return draft.Bytes({Publisher()}); }

struct Attack {
  const char* name;
  std::function<std::string()> bytes;
  absl::StatusCode code;
  const char* reason;
};

inline void PrintTo(const Attack& attack, std::ostream* out) { *out << attack.name; }

class AttackTest : public ::testing::TestWithParam<Attack> {
 protected:
  static void ExpectRefused(const Attack& attack) {
    const auto journal = ReceiveBytes(attack.bytes());
    ASSERT_FALSE(journal.ok());
    EXPECT_EQ(journal.status().code(), attack.code) << journal.status();
    EXPECT_THAT(std::string(journal.status().message()), ::testing::HasSubstr(attack.reason));
    EXPECT_LT(journal.status().message().size(), 1000u);
  }
};

inline std::string NameOfAttack(const ::testing::TestParamInfo<Attack>& info) {
  return info.param.name;
}

}  // namespace espalier::updates::testing
