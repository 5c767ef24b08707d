// weight_edit_bench — changed elements brought into weights that serve. See --help.
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/planner/prepared_model.h"
#include "engine/planner/resident_weight.h"
#include "tests/bench/result_file.h"
#include "tests/bench/timing.h"
#include "tests/kernels/linear/linear_problem.h"

namespace espalier::bench {
namespace {

namespace testing = kernels::testing;
using kernels::Layout;
using planner::MemoryPatcher;
using planner::ResidentWeight;
using sparse::ElementEdit;

MemoryPatcher& OnHost() {
  static MemoryPatcher patcher(nullptr);
  return patcher;
}

constexpr char kHelp[] =
    R"(weight_edit_bench: changed elements of a weight, written where they serve, one thread.

  weight_edit_bench [--size N] [--samples N] [--out FILE]

  --size     in = out = N                            (default 4096)
  --samples  interleaved samples                     (default 11); every row is a median of them
  --out      write JSON there

90 % zeros; 1 % of the non-zeros (dense: of all elements) get another value. Rows of case "weight": one weight in each
layout and type, in place ("in_place_us", "ns_per_change") in turn with encoding and packing the new weight
("rebuild_us"). Rows of case "model": PreparedModel::Edit of a model whose file stores the weight [in, out], so that
positions are transposed on the way. Bytes in memory are compared with those of a fresh encoding first. Fixed seed.
)";

struct Options {
  int64_t size = 4096;
  TimingOptions timing = {.samples = 11, .sample_micros = 20000};
  std::string out, command = "weight_edit_bench";
};

[[noreturn]] void Fail(const std::string& text) {
  std::fprintf(stderr, "weight_edit_bench: %s\n", text.c_str());
  std::exit(1);
}

struct Kind {
  const char* name;
  sparse::LayoutSpec spec;
  testing::Pattern pattern;
};
const Kind kKinds[] = {{"dense", {Layout::kDense, 1, 1}, testing::Pattern::kFull},
                       {"csr", {Layout::kCsr, 1, 1}, testing::Pattern::kScattered},
                       {"block_csr(16)", {Layout::kBlockCsr, 16, 16}, testing::Pattern::kBlocks},
                       {"diagonal(1)", {Layout::kDiagonal, 1, 1}, testing::Pattern::kDiagonals},
                       {"diagonal(16)", {Layout::kDiagonal, 16, 16}, testing::Pattern::kDiagonals}};

uint32_t BitsAt(const Tensor& tensor, int64_t i) {
  const size_t size = SizeOf(tensor.dtype());
  uint32_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(tensor.data()) + i * size, size);
  return bits;
}

struct Pair {
  Tensor before, after;
  std::vector<ElementEdit> there, back;
};

Pair MakePair(const Kind& kind, int64_t size, DType dtype) {
  std::mt19937_64 random(20261201);
  const std::vector<float> dense = testing::MakeDense(
      size, size, kind.pattern, 0.1, kind.spec.block_rows, kind.spec.block_cols, random);
  Pair pair = {
      *Tensor::Allocate(dtype, {size, size}), *Tensor::Allocate(dtype, {size, size}), {}, {}};
  ConvertElements(dense.data(), DType::kFloat32, pair.before.data(), dtype, size * size);
  std::memcpy(pair.after.data(), pair.before.data(), pair.before.bytes());
  for (int64_t i = 0; i < size * size; ++i) {
    if (dense[i] == 0 || random() % 100 != 0) continue;
    const float value = dense[i] * 0.75f;
    ConvertElements(&value, DType::kFloat32,
                    static_cast<char*>(pair.after.data()) + i * SizeOf(dtype), dtype, 1);
    pair.there.push_back({i, BitsAt(pair.before, i), BitsAt(pair.after, i)});
    pair.back.push_back({i, BitsAt(pair.after, i), BitsAt(pair.before, i)});
  }
  return pair;
}

const kernels::LinearVariant& VariantFor(const Kind& kind, DType dtype) {
  kernels::LinearDesc desc;
  desc.tokens = desc.out = desc.in = 64;
  desc.layout = kind.spec.layout;
  desc.weight_dtype = dtype;
  desc.block_rows = kind.spec.block_rows;
  desc.block_cols = kind.spec.block_cols;
  desc.count = 1;
  for (const kernels::LinearVariant& variant : kernels::LinearVariants()) {
    if (variant.supports(desc)) return variant;
  }
  Fail(absl::StrCat("no variant for ", kind.name));
}

bool SameBytes(const kernels::LinearVariant& variant, const ResidentWeight& a,
               const ResidentWeight& b) {
  const kernels::WeightView x = a.view(), y = b.view();
  if (variant.packing == nullptr)
    return std::memcmp(x.values, y.values, x.count * SizeOf(x.dtype)) == 0;
  size_t packed = a.bytes();  // and the indices that are held beside it
  if (x.row_ptr != nullptr) packed -= (x.block_row_count() + 1) * sizeof(*x.row_ptr);
  if (x.col_idx16 != nullptr) packed -= x.count * sizeof(*x.col_idx16);
  if (x.offsets != nullptr) packed -= x.count * sizeof(*x.offsets);
  return a.bytes() == b.bytes() && std::memcmp(x.packed, y.packed, packed) == 0;
}

void OrFail(const absl::Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

void MeasureWeight(const Kind& kind, DType dtype, const Options& options,
                   std::vector<std::string>& rows) {
  const Pair pair = MakePair(kind, options.size, dtype);
  const kernels::LinearVariant& variant = VariantFor(kind, dtype);
  auto edited = ResidentWeight::Create(pair.before.view(), kind.spec, variant);
  auto fresh = ResidentWeight::Create(pair.after.view(), kind.spec, variant);
  OrFail(edited.status());
  OrFail(fresh.status());
  bool is_after = false;
  const auto edit = [&] {
    auto fits = (*edited)->EditInPlace(is_after ? pair.back : pair.there,
                                       ResidentWeight::Zeros::kAsEncoded, OnHost());
    if (!fits.ok() || !*fits) Fail("an edit was refused");
    is_after = !is_after;
  };
  edit();
  if (!SameBytes(variant, **edited, **fresh)) Fail("other bytes than a fresh encoding");
  const auto samples =
      TimeInTurn({edit, [&] { OrFail((*fresh)->Rebuild(pair.after.view())); }}, options.timing);
  const Summary in_place = Summarize(samples[0]), rebuild = Summarize(samples[1]);
  rows.push_back(absl::StrFormat(
      R"({"case": "weight", "layout": "%s", "dtype": "%s", "size": %d, "variant": "%s", "changes": %d, "in_place_us": %.1f, "ns_per_change": %.1f, "spread": %.3f, "rebuild_us": %.1f, "resident_bytes": %d})",
      kind.name, NameOf(dtype), options.size, variant.name, pair.there.size(), in_place.median,
      in_place.median * 1e3 / static_cast<double>(pair.there.size()), in_place.spread,
      rebuild.median, (*fresh)->bytes()));
  std::puts(rows.back().c_str());
}

class OneTensor final : public formats::WeightSource {
 public:
  explicit OneTensor(const Tensor& tensor) : tensor_(tensor) {}
  bool Has(const std::string& name) const override { return name == "w"; }
  absl::Status Read(const std::string&, Tensor& tensor) const override {
    std::memcpy(tensor.data(), tensor_.data(), tensor_.bytes());
    return absl::OkStatus();
  }

 private:
  const Tensor& tensor_;
};

void MeasureModel(const Kind& kind, const Options& options, const Device& device,
                  std::vector<std::string>& rows) {
  const Pair pair = MakePair(kind, options.size, DType::kFloat32);
  formats::ModelGraph graph;
  graph.source = "weight_edit_bench";
  graph.opset = 17;
  graph.inputs.push_back({"x", DType::kFloat32, {kBatch, options.size}});
  graph.outputs.push_back({"y", DType::kFloat32, {kBatch, options.size}});
  graph.initializers.emplace("w", *Convert(pair.before.view(), DType::kFloat32));
  graph.nodes.push_back({"layer", "MatMul", "", {"x", "w"}, {"y"}, {}});
  planner::PrepareOptions prepare;
  prepare.deterministic = true;
  auto model = planner::PreparedModel::Prepare(std::move(graph), device, prepare);
  OrFail(model.status());
  bool is_after = false;
  const auto edit = [&] {
    OrFail((*model)->Edit({{{"w", is_after ? pair.back : pair.there}}},
                          OneTensor(is_after ? pair.before : pair.after)));
    is_after = !is_after;
  };
  const Summary micros = Summarize(TimeInTurn({edit}, options.timing)[0]);
  rows.push_back(absl::StrFormat(
      R"({"case": "model", "layout": "%s", "dtype": "FP32", "size": %d, "changes": %d, "in_place_us": %.1f, "ns_per_change": %.1f, "spread": %.3f, "resident_bytes": %d})",
      sparse::ToString((*model)->plan().layers[0].buckets[0].chosen.spec), options.size,
      pair.there.size(), micros.median,
      micros.median * 1e3 / static_cast<double>(pair.there.size()), micros.spread,
      (*model)->weight_bytes()));
  std::puts(rows.back().c_str());
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    absl::StrAppend(&options.command, " ", flag, " ", value);
    if (flag == "--size") options.size = std::atoll(value.c_str());
    if (flag == "--samples") options.timing.samples = std::atoi(value.c_str());
    if (flag == "--out") options.out = value;
  }
  if (argc % 2 == 0 || options.size < 64 || options.timing.samples < 1) {
    std::fputs(kHelp, stderr);
    return 2;
  }
#ifndef NDEBUG
  std::fputs("weight_edit_bench: built without NDEBUG; build the release preset\n", stderr);
  return 2;
#endif
  std::vector<std::string> rows;
  for (const Kind& kind : kKinds) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      MeasureWeight(kind, dtype, options, rows);
  }
  const auto device = MakeCpuDevice(1);
  for (const Kind& kind : kKinds) MeasureModel(kind, options, *device, rows);
  if (!options.out.empty() &&
      !WriteResultFile(options.out, DescribeCpu() + ", 1 thread", options.command, rows)) {
    Fail("cannot write " + options.out);
  }
  return 0;
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) { return espalier::bench::Main(argc, argv); }
