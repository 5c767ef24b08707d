#include "engine/updates/bytes.h"

#include "absl/strings/str_cat.h"

namespace espalier::updates {

void ByteWriter::Varint(uint64_t value) {
  while (value >= 0x80) {
    Byte(static_cast<uint8_t>(value | 0x80));
    value >>= 7;
  }
  Byte(static_cast<uint8_t>(value));
}

void ByteWriter::LittleEndian(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) Byte(static_cast<uint8_t>(value >> (8 * i)));
}

absl::Status ByteReader::Malformed(absl::string_view what, absl::string_view problem) const {
  return absl::InvalidArgumentError(absl::StrCat(what, " at byte ", offset(), ": ", problem));
}

absl::StatusOr<uint64_t> ByteReader::LongVarint(absl::string_view what, uint64_t most) {
  uint64_t value = 0;
  for (size_t i = 0; i < 10; ++i) {
    if (i >= rest_.size()) return Malformed(what, "the data ends inside a number");
    const auto byte = static_cast<uint8_t>(rest_[i]);
    if (i == 9 && byte > 1) break;
    value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if (byte & 0x80) continue;
    if (byte == 0 && i > 0) return Malformed(what, "a number is not in its shortest form");
    if (value > most) {
      return Malformed(what, absl::StrCat("expected at most ", most, ", got ", value));
    }
    rest_.remove_prefix(i + 1);
    return value;
  }
  return Malformed(what, "a number has more than 64 bits");
}

absl::StatusOr<uint8_t> ByteReader::Byte(absl::string_view what) {
  if (rest_.empty()) return Malformed(what, "the data ends");
  const auto byte = static_cast<uint8_t>(rest_[0]);
  rest_.remove_prefix(1);
  return byte;
}

absl::StatusOr<uint64_t> ByteReader::LittleEndian(absl::string_view what, int bytes) {
  const absl::StatusOr<absl::string_view> raw = Raw(what, static_cast<uint64_t>(bytes));
  if (!raw.ok()) return raw.status();
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= uint64_t{static_cast<uint8_t>((*raw)[i])} << (8 * i);
  return value;
}

absl::StatusOr<absl::string_view> ByteReader::Raw(absl::string_view what, uint64_t bytes) {
  if (bytes > rest_.size()) {
    return Malformed(what, absl::StrCat("expected ", bytes, " more bytes, got ", rest_.size()));
  }
  const absl::string_view raw = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return raw;
}

absl::StatusOr<absl::string_view> ByteReader::Text(absl::string_view what, uint64_t most) {
  const absl::StatusOr<uint64_t> size = Varint(what, most);
  if (!size.ok()) return size.status();
  return Raw(what, *size);
}

absl::Status ByteReader::End(absl::string_view what) const {
  if (rest_.empty()) return absl::OkStatus();
  return Malformed(what, absl::StrCat("expected the end, got ", rest_.size(), " more bytes"));
}

uint8_t FieldReader::Byte(absl::string_view what, uint8_t most) {
  const uint8_t byte = Take(reader_.Byte(what));
  if (byte > most) Fail(absl::StrCat(what, " ", byte, ", expected 0 to ", most));
  return byte;
}

}  // namespace espalier::updates
