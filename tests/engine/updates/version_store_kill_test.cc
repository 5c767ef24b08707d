// A process that updates, rolls back and compacts a store in a loop is killed (SIGKILL) at random
// moments, on the real file system. ESPALIER_KILLS says how often; 50 when it is not set, 15 under a sanitizer.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "tests/engine/updates/store_world.h"
#include "tests/testing/sanitized.h"

namespace espalier::updates {
namespace {

using testing::kNow;
using testing::MemoryWeights;
using testing::Publisher;

// What the child tells before and after a step that changes which version is active.
struct Word {
  int64_t done;    // 0: it begins
  int64_t active;  // what the step leads to
};

absl::StatusOr<std::unique_ptr<VersionStore>> OpenStore(const std::string& folder,
                                                        const Publisher& publisher) {
  StoreOptions options;
  options.now_seconds = [] { return kNow; };
  options.repository = [&](int64_t number) { return publisher.shared(number); };
  options.piece_bytes = 256;
  options.max_chain = options.max_first_chain = 5;
  options.keep_versions = 3;
  options.max_audit_bytes = 64 << 10;
  options.max_unconfirmed_starts = 0;
  return VersionStore::Open(folder, "digits", {1, publisher.digest(1)}, options);
}

MemoryWeights Copy(const TensorReader& reader) {
  MemoryWeights copy;
  for (size_t i = 0; i < reader.tensors().size(); ++i) {
    const TensorInfo& info = reader.tensors()[i];
    std::vector<uint8_t> bytes(static_cast<size_t>(info.bytes));
    EXPECT_TRUE(reader.Read(i, 0, info.elements(), bytes.data()).ok());
    copy.Add(info.name, info.dtype, info.dims, bytes);
  }
  return copy;
}

// Some elements of the active version changed, as a delta to `number`.
std::string NextDelta(const VersionStore& store, const VersionRecord& active, int64_t number,
                      std::mt19937_64& random) {
  const MemoryWeights base = Copy(**store.Weights(active.number));
  MemoryWeights next = base;
  std::string& bytes = next.data(1);
  for (int i = 0; i < 20; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
  testing::Draft draft = testing::MakeDraft(base, next);
  draft.manifest.base_version = active.number;
  draft.manifest.target_version = draft.manifest.sequence = number;
  return draft.Bytes();
}

[[noreturn]] void UpdateUntilKilled(const std::string& folder, const Publisher& publisher,
                                    uint64_t seed, int pipe) {
  std::mt19937_64 random(seed);
  auto store = OpenStore(folder, publisher);
  if (!store.ok()) _exit(2);
  const auto say = [&](int64_t done, int64_t active) {
    const Word word{done, active};
    if (write(pipe, &word, sizeof(word)) != sizeof(word)) _exit(3);
  };
  for (;;) {
    const StoreState state = (*store)->List();
    const VersionRecord& active = *state.Find(state.active);
    int64_t number =
        std::max({state.used_up, state.accepted_sequence, state.versions.back().number});
    ++number;
    if (!testing::Push(**store, NextDelta(**store, active, number, random)).ok()) _exit(4);
    say(0, number);
    if (!(*store)->Activate(number).ok()) _exit(5);
    say(1, number);
    if (random() % 4 == 0) {
      say(0, active.number);
      if (!(*store)->Rollback("test").ok()) _exit(6);
      say(1, active.number);
    }
    if (random() % 3 == 0 && !(*store)->Compact().ok()) _exit(7);
  }
}

int Kills() {
  const char* text = std::getenv("ESPALIER_KILLS");
  if (text == nullptr) return espalier::testing::kSanitized ? 15 : 50;
  int kills = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &kills) && kills > 0) << text;
  return kills;
}

TEST(VersionStoreKillTest, EveryKilledProcessLeavesOldOrNew) {
  const Publisher publisher(1000);
  std::string folder = ::testing::TempDir() + "/version_storeXXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::mt19937_64 random(9);
  int64_t active = 1, updates = 0;
  // That a child lives: more where disk or processor are so busy that hardly one gets anywhere.
  int64_t longest_micros = 120'000;
  for (int kill_number = 0; kill_number < Kills(); ++kill_number) {
    SCOPED_TRACE(kill_number);
    int pipes[2];
    ASSERT_EQ(pipe(pipes), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      close(pipes[0]);
      UpdateUntilKilled(folder, publisher, random(), pipes[1]);
    }
    close(pipes[1]);
    random.discard(1);
    std::this_thread::sleep_for(std::chrono::microseconds(1000 + random() % longest_micros));
    kill(child, SIGKILL);
    int64_t possible = active;
    Word word;
    while (read(pipes[0], &word, sizeof(word)) == sizeof(word)) {
      possible = word.active;
      if (word.done == 0) continue;
      active = word.active;
      ++updates;
    }
    if (4 * updates < kill_number)
      longest_micros = std::min<int64_t>(2 * longest_micros, 2'000'000);
    close(pipes[0]);
    int result = 0;
    ASSERT_EQ(waitpid(child, &result, 0), child);
    ASSERT_TRUE(WIFSIGNALED(result)) << "the child gave up with " << WEXITSTATUS(result);
    const auto store = OpenStore(folder, publisher);
    ASSERT_TRUE(store.ok()) << store.status();
    const StoreState state = (*store)->List();
    ASSERT_TRUE(state.active == active || state.active == possible)
        << state.active << ", expected " << active << " or " << possible;
    active = state.active;
    for (const VersionRecord& record : state.versions) {
      if (record.state == UpdateState::kVerified) continue;
      const auto weights = (*store)->Weights(record.number);
      ASSERT_TRUE(weights.ok()) << weights.status();
      ASSERT_EQ(*DigestOf(**weights), record.weights) << record.number;
    }
    const auto audit = (*store)->Audit(100'000);
    ASSERT_TRUE(audit.ok());
    for (size_t i = 1; i < audit->size(); ++i)
      ASSERT_EQ((*audit)[i].sequence, (*audit)[i - 1].sequence + 1);
  }
  EXPECT_GT(updates, Kills() / 20) << "the children were killed before they did anything";
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace espalier::updates
