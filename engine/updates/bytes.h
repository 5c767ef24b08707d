// bytes.h — the integers of the delta format: written to a string, read back with every bound
// checked.
//
// Varint   LEB128, at most 10 bytes, shortest form only: one value has one encoding, so that two
//          files that mean the same are the same.
// Errors   InvalidArgument, naming what was read and the byte offset inside this part of the file.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace espalier::updates {

class ByteWriter {
 public:
  void Varint(uint64_t value);
  void Byte(uint8_t value) { bytes_.push_back(static_cast<char>(value)); }
  void LittleEndian(uint64_t value, int bytes);
  void Raw(absl::string_view bytes) { bytes_.append(bytes.data(), bytes.size()); }
  void Text(absl::string_view text) {  // its length, then its bytes
    Varint(text.size());
    Raw(text);
  }
  void Reserve(size_t bytes) { bytes_.reserve(bytes); }
  size_t size() const { return bytes_.size(); }
  const std::string& bytes() const { return bytes_; }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Borrows `bytes`.
class ByteReader {
 public:
  explicit ByteReader(absl::string_view bytes) : begin_(bytes.data()), rest_(bytes) {}

  absl::StatusOr<uint64_t> Varint(absl::string_view what, uint64_t most) {
    // Most are of one byte: there are millions in a journal.
    if (!rest_.empty() && static_cast<uint8_t>(rest_[0]) < 0x80 &&
        static_cast<uint8_t>(rest_[0]) <= most) {
      const auto value = static_cast<uint8_t>(rest_[0]);
      rest_.remove_prefix(1);
      return uint64_t{value};
    }
    return LongVarint(what, most);
  }
  absl::StatusOr<uint8_t> Byte(absl::string_view what);
  absl::StatusOr<uint64_t> LittleEndian(absl::string_view what, int bytes);
  absl::StatusOr<absl::string_view> Raw(absl::string_view what, uint64_t bytes);
  absl::StatusOr<absl::string_view> Text(absl::string_view what, uint64_t most);
  // InvalidArgument when something is left over.
  absl::Status End(absl::string_view what) const;
  size_t left() const { return rest_.size(); }
  size_t offset() const { return static_cast<size_t>(rest_.data() - begin_); }

 private:
  absl::StatusOr<uint64_t> LongVarint(absl::string_view what, uint64_t most);
  absl::Status Malformed(absl::string_view what, absl::string_view problem) const;

  const char* begin_;
  absl::string_view rest_;
};

// Reads fields one after the other. After the first failure, which status() has, all that follow read
// as nothing. Borrows `reader`.
class FieldReader {
 public:
  static constexpr uint64_t kMostCounted = uint64_t{1} << 62;

  explicit FieldReader(ByteReader& reader) : reader_(reader) {}

  uint64_t Varint(absl::string_view what, uint64_t most = kMostCounted) {
    return Take(reader_.Varint(what, most));
  }
  int64_t Count(absl::string_view what, uint64_t most = kMostCounted) {
    return static_cast<int64_t>(Varint(what, most));
  }
  uint8_t Byte(absl::string_view what, uint8_t most = 255);
  bool Flag(absl::string_view what) { return Byte(what, 1) != 0; }
  uint64_t LittleEndian(absl::string_view what, int bytes) {
    return Take(reader_.LittleEndian(what, bytes));
  }
  absl::string_view Raw(absl::string_view what, uint64_t bytes) {
    return Take(reader_.Raw(what, bytes));
  }
  std::string Text(absl::string_view what, uint64_t most) {
    return std::string(Take(reader_.Text(what, most)));
  }
  template <size_t kBytes>
  std::array<uint8_t, kBytes> Bytes(absl::string_view what) {
    std::array<uint8_t, kBytes> bytes{};
    const absl::string_view raw = Raw(what, kBytes);
    std::copy(raw.begin(), raw.end(), bytes.begin());
    return bytes;
  }
  // What something else read from the same reader, or its failure.
  template <typename T>
  T Take(absl::StatusOr<T> value) {
    status_.Update(value.status());
    return status_.ok() ? *std::move(value) : T();
  }
  void Fail(absl::string_view problem) { status_.Update(absl::InvalidArgumentError(problem)); }
  void End(absl::string_view what) { status_.Update(reader_.End(what)); }
  ByteReader& reader() { return reader_; }
  const absl::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }

 private:
  ByteReader& reader_;
  absl::Status status_;
};

}  // namespace espalier::updates
