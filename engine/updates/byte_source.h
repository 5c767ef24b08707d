// byte_source.h — bytes that can be read at any place: a file, or memory.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/regular_file.h"

namespace espalier::updates {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual const std::string& name() const = 0;  // for messages
  virtual uint64_t size() const = 0;
  // Exactly `bytes`; InvalidArgument past the end.
  virtual absl::Status ReadAt(uint64_t offset, void* to, uint64_t bytes) const = 0;
};

class FileSource final : public ByteSource {
 public:
  explicit FileSource(formats::RegularFile file) : file_(std::move(file)) {}
  const std::string& name() const override { return file_.path(); }
  uint64_t size() const override { return static_cast<uint64_t>(file_.size()); }
  absl::Status ReadAt(uint64_t offset, void* to, uint64_t bytes) const override {
    return file_.ReadAt(static_cast<int64_t>(offset), to, static_cast<int64_t>(bytes));
  }

 private:
  formats::RegularFile file_;
};

class MemorySource final : public ByteSource {
 public:
  MemorySource(std::string name, std::string bytes)
      : name_(std::move(name)), bytes_(std::move(bytes)) {}
  const std::string& name() const override { return name_; }
  uint64_t size() const override { return bytes_.size(); }
  absl::Status ReadAt(uint64_t offset, void* to, uint64_t bytes) const override {
    if (offset > bytes_.size() || bytes > bytes_.size() - offset)
      return absl::InvalidArgumentError("reads past the end");
    bytes_.copy(static_cast<char*>(to), bytes, offset);
    return absl::OkStatus();
  }

 private:
  std::string name_, bytes_;
};

}  // namespace espalier::updates
