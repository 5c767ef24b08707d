// Any bytes at all, read as the header of a .safetensors file (the JSON, behind two bytes that say how much data follows)
// and as an index: refused with a short message, or tensors that tile the data and names that stay in the folder.
#include "engine/formats/names.h"
#include "engine/formats/safetensors_header.h"
#include "tests/fuzz/fuzz_target.h"

namespace espalier::fuzz {
namespace {

void CheckRefusal(const absl::Status& status) {
  const std::string message(status.message());
  Require(message.size() > 8 && message.size() < 4096, "an error has a short message", message);
  Require(formats::IsUtf8(message), "an error is UTF-8", message);
  Require(status.code() == absl::StatusCode::kInvalidArgument, "the code is a listed one",
          status.ToString());
}

void CheckHeader(const formats::SafetensorsHeader& header, uint64_t begin, uint64_t end) {
  uint64_t next = begin;
  for (const formats::SafetensorsTensor& tensor : header.tensors) {
    Require(tensor.offset == next, "tensors tile the data", tensor.name);
    Require(formats::CheckName("a tensor", tensor.name).ok(), "names are good", tensor.name);
    uint64_t bits = static_cast<uint64_t>(formats::SafetensorsBits(tensor.dtype));
    for (const int64_t dim : tensor.shape) bits *= static_cast<uint64_t>(dim);
    Require(bits == 8 * tensor.bytes, "sizes are what the shape says", tensor.name);
    next += tensor.bytes;
  }
  Require(next == end, "nothing is left over");
}

}  // namespace

std::vector<std::string> Seeds() {
  return {
      std::string("\0\0{}", 4),
      std::string("\x10\0", 2) +
          R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"a":{"dtype":"F32","shape":[],)"
          R"("data_offsets":[0,4]},"__metadata__":{"format":"pt","\u00e9":"\ud83d\ude00"}}  )",
      std::string("\2\0", 2) + R"({"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})",
      std::string("\0\0", 2) + R"({"e":{"dtype":"I64","shape":[0,7],"data_offsets":[0,0]}})",
      std::string("\0\0", 2) +
          R"({"metadata":{"n":[1.5e-3,null,true]},"weight_map":{"w":"a.safetensors","v":"b"}})",
  };
}

// A word, number or bracket of the text exchanged.
std::string MutateStructure(const std::string& input, std::mt19937_64& random) {
  static const std::vector<std::string> kWords = {
      "0",
      "1",
      "4",
      "16",
      "-1",
      "18446744073709551616",
      "\"F32\"",
      "\"U8\"",
      "{",
      "}",
      "[",
      "]",
      ",",
      ":",
      "\"a\"",
      "\"dtype\"",
      "{}",
      "[]",
      "\"\"",
      "\"../x\"",
      "1e3",
      "\\ud800",
      "\"b\"",
      "null",
      "\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"};
  std::string mutant = input;
  for (uint64_t changes = 1 + random() % 3; changes > 0 && mutant.size() > 2; --changes) {
    const size_t at = 2 + random() % (mutant.size() - 2);
    switch (random() % 4) {
      case 0:
        mutant.insert(at, kWords[random() % kWords.size()]);
        break;
      case 1:
        mutant.erase(at, 1 + random() % 4);
        break;
      case 2:
        mutant[0] = static_cast<char>(random() % 20);
        break;
      default:
        mutant.replace(at, 1, kWords[random() % kWords.size()]);
    }
  }
  return mutant;
}

}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;  // NOLINT(google-build-using-namespace): an extern "C" function
  if (size < 2) return 0;
  const absl::string_view json(reinterpret_cast<const char*>(data) + 2, size - 2);
  const uint64_t begin = 8 + json.size(), end = begin + data[0] + 256u * data[1];
  const auto header = formats::ParseSafetensorsHeader(json, begin, end);
  header.ok() ? fuzz::CheckHeader(*header, begin, end) : fuzz::CheckRefusal(header.status());
  const auto index = formats::ParseSafetensorsIndex(json);
  if (!index.ok()) {
    fuzz::CheckRefusal(index.status());
    return 0;
  }
  for (const auto& [tensor, file] : *index) {
    fuzz::Require(formats::IsPathBeneath(file) && file.find('/') == std::string::npos,
                  "files are in the folder", file);
  }
  return 0;
}
