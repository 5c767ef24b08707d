#include "engine/runtime/repository_watch.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/manager_fixture.h"

namespace espalier::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class RepositoryWatchTest : public ::testing::Test {
 protected:
  RepositoryWatchTest()
      : watch_({.repositories = {directory_.path()},
                .interval = absl::Milliseconds(1),
                .load = [this](const std::string& name) { loads_.push_back(name); },
                .remove = [this](const std::string& name) { removed_.push_back(name); }}) {}

  void Write(const std::string& model, const std::string& text) {
    directory_.MakeDirectory(model + "/1");
    directory_.Write(model + "/1/model.onnx", text);
  }
  void Begin(const absl::Status& outcome = absl::OkStatus()) {
    Write("m", "first");
    watch_.Begin();
    watch_.Ended("m", outcome);
  }
  // What a look asks to load.
  std::vector<std::string> Look() {
    loads_.clear();
    watch_.Look();
    return loads_;
  }

  TemporaryDirectory directory_;
  std::vector<std::string> loads_, removed_;
  RepositoryWatch watch_;
};

TEST_F(RepositoryWatchTest, WhatIsAsItWasIsLeftAlone) {
  Begin();
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(removed_, IsEmpty());
}

TEST_F(RepositoryWatchTest, ChangesAndNewModelsAreLoadedOnce) {
  Begin();
  Write("m", "second");
  Write("n", "new");
  EXPECT_THAT(Look(), ElementsAre("m", "n"));
  EXPECT_THAT(Look(), IsEmpty()) << "while they load";
  watch_.Ended("m", absl::OkStatus());
  watch_.Ended("n", absl::OkStatus());
  EXPECT_THAT(Look(), IsEmpty());
  directory_.Write("m/config.pbtxt", "max_batch_size: 8");
  EXPECT_THAT(Look(), ElementsAre("m"));
}

TEST_F(RepositoryWatchTest, AChangeWhileLoadingIsLoadedAfterwards) {
  Begin();
  Write("m", "second");
  EXPECT_THAT(Look(), ElementsAre("m"));
  Write("m", "third");
  EXPECT_THAT(Look(), IsEmpty());
  watch_.Ended("m", absl::OkStatus());
  EXPECT_THAT(Look(), ElementsAre("m"));
}

TEST_F(RepositoryWatchTest, WhatIsGoneIsRemoved) {
  Begin();
  std::filesystem::remove_all(directory_.path() + "/m");
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(removed_, ElementsAre("m"));
  Look();
  EXPECT_EQ(removed_.size(), 1u);
}

TEST_F(RepositoryWatchTest, ARepositoryThatCannotBeListedKeepsItsModels) {
  Begin();
  const std::string away = directory_.path() + ".away";
  std::filesystem::rename(directory_.path(), away);
  EXPECT_THAT(Look(), IsEmpty());
  std::filesystem::rename(away, directory_.path());
  EXPECT_THAT(removed_, IsEmpty());
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(removed_, IsEmpty());
}

TEST_F(RepositoryWatchTest, AFailedLoadIsTriedAgainWhenItsFilesHaveComeToRest) {
  Begin(absl::InvalidArgumentError("truncated"));
  EXPECT_THAT(Look(), IsEmpty()) << "the same bytes fail again";
  for (const char* text : {"more", "more of", "more of it"}) {
    Write("m", text);
    EXPECT_THAT(Look(), IsEmpty()) << "a copy under way";
  }
  EXPECT_THAT(Look(), ElementsAre("m"));
}

TEST_F(RepositoryWatchTest, AFailedLoadIsTriedAgainWithoutWhatWasNoFile) {
  const std::string config = directory_.path() + "/m/config.pbtxt";
  Write("m", "first");
  for (const bool link : {false, true}) {
    ASSERT_EQ(link ? symlink("nowhere", config.c_str()) : mkfifo(config.c_str(), 0600), 0);
    Begin(absl::InvalidArgumentError("config.pbtxt: expected a regular file"));
    EXPECT_THAT(Look(), IsEmpty());
    std::filesystem::remove(config);
    Look();
    EXPECT_THAT(Look(), ElementsAre("m")) << (link ? "link" : "pipe");
  }
}

TEST_F(RepositoryWatchTest, WhatMayMendItselfIsTriedAgainAtGrowingIntervals) {
  Begin(absl::ResourceExhaustedError("no memory"));
  const absl::Time began = absl::Now();
  for (int tries = 0; tries < 6;) {
    ASSERT_LT(absl::Now() - began, absl::Minutes(1));
    if (!Look().empty()) {
      ++tries;
      watch_.Ended("m", absl::ResourceExhaustedError("no memory"));
    }
    absl::SleepFor(absl::Microseconds(100));
  }
  EXPECT_GE(absl::Now() - began, absl::Milliseconds(63)) << "1, 2, 4, … 32 ms";
}

TEST(PollTest, TheManagerFollowsTheRepository) {
  TemporaryDirectory directory;
  auto loader = std::make_unique<FakeLoader>();
  FakeModelOptions fake;
  for (const char* name : {"m", "n"}) loader->models[name] = fake;
  const auto write = [&](const std::string& version, const std::string& text) {
    directory.MakeDirectory(version);
    directory.Write(version + "/model.onnx", text);
  };
  write("m/1", "one");
  ModelManager::Options options;
  options.repositories = {directory.path()};
  options.poll_interval = absl::Milliseconds(5);
  ModelManager manager(options, std::move(loader));
  ASSERT_TRUE(manager.Start().ok());
  const auto ready = [&](const char* name) { return manager.ReadyVersions(name); };
  EXPECT_TRUE(Eventually([&] { return ready("m") == std::vector<int64_t>{1}; }));
  write("m/2", "two");
  EXPECT_TRUE(Eventually([&] { return ready("m") == std::vector<int64_t>{2}; }));
  write("n/1", "another");
  EXPECT_TRUE(Eventually([&] { return ready("n") == std::vector<int64_t>{1}; }));
  std::filesystem::remove_all(directory.path() + "/m/2");
  EXPECT_TRUE(Eventually([&] { return ready("m") == std::vector<int64_t>{1}; }));
  std::filesystem::remove_all(directory.path() + "/n");
  EXPECT_TRUE(Eventually([&] { return manager.Index().size() == 1; })) << "n left the index";
  const int loads = fake.control->loads;
  const timespec now[] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
  utimensat(AT_FDCWD, (directory.path() + "/m/1/model.onnx").c_str(), now, 0);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(fake.control->loads, loads) << "touching is no change";
}

}  // namespace
}  // namespace espalier::runtime
