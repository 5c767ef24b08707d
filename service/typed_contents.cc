#include "service/typed_contents.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "service/wire_reader.h"

namespace espalier::service {
namespace {

// How the elements of a field of InferTensorContents lie on the wire.
enum class Encoding : uint8_t { kVarint, kFixed32, kFixed64, kBytes };

struct Field {
  const char* name;
  Encoding encoding;
};

// By field number, from 1.
constexpr Field kFields[] = {
    {"bool_contents", Encoding::kVarint},   {"int_contents", Encoding::kVarint},
    {"int64_contents", Encoding::kVarint},  {"uint_contents", Encoding::kVarint},
    {"uint64_contents", Encoding::kVarint}, {"fp32_contents", Encoding::kFixed32},
    {"fp64_contents", Encoding::kFixed64},  {"bytes_contents", Encoding::kBytes},
};
constexpr uint32_t kFieldCount = std::size(kFields);

// The field that carries a datatype; 0: none does.
uint32_t FieldOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 1;
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 3;
    case DType::kUint8:
    case DType::kUint16:
    case DType::kUint32:
      return 4;
    case DType::kUint64:
      return 5;
    case DType::kFloat32:
      return 6;
    case DType::kFloat64:
      return 7;
    case DType::kBytes:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 0;
  }
  return 0;
}

// Collects elements, never more than expected.
class Collector {
 public:
  Collector(WireReader& reader, DType dtype, Encoding encoding, int64_t expected)
      : reader_(reader),
        width_(SizeOf(dtype)),
        is_bool_(dtype == DType::kBool),
        encoding_(encoding),
        expected_(expected) {
    // Reserved is no more than a small factor of what the message holds: a varint byte may become 8
    // bytes.
    raw_.reserve(std::min(static_cast<size_t>(expected) * width_, reader.left() * 8));
  }

  int64_t count() const { return count_; }
  std::string Take() { return std::move(raw_); }

  void ReadPacked() {
    const size_t outer = reader_.Enter();
    while (reader_.left() > 0) ReadElement();
    reader_.Leave(outer);
  }

  void ReadElement() {
    if (count_++ >= expected_) return reader_.Fail("more elements than its shape has");
    switch (encoding_) {
      case Encoding::kVarint: {
        const uint64_t value = reader_.ReadVarint();
        return Append(is_bool_ ? value != 0 : value, width_);
      }
      case Encoding::kFixed32:
        return Append(reader_.ReadFixed32(), sizeof(uint32_t));
      case Encoding::kFixed64:
        return Append(reader_.ReadFixed64(), sizeof(uint64_t));
      case Encoding::kBytes: {
        const std::string element = reader_.ReadString();
        Append(element.size(), sizeof(uint32_t));
        raw_ += element;
        return;
      }
    }
  }

 private:
  void Append(uint64_t value, size_t bytes) {
    raw_.append(reinterpret_cast<const char*>(&value), bytes);
  }

  WireReader& reader_;
  const size_t width_;
  const bool is_bool_;
  const Encoding encoding_;
  const int64_t expected_;
  int64_t count_ = 0;
  std::string raw_;
};

// Whether a tag of this wire type holds elements of the encoding one by one.
bool IsSingle(WireType type, Encoding encoding) {
  switch (encoding) {
    case Encoding::kVarint:
      return type == WireType::kVarint;
    case Encoding::kFixed32:
      return type == WireType::kFixed32;
    case Encoding::kFixed64:
      return type == WireType::kFixed64;
    case Encoding::kBytes:
      return type == WireType::kBytes;
  }
  return false;
}

absl::Status Refuse(const DecodedInput& input, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("contents of input '", runtime::Printable(input.name), "': ", why));
}

}  // namespace

std::optional<DType> ParseDType(absl::string_view name) {
#define ESPALIER_MATCH(enumerator, text, size) \
  if (name == text) return DType::enumerator;
  ESPALIER_DTYPES(ESPALIER_MATCH)
#undef ESPALIER_MATCH
  return std::nullopt;
}

absl::StatusOr<std::string> RawElements(const DecodedInput& input, int64_t elements) {
  const std::optional<DType> dtype = ParseDType(input.datatype);
  const uint32_t field = dtype ? FieldOf(*dtype) : 0;
  if (field == 0) {
    return Refuse(input, absl::StrCat("data-type '", runtime::Printable(input.datatype),
                                      "' has no typed form; send it in raw_input_contents"));
  }
  const Field& expected = kFields[field - 1];
  WireReader reader(input.contents);
  Collector collector(reader, *dtype, expected.encoding, elements);
  WireTag tag;
  while (reader.ReadTag(&tag)) {
    const Encoding encoding =
        tag.field <= kFieldCount ? kFields[tag.field - 1].encoding : Encoding::kVarint;
    const bool single = tag.field <= kFieldCount && IsSingle(tag.type, encoding);
    const bool packed = tag.field <= kFieldCount && tag.type == WireType::kBytes && !single;
    if (!single && !packed) {
      reader.Skip(tag);
    } else if (tag.field == field) {
      single ? collector.ReadElement() : collector.ReadPacked();
    } else {
      return Refuse(input, absl::StrCat("data-type '", input.datatype, "' travels in ",
                                        expected.name, ", got ", kFields[tag.field - 1].name));
    }
  }
  if (!reader.ok()) return Refuse(input, reader.error());
  if (collector.count() != elements) {
    return Refuse(input, absl::StrCat("expected ", elements, " elements for shape ",
                                      ToString(input.shape), ", got ", collector.count()));
  }
  return collector.Take();
}

}  // namespace espalier::service
