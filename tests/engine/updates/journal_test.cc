#include "engine/updates/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/updates/weight_digest.h"
#include "tests/engine/updates/memory_weights.h"
#include "tests/engine/updates/random_weights.h"

namespace espalier::updates {
namespace {

using testing::Draft;
using ::testing::HasSubstr;
using testing::MakeDraft;
using testing::MakePair;
using testing::MemoryWeights;
using testing::OpenBytes;

struct WeightsPair {
  MemoryWeights before, after;
};

// Tensors of every kind, one of them larger than a segment, one empty, one scalar.
WeightsPair MakeWeights(uint64_t seed, int64_t large = 4'500'000) {
  WeightsPair weights;
  const auto add = [&](const std::string& name, const std::string& dtype, std::vector<int64_t> dims,
                       const auto& pair) {
    weights.before.Add(name, dtype, dims, pair.before);
    weights.after.Add(name, dtype, dims, pair.after);
  };
  add("w.large", "BF16", {large / 100, 100},
      MakePair<BFloat16Element>(large, seed, {.zeros = 0.9}));
  add("w.f32", "F32", {31, 33}, MakePair<Float32Element>(31 * 33, seed + 1));
  add("w.f16", "F16", {1000}, MakePair<Float16Element>(1000, seed + 2));
  add("w.int8", "I8", {7, 5, 3}, MakePair<ByteElement>(105, seed + 3));
  add("a.scalar", "F32", {}, MakePair<Float32Element>(1, seed + 4, {.arbitrary = 1}));
  add("z.empty", "F32", {0, 4}, MakePair<Float32Element>(0, seed));
  return weights;
}

TEST(JournalTest, LeadsFromTheBaseToTheTargetAndBack) {
  const WeightsPair weights = MakeWeights(11);
  const auto delta = OpenBytes(MakeDraft(weights.before, weights.after).Bytes());
  ASSERT_TRUE(delta.ok()) << delta.status();
  ASSERT_TRUE(delta->CheckBody().ok());
  ASSERT_TRUE(CheckBase(delta->manifest(), *DigestOf(weights.before)).ok());
  const auto status = CheckTarget(*delta, weights.before);
  EXPECT_TRUE(status.ok()) << status;
  const auto journal = DecodeJournal(*delta, weights.before);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ(journal->entries(), delta->manifest().counts().total());

  MemoryWeights live = weights.before;
  live.Apply(*journal);
  EXPECT_TRUE(live == weights.after);
  live.Apply(*journal);
  EXPECT_TRUE(live == weights.after) << "applying twice is applying once";
  live.Undo(*journal);
  EXPECT_TRUE(live == weights.before);
  live.Apply(journal->Inverse().Inverse());
  EXPECT_TRUE(live == weights.after);
  live.Apply(journal->Inverse());
  EXPECT_TRUE(live == weights.before);
}

TEST(JournalTest, KnowsWhetherItWasApplied) {
  WeightsPair weights = MakeWeights(12, 1000);
  const auto delta = OpenBytes(MakeDraft(weights.before, weights.after).Bytes());
  const auto journal = DecodeJournal(*delta, weights.before);
  ASSERT_TRUE(journal.ok());
  for (const TensorJournal& tensor : journal->tensors) {
    const ElementKind kind = weights.before.tensors()[tensor.tensor].kind();
    EXPECT_TRUE(IsBefore(weights.before.data(tensor.tensor).data(), kind, tensor.entries));
    EXPECT_FALSE(IsBefore(weights.after.data(tensor.tensor).data(), kind, tensor.entries));
  }
}

TEST(JournalTest, NoChangeIsAnEmptyJournalAndAllChangedIsAFullOne) {
  WeightsPair weights = MakeWeights(13, 2000);
  const auto none = OpenBytes(MakeDraft(weights.before, weights.before).Bytes());
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(DecodeJournal(*none, weights.before)->entries(), 0);
  EXPECT_TRUE(CheckTarget(*none, weights.before).ok());
  EXPECT_LT(none->size(), 300u);
  int64_t elements = 0;
  for (size_t i = 0; i < weights.before.tensors().size(); ++i) {
    elements += weights.before.tensors()[i].elements();
    weights.after.data(i) = weights.before.data(i);
    for (char& byte : weights.after.data(i)) byte = static_cast<char>(~byte);
  }
  const auto all = OpenBytes(MakeDraft(weights.before, weights.after).Bytes());
  const auto journal = DecodeJournal(*all, weights.before);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ(journal->entries(), elements);
  weights.before.Apply(*journal);
  EXPECT_TRUE(weights.before == weights.after);
}

// Notes which tensors are read, and how much.
class NotingReader final : public TensorReader {
 public:
  explicit NotingReader(const MemoryWeights& weights) : weights_(weights) {}
  const std::vector<TensorInfo>& tensors() const override { return weights_.tensors(); }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override {
    read[tensor] += count;
    return weights_.Read(tensor, first, count, to);
  }
  mutable std::map<size_t, int64_t> read;

 private:
  const MemoryWeights& weights_;
};

// Lets nobody read the base further ahead of what was handed over than it is told; slowly, so that they would.
class LaggingSink final : public JournalSink {
 public:
  absl::Status Begin(absl::Span<const ChangedTensor> tensors) override {
    promised = {tensors.begin(), tensors.end()};
    return absl::OkStatus();
  }
  absl::Status Append(size_t tensor, absl::Span<const JournalEntry> entries) override {
    EXPECT_GE(static_cast<int64_t>(tensor), handed_over.load()) << "in order";
    absl::SleepFor(absl::Milliseconds(1));
    handed_over = static_cast<int64_t>(tensor);
    largest = std::max(largest, entries.size());
    return absl::OkStatus();
  }
  std::vector<ChangedTensor> promised;
  std::atomic<int64_t> handed_over{0};
  size_t largest = 0;
};

class LeadingReader final : public TensorReader {
 public:
  LeadingReader(const MemoryWeights& weights, const LaggingSink& sink)
      : weights_(weights), sink_(sink) {}
  const std::vector<TensorInfo>& tensors() const override { return weights_.tensors(); }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override {
    const int64_t lead = static_cast<int64_t>(tensor) - sink_.handed_over;
    for (int64_t seen = furthest; lead > seen && !furthest.compare_exchange_weak(seen, lead);) {
    }
    return weights_.Read(tensor, first, count, to);
  }
  mutable std::atomic<int64_t> furthest{0};

 private:
  const MemoryWeights& weights_;
  const LaggingSink& sink_;
};

TEST(JournalTest, WhatIsHeldWhileADeltaIsDecodedDoesNotDependOnItsSize) {
  constexpr int kTensors = 60, kThreads = 3;
  MemoryWeights before, after;
  for (int i = 0; i < kTensors; ++i) {
    const auto pair = MakePair<BFloat16Element>(40'000, static_cast<uint64_t>(i));
    before.Add(absl::StrCat("w", 100 + i), "BF16", {40'000}, pair.before);
    after.Add(absl::StrCat("w", 100 + i), "BF16", {40'000}, pair.after);
  }
  const auto delta = OpenBytes(MakeDraft(before, after).Bytes());
  LaggingSink sink;
  const LeadingReader reader(before, sink);
  BlockDigests blocks;
  const auto status = DecodeAndDigest(*delta, reader, {}, kThreads, blocks, sink);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(sink.promised.size(), static_cast<size_t>(kTensors));
  EXPECT_LE(sink.largest, 16u << 10);
  EXPECT_LE(reader.furthest, 2 * kThreads + 1) << "segments";
}

TEST(JournalTest, TheDigestsOfBlocksFollowTheChangesAndOnlyThoseAreRead) {
  const WeightsPair weights = MakeWeights(14);
  const auto delta = OpenBytes(MakeDraft(weights.before, weights.after).Bytes());
  BlockDigests blocks;
  JournalCollector collector;
  const auto status = DecodeAndDigest(*delta, weights.before, {}, 3, blocks, collector);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(collector.journal, *DecodeJournal(*delta, weights.before));
  const auto& tensors = weights.before.tensors();
  EXPECT_EQ(DigestOf(tensors, blocks), *DigestOf(weights.after));

  // At both sides of the cut between two segments, inside a block, and at the very end.
  const size_t large = static_cast<size_t>(FindTensor(tensors, "w.large"));
  ASSERT_NE(kSegmentElements % BlockElements(tensors[large]), 0);
  const int64_t last = tensors[large].elements() - 1;
  for (const auto& changed : std::vector<std::vector<int64_t>>{
           {kSegmentElements - 1}, {kSegmentElements}, {0, kSegmentElements + 1, last}, {}}) {
    MemoryWeights next = weights.after;
    for (const int64_t at : changed) next.data(large)[2 * at] ^= 1;
    const auto step = OpenBytes(MakeDraft(weights.after, next).Bytes());
    const NotingReader noting(weights.after);
    BlockDigests followed = blocks;
    JournalCollector small;
    ASSERT_TRUE(DecodeAndDigest(*step, noting, {}, 1, followed, small).ok());
    EXPECT_EQ(small.journal.entries(), static_cast<int64_t>(changed.size()));
    EXPECT_EQ(DigestOf(tensors, followed), *DigestOf(next));
    EXPECT_EQ(noting.read.size(), changed.empty() ? 0u : 1u);
    EXPECT_LE(noting.read[large], changed.size() > 1
                                      ? last + 1 + BlockElements(tensors[large])
                                      : kSegmentElements + BlockElements(tensors[large]));
  }
}

TEST(JournalTest, AChainOfAThousandDeltasEqualsTheTarget) {
  std::mt19937_64 random(5);
  MemoryWeights live, truth;
  const auto start = MakePair<BFloat16Element>(4096, 6, {.zeros = 0.8});
  truth.Add("w", "BF16", {64, 64}, start.before);
  const auto other = MakePair<Float32Element>(100, 7);
  truth.Add("b", "F32", {100}, other.before);
  live = truth;
  MemoryWeights start_weights = truth;
  std::vector<Journal> journals;
  for (int step = 0; step < 1000; ++step) {
    MemoryWeights next = truth;
    for (size_t tensor = 0; tensor < 2; ++tensor) {
      for (int i = 0; i < 20; ++i) {
        std::string& bytes = next.data(tensor);
        bytes[random() % bytes.size()] = random() % 4 == 0 ? '\0' : static_cast<char>(random());
      }
    }
    const auto delta = OpenBytes(MakeDraft(truth, next).Bytes());
    ASSERT_TRUE(CheckBase(delta->manifest(), *DigestOf(live)).ok()) << step;
    auto journal = DecodeJournal(*delta, live);
    ASSERT_TRUE(journal.ok()) << journal.status();
    live.Apply(*journal);
    ASSERT_EQ(*DigestOf(live), delta->manifest().target_weights) << step;
    journals.push_back(*std::move(journal));
    truth = next;
  }
  EXPECT_TRUE(live == truth);
  for (auto journal = journals.rbegin(); journal != journals.rend(); ++journal) live.Undo(*journal);
  EXPECT_TRUE(live == start_weights);
}

TEST(JournalTest, AnotherBaseIsRefusedByDigestAndByTensor) {
  WeightsPair weights = MakeWeights(14, 1000);
  const Draft draft = MakeDraft(weights.before, weights.after);
  const auto delta = OpenBytes(draft.Bytes());
  const auto again = CheckBase(delta->manifest(), *DigestOf(weights.after));
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(again.message()), HasSubstr("applied already"));
  MemoryWeights other;
  other.Add("w.f32", "F32", {33, 31}, std::vector<uint32_t>(31 * 33));
  const auto missing = DecodeJournal(*delta, other);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("which the base has not"));
}

TEST(JournalTest, ItsMemoryIsCappedBeforeItIsReserved) {
  const WeightsPair weights = MakeWeights(15, 1000);
  const auto delta = OpenBytes(MakeDraft(weights.before, weights.after).Bytes());
  EXPECT_EQ(DecodeJournal(*delta, weights.before, {.max_bytes = 160}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(WeightDigestTest, EveryBitNameAndShapeCounts) {
  WeightsPair weights = MakeWeights(16, 40'000);
  const Digest before = *DigestOf(weights.before);
  EXPECT_EQ(before, *DigestOf(weights.before, 3)) << "threads do not matter";
  for (size_t tensor = 0; tensor < weights.before.tensors().size(); ++tensor) {
    std::string& bytes = weights.before.data(tensor);
    for (size_t at = 0; at < bytes.size(); at += 1 + bytes.size() / 5) {
      bytes[at] = static_cast<char>(bytes[at] ^ 0x40);
      EXPECT_NE(*DigestOf(weights.before), before);
      bytes[at] = static_cast<char>(bytes[at] ^ 0x40);
    }
  }
  MemoryWeights a, b, c, d;
  a.Add("w", "F32", {2, 3}, std::vector<uint32_t>{1, 2, 3, 4, 5, 6});
  b.Add("w", "F32", {3, 2}, std::vector<uint32_t>{1, 2, 3, 4, 5, 6});
  c.Add("v", "F32", {2, 3}, std::vector<uint32_t>{1, 2, 3, 4, 5, 6});
  d.Add("w", "I32", {2, 3}, std::vector<uint32_t>{1, 2, 3, 4, 5, 6});
  EXPECT_NE(*DigestOf(a), *DigestOf(b));
  EXPECT_NE(*DigestOf(a), *DigestOf(c));
  EXPECT_NE(*DigestOf(a), *DigestOf(d));
  MemoryWeights plus, minus;
  plus.Add("w", "F32", {1}, std::vector<uint32_t>{0});
  minus.Add("w", "F32", {1}, std::vector<uint32_t>{0x80000000});
  EXPECT_NE(*DigestOf(plus), *DigestOf(minus));
}

TEST(WeightDigestTest, PiecesOfAnySizeGiveTheSameDigest) {
  const auto pair = MakePair<BFloat16Element>(100'000, 8, {.zeros = 0.5});
  const TensorInfo info{"w", "BF16", {1000, 100}, 200'000};
  Digest digests[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t piece = std::vector<int64_t>{1, 7777, 100'000}[static_cast<size_t>(i)];
    TensorDigester digester(info);
    for (int64_t first = 0; first < 100'000; first += piece)
      digester.Update(pair.before.data() + first, std::min<int64_t>(piece, 100'000 - first));
    digests[i] = digester.Finish();
  }
  EXPECT_EQ(digests[0], digests[1]);
  EXPECT_EQ(digests[1], digests[2]);
}

// Pinned, because digests are compared across versions and machines for ever.
TEST(WeightDigestTest, IsWhatTheFormatSays) {
  MemoryWeights weights;
  weights.Add("w", "F32", {3}, std::vector<uint32_t>{0x3f800000, 0, 0x80000000});
  const Digest block = Sha256Of(std::string("\0\5\0\0\x80\x3f\0\0\0\x80", 10));
  const Digest tensor =
      Sha256Of(std::string("\2\1w\3F32\1\3", 9) + std::string(block.begin(), block.end()));
  const Digest model = Sha256Of(std::string("\3\1", 2) + std::string(tensor.begin(), tensor.end()));
  EXPECT_EQ(*DigestOf(weights), model);
}

}  // namespace
}  // namespace espalier::updates
