// The log of a fleet's transactions: what was promised and decided is what a restart finds, whatever fails.
#include "engine/updates/fleet_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/engine/updates/golden_file.h"
#include "tests/engine/updates/simulated_file_system.h"

namespace espalier::updates {
namespace {

using testing::Fault;
using testing::GoldenFile;
using testing::Loss;
using testing::SimulatedFileSystem;

constexpr int64_t kNow = 1'800'000'000;
constexpr char kPath[] = "/fleet/m";

FleetTransaction Transaction(const std::string& id, const ProbationOptions& probation = {}) {
  return {.id = id,
          .version = 7,
          .participants = {"a:1", "b:2"},
          .self = 1,
          .expires_seconds = kNow + 60,
          .probation = probation};
}

ProbationOptions Terms() {
  return {.duration = absl::Minutes(10),
          .canary_share = 0.05,
          .canary_duration = absl::Milliseconds(1500),
          .max_error_rate = 0.25,
          .max_latency_ratio = 1.5,
          .golden_requests = true};
}

std::unique_ptr<FleetLog> Open(SimulatedFileSystem& disk) {
  auto log = FleetLog::Open(disk, kPath);
  EXPECT_TRUE(log.ok()) << log.status();
  return *std::move(log);
}

TEST(FleetLogTest, TheTermsOfAProbationOutliveARestart) {
  SimulatedFileSystem disk;
  ASSERT_TRUE(Open(disk)->Prepare(Transaction("t", Terms()), kNow).ok());
  disk.Restart(Loss::kUnsynced);
  const auto log = Open(disk);
  EXPECT_EQ(log->Find("t").value(), Transaction("t", Terms()));
  EXPECT_TRUE(log->Prepare(Transaction("t", Terms()), kNow).ok()) << "the same again";
  EXPECT_TRUE(absl::IsFailedPrecondition(log->Prepare(Transaction("t"), kNow))) << "other terms";
  EXPECT_FALSE(log->Committed(7));
  ASSERT_TRUE(log->Decide("t", FleetDecision::kCommit, kNow).ok());
  EXPECT_EQ(log->Committed(7)->id, "t");
  EXPECT_FALSE(log->Committed(8));
}

TEST(FleetLogTest, TermsThatMeanNothingAreRefused) {
  SimulatedFileSystem disk;
  EXPECT_TRUE(absl::IsInvalidArgument(
      Open(disk)->Prepare(Transaction("t", {.max_error_rate = 1.5}), kNow)));
}

TEST(FleetLogTest, TheFirstOnesEverWrittenAreStillRead) {
  for (const bool terms : {false, true}) {
    const FleetTransaction second = Transaction("second", terms ? Terms() : ProbationOptions());
    SimulatedFileSystem disk;
    {
      const auto log = Open(disk);
      ASSERT_TRUE(log->Prepare(Transaction("first"), kNow).ok());
      ASSERT_TRUE(log->Decide("first", FleetDecision::kCommit, kNow).ok());
      ASSERT_TRUE(log->Done("first").ok());
      ASSERT_TRUE(log->Prepare(second, kNow).ok());
    }
    EXPECT_EQ(disk.Contents(kPath)[8], terms ? 2 : 1) << "older builds read what has no terms";
    disk.Put(kPath, GoldenFile(terms ? "fleet-2" : "fleet-1", disk.Contents(kPath)));
    const auto log = Open(disk);
    EXPECT_EQ(log->Find("second").value(), second);
    FleetTransaction first = Transaction("first");
    first.decision = FleetDecision::kCommit;
    first.done = true;
    EXPECT_EQ(log->Find("first").value(), first);
  }
}

TEST(FleetLogTest, DamageOfAnyByteAndANewerFormatAreTold) {
  SimulatedFileSystem disk;
  ASSERT_TRUE(Open(disk)->Prepare(Transaction("t", Terms()), kNow).ok());
  const std::string good = disk.Contents(kPath);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    disk.Put(kPath, bad);
    EXPECT_FALSE(FleetLog::Open(disk, kPath).ok()) << at;
    disk.Put(kPath, good.substr(0, at));
    EXPECT_FALSE(FleetLog::Open(disk, kPath).ok()) << "cut at " << at;
  }
  std::string newer = good;
  newer[8] = 3;
  disk.Put(kPath, newer);
  EXPECT_TRUE(absl::IsUnimplemented(FleetLog::Open(disk, kPath).status()));
}

// Every call that changes the disk fails once in every way, in a transaction from its promise to its end.
TEST(FleetLogTest, AnyFaultLeavesTheOldOrTheNewTransaction) {
  int points = 0;
  for (const Fault fault : {Fault::kCrash, Fault::kIoError, Fault::kDiskFull, Fault::kShortWrite}) {
    bool reached = true;
    for (int64_t call = 1; reached; ++call) {
      SCOPED_TRACE(absl::StrCat("fault ", static_cast<int>(fault), " at call ", call));
      SimulatedFileSystem disk;
      const auto log = Open(disk);
      disk.FailAt(call, fault);
      const auto steps = {
          +[](FleetLog& l) { return l.Prepare(Transaction("t", Terms()), kNow); },
          +[](FleetLog& l) { return l.Decide("t", FleetDecision::kCommit, kNow).status(); },
          +[](FleetLog& l) { return l.Done("t"); }};
      int done = 0;
      for (const auto& step : steps) {
        if (!step(*log).ok()) break;
        ++done;
      }
      reached = disk.reached();
      points += reached ? 1 : 0;
      disk.Restart(call % 2 == 0 ? Loss::kUnsynced : Loss::kTorn, static_cast<uint64_t>(call));
      const auto found = Open(disk)->Find("t");
      FleetTransaction state = Transaction("t", Terms());
      std::vector<absl::StatusOr<FleetTransaction>> states = {absl::NotFoundError(""), state};
      state.decision = FleetDecision::kCommit;
      states.emplace_back(state);
      state.done = true;
      states.emplace_back(state);
      const auto is = [&](const absl::StatusOr<FleetTransaction>& expected) {
        return found.ok() == expected.ok() && (!found.ok() || *found == *expected);
      };
      EXPECT_TRUE(is(states[done]) || (done < 3 && is(states[done + 1]))) << done;
    }
  }
  EXPECT_GT(points, 40);
}

}  // namespace
}  // namespace espalier::updates
