// Regions that clients register, and everything that clients may do to them meanwhile.
#include "service/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::service {
namespace {

using ::testing::HasSubstr;

// A client's shared memory, gone with the test.
class ClientMemory {
 public:
  explicit ClientMemory(size_t bytes, const std::string& name = "memory")
      : key_(absl::StrCat("/espalier_test_", getpid(), "_", name)),
        fd_(shm_open(key_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600)) {
    Resize(bytes);
  }
  ~ClientMemory() {
    close(fd_);
    shm_unlink(key_.c_str());
  }
  const std::string& key() const { return key_; }
  void Resize(size_t bytes) { EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0); }
  size_t size() const {
    struct stat file = {};
    fstat(fd_, &file);
    return static_cast<size_t>(file.st_size);
  }
  void Put(size_t at, absl::string_view text) {
    EXPECT_EQ(pwrite(fd_, text.data(), text.size(), static_cast<off_t>(at)),
              static_cast<ssize_t>(text.size()));
  }
  std::string Get(size_t at, size_t bytes) const {
    std::string text(bytes, '\0');
    EXPECT_EQ(pread(fd_, text.data(), bytes, static_cast<off_t>(at)), static_cast<ssize_t>(bytes));
    return text;
  }

 private:
  const std::string key_;
  const int fd_;
};

absl::Span<const std::byte> Bytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string Read(const SharedMemoryRegion& region, uint64_t offset, size_t bytes) {
  std::string text(bytes, '\0');
  const absl::Status status =
      region.Read(offset, {reinterpret_cast<std::byte*>(text.data()), bytes});
  return status.ok() ? text : std::string(status.message());
}

std::string Message(const absl::Status& status, absl::StatusCode code) {
  EXPECT_EQ(status.code(), code) << status;
  return std::string(status.message());
}
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(SharedMemoryTest, BytesGoInAndOutAtTheRegionsOffset) {
  ClientMemory memory(100);
  memory.Put(10, "abcdef");
  SharedMemoryRegions regions(/*allowed=*/true);
  ASSERT_TRUE(regions.Register("r", memory.key(), 10, 50).ok());
  const auto region = *regions.Find("r");
  EXPECT_EQ(Read(*region, 0, 3), "abc");
  EXPECT_EQ(Read(*region, 2, 4), "cdef");
  ASSERT_TRUE(region->Write(47, Bytes("xyz")).ok());
  EXPECT_EQ(memory.Get(57, 3), "xyz");
  EXPECT_EQ(Read(*region, 50, 0), "");
}

TEST(SharedMemoryTest, RangesOutsideTheRegionAreRefusedAlsoWhereSumsOverflow) {
  ClientMemory memory(100);
  SharedMemoryRegions regions(true);
  ASSERT_TRUE(regions.Register("r", memory.key(), 0, 50).ok());
  const auto region = *regions.Find("r");
  EXPECT_EQ(Read(*region, 48, 3),
            "shared memory region 'r' has 50 bytes, too few for 3 bytes at offset 48");
  EXPECT_FALSE(region->Write(51, {}).ok());
  EXPECT_FALSE(region->CheckRange(UINT64_MAX, 2).ok());
  EXPECT_FALSE(region->CheckRange(2, UINT64_MAX).ok());
  EXPECT_THAT(Message(regions.Register("s", memory.key(), 0, 101), kInvalid),
              HasSubstr("takes 101 bytes from offset 0 of '" + memory.key() +
                        "', which has only 100 bytes"));
  EXPECT_THAT(Message(regions.Register("s", memory.key(), 99, 2), kInvalid), HasSubstr("only 100"));
  EXPECT_FALSE(regions.Register("s", memory.key(), UINT64_MAX, 2).ok());
  EXPECT_FALSE(regions.Register("s", memory.key(), 2, UINT64_MAX).ok());
  EXPECT_FALSE(regions.Register("s", memory.key(), UINT64_MAX - 1, UINT64_MAX - 1).ok());
  EXPECT_THAT(Message(regions.Register("s", memory.key(), 0, 0), kInvalid),
              HasSubstr("byte_size 0, expected at least 1"));
}

TEST(SharedMemoryTest, AClientThatTruncatesItsFileGetsAnError) {
  ClientMemory memory(1 << 20);
  SharedMemoryRegions regions(true);
  ASSERT_TRUE(regions.Register("r", memory.key(), 0, 1 << 20).ok());
  const auto region = *regions.Find("r");
  memory.Resize(1000);
  EXPECT_THAT(Read(*region, 0, 4096), HasSubstr("which has only 1000 bytes"));
  EXPECT_THAT(Message(region->Write(4096, Bytes("x")), kInvalid), HasSubstr("only 1000 bytes"));
  EXPECT_EQ(memory.size(), 1000u) << "the server must not make it longer again";
  memory.Resize(0);
  EXPECT_THAT(Read(*region, 0, 1), HasSubstr("only 0 bytes"));
}

TEST(SharedMemoryTest, KeysNameOneFileInTheFolderOfSharedMemory) {
  SharedMemoryRegions regions(true);
  for (const std::string& key :
       {std::string(), std::string("/"), std::string("//x"), std::string("/.."), std::string("/."),
        std::string("/../../etc/passwd"), std::string("/a/b"), std::string("/a\0b", 4),
        std::string("."), "/" + std::string(255, 'x')}) {
    EXPECT_THAT(Message(regions.Register("r", key, 0, 1), kInvalid),
                HasSubstr("expected the name of a file without '/'"))
        << key;
  }
  EXPECT_THAT(
      Message(regions.Register("r", "/espalier_no_such_memory", 0, 1), absl::StatusCode::kNotFound),
      HasSubstr("No such file"));
  EXPECT_THAT(Message(regions.Register("", "/x", 0, 1), kInvalid), HasSubstr("has 0 bytes"));
  EXPECT_THAT(Message(regions.Register(std::string(256, 'n'), "/x", 0, 1), kInvalid),
              HasSubstr("has 256 bytes, expected 1 to 255"));
}

TEST(SharedMemoryTest, TheSlashInFrontMayBeLeftOutAsForShmOpen) {
  ClientMemory memory(10);
  SharedMemoryRegions regions(true);
  EXPECT_TRUE(regions.Register("r", memory.key().substr(1), 0, 10).ok());
}

TEST(SharedMemoryTest, OnlyRegularFilesAreOpened) {
  SharedMemoryRegions regions(true);
  const std::string link = absl::StrCat("/espalier_test_link_", getpid());
  const std::string path = "/dev/shm" + link;
  ASSERT_EQ(symlink("/etc/passwd", path.c_str()), 0);
  EXPECT_THAT(Message(regions.Register("r", link, 0, 1), kInvalid), HasSubstr("symbolic link"));
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(Message(regions.Register("r", link, 0, 1), kInvalid),
              HasSubstr("not a regular file"));
  unlink(path.c_str());
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  EXPECT_FALSE(regions.Register("r", link, 0, 1).ok());
  rmdir(path.c_str());
}

TEST(SharedMemoryTest, RegionsAreListedFoundAndForgotten) {
  ClientMemory memory(100);
  SharedMemoryRegions regions(true);
  ASSERT_TRUE(regions.Register("b", memory.key(), 0, 10).ok());
  ASSERT_TRUE(regions.Register("a", memory.key(), 5, 20).ok());
  EXPECT_THAT(Message(regions.Register("a", memory.key(), 0, 1), absl::StatusCode::kAlreadyExists),
              HasSubstr("'a' is registered already"));
  const auto all = *regions.List("");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0]->name(), "a");
  EXPECT_EQ(all[0]->offset(), 5u);
  EXPECT_EQ(all[0]->byte_size(), 20u);
  EXPECT_EQ(all[0]->key(), memory.key());
  EXPECT_EQ((*regions.List("b")).size(), 1u);
  EXPECT_THAT(Message(regions.List("c").status(), absl::StatusCode::kNotFound),
              HasSubstr("unable to find shared memory region 'c'"));
  EXPECT_TRUE(regions.Unregister("c").ok());
  EXPECT_TRUE(regions.Unregister("a").ok());
  EXPECT_FALSE(regions.Find("a").ok());
  // Whoever holds it may still use it.
  EXPECT_EQ(Read(*all[0], 0, 1), std::string(1, '\0'));
  EXPECT_TRUE(regions.Unregister("").ok());
  EXPECT_TRUE((*regions.List("")).empty());
}

TEST(SharedMemoryTest, RegionsAreCapped) {
  ClientMemory memory(1);
  SharedMemoryRegions regions(true);
  for (size_t i = 0; i < SharedMemoryRegions::kMaxRegions; ++i) {
    const absl::Status status = regions.Register(absl::StrCat(i), memory.key(), 0, 1);
    if (absl::IsResourceExhausted(status)) GTEST_SKIP() << "too few files may be open: " << status;
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_THAT(
      Message(regions.Register("more", memory.key(), 0, 1), absl::StatusCode::kResourceExhausted),
      HasSubstr("1024 shared memory regions are registered"));
}

TEST(SharedMemoryTest, TheirSizesTogetherAreCapped) {
  constexpr uint64_t kHalf = SharedMemoryRegions::kMaxRegionBytes / 2;
  ClientMemory memory(kHalf + 1);  // of holes
  SharedMemoryRegions regions(true);
  ASSERT_TRUE(regions.Register("a", memory.key(), 0, kHalf).ok());
  EXPECT_THAT(Message(regions.Register("b", memory.key(), 0, kHalf + 1),
                      absl::StatusCode::kResourceExhausted),
              HasSubstr("bytes together"));
  EXPECT_TRUE(regions.Register("b", memory.key(), 0, kHalf).ok());
}

TEST(SharedMemoryTest, NothingWorksWhileItIsNotAllowed) {
  SharedMemoryRegions regions(/*allowed=*/false);
  for (const absl::Status& status : {regions.Register("r", "/x", 0, 1), regions.Unregister(""),
                                     regions.Find("r").status(), regions.List("").status()}) {
    EXPECT_THAT(Message(status, absl::StatusCode::kUnimplemented),
                HasSubstr("--allow_system_shared_memory"));
  }
}

}  // namespace
}  // namespace espalier::service
