#include "engine/formats/regular_file.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/formats/onnx_builder.h"

namespace espalier::formats {
namespace {

using absl::StatusCode;
using espalier::testing::ExpectRefused;
using espalier::testing::TemporaryFolder;

std::string Text(const Buffer& buffer) {
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

TEST(RegularFileTest, AFileIsReadWholeAndInParts) {
  TemporaryFolder folder;
  const auto file = RegularFile::Open(folder.Write("f", "hello"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->size(), 5);
  EXPECT_EQ(Text(*file->ReadAll(5)), "hello");
  char part[3];
  ASSERT_TRUE(file->ReadAt(1, part, 3).ok());
  EXPECT_EQ(std::string(part, 3), "ell");
  EXPECT_TRUE(file->ReadAt(5, part, 0).ok());
  ExpectRefused(file->ReadAt(3, part, 3), StatusCode::kInvalidArgument,
                {"ends early: expected 3 bytes at offset 3, got 2"});
  ExpectRefused(file->ReadAll(4).status(), StatusCode::kResourceExhausted,
                {"has 5 bytes, the limit is 4"});
}

TEST(RegularFileTest, AFileTruncatedWhileItIsReadIsAnError) {
  TemporaryFolder folder;
  const std::string path = folder.Write("f", std::string(10000, 'x'));
  const auto file = RegularFile::Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(truncate(path.c_str(), 4000), 0);
  ExpectRefused(file->ReadAll(1 << 20).status(), StatusCode::kInvalidArgument,
                {path, "expected 10000 bytes at offset 0, got 4000"});
}

TEST(RegularFileTest, AFileThatGrowsOrIsRewrittenWhileItIsReadIsAnError) {
  TemporaryFolder folder;
  const std::string path = folder.Write("f", "hello");
  const auto file = RegularFile::Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->CheckUnchanged().ok());
  folder.Write("f", "hello, world");
  ExpectRefused(file->ReadAll(1 << 20).status(), StatusCode::kInvalidArgument,
                {"expected 5 bytes, got 12"});
  const auto again = RegularFile::Open(path);
  ASSERT_TRUE(again.ok());
  const timespec later[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), later, 0), 0);
  ExpectRefused(again->ReadAll(1 << 20).status(), StatusCode::kInvalidArgument,
                {"was written to while it was read"});
}

TEST(RegularFileTest, AReplacedFileIsReadAsItWasWhenItWasOpened) {
  TemporaryFolder folder;
  const auto file = RegularFile::Open(folder.Write("f", "old"));
  std::filesystem::rename(folder.Write("new", "new and longer"), folder.path() + "/f");
  EXPECT_EQ(Text(*file->ReadAll(100)), "old");
}

TEST(RegularFileTest, LinksToFilesAreFollowed) {
  TemporaryFolder folder;
  folder.Write("..data/f", "hello");
  std::filesystem::create_symlink("..data/f", folder.path() + "/f");
  EXPECT_EQ(Text(*RegularFile::Open(folder.path() + "/f")->ReadAll(100)), "hello");
}

TEST(RegularFileTest, WhatIsNoRegularFileIsRefusedWithoutWaiting) {
  TemporaryFolder folder;
  const std::string fifo = folder.path() + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  ExpectRefused(RegularFile::Open(fifo).status(), StatusCode::kInvalidArgument,
                {fifo, "is a FIFO"});
  ExpectRefused(RegularFile::Open(folder.path()).status(), StatusCode::kInvalidArgument,
                {"is a directory"});
  ExpectRefused(RegularFile::Open("/dev/null").status(), StatusCode::kInvalidArgument,
                {"is a device"});
  std::filesystem::create_symlink("nowhere", folder.path() + "/dangling");
  ExpectRefused(RegularFile::Open(folder.path() + "/dangling").status(),
                StatusCode::kInvalidArgument, {"symbolic link to a file that does not exist"});
  ExpectRefused(RegularFile::Open(folder.path() + "/none").status(), StatusCode::kNotFound,
                {"/none"});
  ExpectRefused(RegularFile::Open(std::string("/dev\0/null", 10)).status(),
                StatusCode::kInvalidArgument, {"NUL"});

  sockaddr_un address = {.sun_family = AF_UNIX};
  const std::string path = folder.path() + "/socket";
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ExpectRefused(RegularFile::Open(path).status(), StatusCode::kInvalidArgument,
                {"is a socket or device"});
  close(descriptor);
}

TEST(RegularFileTest, PathsBeneathAFolderAreTold) {
  for (const char* good : {"a", "a/b", "./a", "././a/b", "..data/a", "a.b", "..."}) {
    EXPECT_TRUE(IsPathBeneath(good)) << good;
  }
  for (const char* bad :
       {"", ".", "..", "./", "/", "/a", "a/", "a//b", "a/./b", "a/..", "../a", "./../a"}) {
    EXPECT_FALSE(IsPathBeneath(bad)) << bad;
  }
  EXPECT_FALSE(IsPathBeneath(absl::string_view("a\0b", 3)));
}

// The way of kernels without openat2.
TEST(RegularFileTest, WithoutOpenat2NoLinkIsFollowed) {
  TemporaryFolder folder;
  folder.Write("a/b/f", "hello");
  std::filesystem::create_symlink("f", folder.path() + "/a/b/link");
  std::filesystem::create_symlink("a", folder.path() + "/dir");
  const int base = open(folder.path().c_str(), O_PATH | O_DIRECTORY);
  ASSERT_GE(base, 0);
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = descriptors();
  const int file = OpenWithoutLinks(base, "./a/b/f", O_RDONLY);
  ASSERT_GE(file, 0) << std::strerror(errno);
  char text[5];
  EXPECT_EQ(read(file, text, 5), 5);
  EXPECT_EQ(std::string(text, 5), "hello");
  close(file);
  EXPECT_EQ(OpenWithoutLinks(base, "a/b/link", O_RDONLY), -1);
  EXPECT_EQ(errno, ELOOP);
  EXPECT_EQ(OpenWithoutLinks(base, "dir/b/f", O_RDONLY), -1);
  EXPECT_EQ(OpenWithoutLinks(base, "a/none/f", O_RDONLY), -1);
  EXPECT_EQ(errno, ENOENT);
  EXPECT_EQ(descriptors(), before) << "a descriptor leaks";
  close(base);
}

}  // namespace
}  // namespace espalier::formats
