// The files of a version store, each alone: what was written is read, damage of any byte is told, a
// newer format is refused by name, and the first ones ever written stay readable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "engine/updates/anchor_file.h"
#include "engine/updates/audit_log.h"
#include "engine/updates/journal_chain.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/partial_delta.h"
#include "engine/updates/stored_file.h"
#include "engine/updates/weight_digest.h"
#include "tests/engine/updates/golden_file.h"
#include "tests/engine/updates/journals.h"
#include "tests/engine/updates/memory_weights.h"
#include "tests/engine/updates/random_weights.h"
#include "tests/engine/updates/simulated_file_system.h"

namespace espalier::updates {
namespace {

using testing::Fault;
using testing::GoldenFile;
using ::testing::HasSubstr;
using testing::Loss;
using testing::MakePair;
using testing::MemoryWeights;
using testing::ReadAll;
using testing::ReadJournal;
using testing::SimulatedFileSystem;
using testing::WriteJournal;

MemoryWeights SmallWeights(uint64_t seed) {
  MemoryWeights weights;
  weights.Add("a", "F32", {3, 11}, MakePair<Float32Element>(33, seed).before);
  weights.Add("b", "BF16", {40}, MakePair<BFloat16Element>(40, seed + 1).before);
  weights.Add("c", "I8", {7}, MakePair<ByteElement>(7, seed + 2).before);
  weights.Add("d", "F16", {0, 2}, std::vector<uint16_t>());
  weights.Add("e", "F32", {}, std::vector<uint32_t>{0x80000000});
  return weights;
}

Journal SmallJournal() {
  return Journal{{{0, {{0, 1, 2}, {7, 0xffffffff, 0x80000000}, {32, 5, 0}}}, {2, {{6, 255, 0}}}}};
}

JournalEnds SmallEnds() { return {3, 4, Sha256Of("3"), Sha256Of("4")}; }

void SetVersion(SimulatedFileSystem& disk, const std::string& path, char version) {
  std::string bytes = disk.Contents(path);
  bytes[8] = version;
  disk.Put(path, bytes);
}

// Calls `read` with each byte turned, and each length cut.
template <typename Read>
void ExpectDamageIsTold(SimulatedFileSystem& disk, const std::string& path, const Read& read) {
  const std::string good = disk.Contents(path);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    disk.Put(path, bad);
    EXPECT_FALSE(read().ok()) << "byte " << at;
    disk.Put(path, good.substr(0, at));
    EXPECT_FALSE(read().ok()) << "cut at " << at;
  }
  disk.Put(path, good + "x");
  EXPECT_FALSE(read().ok());
  disk.Put(path, good);
}

// --- journals --------------------------------------------------------------------------------------

TEST(JournalFileTest, GivesBackWhatWasWritten) {
  SimulatedFileSystem disk;
  const auto size = WriteJournal(disk, "/4.espj", SmallEnds(), SmallJournal());
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(*size, disk.Contents("/4.espj").size());
  disk.Restart(Loss::kUnsynced);
  EXPECT_EQ(ReadJournal(disk, "/4.espj", SmallEnds()).value(), SmallJournal());
  ASSERT_TRUE(WriteJournal(disk, "/4.espj", SmallEnds(), Journal{}).ok());
  EXPECT_EQ(ReadJournal(disk, "/4.espj", SmallEnds()).value(), Journal{});
}

TEST(JournalFileTest, LargeJournalsGoInPieces) {
  Journal journal{{{5, {}}}};
  std::mt19937_64 random(1);
  int64_t position = 0;
  for (int i = 0; i < 200'000; ++i) {
    position += 1 + static_cast<int64_t>(random() % 100);
    journal.tensors[0].entries.push_back(
        {position, static_cast<uint32_t>(random() & 0xffff), static_cast<uint32_t>(i & 0xffff)});
  }
  SimulatedFileSystem disk;
  const auto size = WriteJournal(disk, "/4.espj", SmallEnds(), journal);
  ASSERT_TRUE(size.ok());
  EXPECT_LT(*size, 200'000u * 6) << "bytes an entry";
  EXPECT_EQ(ReadJournal(disk, "/4.espj", SmallEnds()).value(), journal);
  EXPECT_EQ(ReadJournal(disk, "/4.espj", SmallEnds(), {.max_bytes = 1 << 20}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(JournalFileTest, OfOtherVersionsDamagedOrNewerIsRefused) {
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteJournal(disk, "/4.espj", SmallEnds(), SmallJournal()).ok());
  const auto read = [&] { return ReadJournal(disk, "/4.espj", SmallEnds()).status(); };
  JournalEnds other = SmallEnds();
  other.to_weights = Sha256Of("5");
  const auto status = ReadJournal(disk, "/4.espj", other).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("it leads from version 3"));
  ExpectDamageIsTold(disk, "/4.espj", read);
  EXPECT_TRUE(read().ok());
  SetVersion(disk, "/4.espj", 2);
  EXPECT_EQ(read().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(read().message()), HasSubstr("format version 2, this build reads 1"));
  EXPECT_TRUE(absl::IsNotFound(ReadJournal(disk, "/none", SmallEnds()).status()));
}

TEST(JournalFileTest, TheFirstOneEverWrittenIsStillRead) {
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteJournal(disk, "/now", SmallEnds(), SmallJournal()).ok());
  disk.Put("/4.espj", GoldenFile("journal-1.espj", disk.Contents("/now")));
  EXPECT_EQ(ReadJournal(disk, "/4.espj", SmallEnds()).value(), SmallJournal());
}

TEST(JournalChainTest, JournalsLeadAsOneWhereTheyLeadOneByOne) {
  const Journal first{{{0, {{1, 10, 11}, {2, 20, 21}, {5, 50, 51}}}, {3, {{0, 1, 2}}}}};
  const Journal second{{{0, {{0, 1, 2}, {2, 21, 22}, {5, 51, 50}}}, {1, {{9, 1, 0}}}}};
  const Journal both{
      {{0, {{0, 1, 2}, {1, 10, 11}, {2, 20, 22}}}, {1, {{9, 1, 0}}}, {3, {{0, 1, 2}}}}};
  SimulatedFileSystem disk;
  JournalEnds ends = SmallEnds();
  const auto open = [&](const std::string& path) {
    auto reader = JournalReader::Open(disk, path, ends);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return *std::move(reader);
  };
  const auto chain = [&](std::vector<std::pair<std::string, bool>> way) {
    std::vector<JournalChain::Step> steps;
    for (const auto& [path, forward] : way) steps.push_back({open(path), forward});
    return ReadAll(JournalChain(std::move(steps)));
  };
  ASSERT_TRUE(WriteJournal(disk, "/1", ends, first).ok());
  ASSERT_TRUE(WriteJournal(disk, "/2", ends, second).ok());
  EXPECT_EQ(chain({{"/1", true}, {"/2", true}}).value(), both);
  EXPECT_EQ(chain({{"/2", false}, {"/1", false}}).value(), both.Inverse());
  EXPECT_EQ(chain({{"/1", true}, {"/1", false}}).value(), Journal{});
  EXPECT_EQ(chain({{"/1", true}}).value(), first);
  EXPECT_EQ(chain({}).value(), Journal{});
  std::string damaged = disk.Contents("/2");
  damaged.back() ^= 1;  // the seal
  disk.Put("/2", damaged);
  EXPECT_EQ(chain({{"/1", true}, {"/2", true}}).status().code(), absl::StatusCode::kDataLoss);
}

TEST(JournalChainTest, ChangesOfOneTensorComeInPiecesAndPiecesThatComeToNothingDoNot) {
  Journal first{{{0, {}}, {1, {{7, 1, 2}}}}}, second{{{0, {}}}};
  constexpr int64_t kMany = 200'000, kUndone = 100'000;
  for (int64_t i = 0; i < kMany; ++i) {
    first.tensors[0].entries.push_back({2 * i, 1, 2});
    second.tensors[0].entries.push_back(i < kUndone ? JournalEntry{2 * i, 2, 1}
                                                    : JournalEntry{2 * i + 1, 3, 4});
  }
  SimulatedFileSystem disk;
  std::vector<JournalChain::Step> steps;
  for (const Journal* journal : {&first, &second}) {
    const std::string path = journal == &first ? "/1" : "/2";
    ASSERT_TRUE(WriteJournal(disk, path, SmallEnds(), *journal).ok());
    steps.push_back({*JournalReader::Open(disk, path, SmallEnds())});
  }
  JournalChain chain(std::move(steps));
  int64_t next = 2 * kUndone;
  for (;;) {
    const auto changes = chain.Next();
    ASSERT_TRUE(changes.ok()) << changes.status();
    ASSERT_TRUE(*changes);
    const auto& [tensor, entries] = **changes;
    if (tensor == 1) break;
    ASSERT_FALSE(entries.empty());
    ASSERT_LE(entries.size(), size_t{1} << 16);
    for (const JournalEntry& entry : entries) ASSERT_EQ(entry.position, next++);
  }
  EXPECT_EQ(next, 2 * kMany);
  EXPECT_FALSE((*chain.Next()).has_value());
}

TEST(JournalFileTest, WhatIsNotCommittedLeavesNoFile) {
  SimulatedFileSystem disk;
  {
    JournalWriter writer(disk, "/4.espj", SmallEnds());
    ASSERT_TRUE(writer.Begin({{{0, 1}}}).ok());
    ASSERT_TRUE(writer.Append(0, {{{0, 1, 2}}}).ok());
    EXPECT_EQ(writer.entries(), 1);
    EXPECT_EQ(disk.files(), 1);
  }
  EXPECT_EQ(disk.files(), 0);
}

// All elements, as windows give them.
template <typename Bits>
std::vector<Bits> ReadInWindows(const TensorReader& reader, size_t tensor, int64_t first,
                                int64_t count) {
  std::vector<Bits> all;
  const auto status =
      reader.ReadWindows(tensor, first, count, [&](int64_t at, const void* elements, int64_t here) {
        EXPECT_EQ(at, first + static_cast<int64_t>(all.size()));
        EXPECT_LE(here, TensorReader::kWindowElements);
        const auto* begin = static_cast<const Bits*>(elements);
        all.insert(all.end(), begin, begin + here);
      });
  EXPECT_TRUE(status.ok()) << status;
  return all;
}

std::shared_ptr<const JournalOnDisk> OnDisk(SimulatedFileSystem& disk, const std::string& path) {
  auto journal = JournalOnDisk::Open(disk, path, SmallEnds());
  EXPECT_TRUE(journal.ok()) << journal.status();
  return *std::move(journal);
}

TEST(JournaledReaderTest, JournalsOverWeightsReadAsTheNextVersion) {
  const auto base = std::make_shared<MemoryWeights>(SmallWeights(1));
  MemoryWeights next = SmallWeights(1);
  const Journal first{{{0, {{2, 0, 7}, {31, 0, 9}}}, {2, {{0, 0, 1}}}}};
  const Journal second{{{0, {{2, 7, 8}, {30, 0, 1}}}}};
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteJournal(disk, "/1", SmallEnds(), first).ok());
  ASSERT_TRUE(WriteJournal(disk, "/2", SmallEnds(), second).ok());
  next.Apply(first);
  auto reader = JournaledReader::Create(base, {{OnDisk(disk, "/1")}});
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(*DigestOf(**reader), *DigestOf(next));
  uint32_t one = 0;
  ASSERT_TRUE((*reader)->Read(0, 31, 1, &one).ok());
  EXPECT_EQ(one, 9u);
  next.Apply(second);
  reader = JournaledReader::Create(base, {{OnDisk(disk, "/1")}, {OnDisk(disk, "/2")}});
  EXPECT_EQ(*DigestOf(**reader), *DigestOf(next));
  reader = JournaledReader::Create(
      base, {{OnDisk(disk, "/1")}, {OnDisk(disk, "/2")}, {OnDisk(disk, "/2"), false}});
  next.Apply(second.Inverse());
  EXPECT_EQ(*DigestOf(**reader), *DigestOf(next));
}

TEST(JournaledReaderTest, AJournalThatDoesNotFitIsRefused) {
  const auto base = std::make_shared<MemoryWeights>(SmallWeights(1));
  for (const Journal& other : {Journal{{{0, {{33, 0, 0}}}}}, Journal{{{5, {{0, 0, 0}}}}}}) {
    SimulatedFileSystem disk;
    ASSERT_TRUE(WriteJournal(disk, "/1", SmallEnds(), other).ok());
    EXPECT_EQ(JournaledReader::Create(base, {{OnDisk(disk, "/1")}}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

// Several pieces, so that most reads begin and end inside of one.
TEST(JournaledReaderTest, AnyRangeIsReadOfALargeJournal) {
  constexpr int64_t kElements = 400'000;
  const auto base = std::make_shared<MemoryWeights>();
  base->Add("w", "BF16", {kElements}, std::vector<uint16_t>(kElements, 3));
  Journal journal{{{0, {}}}};
  std::mt19937_64 random(1);
  for (int64_t position = 0; position < kElements;
       position += 1 + static_cast<int64_t>(random() % 3))
    journal.tensors[0].entries.push_back({position, 3, static_cast<uint32_t>(random() & 0xffff)});
  ASSERT_GT(journal.entries(), 3 * 65536);
  MemoryWeights next = *base;
  next.Apply(journal);
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteJournal(disk, "/1", SmallEnds(), journal).ok());
  const auto reader = JournaledReader::Create(base, {{OnDisk(disk, "/1")}});
  ASSERT_TRUE(reader.ok());
  std::vector<uint16_t> got(kElements), expected(kElements);
  for (int i = 0; i < 30; ++i) {
    const auto first = static_cast<int64_t>(random() % kElements);
    const auto count =
        1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kElements - first));
    ASSERT_TRUE((*reader)->Read(0, first, count, got.data()).ok());
    ASSERT_TRUE(next.Read(0, first, count, expected.data()).ok());
    ASSERT_TRUE(std::equal(got.begin(), got.begin() + count, expected.begin()))
        << first << " " << count;
    expected.resize(static_cast<size_t>(count));
    EXPECT_EQ(ReadInWindows<uint16_t>(**reader, 0, first, count), expected);
    expected.resize(kElements);
  }
}

TEST(JournaledReaderTest, AJournalIsReadAgainAsItWasWritten) {
  const auto base = std::make_shared<MemoryWeights>(SmallWeights(1));
  SimulatedFileSystem disk;
  const Journal journal{{{0, {{2, 0, 7}, {31, 0, 9}}}, {2, {{0, 0, 1}}}}};
  JournalWriter writer(disk, "/1", SmallEnds());
  ASSERT_TRUE(writer.Begin({{{0, 2}, {2, 1}}}).ok());
  for (const TensorJournal& tensor : journal.tensors)
    ASSERT_TRUE(writer.Append(tensor.tensor, tensor.entries).ok());
  ASSERT_TRUE(writer.Commit().ok());
  const auto written = writer.Reopen();
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ((*written)->ends(), SmallEnds());
  MemoryWeights next = *base;
  next.Apply(journal);
  EXPECT_EQ(*DigestOf(**JournaledReader::Create(base, {{*written}})), *DigestOf(next));
}

TEST(JournaledReaderTest, AJournalThatIsDamagedLaterIsToldFromWhatWasOpened) {
  const auto base = std::make_shared<MemoryWeights>(SmallWeights(1));
  SimulatedFileSystem disk;
  ASSERT_TRUE(WriteJournal(disk, "/1", SmallEnds(), {{{0, {{2, 0, 7}}}}}).ok());
  ExpectDamageIsTold(disk, "/1", [&] { return JournalOnDisk::Open(disk, "/1", SmallEnds()); });
  const auto reader = JournaledReader::Create(base, {{OnDisk(disk, "/1")}});
  std::string bytes = disk.Contents("/1");
  bytes[bytes.size() - sizeof(Digest) - 2] ^= 1;  // of the last piece
  disk.Put("/1", bytes);
  uint32_t element = 0;
  EXPECT_EQ((*reader)->Read(0, 2, 1, &element).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE((*reader)->Read(1, 0, 1, &element).ok()) << "no piece of it is read";
}

// --- anchors ---------------------------------------------------------------------------------------

TEST(AnchorFileTest, HoldsTheWeightsBitForBit) {
  SimulatedFileSystem disk;
  MemoryWeights weights = SmallWeights(2);
  const auto large = MakePair<BFloat16Element>(kSegmentElements + 1000, 3, {.zeros = 0.9});
  weights.Add("large", "BF16", {kSegmentElements + 1000}, large.before);
  const Digest digest = *DigestOf(weights);
  const auto size = WriteAnchor(disk, "/4.espa", 4, digest, weights);
  ASSERT_TRUE(size.ok()) << size.status();
  disk.Restart(Loss::kUnsynced);
  const auto anchor = AnchorReader::Open(disk, "/4.espa", 4, digest);
  ASSERT_TRUE(anchor.ok()) << anchor.status();
  EXPECT_EQ((*anchor)->tensors(), weights.tensors());
  EXPECT_EQ(*DigestOf(**anchor), digest);
  const auto tensor = static_cast<size_t>(FindTensor(weights.tensors(), "large"));
  std::vector<uint16_t> some(2000);
  ASSERT_TRUE((*anchor)->Read(tensor, kSegmentElements - 1000, 2000, some.data()).ok());
  EXPECT_TRUE(std::equal(some.begin(), some.end(), large.before.end() - 2000)) << "two segments";
  EXPECT_EQ(ReadInWindows<uint16_t>(**anchor, tensor, 0, kSegmentElements),
            std::vector<uint16_t>(large.before.begin(), large.before.end() - 1000));
  EXPECT_EQ(ReadInWindows<uint16_t>(**anchor, tensor, kSegmentElements - 1000, 2000), some);
  EXPECT_LT(*size, (kSegmentElements + 1000) * 2u / 2) << "zeros take a bit";
}

TEST(AnchorFileTest, OfOtherWeightsIsNotWritten) {
  SimulatedFileSystem disk;
  const auto size = WriteAnchor(disk, "/4.espa", 4, Sha256Of("x"), SmallWeights(1));
  EXPECT_EQ(size.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(disk.files(), 0);
}

TEST(AnchorFileTest, OfAnotherVersionDamagedOrNewerIsRefused) {
  SimulatedFileSystem disk;
  const MemoryWeights weights = SmallWeights(1);
  const Digest digest = *DigestOf(weights);
  ASSERT_TRUE(WriteAnchor(disk, "/4.espa", 4, digest, weights).ok());
  const auto read = [&]() -> absl::Status {
    const auto anchor = AnchorReader::Open(disk, "/4.espa", 4, digest);
    return anchor.ok() ? DigestOf(**anchor).status() : anchor.status();
  };
  EXPECT_TRUE(absl::IsDataLoss(AnchorReader::Open(disk, "/4.espa", 5, digest).status()));
  EXPECT_TRUE(absl::IsDataLoss(AnchorReader::Open(disk, "/4.espa", 4, Sha256Of("y")).status()));
  ExpectDamageIsTold(disk, "/4.espa", read);
  EXPECT_TRUE(read().ok());
  SetVersion(disk, "/4.espa", 2);
  EXPECT_EQ(read().code(), absl::StatusCode::kUnimplemented);
}

TEST(AnchorFileTest, TheFirstOneEverWrittenIsStillRead) {
  SimulatedFileSystem disk;
  MemoryWeights weights;
  weights.Add("w", "F32", {2, 3}, std::vector<uint32_t>{1, 0, 0x80000000, 0, 5, 0x7fc00001});
  weights.Add("b", "BF16", {3}, std::vector<uint16_t>{0, 0x3f80, 0});
  const Digest digest = *DigestOf(weights);
  ASSERT_TRUE(WriteAnchor(disk, "/now", 4, digest, weights).ok());
  disk.Put("/4.espa", GoldenFile("anchor-1.espa", disk.Contents("/now")));
  const auto anchor = AnchorReader::Open(disk, "/4.espa", 4, digest);
  ASSERT_TRUE(anchor.ok()) << anchor.status();
  EXPECT_EQ(*DigestOf(**anchor), digest);
}

// --- the audit log ---------------------------------------------------------------------------------

AuditRecord Record(int64_t sequence) {
  AuditRecord record{sequence, 1'800'000'000 + sequence, AuditAction::kActivated, sequence + 1};
  record.before = Sha256Of(absl::StrCat(sequence));
  record.after = Sha256Of(absl::StrCat(sequence + 1));
  record.signers = {KeyId{1, 2, 3}};
  record.reason = "because";
  return record;
}

TEST(AuditLogTest, KeepsItsRecordsInOrderOverRestarts) {
  SimulatedFileSystem disk;
  for (int64_t sequence = 1; sequence <= 5; ++sequence) {
    auto log = AuditLog::Open(disk, "/audit", 1 << 20);
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_EQ(log->last_sequence(), sequence - 1);
    ASSERT_TRUE(log->Append({Record(sequence)}).ok());
    disk.Restart(Loss::kUnsynced);
  }
  const auto log = AuditLog::Open(disk, "/audit", 1 << 20);
  const auto records = log->Read(3);
  ASSERT_TRUE(records.ok());
  EXPECT_THAT(*records, ::testing::ElementsAre(Record(3), Record(4), Record(5)));
}

TEST(AuditLogTest, WhatIsBehindTheLastSoundRecordIsCutOff) {
  SimulatedFileSystem disk;
  auto first = AuditLog::Open(disk, "/audit", 1 << 20);
  ASSERT_TRUE(first->Append({Record(1), Record(2)}).ok());
  const std::string good = disk.Contents("/audit");
  for (size_t cut = 1; cut < 100; cut += 7) {
    disk.Put("/audit", good.substr(0, good.size() - cut));
    auto log = AuditLog::Open(disk, "/audit", 1 << 20);
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_EQ(log->last_sequence(), 1);
    EXPECT_GT(log->damaged_bytes(), 0u);
    ASSERT_TRUE(log->Append({Record(2)}).ok());
    EXPECT_EQ(disk.Contents("/audit"), good);
  }
}

TEST(AuditLogTest, ARecordThatWasChangedOrTakenOutShows) {
  SimulatedFileSystem disk;
  auto log = AuditLog::Open(disk, "/audit", 1 << 20);
  ASSERT_TRUE(log->Append({Record(1)}).ok());
  const size_t one = disk.Contents("/audit").size();
  ASSERT_TRUE(log->Append({Record(2)}).ok());
  const size_t two = disk.Contents("/audit").size();
  ASSERT_TRUE(log->Append({Record(3)}).ok());
  const std::string good = disk.Contents("/audit");
  std::string changed = good;
  changed[one + 10] ^= 1;
  disk.Put("/audit", changed);
  EXPECT_EQ(AuditLog::Open(disk, "/audit", 1 << 20)->last_sequence(), 1);
  disk.Put("/audit", good.substr(0, one) + good.substr(two));
  EXPECT_EQ(AuditLog::Open(disk, "/audit", 1 << 20)->last_sequence(), 1);
  SetVersion(disk, "/audit", 2);
  EXPECT_EQ(AuditLog::Open(disk, "/audit", 1 << 20).status().code(),
            absl::StatusCode::kUnimplemented);
}

TEST(AuditLogTest, ItsSizeIsBoundedAndItsChainGoesOn) {
  SimulatedFileSystem disk;
  auto log = AuditLog::Open(disk, "/audit", 8192);
  for (int64_t sequence = 1; sequence <= 500; ++sequence) {
    ASSERT_TRUE(log->Append({Record(sequence)}).ok());
    ASSERT_LE(disk.bytes(), 8192u);
  }
  auto again = AuditLog::Open(disk, "/audit", 8192);
  EXPECT_EQ(again->last_sequence(), 500);
  const auto records = again->Read(1000);
  ASSERT_GT(records->size(), 20u);
  for (size_t i = 0; i < records->size(); ++i)
    EXPECT_EQ((*records)[i].sequence, 501 - static_cast<int64_t>(records->size() - i));
}

TEST(AuditLogTest, AfterAnyFaultItGoesOnWithoutAGapOrATwin) {
  int points = 0;
  for (const Fault fault : {Fault::kIoError, Fault::kShortWrite, Fault::kCrash}) {
    for (int64_t call = 1;; ++call) {
      SimulatedFileSystem disk;
      disk.FailAt(call, fault);
      absl::StatusOr<AuditLog> log = AuditLog::Open(disk, "/audit", 700);
      for (int64_t next = 1; next <= 12;) {
        if (disk.crashed() || !log.ok()) {
          if (disk.crashed()) disk.Restart(Loss::kTorn, static_cast<uint64_t>(call));
          log = AuditLog::Open(disk, "/audit", 700);
          if (log.ok()) next = log->last_sequence() + 1;
          continue;
        }
        if (!log->Append({Record(next)}).ok()) continue;
        ++next;
      }
      if (!disk.reached()) break;
      ++points;
      disk.Restart(Loss::kUnsynced);
      const auto records = AuditLog::Open(disk, "/audit", 700)->Read(100);
      ASSERT_TRUE(records.ok());
      ASSERT_FALSE(records->empty());
      EXPECT_EQ(records->back(), Record(12)) << call;
      for (size_t i = 1; i < records->size(); ++i)
        EXPECT_EQ((*records)[i].sequence, (*records)[i - 1].sequence + 1) << call;
    }
  }
  EXPECT_GT(points, 60);
}

TEST(AuditLogTest, TheFirstOneEverWrittenIsStillRead) {
  SimulatedFileSystem disk;
  auto now = AuditLog::Open(disk, "/now", 1 << 20);
  ASSERT_TRUE(now->Append({Record(1), Record(2)}).ok());
  disk.Put("/audit", GoldenFile("audit-1", disk.Contents("/now")));
  EXPECT_THAT(AuditLog::Open(disk, "/audit", 1 << 20)->Read(9).value(),
              ::testing::ElementsAre(Record(1), Record(2)));
}

// --- deltas that are being received ----------------------------------------------------------------

std::string Payload(size_t bytes) {
  std::mt19937_64 random(7);
  std::string payload;
  for (size_t i = 0; i < bytes; ++i) payload.push_back(static_cast<char>(random()));
  return payload;
}

absl::StatusOr<PartialDelta> OpenPartial(SimulatedFileSystem& disk, const std::string& payload) {
  return PartialDelta::Open(disk, "/in", Sha256Of(payload), payload.size(), 100);
}

TEST(PartialDeltaTest, CutAnywhereItGoesOnWhereItWas) {
  const std::string payload = Payload(1000);
  for (size_t cut = 0; cut <= payload.size(); cut += 9) {
    SimulatedFileSystem disk;
    ASSERT_TRUE(disk.MakeFolder("/in").ok());
    {
      auto partial = OpenPartial(disk, payload);
      ASSERT_TRUE(partial.ok()) << partial.status();
      ASSERT_TRUE(partial->Append(0, payload.substr(0, cut)).ok());
    }
    auto partial = OpenPartial(disk, payload);
    ASSERT_EQ(partial->offset(), cut) << "nothing is sent twice";
    ASSERT_TRUE(partial->Append(cut, payload.substr(cut)).ok());
    ASSERT_TRUE(partial->Finish().ok());
    ASSERT_TRUE(disk.SyncFolder("/").ok());
    disk.Restart(Loss::kUnsynced);
    EXPECT_EQ(disk.Contents(PartialDelta::WholePathOf("/in", Sha256Of(payload))), payload);
  }
}

TEST(PartialDeltaTest, PowerLossCostsAtMostWhatWasNotSoundAndNeverTheTruth) {
  const std::string payload = Payload(1000);
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SimulatedFileSystem disk;
    ASSERT_TRUE(disk.MakeFolder("/in").ok());
    for (const Loss loss : {Loss::kTorn, Loss::kTorn, Loss::kUnsynced}) {
      auto partial = OpenPartial(disk, payload);
      ASSERT_TRUE(partial.ok()) << partial.status();
      const uint64_t from = partial->offset();
      ASSERT_TRUE(partial->Append(from, payload.substr(from, 300)).ok());
      ASSERT_TRUE(disk.SyncFolder("/").ok() && disk.SyncFolder("/in").ok());
      disk.Restart(loss, seed);
    }
    auto partial = OpenPartial(disk, payload);
    ASSERT_TRUE(partial->Append(partial->offset(), payload.substr(partial->offset())).ok());
    EXPECT_TRUE(partial->Finish().ok()) << seed;
    disk.Restart(Loss::kUnsynced);
    EXPECT_EQ(OpenPartial(disk, payload)->offset(), 1000u) << "whole, and not sent again";
  }
}

TEST(PartialDeltaTest, OtherBytesMoreBytesAndGapsAreRefused) {
  const std::string payload = Payload(300);
  SimulatedFileSystem disk;
  ASSERT_TRUE(disk.MakeFolder("/in").ok());
  auto partial = OpenPartial(disk, payload);
  EXPECT_FALSE(partial->Append(1, "x").ok());
  EXPECT_FALSE(partial->Append(0, payload + "x").ok());
  ASSERT_TRUE(partial->Append(0, payload.substr(0, 299)).ok());
  EXPECT_THAT(std::string(partial->Finish().message()), HasSubstr("got 299 bytes, 300 were"));
  ASSERT_TRUE(partial->Append(299, "?").ok());
  EXPECT_THAT(std::string(partial->Finish().message()), HasSubstr("was announced"));
  EXPECT_EQ(disk.files(), 0) << "what is wrong is not kept";
}

TEST(PartialDeltaTest, AfterAFailedSyncTheBytesAreNotBelieved) {
  const std::string payload = Payload(300);
  SimulatedFileSystem disk;
  ASSERT_TRUE(disk.MakeFolder("/in").ok());
  auto partial = OpenPartial(disk, payload);
  ASSERT_TRUE(partial->Append(0, payload).ok());
  disk.FailAt(2, Fault::kDead);  // the sync, and the deletion after it
  EXPECT_FALSE(partial->Finish().ok());
  disk.Heal();
  EXPECT_EQ(OpenPartial(disk, payload)->offset(), 0u);
}

TEST(PartialDeltaTest, SumsOfANewerFormatAreRefusedAndTheFirstOnesAreRead) {
  const std::string payload = Payload(300);
  const Digest digest = Sha256Of(payload);
  SimulatedFileSystem disk;
  ASSERT_TRUE(disk.MakeFolder("/in").ok());
  ASSERT_TRUE(OpenPartial(disk, payload)->Append(0, payload.substr(0, 250)).ok());
  const std::string sums = absl::StrCat("/in/", Hex(digest), ".sums");
  disk.Put(sums, GoldenFile("partial-1.sums", disk.Contents(sums)));
  EXPECT_EQ(OpenPartial(disk, payload)->offset(), 250u);
  SetVersion(disk, sums, 2);
  EXPECT_EQ(OpenPartial(disk, payload).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace espalier::updates
