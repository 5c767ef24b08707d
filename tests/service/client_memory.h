// client_memory.h — shared memory of a client, and what tests of regions ask again and again.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "service/shared_memory_region.h"

namespace espalier::service {

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

inline absl::Span<const std::byte> Bytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline std::string Read(const SharedMemoryRegion& region, uint64_t offset, size_t bytes) {
  std::string text(bytes, '\0');
  const absl::Status status =
      region.Read(offset, {reinterpret_cast<std::byte*>(text.data()), bytes});
  return status.ok() ? text : std::string(status.message());
}

inline std::string Message(const absl::Status& status, absl::StatusCode code) {
  EXPECT_EQ(status.code(), code) << status;
  return std::string(status.message());
}

}  // namespace espalier::service
