#include "engine/updates/file_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"
#include "engine/updates/atomic_file.h"
#include "tests/engine/updates/simulated_file_system.h"

namespace espalier::updates {
namespace {

using testing::Fault;
using ::testing::HasSubstr;
using testing::Loss;
using testing::SimulatedFileSystem;

void WriteFile(FileSystem& files, const std::string& path, absl::string_view bytes) {
  auto file = files.Open(path, OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(AppendAll(**file, bytes).ok());
}

std::string ReadFile(FileSystem& files, const std::string& path) {
  const auto bytes = ReadWhole(files, path, 1 << 20);
  return bytes.ok() ? *bytes : absl::StrCat("(", bytes.status().ToString(), ")");
}

// --- both file systems keep the interface's word ---------------------------------------------------

class EveryFileSystemTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) {
      simulated_ = std::make_unique<SimulatedFileSystem>();
      ASSERT_TRUE(simulated_->MakeFolder("/d").ok());
      folder_ = "/d";
    } else {
      std::string pattern = ::testing::TempDir() + "/file_systemXXXXXX";
      folder_ = mkdtemp(pattern.data());
    }
  }
  void TearDown() override {
    if (!GetParam()) std::filesystem::remove_all(folder_);
  }
  FileSystem& files() { return GetParam() ? *simulated_ : PosixFileSystem(); }
  std::string At(absl::string_view name) const { return absl::StrCat(folder_, "/", name); }

  std::unique_ptr<SimulatedFileSystem> simulated_;
  std::string folder_;
};

TEST_P(EveryFileSystemTest, FilesGrowAtTheirEndAndAreReadAnywhere) {
  {
    auto file = files().Open(At("a"), OpenMode::kCreate);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ((*file)->Append("hello ").value(), 6u);
    EXPECT_EQ((*file)->Append("world").value(), 5u);
    EXPECT_TRUE((*file)->Sync().ok());
    char three[3];
    EXPECT_EQ((*file)->ReadAt(4, three, 3).value(), 3u);
    EXPECT_EQ(std::string(three, 3), "o w");
    EXPECT_EQ((*file)->ReadAt(11, three, 3).value(), 0u);
    EXPECT_EQ(ReadExactly(**file, 10, three, 2).code(), absl::StatusCode::kDataLoss);
    EXPECT_TRUE((*file)->Close().ok());
  }
  auto file = files().Open(At("a"), OpenMode::kChange);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Truncate(5).ok());
  ASSERT_TRUE(AppendAll(**file, "!").ok());
  EXPECT_EQ((*file)->Size().value(), 6u);
  EXPECT_EQ(ReadFile(files(), At("a")), "hello!");
  EXPECT_EQ(ReadWhole(files(), At("a"), 5).status().code(), absl::StatusCode::kResourceExhausted);
  auto reader = files().Open(At("a"), OpenMode::kRead);
  EXPECT_FALSE((*reader)->Append("x").ok()) << "opened to be read";
}

TEST_P(EveryFileSystemTest, SaysWhatIsWrongByCodeAndPath) {
  const auto missing = files().Open(At("none"), OpenMode::kRead);
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("none"));
  EXPECT_TRUE(absl::IsNotFound(files().Open(At("none"), OpenMode::kChange).status()));
  EXPECT_TRUE(absl::IsNotFound(files().Open(At("no/file"), OpenMode::kCreate).status()));
  EXPECT_TRUE(absl::IsNotFound(files().Unlink(At("none"))));
  EXPECT_TRUE(UnlinkIfThere(files(), At("none")).ok());
  EXPECT_TRUE(absl::IsNotFound(files().Rename(At("none"), At("b"))));
  EXPECT_TRUE(absl::IsNotFound(files().SyncFolder(At("none"))));
  EXPECT_TRUE(absl::IsNotFound(files().List(At("none")).status()));
  WriteFile(files(), At("a"), "1");
  EXPECT_TRUE(absl::IsAlreadyExists(files().Open(At("a"), OpenMode::kCreate).status()));
  EXPECT_TRUE(files().Exists(At("a")).value());
  EXPECT_FALSE(files().Exists(At("none")).value());
  EXPECT_FALSE(files().Exists(At("none/deeper")).value());
}

TEST_P(EveryFileSystemTest, RenamesReplaceOrRefuseTo) {
  WriteFile(files(), At("a"), "1");
  WriteFile(files(), At("b"), "2");
  EXPECT_TRUE(absl::IsAlreadyExists(files().RenameNew(At("a"), At("b"))));
  EXPECT_EQ(ReadFile(files(), At("b")), "2");
  EXPECT_TRUE(files().Rename(At("a"), At("b")).ok());
  EXPECT_EQ(ReadFile(files(), At("b")), "1");
  EXPECT_FALSE(files().Exists(At("a")).value());
  EXPECT_TRUE(files().RenameNew(At("b"), At("a")).ok());
  EXPECT_EQ(ReadFile(files(), At("a")), "1");
}

TEST_P(EveryFileSystemTest, FoldersAreMadeListedAndRemovedWhenEmpty) {
  EXPECT_TRUE(EnsureFolder(files(), At("f")).ok());
  EXPECT_TRUE(EnsureFolder(files(), At("f")).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(files().MakeFolder(At("f"))));
  WriteFile(files(), At("f/z"), "1");
  WriteFile(files(), At("f/a"), "1");
  ASSERT_TRUE(files().MakeFolder(At("f/m")).ok());
  const auto entries = files().List(At("f"));
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 3u);
  EXPECT_EQ((*entries)[0].name, "a");
  EXPECT_EQ((*entries)[1].name, "m");
  EXPECT_TRUE((*entries)[1].folder);
  EXPECT_FALSE((*entries)[2].folder);
  EXPECT_FALSE(files().RemoveFolder(At("f")).ok());
  EXPECT_TRUE(files().RemoveFolder(At("f/m")).ok());
}

TEST_P(EveryFileSystemTest, AnAtomicFileIsThereWholeOrNotAtAll) {
  {
    auto dropped = AtomicFile::Create(At("a"), 0666, files());
    ASSERT_TRUE(dropped.ok());
    ASSERT_TRUE(dropped->Append("half").ok());
  }
  EXPECT_TRUE(files().List(folder_)->empty()) << "its temporary file is deleted";
  auto first = AtomicFile::Create(At("a"), 0666, files());
  ASSERT_TRUE(first->Append("1").ok());
  ASSERT_TRUE(first->CommitNew().ok());
  auto second = AtomicFile::Create(At("a"), 0666, files());
  ASSERT_TRUE(second->Append("2").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(second->CommitNew()));
  auto third = AtomicFile::Create(At("a"), 0666, files());
  ASSERT_TRUE(third->Append("33").ok());
  EXPECT_EQ(third->size(), 2u);
  ASSERT_TRUE(third->Commit().ok());
  EXPECT_EQ(ReadFile(files(), At("a")), "33");
}

TEST_P(EveryFileSystemTest, AnAtomicFolderIsThereWholeOrNotAtAll) {
  const auto write = [&](const AtomicFolder& folder) {
    auto file = AtomicFile::Create(folder.temporary_path() + "/inside", 0666, files());
    ASSERT_TRUE(file->Append("1").ok());
    ASSERT_TRUE(file->Commit().ok());
  };
  {
    auto dropped = AtomicFolder::Create(At("f/"), files());
    ASSERT_TRUE(dropped.ok());
    write(*dropped);
  }
  EXPECT_TRUE(files().List(folder_)->empty());
  auto folder = AtomicFolder::Create(At("f/"), files());
  write(*folder);
  ASSERT_TRUE(folder->Commit().ok());
  EXPECT_EQ(ReadFile(files(), At("f/inside")), "1");
  EXPECT_TRUE(absl::IsAlreadyExists(AtomicFolder::Create(At("f"), files()).status()));
}

std::string NameOfParam(const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "Simulated" : "Posix";
}

INSTANTIATE_TEST_SUITE_P(All, EveryFileSystemTest, ::testing::Bool(), NameOfParam);

// --- the simulated one forgets and fails as it says -------------------------------------------------

TEST(SimulatedFileSystemTest, BytesAndNamesAreLostUntilTheyAreSynced) {
  SimulatedFileSystem disk;
  WriteFile(disk, "/a", "1");
  disk.Restart(Loss::kNothing);
  EXPECT_EQ(ReadFile(disk, "/a"), "1") << "a killed process loses nothing that it wrote";
  disk.Restart(Loss::kUnsynced);
  EXPECT_FALSE(disk.Exists("/a").value());

  WriteFile(disk, "/a", "1");
  ASSERT_TRUE(disk.SyncFolder("/").ok());
  disk.Restart(Loss::kUnsynced);
  EXPECT_EQ(ReadFile(disk, "/a"), "") << "the name is durable, the bytes are not";

  auto file = disk.Open("/a", OpenMode::kChange, 0);
  ASSERT_TRUE(AppendAll(**file, "12").ok());
  ASSERT_TRUE((*file)->Sync().ok());
  ASSERT_TRUE(AppendAll(**file, "3").ok());
  ASSERT_TRUE(disk.Rename("/a", "/b").ok());
  disk.Restart(Loss::kUnsynced);
  EXPECT_EQ(ReadFile(disk, "/a"), "12");
  EXPECT_FALSE(disk.Exists("/b").value());
  EXPECT_FALSE((*file)->Append("x").ok()) << "a file of a process that is gone";

  ASSERT_TRUE(disk.Unlink("/a").ok());
  disk.Restart(Loss::kUnsynced);
  EXPECT_TRUE(disk.Exists("/a").value());
}

TEST(SimulatedFileSystemTest, ATornFileEndsAnywhereInGarbageBehindWhatWasSynced) {
  const std::string synced(1000, 's'), unsynced(3000, 'u');
  bool shorter = false, garbage = false, gone = false;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SimulatedFileSystem disk;
    auto file = disk.Open("/a", OpenMode::kCreate, 0);
    ASSERT_TRUE(AppendAll(**file, synced).ok());
    ASSERT_TRUE((*file)->Sync().ok());
    ASSERT_TRUE(disk.SyncFolder("/").ok());
    ASSERT_TRUE(AppendAll(**file, unsynced).ok());
    WriteFile(disk, "/b", "");
    disk.Restart(Loss::kTorn, seed);
    const std::string found = ReadFile(disk, "/a");
    ASSERT_EQ(found.substr(0, 1000), synced);
    shorter |= found.size() < 4000;
    garbage |= found != (synced + unsynced).substr(0, found.size());
    gone |= !disk.Exists("/b").value();
  }
  EXPECT_TRUE(shorter && garbage && gone);
}

TEST(SimulatedFileSystemTest, FailsAtTheChosenCallInTheChosenWay) {
  SimulatedFileSystem disk;
  auto file = disk.Open("/a", OpenMode::kCreate, 0);
  EXPECT_EQ(disk.calls(), 1);
  disk.FailAt(2, Fault::kShortWrite);
  EXPECT_EQ((*file)->Append("12345").value(), 5u);
  EXPECT_EQ((*file)->Append("12345").value(), 3u);
  disk.FailAt(1, Fault::kIoError);
  EXPECT_FALSE((*file)->Append("x").ok());
  EXPECT_TRUE((*file)->Append("x").ok());
  disk.FailAt(1, Fault::kDiskFull);
  EXPECT_TRUE(absl::IsResourceExhausted((*file)->Append("x").status()));
  EXPECT_TRUE(absl::IsResourceExhausted(disk.MakeFolder("/f")));
  EXPECT_TRUE((*file)->Truncate(9).ok()) << "needs no space";
  disk.Heal();
  EXPECT_TRUE(disk.MakeFolder("/f").ok());
  disk.FailAt(1, Fault::kDead);
  EXPECT_FALSE((*file)->Append("x").ok());
  EXPECT_FALSE(disk.Unlink("/a").ok());
  disk.Heal();
  disk.FailAt(1, Fault::kCrash);
  EXPECT_FALSE((*file)->Append("yz").ok());
  EXPECT_TRUE(disk.crashed());
  EXPECT_FALSE(disk.Exists("/a").ok());
  disk.Restart(Loss::kNothing);
  EXPECT_EQ(ReadFile(disk, "/a"), "12345123xy") << "half of the last write";
}

TEST(SimulatedFileSystemTest, ASyncThatFailedHasLostTheBytesForGood) {
  SimulatedFileSystem disk;
  auto file = disk.Open("/a", OpenMode::kCreate, 0);
  ASSERT_TRUE(disk.SyncFolder("/").ok());
  ASSERT_TRUE(AppendAll(**file, "1").ok());
  disk.FailAt(1, Fault::kIoError);
  EXPECT_FALSE((*file)->Sync().ok());
  EXPECT_TRUE((*file)->Sync().ok());
  disk.Restart(Loss::kUnsynced);
  EXPECT_EQ(ReadFile(disk, "/a"), "");
}

// --- what AtomicFile is for ------------------------------------------------------------------------

TEST(AtomicFileTest, EveryCrashLeavesTheOldFileOrTheNewOne) {
  const std::string before(700, 'o'), after(1300, 'n');
  int points = 0;
  for (const Loss loss : {Loss::kNothing, Loss::kUnsynced, Loss::kTorn}) {
    for (int64_t call = 1;; ++call) {
      SimulatedFileSystem disk;
      disk.Put("/a", before);
      disk.FailAt(call, Fault::kCrash);
      absl::Status status;
      {
        auto file = AtomicFile::Create("/a", 0666, disk);
        status = file.status();
        if (status.ok()) status = file->Append(after);
        if (status.ok()) status = file->Commit();
      }
      if (!disk.reached()) break;
      ++points;
      EXPECT_FALSE(status.ok());
      disk.Restart(loss, static_cast<uint64_t>(call));
      const std::string found = ReadFile(disk, "/a");
      EXPECT_TRUE(found == before || found == after) << call;
    }
  }
  EXPECT_EQ(points, 3 * 5) << "create, append, sync, rename, sync of the folder";
}

TEST(AtomicFileTest, WhatWasCommittedSurvivesPowerLoss) {
  SimulatedFileSystem disk;
  auto file = AtomicFile::Create("/a", 0666, disk);
  ASSERT_TRUE(file->Append("1").ok());
  ASSERT_TRUE(file->Commit().ok());
  disk.Restart(Loss::kUnsynced);
  EXPECT_EQ(ReadFile(disk, "/a"), "1");
}

}  // namespace
}  // namespace espalier::updates
