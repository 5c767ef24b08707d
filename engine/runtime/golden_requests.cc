#include "engine/runtime/golden_requests.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <latch>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/formats/regular_file.h"
#include "engine/runtime/npy.h"
#include "engine/tensor/tensor.h"

namespace espalier::runtime {
namespace {

using absl::FailedPreconditionError;
using absl::InvalidArgumentError;
using absl::StrCat;

struct Tolerance {
  double relative = 1e-3, absolute = 1e-5;
};

struct GoldenCase {
  std::map<std::string, NpyArray> inputs, outputs;
  Tolerance tolerance;
};

class GoldenRequest final : public InferRequest {
 public:
  explicit GoldenRequest(const GoldenCase& from) {
    counted = false;
    for (const auto& [name, array] : from.inputs) {
      inputs.push_back({.name = name,
                        .datatype = NameOf(array.dtype),
                        .shape = array.shape,
                        .data = {{reinterpret_cast<const std::byte*>(array.elements.data()),
                                  array.elements.size()}}});
    }
    for (const auto& [name, array] : from.outputs) requested_outputs.push_back(name);
  }
  absl::Status TakeOutputs(absl::Span<const std::byte* const> from) override {
    for (size_t i = 0; i < outputs.size(); ++i)
      results.emplace_back(reinterpret_cast<const char*>(from[i]), outputs[i].bytes);
    return absl::OkStatus();
  }
  void Answer(absl::Status answer) override {
    status = std::move(answer);
    answered.count_down();
  }

  std::vector<std::string> results;
  absl::Status status;
  std::latch answered{1};
};

// Names of what is in a folder, ascending, without hidden ones.
absl::StatusOr<std::vector<std::string>> List(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename();
    if (name[0] != '.') names.push_back(std::move(name));
    if (names.size() > kMaxGoldenCases)
      return InvalidArgumentError(StrCat(folder, " has more than ", kMaxGoldenCases, " entries"));
  }
  if (error) {
    return error == std::errc::no_such_file_or_directory
               ? absl::NotFoundError(StrCat("there is no ", folder))
               : absl::UnavailableError(StrCat(folder, ": ", error.message()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::map<std::string, NpyArray>> ReadArrays(const std::string& folder) {
  const auto names = List(folder);
  if (!names.ok()) return names.status();
  std::map<std::string, NpyArray> arrays;
  for (const std::string& file : *names) {
    absl::string_view name = file;
    if (!absl::ConsumeSuffix(&name, ".npy"))
      return InvalidArgumentError(StrCat(folder, "/", file, " is no .npy file"));
    auto opened = formats::RegularFile::Open(StrCat(folder, "/", file));
    if (!opened.ok()) return opened.status();
    const auto bytes = opened->ReadAll(kMaxGoldenFileBytes);
    if (!bytes.ok()) return bytes.status();
    auto array = ParseNpy({reinterpret_cast<const char*>(bytes->data()), bytes->size()});
    if (!array.ok())
      return InvalidArgumentError(StrCat(folder, "/", file, ": ", array.status().message()));
    arrays.emplace(name, *std::move(array));
  }
  return arrays;
}

absl::StatusOr<Tolerance> ReadTolerance(const std::string& path) {
  Tolerance tolerance;
  auto file = formats::RegularFile::Open(path);
  if (absl::IsNotFound(file.status())) return tolerance;
  if (!file.ok()) return file.status();
  const auto bytes = file->ReadAll(4096);
  if (!bytes.ok()) return bytes.status();
  const absl::string_view text(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty());
  if (parts.size() == 2 && absl::SimpleAtod(parts[0], &tolerance.relative) &&
      absl::SimpleAtod(parts[1], &tolerance.absolute) && tolerance.relative >= 0 &&
      tolerance.absolute >= 0)
    return tolerance;
  return InvalidArgumentError(StrCat(path, ": expected two numbers, relative and absolute"));
}

absl::StatusOr<GoldenCase> ReadCase(const std::string& folder) {
  GoldenCase golden;
  auto inputs = ReadArrays(folder + "/inputs");
  if (!inputs.ok()) return inputs.status();
  auto outputs = ReadArrays(folder + "/outputs");
  if (!outputs.ok()) return outputs.status();
  if (outputs->empty()) return InvalidArgumentError(folder + "/outputs has no .npy file");
  auto tolerance = ReadTolerance(folder + "/tolerance");
  if (!tolerance.ok()) return tolerance.status();
  return GoldenCase{*std::move(inputs), *std::move(outputs), *tolerance};
}

bool IsFloat(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

bool Agree(double got, double expected, const Tolerance& tolerance) {
  if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got);
  return got == expected ||
         std::abs(got - expected) <= tolerance.relative * std::abs(expected) + tolerance.absolute;
}

absl::Status Compare(const std::string& name, const NpyArray& expected, const TensorSpec& spec,
                     const OutputTensor& output, const std::string& got,
                     const Tolerance& tolerance) {
  if (expected.shape != output.shape) {
    return InvalidArgumentError(StrCat("output '", name, "' has the shape ", ToString(output.shape),
                                       ", the file's is ", ToString(expected.shape)));
  }
  const auto count = static_cast<int64_t>(expected.elements.size() / SizeOf(expected.dtype));
  if (spec.dtype == expected.dtype && got == expected.elements) return absl::OkStatus();
  std::vector<double> want(static_cast<size_t>(count)), is(want.size());
  ConvertElements(expected.elements.data(), expected.dtype, want.data(), DType::kFloat64, count);
  ConvertElements(got.data(), spec.dtype, is.data(), DType::kFloat64, count);
  const Tolerance allowed = IsFloat(spec.dtype) ? tolerance : Tolerance{0, 0};
  for (size_t i = 0; i < want.size(); ++i) {
    if (Agree(is[i], want[i], allowed)) continue;
    return FailedPreconditionError(
        StrCat("output '", name, "' element ", i, " is ", is[i], ", expected ", want[i]));
  }
  return absl::OkStatus();
}

absl::Status Ask(const VersionHandle& version, const GoldenCase& golden) {
  GoldenRequest request(golden);
  request.version = version;
  version->Submit(&request);
  request.answered.wait();
  if (!request.status.ok()) return request.status;
  size_t i = 0;
  for (const auto& [name, expected] : golden.outputs) {
    const OutputTensor& output = request.outputs[i];
    auto status = Compare(name, expected, version->signature().outputs[output.index], output,
                          request.results[i++], golden.tolerance);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> AskGoldenRequests(const VersionHandle& version,
                                      const std::string& model_directory) {
  const std::string folder = model_directory + "/golden";
  const auto cases = List(folder);
  if (!cases.ok()) return cases.status();
  for (const std::string& name : *cases) {
    const auto golden = ReadCase(StrCat(folder, "/", name));
    absl::Status status = golden.ok() ? Ask(version, *golden) : golden.status();
    if (!status.ok()) {
      // What cannot be read says nothing about the version.
      const auto code =
          absl::IsNotFound(status) ? absl::StatusCode::kInvalidArgument : status.code();
      return absl::Status(code,
                          StrCat("golden request '", Printable(name), "': ", status.message()));
    }
  }
  if (cases->empty()) return absl::NotFoundError(folder + " is empty");
  return static_cast<int>(cases->size());
}

}  // namespace espalier::runtime
