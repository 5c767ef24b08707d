#include "engine/formats/onnx_wire.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"

namespace espalier::formats {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroupBegin = 3,
  kGroupEnd = 4,
  kFixed32 = 5
};

constexpr int64_t kStringBytes = sizeof(std::string) + sizeof(void*);
constexpr int64_t kScalarBytes = sizeof(int64_t);
constexpr int64_t kUnknownBytes = 2 * sizeof(void*) + sizeof(std::string);

class Walk {
 public:
  Walk(absl::string_view wire, int64_t max_bytes) : begin_(wire.data()), max_bytes_(max_bytes) {}

  absl::Status Message(absl::string_view wire, const Descriptor& type, int nesting) {
    if (nesting > kMaxOnnxNesting) {
      return Malformed(wire,
                       absl::StrCat("messages are nested more than ", kMaxOnnxNesting, " deep"));
    }
    if (auto status = Spend(ObjectBytes(type)); !status.ok()) return status;
    while (!wire.empty()) {
      const absl::string_view start = wire;
      uint64_t tag;
      if (!ReadVarint(wire, tag) || tag > UINT32_MAX || (tag >> 3) == 0)
        return Malformed(start, "bad field tag");
      const FieldDescriptor* field = type.FindFieldByNumber(static_cast<int>(tag >> 3));
      auto status = Field(wire, static_cast<WireType>(tag & 7), field, nesting);
      if (!status.ok()) {
        const std::string name = field ? field->name() : absl::StrCat("field ", tag >> 3);
        return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
      }
    }
    return absl::OkStatus();
  }

  int64_t bytes() const { return bytes_; }

 private:
  // Consumes the value of one field.
  absl::Status Field(absl::string_view& wire, WireType wire_type, const FieldDescriptor* field,
                     int nesting) {
    const absl::string_view start = wire;
    switch (wire_type) {
      case kVarint: {
        uint64_t value;
        if (!ReadVarint(wire, value)) return Malformed(start, "bad varint");
        return Spend(field ? kScalarBytes : kUnknownBytes);
      }
      case kFixed64:
      case kFixed32: {
        const size_t size = wire_type == kFixed64 ? 8 : 4;
        if (wire.size() < size) return TooShort(start, size, wire.size());
        wire.remove_prefix(size);
        return Spend(field ? kScalarBytes : kUnknownBytes);
      }
      case kBytes: {
        uint64_t size;
        if (!ReadVarint(wire, size)) return Malformed(start, "bad length");
        if (size > wire.size()) return TooShort(start, size, wire.size());
        const absl::string_view payload = wire.substr(0, size);
        wire.remove_prefix(size);
        return Payload(payload, field, nesting);
      }
      default:
        return Malformed(start, absl::StrCat("wire type ", wire_type, " is not used by ONNX"));
    }
  }

  absl::Status Payload(absl::string_view payload, const FieldDescriptor* field, int nesting) {
    const int64_t size = static_cast<int64_t>(payload.size());
    if (field == nullptr) return Spend(kUnknownBytes + kStringBytes + size);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return Message(payload, *field->message_type(), nesting + 1);
      case FieldDescriptor::CPPTYPE_STRING:
        return Spend(kStringBytes + size);
      case FieldDescriptor::CPPTYPE_FLOAT:
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return Spend(size);
      default: {  // packed varints: as many as there are bytes without the continuation bit
        const int64_t count = std::count_if(payload.begin(), payload.end(), [](char c) {
          return (static_cast<uint8_t>(c) & 0x80) == 0;
        });
        return Spend(std::max(kScalarBytes * count, size));
      }
    }
  }

  static bool ReadVarint(absl::string_view& wire, uint64_t& value) {
    value = 0;
    for (size_t i = 0; i < std::min<size_t>(wire.size(), 10); ++i) {
      value |= (static_cast<uint64_t>(wire[i]) & 0x7f) << (7 * i);
      if (static_cast<uint8_t>(wire[i]) & 0x80) continue;
      wire.remove_prefix(i + 1);
      return true;
    }
    return false;
  }

  int64_t ObjectBytes(const Descriptor& type) {
    auto [entry, added] = object_bytes_.try_emplace(&type, 0);
    if (added) {
      const auto* prototype =
          google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type);
      entry->second = static_cast<int64_t>(prototype->SpaceUsedLong() + sizeof(void*));
    }
    return entry->second;
  }

  absl::Status Spend(int64_t bytes) {
    bytes_ += bytes;
    if (bytes_ <= max_bytes_) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("parsing the file takes more than ", max_bytes_, " bytes"));
  }

  absl::Status Malformed(absl::string_view at, absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed at byte ", at.data() - begin_, ": ", what));
  }

  absl::Status TooShort(absl::string_view at, uint64_t expected, uint64_t got) const {
    return Malformed(at, absl::StrCat("expected ", expected, " more bytes, got ", got));
  }

  const char* begin_;
  int64_t max_bytes_;
  int64_t bytes_ = 0;
  absl::flat_hash_map<const Descriptor*, int64_t> object_bytes_;
};

}  // namespace

absl::StatusOr<int64_t> ParsedBytes(absl::string_view wire, const Descriptor& type,
                                    int64_t max_bytes) {
  Walk walk(wire, max_bytes);
  if (auto status = walk.Message(wire, type, 1); !status.ok()) return status;
  return walk.bytes();
}

}  // namespace espalier::formats
