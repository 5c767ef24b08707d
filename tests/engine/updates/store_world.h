// store_world.h — a publisher with many versions of a small model, and the shortest way to push them
// into a store.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "engine/updates/version_store.h"
#include "engine/updates/weight_digest.h"
#include "tests/engine/updates/memory_weights.h"
#include "tests/engine/updates/random_weights.h"

namespace espalier::updates::testing {

// Version 1 is the repository's; any other is made from one that exists.
class Publisher {
 public:
  explicit Publisher(int64_t elements = 300) {
    MemoryWeights first;
    first.Add("bias", "F32", {4}, std::vector<uint32_t>{0x3f800000, 0, 0x40000000, 0x80000000});
    first.Add("w", "BF16", {elements / 10, 10}, MakePair<BFloat16Element>(elements, 5).before);
    Remember(1, std::move(first));
  }
  const MemoryWeights& weights(int64_t number) const { return *weights_.at(number); }
  std::shared_ptr<const MemoryWeights> shared(int64_t number) const { return weights_.at(number); }
  const Digest& digest(int64_t number) const { return digests_.at(number); }

  // Some elements of `base` changed; which ones depends on the numbers alone.
  void MakeVersion(int64_t base, int64_t number) {
    MemoryWeights next = weights(base);
    std::mt19937_64 random(static_cast<uint64_t>(base * 1000 + number));
    std::string& bytes = next.data(1);
    for (int i = 0; i < 12; ++i)
      bytes[random() % bytes.size()] = random() % 4 == 0 ? '\0' : static_cast<char>(random());
    next.data(0)[static_cast<size_t>(number % 16)] ^= 1;
    Remember(number, std::move(next));
  }
  Draft MakeDelta(int64_t base, int64_t number, int64_t sequence) const {
    Draft draft = MakeDraft(weights(base), weights(number));
    draft.manifest.base_version = base;
    draft.manifest.target_version = number;
    draft.manifest.sequence = sequence;
    return draft;
  }

 private:
  void Remember(int64_t number, MemoryWeights weights) {
    digests_[number] = *DigestOf(weights);
    weights_[number] = std::make_shared<MemoryWeights>(std::move(weights));
  }
  std::map<int64_t, std::shared_ptr<const MemoryWeights>> weights_;
  std::map<int64_t, Digest> digests_;
};

inline constexpr int64_t kNow = 1'800'000'100;

inline ReceivePolicy UnsignedPolicy() {
  ReceivePolicy policy;
  policy.now_seconds = kNow;
  return policy;
}

inline absl::Status ReceiveWhole(VersionStore& store, const std::string& bytes) {
  const Digest file = Sha256Of(bytes);
  const auto offset = store.BeginReceive(file, bytes.size());
  if (!offset.ok()) return offset.status();
  auto status = store.Append(file, *offset, absl::string_view(bytes).substr(*offset));
  return status.ok() ? store.FinishReceive(file).status() : status;
}

// To STAGED.
inline absl::Status Push(VersionStore& store, const std::string& bytes,
                         const ReceivePolicy& policy = UnsignedPolicy()) {
  if (auto status = ReceiveWhole(store, bytes); !status.ok()) return status;
  auto verified = store.Verify(Sha256Of(bytes), policy);
  if (!verified.ok()) return verified.status();
  return store.Stage(*std::move(verified));
}

// What the store says of a version is what the publisher made.
inline void ExpectWeights(const VersionStore& store, const Publisher& publisher, int64_t number) {
  const auto weights = store.Weights(number);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(*DigestOf(**weights), publisher.digest(number)) << "version " << number;
}

}  // namespace espalier::updates::testing
