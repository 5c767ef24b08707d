#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "clients/cli/command.h"
#include "clients/cli/elements.h"
#include "clients/cli/images.h"
#include "clients/cli/server.h"
#include "clients/cli/table.h"

namespace espalier::cli {
namespace {

constexpr int64_t kMaxBatch = 1 << 16;

struct LabelledImages {
  IdxFile images, labels;
  int64_t count = 0;  // of them that are used
};

struct Evaluation {
  std::string model, version;
  ModelFacts facts;
  int64_t items = 0, correct = 0;
  std::vector<double> micros;  // of each request, sorted

  double accuracy() const { return static_cast<double>(correct) / static_cast<double>(items); }
  // Nearest rank.
  double percentile(double share) const {
    return micros[static_cast<size_t>(share * static_cast<double>(micros.size() - 1) + 0.5)];
  }
};

// One line on a terminal, rewritten in place; silent for the first second and into files.
class Progress {
 public:
  Progress(std::string model, int64_t total) : model_(std::move(model)), total_(total) {}
  ~Progress() {
    if (shown_) std::cerr << "\r\033[K" << std::flush;
  }
  void Update(int64_t done) {
    const absl::Time now = absl::Now();
    if (!on_terminal_ || now < next_) return;
    std::cerr << "\r" << model_ << ": " << done << " of " << total_ << " images" << std::flush;
    next_ = now + absl::Milliseconds(200);
    shown_ = true;
  }

 private:
  std::string model_;
  int64_t total_;
  bool on_terminal_ = isatty(STDERR_FILENO);
  bool shown_ = false;
  absl::Time next_ = absl::Now() + absl::Seconds(1);
};

absl::StatusOr<LabelledImages> ReadData(const Args& args) {
  for (const char* flag : {"images", "labels"}) {
    if (!args.Has(flag))
      return WrongUsage(absl::StrCat("--", flag, " is missing; give an IDX file (.gz or plain)"));
  }
  absl::StatusOr<int64_t> limit = args.Int("limit", INT64_MAX, 1, INT64_MAX);
  if (!limit.ok()) return limit.status();
  LabelledImages data;
  absl::StatusOr<IdxFile> images = ReadIdx(args.String("images", ""));
  if (!images.ok()) return images.status();
  absl::StatusOr<IdxFile> labels = ReadIdx(args.String("labels", ""));
  if (!labels.ok()) return labels.status();
  if (labels->shape.size() != 1 || labels->items() != images->items() ||
      images->item_bytes() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected one label per image, got ", images->items(), " images and labels of rank ",
        labels->shape.size(), " with ", labels->items(), " items"));
  }
  data.images = *std::move(images);
  data.labels = *std::move(labels);
  data.count = std::min(*limit, data.images.items());
  return data;
}

// Counts the items of `output` whose largest value stands at the label's index.
absl::StatusOr<int64_t> CountCorrect(const client::Tensor& output, const char* labels,
                                     int64_t count) {
  absl::StatusOr<std::vector<double>> scores = Numbers(output);
  if (!scores.ok()) return scores.status();
  const Items items = Items::Of(output);
  if (items.count != count || items.item_size == 0) {
    return absl::InvalidArgumentError(absl::StrCat("output '", output.name, "' has ", items.count,
                                                   " items of ", items.item_size, " scores for ",
                                                   count, " images"));
  }
  int64_t correct = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double* item = scores->data() + i * items.item_size;
    correct += TopIndices(item, items.item_size, 1)[0] == static_cast<unsigned char>(labels[i]);
  }
  return correct;
}

absl::StatusOr<Evaluation> Evaluate(const Server& server, const std::string& model,
                                    const LabelledImages& data, int64_t batch) {
  auto metadata = server.client->ModelMetadata(model);
  if (!metadata.ok()) return server.Explain(metadata.status());
  if (metadata->inputs_size() != 1 || metadata->outputs_size() < 1) {
    return absl::InvalidArgumentError(absl::StrCat("expected one input and an output, got ",
                                                   metadata->inputs_size(), " and ",
                                                   metadata->outputs_size()));
  }
  auto config = server.client->ModelConfig(model);
  if (!config.ok()) return server.Explain(config.status());
  Evaluation evaluation{model, "", ModelFacts::From(*config)};
  Progress progress(model, data.count);
  for (int64_t first = 0; first < data.count; first += batch) {
    const int64_t count = std::min(batch, data.count - first);
    absl::StatusOr<client::Tensor> input =
        ImageTensor(data.images, first, count, metadata->inputs(0));
    if (!input.ok()) return input.status();
    client::InferRequest request{
        .model = model, .inputs = {}, .outputs = {metadata->outputs(0).name()}};
    request.inputs.push_back(*std::move(input));
    const absl::Time start = absl::Now();
    absl::StatusOr<client::InferResult> result = server.client->Infer(request);
    evaluation.micros.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    if (!result.ok()) return server.Explain(result.status());
    if (result->outputs.empty()) return absl::InternalError("the server answered without outputs");
    absl::StatusOr<int64_t> correct =
        CountCorrect(result->outputs[0], data.labels.bytes.data() + first, count);
    if (!correct.ok()) return correct.status();
    evaluation.correct += *correct;
    evaluation.items += count;
    evaluation.version = result->version;
    progress.Update(evaluation.items);
  }
  std::sort(evaluation.micros.begin(), evaluation.micros.end());
  return evaluation;
}

void PrintTable(const std::vector<Evaluation>& evaluations, int64_t batch) {
  Table table({"MODEL", "FOUND", "SERVED AS", ">SPARSITY", ">ACCURACY", ">P50", ">P99",
               ">WEIGHTS OF DENSE"});
  for (const Evaluation& evaluation : evaluations) {
    const ModelFacts& facts = evaluation.facts;
    table.AddRow({evaluation.model, facts.StructuresText(), facts.LayoutsText(),
                  facts.SparsityText(), FormatPercent(evaluation.accuracy()),
                  FormatMicros(evaluation.percentile(0.5)),
                  FormatMicros(evaluation.percentile(0.99)), facts.MemoryText()});
  }
  std::cout << table.ToString() << evaluations.front().items << " images; latency of a request of "
            << (batch == 1 ? "one image" : absl::StrCat(batch, " images"))
            << ", one at a time, seen by the client\n";
}

void PrintJson(const std::vector<Evaluation>& evaluations, int64_t batch) {
  JsonWriter json;
  json.BeginArray();
  for (const Evaluation& evaluation : evaluations) {
    json.BeginObject()
        .Key("model")
        .String(evaluation.model)
        .Key("version")
        .String(evaluation.version);
    evaluation.facts.WriteJson(json);
    json.Key("images").Int(evaluation.items).Key("correct").Int(evaluation.correct);
    json.Key("accuracy").Number(evaluation.accuracy()).Key("batch").Int(batch);
    json.Key("p50_us")
        .Number(evaluation.percentile(0.5))
        .Key("p99_us")
        .Number(evaluation.percentile(0.99));
    json.EndObject();
  }
  std::cout << json.EndArray().text() << "\n";
}

absl::Status Run(const Args& args) {
  absl::StatusOr<int64_t> batch = args.Int("batch", 1, 1, kMaxBatch);
  if (!batch.ok()) return batch.status();
  absl::StatusOr<LabelledImages> data = ReadData(args);
  if (!data.ok()) return data.status();
  absl::StatusOr<Server> server = Connect(args);
  if (!server.ok()) return server.status();
  std::vector<Evaluation> evaluations;
  for (const std::string& model : args.positional()) {
    absl::StatusOr<Evaluation> evaluation = Evaluate(*server, model, *data, *batch);
    if (!evaluation.ok()) {
      return absl::Status(evaluation.status().code(),
                          absl::StrCat(model, ": ", evaluation.status().message()));
    }
    evaluations.push_back(*std::move(evaluation));
  }
  args.Has("json") ? PrintJson(evaluations, *batch) : PrintTable(evaluations, *batch);
  return absl::OkStatus();
}

}  // namespace

Command EvaluateCommand() {
  return {
      {.name = "evaluate",
       .summary = "accuracy and latency of served classifiers over labelled images",
       .arguments = "MODEL...",
       .min_positional = 1,
       .max_positional = SIZE_MAX,
       .flags = WithServerFlags({
           {"images", "FILE", "Images in IDX format, gzipped or plain. Required."},
           {"labels", "FILE", "Their labels in IDX format, gzipped or plain. Required."},
           {"limit", "N", "Use only the first N images. Default: all."},
           {"batch", "N", "Images in one request. Default: 1."},
           {"json", "", "Print JSON instead of a table."},
       }),
       .details =
           R"(FOUND is the structure in the zeros of the weights, SERVED AS how they are held, WEIGHTS OF DENSE
the bytes that they take and would take with all zeros stored. Pixels are sent as FP32, byte / 255,
in the shape of the model's input; an answer is right when its largest score stands at the label's
index. Requests go one at a time, so P50 and P99 are latencies without load. Any error ends it.

Example:
  espalier evaluate mnist_dense mnist_diagonal16 \
    --images tests/data/mnist/t10k-images-idx3-ubyte.gz \
    --labels tests/data/mnist/t10k-labels-idx1-ubyte.gz)"},
      &Run};
}

}  // namespace espalier::cli
