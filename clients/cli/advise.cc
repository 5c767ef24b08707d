#include <algorithm>
#include <iostream>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "clients/cli/advice.h"
#include "clients/cli/build_info.h"
#include "clients/cli/command.h"
#include "clients/cli/device_flags.h"
#include "clients/cli/linear_weights.h"
#include "clients/cli/model_file.h"
#include "clients/cli/table.h"
#include "engine/formats/model_settings.h"
#include "engine/formats/reader.h"
#include "engine/planner/speed_table.h"
#include "engine/planner/weight_plan.h"

namespace espalier::cli {
namespace {

using sparse::Pattern;

constexpr int64_t kMaxBatch = 1 << 16;
constexpr int64_t kMaxSide = 1 << 16;
constexpr int64_t kMaxElements = int64_t{1} << 28;     // of a weight: 1 GiB in f32
constexpr int64_t kMaxActivations = int64_t{1} << 30;  // of x or y: 4 GiB
constexpr size_t kMaxListed = 64;
constexpr int64_t kMaxMeasureSeconds = 24 * 3600;
constexpr uint64_t kSeed = 1;
constexpr std::pair<const char*, DType> kPrecisions[] = {
    {"f32", DType::kFloat32}, {"bf16", DType::kBFloat16}, {"f16", DType::kFloat16}};

// How to prune, once.
struct Pruning {
  Pattern pattern;
  double sparsity = 0;
};

struct Request {
  std::vector<AdviceLayer> layers;    // without points
  std::vector<LinearWeight> weights;  // of the model, one for each layer; empty without one
  DType dtype = DType::kFloat32;
  std::vector<int64_t> batches;
  std::vector<Pruning> prunings;
  planner::WeightMemory weight_memory = planner::WeightMemory::kBalanced;
  std::string weights_from;  // for people
};

absl::Status WrongFlag(absl::string_view flag, absl::string_view got, absl::string_view expected) {
  return WrongUsage(absl::StrCat("--", flag, " has '", got, "', expected ", expected));
}

// "4096x1024", or "4096" for a square.
absl::StatusOr<AdviceLayer> ParseShape(const std::string& text) {
  const std::vector<std::string> sides = absl::StrSplit(text, 'x');
  AdviceLayer layer;
  const bool numbers = sides.size() <= 2 && absl::SimpleAtoi(sides.front(), &layer.out) &&
                       absl::SimpleAtoi(sides.back(), &layer.in);
  if (!numbers || layer.out < 1 || layer.in < 1 || layer.out > kMaxSide || layer.in > kMaxSide) {
    return WrongFlag("shape", text,
                     absl::StrCat("OUTxIN with sides from 1 to ", kMaxSide, ", as in 4096x1024"));
  }
  return layer;
}

absl::StatusOr<DType> ParsePrecision(const std::string& text) {
  for (const auto& [name, dtype] : kPrecisions) {
    if (text == name) return dtype;
  }
  return WrongFlag("precision", text, "f32, bf16 or f16");
}

const char* PrecisionName(DType dtype) {
  for (const auto& [name, known] : kPrecisions) {
    if (known == dtype) return name;
  }
  return NameOf(dtype);
}

absl::StatusOr<double> ParseSparsity(const std::string& text) {
  double percent = 0;
  if (!absl::SimpleAtod(text, &percent) || !(percent >= 1 && percent < 100)) {
    return WrongFlag("sparsity", text,
                     "percentages of zeros, at least 1 and below 100, as in 80,90,99.5");
  }
  return percent / 100;
}

// Every pattern at every sparsity; 2:4 has one of its own.
absl::StatusOr<std::vector<Pruning>> ReadPrunings(const Args& args) {
  std::vector<double> sparsities;
  const std::vector<std::string> listed =
      absl::StrSplit(args.String("sparsity", "80,90,95,99"), ',');
  for (const std::string& text : listed) {
    auto sparsity = ParseSparsity(text);
    if (!sparsity.ok()) return sparsity.status();
    sparsities.push_back(*sparsity);
  }
  std::vector<Pruning> prunings;
  const std::vector<std::string> patterns = absl::StrSplit(
      args.String("pattern", "unstructured,diagonal,diagonal(16),block(32),2:4"), ',');
  for (const std::string& text : patterns) {
    auto pattern = sparse::ParsePattern(text);
    if (!pattern.ok()) return WrongUsage(absl::StrCat("--pattern: ", pattern.status().message()));
    if (pattern->kind == Pattern::Kind::kTwoFour) {
      prunings.push_back({*pattern, 0.5});
    } else {
      for (const double sparsity : sparsities) prunings.push_back({*pattern, sparsity});
    }
  }
  if (prunings.size() > kMaxListed) {
    return WrongUsage(absl::StrCat("--pattern and --sparsity make ", prunings.size(),
                                   " combinations, expected at most ", kMaxListed));
  }
  return prunings;
}

// Layers of one shape become one, with the first's weights.
void AddLayer(AdviceLayer layer, const LinearWeight* weight, Request& request) {
  for (AdviceLayer& other : request.layers) {
    if (other.out == layer.out && other.in == layer.in) {
      ++other.count;
      return;
    }
  }
  request.layers.push_back(std::move(layer));
  if (weight != nullptr) request.weights.push_back(*weight);
}

absl::Status AddModel(const std::string& path, std::optional<formats::ModelGraph>& graph,
                      Request& request) {
  absl::StatusOr<ModelFile> file = FindModel(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<formats::ModelGraph> read = formats::ReadModel(file->path);
  if (!read.ok()) return read.status();
  graph = *std::move(read);
  for (const LinearWeight& weight : LinearWeightsOf(*graph)) {
    AddLayer({.out = weight.out(), .in = weight.in()}, &weight, request);
  }
  if (request.layers.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file->path, " has no linear layer (Gemm or MatMul) with a constant weight"));
  }
  request.dtype = request.weights.front().stored->dtype();
  request.weights_from = absl::StrCat("weights of ", file->path, " pruned by magnitude");
  return absl::OkStatus();
}

absl::Status CheckSizes(const Request& request) {
  for (const AdviceLayer& layer : request.layers) {
    if (layer.out * layer.in > kMaxElements) {
      return absl::InvalidArgumentError(absl::StrCat("a weight of ", layer.out, " x ", layer.in,
                                                     " has ", layer.out * layer.in,
                                                     " elements, expected at most ", kMaxElements));
    }
    if (request.batches.back() * std::max(layer.out, layer.in) > kMaxActivations) {
      return absl::InvalidArgumentError(absl::StrCat(
          "batch ", request.batches.back(), " of ", std::max(layer.out, layer.in),
          " features is more than ", kMaxActivations, " elements; give a smaller --batch"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Request> ReadRequest(const Args& args, std::optional<formats::ModelGraph>& graph) {
  Request request;
  if (args.Has("model") == args.Has("shape")) {
    return WrongUsage("advise needs --shape OUTxIN (repeat it for several) or --model FILE");
  }
  request.weights_from = "random weights";
  for (const std::string& text : args.All("shape")) {
    auto layer = ParseShape(text);
    if (!layer.ok()) return layer.status();
    AddLayer(*std::move(layer), nullptr, request);
  }
  if (args.Has("model")) {
    absl::Status added = AddModel(args.String("model", ""), graph, request);
    if (!added.ok()) return added;
  }
  if (args.Has("precision")) {
    auto dtype = ParsePrecision(args.String("precision", ""));
    if (!dtype.ok()) return dtype.status();
    request.dtype = *dtype;
  }
  auto batches = args.IntList("batch", 1, kMaxBatch);
  if (!batches.ok()) return batches.status();
  request.batches = batches->empty() ? std::vector<int64_t>{1, 16, 64} : *std::move(batches);
  std::sort(request.batches.begin(), request.batches.end());
  request.batches.erase(std::unique(request.batches.begin(), request.batches.end()),
                        request.batches.end());
  auto prunings = ReadPrunings(args);
  if (!prunings.ok()) return prunings.status();
  request.prunings = *std::move(prunings);
  inference::ModelConfig config;
  (*config.mutable_parameters())["weight_memory"].set_string_value(
      args.String("weight_memory", "balanced"));
  auto settings = formats::ReadModelSettings(config);
  if (!settings.ok()) return settings.status();
  request.weight_memory = settings->weight_memory;
  if (absl::Status fits = CheckSizes(request); !fits.ok()) return fits;
  return request;
}

AdvicePoint PointOf(const Pruning& pruning, planner::WeightPlan plan) {
  AdvicePoint point;
  point.pattern = pruning.pattern;
  point.asked = pruning.sparsity;
  point.zeros = plan.sparsity;
  point.weight_bytes = static_cast<double>(plan.weight_bytes);
  point.dense_bytes = static_cast<double>(plan.dense_bytes);
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    planner::BucketChoice& bucket = plan.buckets[b];
    point.batches.push_back(
        {bucket.batch, std::move(bucket.chosen), std::move(plan.sparse[b]), bucket.dense_micros});
  }
  return point;
}

double SumOfSquares(const Tensor& weight) {
  const auto values = Convert(weight.view(), DType::kFloat32);
  double sum = 0;
  for (int64_t i = 0; values.ok() && i < values->elements(); ++i)
    sum += static_cast<double>(values->As<float>()[i]) * values->As<float>()[i];
  return sum;
}

// The dense weight of layer `index`, in the request's type.
absl::StatusOr<Tensor> DenseWeight(const Request& request, size_t index) {
  const AdviceLayer& layer = request.layers[index];
  if (request.weights.empty())
    return sparse::RandomWeight(request.dtype, layer.out, layer.in, kSeed);
  auto matrix = request.weights[index].Matrix();
  if (!matrix.ok() || matrix->dtype() == request.dtype) return matrix;
  return Convert(matrix->view(), request.dtype);
}

// Measures every layer pruned in every way. Progress goes to standard error.
absl::Status MeasureAll(const Device& device, absl::Duration budget, Request& request) {
  const absl::Time deadline = absl::Now() + budget;
  size_t done = 0;
  const size_t all = request.layers.size() * request.prunings.size();
  for (size_t i = 0; i < request.layers.size(); ++i) {
    AdviceLayer& layer = request.layers[i];
    auto dense = DenseWeight(request, i);
    if (!dense.ok()) return dense.status();
    const double squares = request.weights.empty() ? 0 : SumOfSquares(*dense);
    for (const Pruning& pruning : request.prunings) {
      std::cerr << absl::StrFormat("[%d/%d] %d x %d, %s, %s zeros\n", ++done, all, layer.out,
                                   layer.in, ToString(pruning.pattern),
                                   FormatPercent(pruning.sparsity));
      auto pruned = sparse::Prune(dense->view(), pruning.pattern, pruning.sparsity);
      if (!pruned.ok()) return pruned.status();
      planner::WeightPlanOptions options;
      options.weight_memory = request.weight_memory;
      options.budget = std::max(absl::ZeroDuration(), deadline - absl::Now()) /
                       static_cast<double>(all - done + 1);
      auto plan = planner::PlanWeight(pruned->view(), request.batches, device, options);
      if (!plan.ok()) return plan.status();
      AdvicePoint point = PointOf(pruning, *std::move(plan));
      if (!request.weights.empty()) point.kept = squares > 0 ? SumOfSquares(*pruned) / squares : 1;
      layer.points.push_back(std::move(point));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Advice> Measured(const Args& args, Request request) {
  auto seconds = args.Int("measure_seconds", 120, 0, kMaxMeasureSeconds);
  if (!seconds.ok()) return seconds.status();
  absl::StatusOr<Devices> devices = OpenDevices(args);
  if (!devices.ok()) return devices.status();
  const Device& device = MeasuringDevice(*devices);
  absl::Status status = MeasureAll(device, absl::Seconds(*seconds), request);
  if (!status.ok()) return status;
  Advice advice;
  advice.source = "measured";
  advice.device = device.Description();
  advice.commit = BuildCommit();
  advice.date = absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone());
  advice.basis = absl::StrCat(request.weights_from, ", commit ", advice.commit, ", ", advice.date);
  advice.layers = std::move(request.layers);
  return advice;
}

std::string TableNames() {
  return absl::StrJoin(planner::SpeedTables(), ", ",
                       [](std::string* text, const planner::SpeedTable& table) {
                         absl::StrAppend(text, table.name);
                       });
}

// Where a table's numbers come from and how good predictions from it are.
std::string BasisOf(const planner::SpeedTable& table, const planner::SpeedPrediction& furthest) {
  std::string text = absl::StrCat("from ", table.rows.size(), " measurements:");
  for (const planner::SpeedSource& source : table.sources) {
    absl::StrAppend(&text, " ", source.file, " (commit ", source.commit, ", ", source.date, ")");
  }
  const planner::SpeedError error = planner::SpeedTableError(table);
  absl::StrAppendFormat(&text,
                        "\neach predicted from the others, half of their gains are right within a "
                        "factor of %.2f, nine tenths within %.2f",
                        error.half, error.nine_tenths);
  constexpr double kFar = 2;
  if (furthest.doublings > kFar) {
    const planner::SpeedRow& row = furthest.nearest;
    absl::StrAppendFormat(
        &text,
        "\nfar from anything measured: the nearest is %s, %d x %d, %s zeros, batch %d; measure on "
        "the device itself before you rely on this",
        row.pattern, row.out, row.in, FormatPercent(row.sparsity), row.tokens);
  }
  return text;
}

absl::StatusOr<Advice> Predicted(const Args& args, Request request) {
  const std::string name = args.String("for", "");
  const planner::SpeedTable* table = planner::FindSpeedTableOrNull(name);
  if (table == nullptr) {
    return WrongFlag("for", name,
                     absl::StrCat(TableNames(), "; for other devices run advise there"));
  }
  for (const char* flag : {"device", "cuda_module", "threads", "measure_seconds"}) {
    if (args.Has(flag)) {
      return WrongUsage(absl::StrCat("--", flag, " is for measuring here; --for predicts"));
    }
  }
  planner::SpeedPrediction furthest;
  for (AdviceLayer& layer : request.layers) {
    for (const Pruning& pruning : request.prunings) {
      auto one = planner::PredictPlan(
          *table, {pruning.pattern, request.dtype, pruning.sparsity, layer.out, layer.in},
          request.batches, request.weight_memory);
      if (!one.ok()) return one.status();
      layer.points.push_back(PointOf(pruning, one->plan));
      if (one->doublings > furthest.doublings) furthest = *std::move(one);
    }
  }
  Advice advice;
  advice.source = "predicted";
  advice.device = table->device;
  advice.commit = table->sources.front().commit;
  advice.date = table->sources.front().date;
  advice.basis = BasisOf(*table, furthest);
  advice.layers = std::move(request.layers);
  return advice;
}

absl::Status Run(const Args& args) {
  auto wanted = args.Double("faster", 2, kWorthPruning, 1000);
  if (!wanted.ok()) return wanted.status();
  std::optional<formats::ModelGraph> graph;
  auto request = ReadRequest(args, graph);
  if (!request.ok()) return request.status();
  const std::string precision = PrecisionName(request->dtype);
  auto advice =
      args.Has("for") ? Predicted(args, *std::move(request)) : Measured(args, *std::move(request));
  if (!advice.ok()) return advice.status();
  advice->precision = precision;
  advice->weight_memory = args.String("weight_memory", "balanced");
  advice->wanted = *wanted;
  std::cout << (args.Has("json") ? AdviceJson(*advice) : AdviceTable(*advice));
  return absl::OkStatus();
}

}  // namespace

Command AdviseCommand() {
  return {
      {.name = "advise",
       .summary = "will pruning make it faster here, how much, and which pattern to prune to",
       .flags = WithDeviceFlags(
           {{"shape", "OUTxIN", "A linear layer, as W [out, in]; repeat it for several.", true},
            {"model", "FILE",
             "An .onnx file, a version or model directory: its linear layers, pruned by "
             "magnitude."},
            {"precision", "f32|bf16|f16", "Type of the weights. Default: the model's, else f32."},
            {"batch", "1,16,64", "Batch sizes: rows of x that a layer gets at a time."},
            {"pattern", "P,P",
             "unstructured, diagonal, diagonal(B), block(B), 2:4. Default: unstructured,\n"
             "diagonal,diagonal(16),block(32),2:4"},
            {"sparsity", "80,90,95,99", "Percentages of zeros to try; 2:4 always has 50."},
            {"faster", "X", "The gain over dense that you want. Default: 2."},
            {"weight_memory", "MODE",
             "smallest, balanced or fastest, as config.pbtxt will say. Default: balanced."},
            {"for", "DEVICE",
             "Predict for a device that is not here, from measurements that came with this build."},
            {"measure_seconds", "N",
             "Time for measuring; the cost model decides the rest. Default: 120."},
            {"json", "", "Print JSON instead of tables."}}),
       .details =
           R"(Answers before anybody prunes: each layer is filled with random numbers (or a model's own weights are pruned
by magnitude), planned and measured as a server would, beside dense in the same type. Dense is always a
candidate: what does not pay shows as 1.00x and runs dense.

  zeros    share of zeros that the pattern came to
  kept     with --model: share of the squared weights that pruning leaves. The more, the less there is to
           retrain; compare patterns by it
  memory   of the dense weight
  batch N  how much faster than dense; all: the geometric mean

Of what brings the wanted gain (--faster) it recommends the lowest sparsity, and there the fastest pattern; with
a model's weights, what keeps the most of them. One batch size may lose 5 % or 3 µs where the others win more,
as a server accepts it; weight_memory fastest gives nothing away.
Layers of one shape are measured once, on the first one's weights. 2:4 and whatever else has no kernel of
its own here runs in the layouts that exist; "runs as" names them.

Examples:
  espalier advise --shape 4096x4096
  espalier advise --model digits/1/model.onnx --batch 1,8 --sparsity 90,95 --faster 3
  espalier advise --shape 3072x768 --shape 768x3072 --precision bf16 --batch 1576 --for h200
  espalier advise --shape 8192 --precision bf16 --device cuda --pattern "block(64),diagonal" --json)"},
      &Run};
}

}  // namespace espalier::cli
