#include "service/wire_reader.h"

#include <algorithm>
#include <cstring>

namespace espalier::service {
namespace {

// Protobuf's own limit on nesting.
constexpr int kMaxGroupDepth = 100;
constexpr int kMaxVarintBytes = 10;

}  // namespace

WireReader::WireReader(absl::Span<const runtime::ByteSlice> slices) : slices_(slices) {
  for (const runtime::ByteSlice& slice : slices) end_ += slice.size;
  if (slices_.empty()) return;
  at_ = reinterpret_cast<const uint8_t*>(slices_[0].data);
  slice_end_ = at_ + slices_[0].size;
  if (at_ == slice_end_) NextSlice();
}

void WireReader::Fail(const char* error) {
  if (error_ == nullptr) error_ = error;
  end_ = position_;
}

void WireReader::NextSlice() {
  while (at_ == slice_end_ && slice_ + 1 < slices_.size()) {
    ++slice_;
    at_ = reinterpret_cast<const uint8_t*>(slices_[slice_].data);
    slice_end_ = at_ + slices_[slice_].size;
  }
}

uint8_t WireReader::ReadByte() {
  if (position_ >= end_) {
    Fail("ends in the middle of a field");
    return 0;
  }
  const uint8_t byte = *at_++;
  ++position_;
  if (at_ == slice_end_) NextSlice();
  return byte;
}

uint64_t WireReader::ReadVarint() {
  // One byte in most cases: tags, short lengths, small dimensions.
  if (position_ < end_ && *at_ < 0x80) return ReadByte();
  return ReadVarintSlow();
}

uint64_t WireReader::ReadVarintSlow() {
  uint64_t value = 0;
  for (int i = 0; i < kMaxVarintBytes; ++i) {
    const uint8_t byte = ReadByte();
    value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) return ok() ? value : 0;
  }
  Fail("a varint has more than 10 bytes");
  return 0;
}

void WireReader::Copy(char* to, size_t bytes) {
  while (bytes > 0) {
    const size_t here = std::min(bytes, static_cast<size_t>(slice_end_ - at_));
    std::memcpy(to, at_, here);
    to += here;
    bytes -= here;
    Advance(here);
  }
}

void WireReader::Advance(size_t bytes) {
  position_ += bytes;
  while (bytes > 0) {
    const size_t here = std::min(bytes, static_cast<size_t>(slice_end_ - at_));
    at_ += here;
    bytes -= here;
    if (at_ == slice_end_) NextSlice();
  }
}

uint32_t WireReader::ReadFixed32() {
  uint32_t value = 0;
  if (left() < sizeof(value)) {
    Fail("ends in the middle of a field");
    return 0;
  }
  Copy(reinterpret_cast<char*>(&value),
       sizeof(value));  // little-endian, as are the machines that we build for
  return value;
}

uint64_t WireReader::ReadFixed64() {
  uint64_t value = 0;
  if (left() < sizeof(value)) {
    Fail("ends in the middle of a field");
    return 0;
  }
  Copy(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

size_t WireReader::ReadLength() {
  const uint64_t length = ReadVarint();
  if (length > left()) {
    Fail("a length exceeds what is left of the message");
    return 0;
  }
  return static_cast<size_t>(length);
}

std::string WireReader::ReadString() {
  std::string text(ReadLength(), '\0');
  Copy(text.data(), text.size());
  return text;
}

void WireReader::ReadBytes(runtime::ByteSlices* pieces) {
  size_t length = ReadLength();
  while (length > 0) {
    const size_t here = std::min(length, static_cast<size_t>(slice_end_ - at_));
    pieces->push_back({reinterpret_cast<const std::byte*>(at_), here});
    length -= here;
    Advance(here);
  }
}

bool WireReader::ReadTag(WireTag* tag) {
  if (position_ >= end_) return false;
  const size_t begin = position_;
  // As protobuf has it: five bytes at most, of which 32 bits count.
  const uint32_t value = static_cast<uint32_t>(ReadVarint()), type = value & 7;
  if (!ok()) return false;
  if (position_ - begin > 5 || (value >> 3) == 0 || type > 5) {
    Fail("a tag is no field number and wire type");
    return false;
  }
  *tag = {value >> 3, static_cast<WireType>(type)};
  return true;
}

void WireReader::Skip(const WireTag& tag) { SkipField(tag, 0); }

void WireReader::SkipField(const WireTag& tag, int depth) {
  switch (tag.type) {
    case WireType::kVarint:
      ReadVarint();
      return;
    case WireType::kFixed64:
      ReadFixed64();
      return;
    case WireType::kFixed32:
      ReadFixed32();
      return;
    case WireType::kBytes:
      Advance(ReadLength());
      return;
    case WireType::kEndGroup:
      Fail("a group ends that did not begin");
      return;
    case WireType::kStartGroup:
      break;
  }
  if (depth >= kMaxGroupDepth) return Fail("groups are nested too deep");
  WireTag inner;
  while (ReadTag(&inner)) {
    if (inner.type == WireType::kEndGroup) {
      if (inner.field != tag.field) Fail("a group ends that did not begin");
      return;
    }
    SkipField(inner, depth + 1);
  }
  Fail("ends in the middle of a group");
}

size_t WireReader::Enter() {
  const size_t length = ReadLength();
  const size_t outer_end = end_;
  if (ok()) end_ = position_ + length;
  return outer_end;
}

void WireReader::Leave(size_t outer_end) {
  if (ok()) end_ = outer_end;
}

}  // namespace espalier::service
