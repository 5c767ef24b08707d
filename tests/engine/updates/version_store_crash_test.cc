// Every call that changes the disk, in a life of a store that does everything it can, fails once in
// every way. Whatever happened: opening the store again gives exactly the old or exactly the new
// active version, with its weights bit for bit, counters that did not go back, and a store that goes
// on working.
#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/str_cat.h"
#include "tests/engine/updates/simulated_file_system.h"
#include "tests/engine/updates/store_world.h"
#include "tests/testing/sanitized.h"

namespace espalier::updates {
namespace {

using espalier::testing::kSanitized;
using testing::ExpectWeights;
using testing::Fault;
using testing::kNow;
using testing::Loss;
using testing::Publisher;
using testing::SimulatedFileSystem;
using testing::UnsignedPolicy;

const Probation kTerms = {
    .terms = {.duration = absl::Minutes(10), .max_error_rate = 0.25, .max_latency_ratio = 1.5},
    .until_micros = (kNow + 600) * 1'000'000,
    .old = {.answered = 1000, .failed = 3, .compute_nanos = 7'000'000'000}};

// What a step was to lead to, if it succeeds.
struct Expected {
  int64_t active = 1;
  int64_t sequence = 0;
  std::optional<Probation> probation = std::nullopt;
  bool operator==(const Expected&) const = default;
};

const Publisher& ThePublisher() {
  static const Publisher* const publisher = [] {
    auto* made = new Publisher(60);
    for (const auto& [base, number] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 2}, {2, 3}, {3, 4}, {3, 5}, {5, 6}, {6, 7}, {7, 8}})
      made->MakeVersion(base, number);
    for (const int64_t base : {1, 2, 3, 4, 5, 6, 7, 8}) made->MakeVersion(base, 100 + base);
    return made;
  }();
  return *publisher;
}

std::string Bytes(int64_t base, int64_t number, int64_t sequence) {
  static std::map<std::array<int64_t, 3>, std::string> made;
  std::string& bytes = made[{base, number, sequence}];
  if (bytes.empty()) bytes = ThePublisher().MakeDelta(base, number, sequence).Bytes();
  return bytes;
}

// One life of a store: steps that are made in order, each of which leads to something.
class Life {
 public:
  explicit Life(SimulatedFileSystem& disk) : disk_(disk) {}

  absl::Status Open() {
    store_.reset();
    StoreOptions options;
    options.files = &disk_;
    options.now_seconds = [] { return kNow; };
    options.repository = [](int64_t number) { return ThePublisher().shared(number); };
    options.piece_bytes = 64;
    options.max_chain = options.max_first_chain = 3;
    options.keep_versions = 2;
    options.max_audit_bytes = 4096;
    options.max_unconfirmed_starts = 0;
    auto store = VersionStore::Open("/s", "digits", {1, ThePublisher().digest(1)}, options);
    if (store.ok()) store_ = *std::move(store);
    return store.status();
  }
  void Die() { store_.reset(); }
  VersionStore* store() { return store_.get(); }

  // In three pieces, over two connections.
  absl::Status Receive(const std::string& bytes) {
    const Digest file = Sha256Of(bytes);
    for (int piece = 1; piece <= 3; ++piece) {
      const auto offset = store_->BeginReceive(file, bytes.size());
      if (!offset.ok()) return offset.status();
      const size_t end = bytes.size() * static_cast<size_t>(piece) / 3;
      if (*offset >= end) continue;
      auto status = store_->Append(file, *offset, bytes.substr(*offset, end - *offset));
      if (!status.ok()) return status;
    }
    return store_->FinishReceive(file).status();
  }
  absl::Status Stage(const std::string& bytes) {
    if (auto status = Receive(bytes); !status.ok()) return status;
    auto verified = store_->Verify(Sha256Of(bytes), UnsignedPolicy());
    if (absl::IsAlreadyExists(verified.status())) return absl::OkStatus();  // by an earlier attempt
    if (!verified.ok()) return verified.status();
    return store_->Stage(*std::move(verified));
  }

 private:
  SimulatedFileSystem& disk_;
  std::unique_ptr<VersionStore> store_;
};

struct LifeStep {
  std::string name;
  std::function<absl::Status(Life&)> run;
  std::function<void(Expected&)> leads;
};

// A life that goes through every state and every kind of file.
std::vector<LifeStep> Steps() {
  std::vector<LifeStep> steps;
  const auto nothing = [](Expected&) {};
  const auto open = [](Life& life) { return life.Open(); };
  const auto stage = [&](int64_t base, int64_t number) {
    steps.push_back({absl::StrCat("stage ", number),
                     [=](Life& life) { return life.Stage(Bytes(base, number, number)); }, nothing});
  };
  const auto activate = [&](int64_t number, std::optional<Probation> probation = std::nullopt) {
    steps.push_back({absl::StrCat("activate ", number),
                     [=](Life& life) { return life.store()->Activate(number, probation); },
                     [=](Expected& expected) {
                       expected.active = number;
                       expected.sequence = std::max(expected.sequence, number);
                       expected.probation = probation;
                     }});
  };
  const auto call = [&](const std::string& name, std::function<absl::Status(VersionStore&)> run) {
    steps.push_back({name, [=](Life& life) { return run(*life.store()); }, nothing});
  };
  const auto back = [&](int64_t to, std::function<absl::Status(VersionStore&)> run) {
    steps.push_back({absl::StrCat("back to ", to),
                     [=](Life& life) {
                       // An attempt that was told to have failed may have happened, by a restart.
                       if (life.store()->List().active == to) return absl::OkStatus();
                       return run(*life.store());
                     },
                     [=](Expected& expected) {
                       expected.active = to;
                       expected.probation.reset();
                     }});
  };
  steps.push_back({"open", open, nothing});
  stage(1, 2);
  activate(2);
  stage(2, 3);
  call("canary", [](VersionStore& store) { return store.StartCanary(3); });
  activate(3, kTerms);
  steps.push_back({"reopen on probation", open, nothing});
  steps.push_back({"confirm", [](Life& life) { return life.store()->Confirm(3); },
                   [](Expected& expected) { expected.probation.reset(); }});
  stage(3, 4);
  activate(4, Probation());
  back(3, [](VersionStore& store) { return store.Quarantine(4, "breach"); });
  steps.push_back({"reopen", open, nothing});
  stage(3, 5);
  activate(5);
  back(3, [](VersionStore& store) { return store.Rollback("worse").status(); });
  activate(5);
  call("compact", [](VersionStore& store) { return store.Compact(); });
  stage(5, 6);
  activate(6);
  call("compact again", [](VersionStore& store) { return store.Compact(); });
  stage(6, 7);
  activate(7);
  call("compact at last", [](VersionStore& store) { return store.Compact(); });
  steps.push_back({"reopen at last", open, nothing});
  return steps;
}

// Where a life came to: what is certain, and what the step that failed may have led to.
struct Fate {
  Expected certain, possible;
  size_t next = 0;  // the step that failed
};

Fate Live(Life& life, const std::vector<LifeStep>& steps, size_t from = 0, Expected start = {}) {
  Fate fate{start, start, from};
  for (; fate.next < steps.size(); ++fate.next) {
    steps[fate.next].leads(fate.possible);
    const auto status = steps[fate.next].run(life);
    if (!status.ok()) return fate;
    fate.certain = fate.possible;
  }
  return fate;
}

void ExpectOldOrNew(const VersionStore& store, const Fate& fate) {
  const StoreState state = store.List();
  const Expected found{state.active, state.accepted_sequence, state.probation};
  EXPECT_TRUE(found == fate.certain || found == fate.possible)
      << "active " << found.active << " sequence " << found.sequence << ", expected "
      << fate.certain.active << " (" << fate.certain.sequence << ") or " << fate.possible.active
      << " (" << fate.possible.sequence << "), on probation " << found.probation.has_value()
      << ", expected " << fate.certain.probation.has_value() << " or "
      << fate.possible.probation.has_value();
  ExpectWeights(store, ThePublisher(), state.active);
  for (const VersionRecord& record : state.versions) {
    EXPECT_EQ(record.weights, ThePublisher().digest(record.number));
    if (record.state != UpdateState::kVerified && record.state != UpdateState::kRefused &&
        record.journal_bytes > 0)
      ExpectWeights(store, ThePublisher(), record.number);
  }
}

// Another update of whatever is active, and back.
void ExpectGoesOnWorking(Life& life) {
  VersionStore& store = *life.store();
  const StoreState state = store.List();
  ASSERT_TRUE(store.Confirm(state.active).ok());
  const int64_t next = 100 + state.active;
  auto status = life.Stage(Bytes(state.active, next, next));
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(store.Activate(next).ok());
  ExpectWeights(store, ThePublisher(), next);
  status = store.Compact();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(store.Rollback("test").value(), state.active);
  ExpectWeights(store, ThePublisher(), state.active);
  ASSERT_TRUE(life.Open().ok());
  EXPECT_EQ(life.store()->List().active, state.active);
  const auto audit = life.store()->Audit(1000);
  ASSERT_TRUE(audit.ok());
  EXPECT_EQ(audit->back().action, AuditAction::kRolledBack);
  for (size_t i = 1; i < audit->size(); ++i)
    EXPECT_EQ((*audit)[i].sequence, (*audit)[i - 1].sequence + 1) << "the audit log has a gap";
}

int64_t CallsOfALife() {
  SimulatedFileSystem disk;
  EXPECT_TRUE(EnsureFolder(disk, "/s").ok());
  const int64_t before = disk.calls();
  Life life(disk);
  const auto steps = Steps();
  const Fate fate = Live(life, steps);
  EXPECT_EQ(fate.next, steps.size());
  ExpectOldOrNew(*life.store(), fate);
  EXPECT_EQ(fate.certain, (Expected{7, 7}));
  return disk.calls() - before;
}

struct Way {
  const char* name;
  Fault fault;
  Loss loss;
  bool restart;  // the process dies of it, or is restarted right after; else it goes on
  int index;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

class EveryCallTest : public ::testing::TestWithParam<Way> {};

TEST_P(EveryCallTest, LeadsToOldOrNewAndTheStoreGoesOn) {
  const Way& way = GetParam();
  const auto steps = Steps();
  const int64_t calls = CallsOfALife();
  EXPECT_GE(calls, 200);
  // Under a sanitizer each way takes another third.
  const int64_t step = kSanitized ? 3 : 1;
  for (int64_t call = 1 + way.index % step; call <= calls; call += step) {
    SCOPED_TRACE(absl::StrCat("call ", call));
    SimulatedFileSystem disk;
    ASSERT_TRUE(EnsureFolder(disk, "/s").ok());
    Life life(disk);
    disk.FailAt(call, way.fault);
    Fate fate = Live(life, steps);
    ASSERT_TRUE(disk.reached());
    SCOPED_TRACE(fate.next < steps.size() ? steps[fate.next].name : "no step failed");
    if (way.restart) {
      life.Die();
      disk.Restart(way.loss, static_cast<uint64_t>(call));
      const auto status = life.Open();
      ASSERT_TRUE(status.ok()) << status;
      // One error, and a disk that worked again: the step that failed was taken back at once.
      if (way.fault == Fault::kIoError) fate.possible = fate.certain;
      ExpectOldOrNew(*life.store(), fate);
    } else {
      disk.Heal();
      ASSERT_TRUE(life.store() != nullptr || life.Open().ok());
      // A step that was told to have failed has not happened.
      ExpectOldOrNew(*life.store(), {fate.certain, fate.certain, fate.next});
      const Fate rest = Live(life, steps, fate.next, fate.certain);
      ASSERT_EQ(rest.next, steps.size()) << steps[rest.next].name << " fails for good";
      ExpectOldOrNew(*life.store(), rest);
      life.Die();
      disk.Restart(Loss::kUnsynced);
      ASSERT_TRUE(life.Open().ok());
      ExpectOldOrNew(*life.store(), rest);
    }
    ExpectGoesOnWorking(life);
    if (HasFatalFailure() || HasNonfatalFailure()) return;  // one is enough to read
  }
}

constexpr Way kWays[] = {
    {"Kill", Fault::kCrash, Loss::kNothing, true, 0},
    {"PowerLoss", Fault::kCrash, Loss::kUnsynced, true, 1},
    {"PowerLossTorn", Fault::kCrash, Loss::kTorn, true, 2},
    {"IoErrorThenOn", Fault::kIoError, Loss::kNothing, false, 3},
    {"IoErrorThenKill", Fault::kIoError, Loss::kNothing, true, 4},
    {"IoErrorThenPowerLoss", Fault::kIoError, Loss::kTorn, true, 5},
    {"DeadDiskThenOn", Fault::kDead, Loss::kNothing, false, 6},
    {"DeadDiskThenPowerLoss", Fault::kDead, Loss::kUnsynced, true, 7},
    {"DiskFullThenOn", Fault::kDiskFull, Loss::kNothing, false, 8},
    {"DiskFullThenKill", Fault::kDiskFull, Loss::kNothing, true, 9},
    {"DiskFullThenPowerLoss", Fault::kDiskFull, Loss::kTorn, true, 10},
    {"ShortWrite", Fault::kShortWrite, Loss::kUnsynced, true, 11},
};

std::string NameOfWay(const ::testing::TestParamInfo<Way>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(All, EveryCallTest, ::testing::ValuesIn(kWays), NameOfWay);

// Two crashes: the second while the store recovers from the first.
TEST(VersionStoreCrashTest, ACrashWhileRecoveringFromACrashLosesNothingMore) {
  const auto steps = Steps();
  const int64_t calls = CallsOfALife();
  int recoveries = 0;
  for (int64_t call = 5; call <= calls; call += kSanitized ? 33 : 11) {
    for (int64_t second = 1;; ++second) {
      SimulatedFileSystem disk;
      ASSERT_TRUE(EnsureFolder(disk, "/s").ok());
      Life life(disk);
      disk.FailAt(call, Fault::kCrash);
      const Fate fate = Live(life, steps);
      life.Die();
      disk.Restart(Loss::kTorn, static_cast<uint64_t>(call));
      disk.FailAt(second, Fault::kCrash);
      const auto status = life.Open();
      const bool crashed = disk.reached();
      life.Die();
      disk.Restart(Loss::kTorn, static_cast<uint64_t>(second));
      ASSERT_TRUE(life.Open().ok()) << call << " " << second;
      ExpectOldOrNew(*life.store(), fate);
      if (!crashed) break;
      ++recoveries;
      EXPECT_FALSE(status.ok());
    }
  }
  EXPECT_GT(recoveries, kSanitized ? 20 : 200);
}

}  // namespace
}  // namespace espalier::updates
