// wire_reader.h — reads protobuf's wire format from a message that lies in pieces, without joining
// them.
//
// Every length is checked against what is left before anything is done with it, so that no number
// in a message can make the reader allocate, overflow or run past the end. After an error the
// reader stays at the end: `ok()` is checked once, when a message was read.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/runtime/infer_request.h"

namespace espalier::service {

enum class WireType : uint8_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5
};

struct WireTag {
  uint32_t field = 0;
  WireType type = WireType::kVarint;
};

class WireReader {
 public:
  // `slices` must outlive the reader and what it hands out.
  explicit WireReader(absl::Span<const runtime::ByteSlice> slices);

  bool ok() const { return error_ == nullptr; }
  const char* error() const { return error_; }  // what was malformed; static text
  size_t position() const { return position_; }
  size_t left() const { return end_ - position_; }  // in the innermost message

  // False at the end of the message and on an error.
  bool ReadTag(WireTag* tag);
  uint64_t ReadVarint();
  uint32_t ReadFixed32();
  uint64_t ReadFixed64();
  // A length-delimited field: copied, or as pieces of the slices.
  std::string ReadString();
  void ReadBytes(runtime::ByteSlices* pieces);
  // A field of no interest, groups included.
  void Skip(const WireTag& tag);

  // A length-delimited field as a message of its own: between Enter and Leave, ReadTag ends at its
  // end. Leave takes what Enter returned.
  size_t Enter();
  void Leave(size_t outer_end);

  void Fail(const char* error);

 private:
  // The length in front of a length-delimited field; 0 after an error.
  size_t ReadLength();
  uint8_t ReadByte();
  uint64_t ReadVarintSlow();
  void Copy(char* to, size_t bytes);
  void Advance(size_t bytes);  // within the message
  void NextSlice();            // to the next one with bytes in it
  void SkipField(const WireTag& tag, int depth);

  absl::Span<const runtime::ByteSlice> slices_;
  size_t slice_ = 0;             // current slice
  const uint8_t* at_ = nullptr;  // next byte and end of the current slice
  const uint8_t* slice_end_ = nullptr;
  size_t position_ = 0;  // of at_ in the whole message
  size_t end_ = 0;       // of the innermost message
  const char* error_ = nullptr;
};

}  // namespace espalier::service
