#include "engine/runtime/npy.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace espalier::runtime {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kMaxHeaderBytes = 64 << 10;

std::optional<DType> DTypeOf(absl::string_view descr) {
  constexpr std::pair<const char*, DType> kNames[] = {
      {"|b1", DType::kBool},    {"|u1", DType::kUint8},   {"<u2", DType::kUint16},
      {"<u4", DType::kUint32},  {"<u8", DType::kUint64},  {"|i1", DType::kInt8},
      {"<i2", DType::kInt16},   {"<i4", DType::kInt32},   {"<i8", DType::kInt64},
      {"<f2", DType::kFloat16}, {"<f4", DType::kFloat32}, {"<f8", DType::kFloat64}};
  for (const auto& [name, dtype] : kNames) {
    if (descr == name) return dtype;
  }
  return std::nullopt;
}

// What follows "'key':" in the header, a Python dictionary; empty when it is not there.
absl::string_view Entry(absl::string_view header, absl::string_view key) {
  const size_t at = header.find(StrCat("'", key, "':"));
  if (at == absl::string_view::npos) return {};
  return absl::StripLeadingAsciiWhitespace(header.substr(at + key.size() + 3));
}

absl::StatusOr<Shape> ParseShape(absl::string_view text) {
  const size_t end = text.find(')');
  if (!absl::ConsumePrefix(&text, "(") || end == absl::string_view::npos)
    return InvalidArgumentError("its header has no shape");
  Shape shape;
  for (absl::string_view part : absl::StrSplit(text.substr(0, end - 1), ',')) {
    part = absl::StripAsciiWhitespace(part);
    if (part.empty()) continue;  // "(3,)" and "()"
    int64_t dim = 0;
    if (!absl::SimpleAtoi(part, &dim) || dim < 0 || shape.size() >= 32)
      return InvalidArgumentError("its shape is none");
    shape.push_back(dim);
  }
  return shape;
}

// The header, and where the elements begin.
absl::StatusOr<std::pair<absl::string_view, size_t>> FindHeader(absl::string_view bytes) {
  if (bytes.size() < 12 || bytes.substr(0, kMagic.size()) != kMagic)
    return InvalidArgumentError("no .npy file: expected one that numpy.save wrote");
  const auto byte = [&](size_t at) { return static_cast<size_t>(static_cast<uint8_t>(bytes[at])); };
  const size_t version = byte(6);
  if (version < 1 || version > 3)
    return InvalidArgumentError(StrCat(".npy version ", version, ", expected 1 to 3"));
  const size_t begin = version == 1 ? 10 : 12;
  size_t size = byte(8) | byte(9) << 8;
  if (version > 1) size |= byte(10) << 16 | byte(11) << 24;
  if (size > kMaxHeaderBytes || size > bytes.size() - begin)
    return InvalidArgumentError(StrCat("its header has ", size, " bytes, more than there can be"));
  return std::make_pair(bytes.substr(begin, size), begin + size);
}

}  // namespace

absl::StatusOr<NpyArray> ParseNpy(absl::string_view bytes) {
  const auto header = FindHeader(bytes);
  if (!header.ok()) return header.status();
  NpyArray array;
  absl::string_view descr = Entry(header->first, "descr");
  if (!absl::ConsumePrefix(&descr, "'")) return InvalidArgumentError("its header has no descr");
  descr = descr.substr(0, descr.find('\''));
  const std::optional<DType> dtype = DTypeOf(descr);
  if (!dtype) {
    return InvalidArgumentError(StrCat("elements of type '", absl::CHexEscape(descr.substr(0, 32)),
                                       "', expected little-endian numbers such as '<f4'"));
  }
  array.dtype = *dtype;
  if (!absl::StartsWith(Entry(header->first, "fortran_order"), "False"))
    return InvalidArgumentError("it is in Fortran's order: save numpy.ascontiguousarray of it");
  auto shape = ParseShape(Entry(header->first, "shape"));
  if (!shape.ok()) return shape.status();
  array.shape = *std::move(shape);
  size_t expected = SizeOf(array.dtype);
  for (const int64_t dim : array.shape) {
    if (dim != 0 && expected > std::numeric_limits<size_t>::max() / static_cast<size_t>(dim))
      return InvalidArgumentError("its shape is too large");
    expected *= static_cast<size_t>(dim);
  }
  const absl::string_view elements = bytes.substr(header->second);
  if (elements.size() != expected) {
    return InvalidArgumentError(
        StrCat("it has ", elements.size(), " bytes of elements, its shape ", expected));
  }
  array.elements = std::string(elements);
  return array;
}

}  // namespace espalier::runtime
