#include "clients/cli/npy.h"

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace espalier::cli {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kPreludeBytes = 8;  // magic, major and minor version
constexpr size_t kMaxHeaderBytes = 64 << 10;
constexpr size_t kMaxDimensions = 32;
constexpr size_t kAlignment = 64;  // of the data, as NumPy writes it

struct NpyType {
  absl::string_view descr, datatype;
};
// The first line of a datatype is the one written.
constexpr NpyType kTypes[] = {
    {"|b1", "BOOL"}, {"|u1", "UINT8"}, {"<u2", "UINT16"}, {"<u4", "UINT32"}, {"<u8", "UINT64"},
    {"|i1", "INT8"}, {"<i2", "INT16"}, {"<i4", "INT32"},  {"<i8", "INT64"},  {"<f2", "FP16"},
    {"<f4", "FP32"}, {"<f8", "FP64"},  {"<V2", "BF16"},   {"|V2", "BF16"},
};

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// Consumes the header's Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4),
// }.
class HeaderParser {
 public:
  explicit HeaderParser(absl::string_view text) : rest_(text) {}

  // False for anything but one dictionary with just these keys, each once.
  bool Parse(Header& header) {
    if (!Take("{")) return false;
    while (!Take("}")) {
      std::string key;
      if (!TakeString(key) || !Take(":") || !TakeValue(key, header)) return false;
      if (!Take(",") && !Peek("}")) return false;
    }
    rest_ = absl::StripAsciiWhitespace(rest_);
    return rest_.empty() && header.descr && header.fortran_order && header.shape;
  }

 private:
  bool Peek(absl::string_view token) {
    rest_ = absl::StripLeadingAsciiWhitespace(rest_);
    return absl::StartsWith(rest_, token);
  }
  bool Take(absl::string_view token) { return Peek(token) && absl::ConsumePrefix(&rest_, token); }

  bool TakeString(std::string& value) {
    if (!Take("'")) return false;
    const size_t end = rest_.find('\'');
    if (end == absl::string_view::npos) return false;
    value = std::string(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return true;
  }

  bool TakeShape(std::vector<int64_t>& shape) {
    if (!Take("(")) return false;
    while (!Take(")")) {
      Peek("");
      const size_t digits = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
      int64_t dim = 0;
      if (shape.size() == kMaxDimensions || !absl::SimpleAtoi(rest_.substr(0, digits), &dim))
        return false;
      shape.push_back(dim);
      rest_.remove_prefix(digits);
      if (!Take(",") && !Peek(")")) return false;
    }
    return true;
  }

  bool TakeValue(const std::string& key, Header& header) {
    if (key == "descr" && !header.descr) return TakeString(header.descr.emplace());
    if (key == "shape" && !header.shape) return TakeShape(header.shape.emplace());
    if (key != "fortran_order" || header.fortran_order) return false;
    header.fortran_order = Peek("True");
    return Take("True") || Take("False");
  }

  absl::string_view rest_;
};

absl::Status Bad(absl::string_view origin, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(origin, ": ", problem));
}

uint32_t LittleEndian(absl::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

absl::StatusOr<absl::string_view> DatatypeOfDescr(absl::string_view descr,
                                                  absl::string_view origin) {
  for (const NpyType& type : kTypes) {
    if (type.descr == descr) return type.datatype;
  }
  if (absl::StartsWith(descr, ">")) {
    return Bad(origin,
               absl::StrCat("dtype '", descr,
                            "' is big-endian; convert it: a.astype(a.dtype.newbyteorder('<'))"));
  }
  return Bad(origin, absl::StrCat("dtype '", descr,
                                  "' cannot be sent; convert it, e.g. a.astype('float32')"));
}

}  // namespace

bool IsNpy(absl::string_view content) { return absl::StartsWith(content, kMagic); }

absl::StatusOr<client::Tensor> ParseNpy(absl::string_view content, absl::string_view origin) {
  if (!IsNpy(content) || content.size() < kPreludeBytes)
    return Bad(origin, "not an .npy file (wrong magic)");
  const int major = content[6];
  if (major < 1 || major > 3)
    return Bad(origin, absl::StrCat(".npy format version ", major, "; expected 1 to 3"));
  const size_t length_bytes = major == 1 ? 2 : 4;
  if (content.size() < kPreludeBytes + length_bytes)
    return Bad(origin, "cut off inside the header");
  const size_t header_bytes = LittleEndian(content.substr(kPreludeBytes, length_bytes));
  content.remove_prefix(kPreludeBytes + length_bytes);
  if (header_bytes > kMaxHeaderBytes || header_bytes > content.size()) {
    return Bad(origin, absl::StrCat("header of ", header_bytes, " bytes; the file has ",
                                    content.size(), " more and the limit is ", kMaxHeaderBytes));
  }
  Header header;
  if (!HeaderParser(content.substr(0, header_bytes)).Parse(header)) {
    return Bad(
        origin,
        "malformed header; expected {'descr': '<f4', 'fortran_order': False, 'shape': (…), }");
  }
  content.remove_prefix(header_bytes);
  if (*header.fortran_order) {
    return Bad(origin, "stored column by column; save numpy.ascontiguousarray(a) instead");
  }
  absl::StatusOr<absl::string_view> datatype = DatatypeOfDescr(*header.descr, origin);
  if (!datatype.ok()) return datatype.status();
  client::Tensor tensor{"", std::string(*datatype), *std::move(header.shape), {}};
  absl::StatusOr<int64_t> count = client::ElementCount(tensor.shape);
  if (!count.ok()) return Bad(origin, count.status().message());
  const size_t element_bytes = client::ElementBytes(tensor.datatype).value();
  if (content.size() % element_bytes != 0 ||
      content.size() / element_bytes != static_cast<uint64_t>(*count)) {
    return Bad(origin, absl::StrCat("shape (", absl::StrJoin(tensor.shape, ", "), ") of ",
                                    tensor.datatype, " needs ", *count, " elements of ",
                                    element_bytes, " bytes; got ", content.size(), " bytes"));
  }
  tensor.bytes = std::string(content);
  return tensor;
}

absl::StatusOr<std::string> FormatNpy(const client::Tensor& tensor) {
  if (absl::Status status = client::CheckTensor(tensor); !status.ok()) return status;
  for (const NpyType& type : kTypes) {
    if (type.datatype != tensor.datatype) continue;
    std::string header = absl::StrCat(
        "{'descr': '", type.descr, "', 'fortran_order': False, 'shape': (",
        absl::StrJoin(tensor.shape, ", "), tensor.shape.size() == 1 ? ",), }" : "), }");
    const size_t prelude = kPreludeBytes + 2;
    header.append((kAlignment - (prelude + header.size() + 1) % kAlignment) % kAlignment, ' ');
    header.push_back('\n');
    std::string content(kMagic);
    content.append(
        {1, 0, static_cast<char>(header.size() & 0xFF), static_cast<char>(header.size() >> 8)});
    return absl::StrCat(content, header, tensor.bytes);
  }
  return absl::InvalidArgumentError(absl::StrCat("output '", tensor.name, "' is ", tensor.datatype,
                                                 ", which .npy cannot hold; use --json"));
}

}  // namespace espalier::cli
