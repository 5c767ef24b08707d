// Regions that clients register, and everything that clients may do to them meanwhile.
#include "service/shared_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/client_memory.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::service {
namespace {

using espalier::testing::FakeCuda;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kSystem = SharedMemoryKind::kSystem;
const Devices kNoDevices{};

TEST(SharedMemoryTest, BytesGoInAndOutAtTheRegionsOffset) {
  ClientMemory memory(100);
  memory.Put(10, "abcdef");
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  ASSERT_TRUE(regions.RegisterSystem("r", memory.key(), 10, 50).ok());
  const auto region = *regions.Find("r");
  EXPECT_EQ(Read(*region, 0, 3), "abc");
  EXPECT_EQ(Read(*region, 2, 4), "cdef");
  ASSERT_TRUE(region->Write(47, Bytes("xyz")).ok());
  EXPECT_EQ(memory.Get(57, 3), "xyz");
  EXPECT_EQ(Read(*region, 50, 0), "");
}

TEST(SharedMemoryTest, RangesOutsideTheRegionAreRefusedAlsoWhereSumsOverflow) {
  ClientMemory memory(100);
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  ASSERT_TRUE(regions.RegisterSystem("r", memory.key(), 0, 50).ok());
  const auto region = *regions.Find("r");
  EXPECT_EQ(Read(*region, 48, 3),
            "shared memory region 'r' has 50 bytes, too few for 3 bytes at offset 48");
  EXPECT_FALSE(region->Write(51, {}).ok());
  EXPECT_FALSE(region->CheckRange(UINT64_MAX, 2).ok());
  EXPECT_FALSE(region->CheckRange(2, UINT64_MAX).ok());
  EXPECT_THAT(Message(regions.RegisterSystem("s", memory.key(), 0, 101), kInvalid),
              HasSubstr("takes 101 bytes from offset 0 of '" + memory.key() +
                        "', which has only 100 bytes"));
  EXPECT_THAT(Message(regions.RegisterSystem("s", memory.key(), 99, 2), kInvalid),
              HasSubstr("only 100"));
  EXPECT_FALSE(regions.RegisterSystem("s", memory.key(), UINT64_MAX, 2).ok());
  EXPECT_FALSE(regions.RegisterSystem("s", memory.key(), 2, UINT64_MAX).ok());
  EXPECT_FALSE(regions.RegisterSystem("s", memory.key(), UINT64_MAX - 1, UINT64_MAX - 1).ok());
  EXPECT_THAT(Message(regions.RegisterSystem("s", memory.key(), 0, 0), kInvalid),
              HasSubstr("byte_size 0, expected at least 1"));
}

TEST(SharedMemoryTest, AClientThatTruncatesItsFileGetsAnError) {
  ClientMemory memory(1 << 20);
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  ASSERT_TRUE(regions.RegisterSystem("r", memory.key(), 0, 1 << 20).ok());
  const auto region = *regions.Find("r");
  memory.Resize(1000);
  EXPECT_THAT(Read(*region, 0, 4096), HasSubstr("which has only 1000 bytes"));
  EXPECT_THAT(Message(region->Write(4096, Bytes("x")), kInvalid), HasSubstr("only 1000 bytes"));
  EXPECT_EQ(memory.size(), 1000u) << "the server must not make it longer again";
  memory.Resize(0);
  EXPECT_THAT(Read(*region, 0, 1), HasSubstr("only 0 bytes"));
}

TEST(SharedMemoryTest, KeysNameOneFileInTheFolderOfSharedMemory) {
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  for (const std::string& key :
       {std::string(), std::string("/"), std::string("//x"), std::string("/.."), std::string("/."),
        std::string("/../../etc/passwd"), std::string("/a/b"), std::string("/a\0b", 4),
        std::string("."), "/" + std::string(255, 'x')}) {
    EXPECT_THAT(Message(regions.RegisterSystem("r", key, 0, 1), kInvalid),
                HasSubstr("expected the name of a file without '/'"))
        << key;
  }
  EXPECT_THAT(Message(regions.RegisterSystem("r", "/espalier_no_such_memory", 0, 1),
                      absl::StatusCode::kNotFound),
              HasSubstr("No such file"));
  EXPECT_THAT(Message(regions.RegisterSystem("", "/x", 0, 1), kInvalid), HasSubstr("has 0 bytes"));
  EXPECT_THAT(Message(regions.RegisterSystem(std::string(256, 'n'), "/x", 0, 1), kInvalid),
              HasSubstr("has 256 bytes, expected 1 to 255"));
}

TEST(SharedMemoryTest, TheSlashInFrontMayBeLeftOutAsForShmOpen) {
  ClientMemory memory(10);
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  EXPECT_TRUE(regions.RegisterSystem("r", memory.key().substr(1), 0, 10).ok());
}

TEST(SharedMemoryTest, OnlyRegularFilesAreOpened) {
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  const std::string link = absl::StrCat("/espalier_test_link_", getpid());
  const std::string path = "/dev/shm" + link;
  ASSERT_EQ(symlink("/etc/passwd", path.c_str()), 0);
  EXPECT_THAT(Message(regions.RegisterSystem("r", link, 0, 1), kInvalid),
              HasSubstr("symbolic link"));
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(Message(regions.RegisterSystem("r", link, 0, 1), kInvalid),
              HasSubstr("not a regular file"));
  unlink(path.c_str());
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  EXPECT_FALSE(regions.RegisterSystem("r", link, 0, 1).ok());
  rmdir(path.c_str());
}

TEST(SharedMemoryTest, RegionsAreListedFoundAndForgotten) {
  ClientMemory memory(100);
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  ASSERT_TRUE(regions.RegisterSystem("b", memory.key(), 0, 10).ok());
  ASSERT_TRUE(regions.RegisterSystem("a", memory.key(), 5, 20).ok());
  EXPECT_THAT(
      Message(regions.RegisterSystem("a", memory.key(), 0, 1), absl::StatusCode::kAlreadyExists),
      HasSubstr("'a' is registered already"));
  const auto all = *regions.List<SystemSharedMemory>("");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0]->name(), "a");
  EXPECT_EQ(all[0]->offset(), 5u);
  EXPECT_EQ(all[0]->byte_size(), 20u);
  EXPECT_EQ(all[0]->key(), memory.key());
  EXPECT_EQ((*regions.List<SystemSharedMemory>("b")).size(), 1u);
  EXPECT_THAT(Message(regions.List<SystemSharedMemory>("c").status(), absl::StatusCode::kNotFound),
              HasSubstr("unable to find shared memory region 'c'"));
  EXPECT_TRUE(regions.Unregister(kSystem, "c").ok());
  EXPECT_TRUE(regions.Unregister(kSystem, "a").ok());
  EXPECT_FALSE(regions.Find("a").ok());
  // Whoever holds it may still use it.
  EXPECT_EQ(Read(*all[0], 0, 1), std::string(1, '\0'));
  EXPECT_TRUE(regions.Unregister(kSystem, "").ok());
  EXPECT_TRUE((*regions.List<SystemSharedMemory>("")).empty());
}

TEST(SharedMemoryTest, RegionsAreCapped) {
  ClientMemory memory(1);
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  for (size_t i = 0; i < SharedMemoryRegions::kMaxRegions; ++i) {
    const absl::Status status = regions.RegisterSystem(absl::StrCat(i), memory.key(), 0, 1);
    if (absl::IsResourceExhausted(status)) GTEST_SKIP() << "too few files may be open: " << status;
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_THAT(Message(regions.RegisterSystem("more", memory.key(), 0, 1),
                      absl::StatusCode::kResourceExhausted),
              HasSubstr("1024 shared memory regions are registered"));
}

TEST(SharedMemoryTest, TheirSizesTogetherAreCapped) {
  constexpr uint64_t kHalf = SharedMemoryRegions::kMaxRegionBytes / 2;
  ClientMemory memory(kHalf + 1);  // of holes
  SharedMemoryRegions regions({.system = true}, kNoDevices);
  ASSERT_TRUE(regions.RegisterSystem("a", memory.key(), 0, kHalf).ok());
  EXPECT_THAT(Message(regions.RegisterSystem("b", memory.key(), 0, kHalf + 1),
                      absl::StatusCode::kResourceExhausted),
              HasSubstr("bytes together"));
  EXPECT_TRUE(regions.RegisterSystem("b", memory.key(), 0, kHalf).ok());
}

// With a GPU, the fake one: copies of its are ordinary ones.
class PinnedMemoryTest : public ::testing::Test {
 protected:
  static std::string At(const std::byte* address, size_t bytes) {
    return std::string(reinterpret_cast<const char*>(address), bytes);
  }
  FakeCuda& fake_ = FakeCuda::Reset();
  const Devices devices_ = *OpenDevices({.threads = 1}, FakeCuda::Module());
  SharedMemoryRegions regions_{{.system = true}, devices_};
};

TEST_F(PinnedMemoryTest, AGpuHasAnAddressForEveryRangeOfARegion) {
  ClientMemory memory(20'000);
  memory.Put(5'000, "abcdef");
  ASSERT_TRUE(regions_.RegisterSystem("r", memory.key(), 4'999, 10'000).ok());
  const auto region = *regions_.Find("r");
  EXPECT_EQ(fake_.live_handles, 1);
  ASSERT_NE(region->DeviceAddress(1, 6), nullptr);
  EXPECT_EQ(At(region->DeviceAddress(1, 6), 6), "abcdef");
  std::memcpy(region->DeviceAddress(9'998, 2), "xy", 2);
  EXPECT_EQ(memory.Get(14'997, 2), "xy");
  EXPECT_EQ(region->DeviceAddress(9'999, 2), nullptr) << "behind the end";
  EXPECT_EQ(region->DeviceAddress(UINT64_MAX, 2), nullptr);
}

TEST_F(PinnedMemoryTest, AFileThatBecameShorterHasNoAddressAnyMore) {
  ClientMemory memory(8'192);
  ASSERT_TRUE(regions_.RegisterSystem("r", memory.key(), 0, 8'192).ok());
  const auto region = *regions_.Find("r");
  memory.Resize(8'191);
  EXPECT_EQ(region->DeviceAddress(0, 1), nullptr);
  EXPECT_THAT(Message(region->Write(0, Bytes("x")), kInvalid), HasSubstr("only 8191 bytes"));
}

TEST_F(PinnedMemoryTest, AFileThatWasCutShortAndGrewAgainIsReadByTheHostForItsPagesAreOthers) {
  for (const size_t cut_at : {0, 4'096, 16'383}) {
    ClientMemory memory(20'000);
    ASSERT_TRUE(regions_.RegisterSystem("r", memory.key(), 0, 20'000).ok());
    const auto region = *regions_.Find("r");
    ASSERT_NE(region->DeviceAddress(0, 1), nullptr);
    memory.Resize(cut_at);
    memory.Resize(20'000);
    memory.Put(0, "abc");
    EXPECT_EQ(region->DeviceAddress(0, 1), nullptr) << cut_at;
    EXPECT_EQ(Read(*region, 0, 3), "abc");
    ASSERT_TRUE(regions_.Unregister(kSystem, "r").ok());
  }
}

TEST_F(PinnedMemoryTest, ItIsUnpinnedWithItsLastUser) {
  ClientMemory memory(100);
  ASSERT_TRUE(regions_.RegisterSystem("r", memory.key(), 0, 100).ok());
  auto held = *regions_.Find("r");
  ASSERT_TRUE(regions_.Unregister(kSystem, "r").ok());
  EXPECT_EQ(fake_.live_handles, 1) << "a request may still run on it";
  held.reset();
  EXPECT_EQ(fake_.live_handles, 0);
}

TEST_F(PinnedMemoryTest, WhatCannotBePinnedIsReadAndWrittenByTheHost) {
  fake_.pins_fail = true;
  ClientMemory memory(100);
  memory.Put(0, "abc");
  ASSERT_TRUE(regions_.RegisterSystem("r", memory.key(), 0, 100).ok());
  const auto region = *regions_.Find("r");
  EXPECT_EQ(region->DeviceAddress(0, 1), nullptr);
  EXPECT_EQ(Read(*region, 0, 3), "abc");
}

TEST_F(PinnedMemoryTest, NoMoreIsPinnedThanTheCapWhateverFilesOfHolesClientsBring) {
  constexpr uint64_t kCap = SystemSharedMemory::kMaxPinnedBytes;
  ClientMemory memory(8 * kCap);
  ASSERT_TRUE(regions_.RegisterSystem("most", memory.key(), 0, kCap - 4096).ok());
  ASSERT_TRUE(regions_.RegisterSystem("rest", memory.key(), 0, 4097).ok());
  ASSERT_TRUE(regions_.RegisterSystem("all", memory.key(), 0, 8 * kCap).ok());
  EXPECT_NE((*regions_.Find("most"))->DeviceAddress(0, 1), nullptr);
  EXPECT_EQ((*regions_.Find("rest"))->DeviceAddress(0, 1), nullptr);
  EXPECT_EQ((*regions_.Find("all"))->DeviceAddress(0, 1), nullptr);
  EXPECT_EQ(Read(**regions_.Find("all"), 7 * kCap, 1), std::string(1, '\0'));
  ASSERT_TRUE(regions_.Unregister(kSystem, "most").ok());
  ASSERT_TRUE(regions_.Unregister(kSystem, "rest").ok());
  ASSERT_TRUE(regions_.RegisterSystem("rest", memory.key(), 0, 4097).ok());
  EXPECT_NE((*regions_.Find("rest"))->DeviceAddress(0, 1), nullptr);
}

TEST(SharedMemoryTest, NothingWorksWhileItIsNotAllowed) {
  SharedMemoryRegions regions({}, kNoDevices);
  for (const absl::Status& status :
       {regions.RegisterSystem("r", "/x", 0, 1), regions.Unregister(kSystem, ""),
        regions.Find("r").status(), regions.List<SystemSharedMemory>("").status()}) {
    EXPECT_THAT(Message(status, absl::StatusCode::kUnimplemented),
                HasSubstr("--allow_system_shared_memory"));
  }
}

}  // namespace
}  // namespace espalier::service
