#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "clients/cli/bench_inputs.h"
#include "clients/cli/bench_report.h"
#include "clients/cli/build_info.h"
#include "clients/cli/command.h"
#include "clients/cli/file.h"
#include "clients/cli/load_levels.h"
#include "clients/cli/server.h"
#include "clients/cli/table.h"
#include "engine/tensor/device.h"

namespace espalier::cli {
namespace {

constexpr int64_t kMaxConcurrency = 65536, kMaxChannels = 256, kMaxThreads = 64;
constexpr double kMaxRate = 1e7, kMaxSeconds = 86400;
constexpr int64_t kDefaultChannels = 4;

// The command as it was typed, for whoever wants to repeat it.
std::string CommandLine() {
  absl::StatusOr<std::string> line = ReadFile("/proc/self/cmdline", 1 << 20);
  if (!line.ok()) return "espalier bench";
  return absl::StrReplaceAll(absl::StripSuffix(*line, std::string(1, '\0')),
                             {{std::string(1, '\0'), " "}});
}

absl::Status ReadTimes(const Args& args, bench::LoadOptions& options) {
  struct Flag {
    const char* name;
    double& value;
    double least;
  };
  for (const Flag& flag :
       {Flag{"duration", options.duration_seconds, 0.01}, Flag{"warmup", options.warmup_seconds, 0},
        Flag{"timeout", options.timeout_seconds, 0.001}}) {
    absl::StatusOr<double> value = args.Double(flag.name, flag.value, flag.least, kMaxSeconds);
    if (!value.ok()) return value.status();
    flag.value = *value;
  }
  return absl::OkStatus();
}

// The loads to try, in turn; without their callbacks.
absl::StatusOr<std::vector<bench::LoadOptions>> ReadLoads(const Args& args) {
  bench::LoadOptions options;
  options.url = args.String("url", "127.0.0.1:8001");
  options.streaming = args.Has("streaming");
  if (absl::Status status = ReadTimes(args, options); !status.ok()) return status;
  absl::StatusOr<int64_t> threads = args.Int("threads", 1, 1, kMaxThreads);
  if (!threads.ok()) return threads.status();
  absl::StatusOr<int64_t> outstanding =
      args.Int("max_outstanding", options.max_outstanding, 1, 1 << 20);
  if (!outstanding.ok()) return outstanding.status();
  absl::StatusOr<int64_t> channels = args.Int("channels", kDefaultChannels, 1, kMaxChannels);
  if (!channels.ok()) return channels.status();
  absl::StatusOr<int64_t> seed = args.Int("seed", 1, 0, INT64_MAX);
  if (!seed.ok()) return seed.status();
  options.threads = static_cast<int>(*threads);
  options.max_outstanding = *outstanding;
  options.seed = static_cast<uint64_t>(*seed);
  if (const std::string kind = args.String("shared_memory", "system"); kind != "system")
    return WrongUsage(absl::StrCat("--shared_memory: expected system, got '", kind, "'"));
  if (args.Has("rate") && args.Has("concurrency")) {
    return WrongUsage("--rate and --concurrency exclude each other: open or closed loop");
  }
  const bool open = args.Has("rate");
  absl::StatusOr<std::vector<double>> levels =
      open ? ParseLevels("rate", args.String("rate", ""), 0.001, kMaxRate)
           : ParseLevels("concurrency", args.String("concurrency", "1"), 1, kMaxConcurrency);
  if (!levels.ok()) return levels.status();
  std::vector<bench::LoadOptions> loads;
  for (double level : *levels) {
    if (open) options.rate = level;
    options.concurrency = open ? 0 : static_cast<int>(level);
    // More connections than requests in flight would only be idle.
    const int most = open || args.Has("channels") ? kMaxChannels : options.concurrency;
    options.channels = std::max(options.threads, std::min(static_cast<int>(*channels), most));
    loads.push_back(options);
  }
  return loads;
}

// Sends one request, so that a wrong shape or an unknown model is one clear error and not a hundred
// thousand. Returns the version that answered; "" from a server that is too busy for it, which is what
// some come to measure.
absl::StatusOr<std::string> Probe(const Server& server, const client::InferRequest& request) {
  absl::StatusOr<client::InferResult> result = server.client->Infer(request);
  if (result.ok()) return std::move(result->version);
  const bool busy =
      absl::IsUnavailable(result.status()) || absl::IsResourceExhausted(result.status());
  if (busy && server.client->ServerReady().value_or(false)) return request.version;
  return server.Explain(result.status());
}

// Null without --shared_memory.
absl::StatusOr<std::unique_ptr<bench::SharedTensors>> Share(
    const Args& args, const Server& server, const inference::ModelMetadataResponse& metadata,
    BenchInputs& inputs, int64_t batch) {
  if (!args.Has("shared_memory")) return std::unique_ptr<bench::SharedTensors>();
  auto outputs = OutputsOf(metadata, batch);
  if (!outputs.ok()) return outputs.status();
  auto shared = bench::SharedTensors::Create(*server.client, inputs.requests, *std::move(outputs));
  if (!shared.ok()) return server.Explain(shared.status());
  absl::StrAppend(&inputs.description, ", in shared memory");
  return shared;
}

void Announce(const bench::LoadOptions& options) {
  if (!isatty(STDERR_FILENO)) return;
  std::cerr << "\r\033[K" << (options.rate > 0 ? "rate " : "concurrency ")
            << (options.rate > 0 ? options.rate : options.concurrency) << ", "
            << options.warmup_seconds + options.duration_seconds << " s …" << std::flush;
}

absl::StatusOr<BenchLevel> RunLevel(const Server& server, bench::LoadOptions options,
                                    const bench::RequestSource& source, const std::string& model,
                                    const std::string& version) {
  std::optional<ServerCounters> before, after;
  options.measure_begins = [&] { before = ReadServerCounters(*server.client, model, version); };
  options.measure_ends = [&] { after = ReadServerCounters(*server.client, model, version); };
  Announce(options);
  absl::StatusOr<bench::LoadResult> result = bench::RunLoad(options, source);
  if (!result.ok()) return server.Explain(result.status());
  BenchLevel level{options, *std::move(result), std::nullopt};
  if (before && after) level.server = after->Since(*before);
  return level;
}

void DescribeServer(const Server& server, BenchReport& report) {
  report.url = server.url;
  if (auto metadata = server.client->ServerMetadata(); metadata.ok()) {
    report.server_name = metadata->name();
    report.server_version = metadata->version();
  }
  if (auto config = server.client->ModelConfig(report.model, report.version); config.ok()) {
    report.layouts = ModelFacts::From(*config).layouts;
  }
}

absl::Status Write(const Args& args, const BenchReport& report) {
  if (args.Has("json")) {
    absl::Status status = WriteFile(args.String("json", ""), BenchJson(report));
    if (!status.ok()) return status;
  }
  if (args.Has("hgrm")) return WriteFile(args.String("hgrm", ""), BenchHgrm(report.levels.back()));
  return absl::OkStatus();
}

// An answer that is missing or came twice is a fault that no table may hide; so is having none.
absl::Status Verdict(const BenchReport& report) {
  uint64_t good = 0;
  for (const BenchLevel& level : report.levels) {
    if (!level.result.ledger.Balances()) {
      return absl::DataLossError("not every request was answered once with its own id, see above");
    }
    good += level.result.latency.count();
  }
  return good > 0 ? absl::OkStatus() : absl::UnavailableError("no request was answered well");
}

absl::Status Run(const Args& args) {
  absl::StatusOr<std::vector<bench::LoadOptions>> loads = ReadLoads(args);
  if (!loads.ok()) return loads.status();
  absl::StatusOr<int64_t> batch = args.Int("batch", 1, 1, 1 << 20);
  if (!batch.ok()) return batch.status();
  absl::StatusOr<Server> server = Connect(args);
  if (!server.ok()) return server.status();
  BenchReport report{
      .command = CommandLine(),
      .date = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()),
      .commit = BuildCommit(),
      .client_version = BuildVersion(),
      .device = MakeCpuDevice(0)->Description(),
      .model = args.positional()[0],
      .version = args.String("version", ""),
      .batch = *batch};
  auto metadata = server->client->ModelMetadata(report.model, args.String("version", ""));
  if (!metadata.ok()) return server->Explain(metadata.status());
  absl::StatusOr<BenchInputs> inputs = MakeBenchInputs(args, *metadata, *batch);
  if (!inputs.ok()) return inputs.status();
  absl::StatusOr<std::string> version = Probe(*server, inputs->requests[0]);
  if (!version.ok()) return version.status();
  absl::StatusOr<std::unique_ptr<bench::SharedTensors>> shared =
      Share(args, *server, *metadata, *inputs, *batch);
  if (!shared.ok()) return shared.status();
  absl::StatusOr<bench::RequestSource> source =
      bench::RequestSource::Create(inputs->requests, shared->get());
  if (!source.ok()) return source.status();
  report.version = *std::move(version);
  DescribeServer(*server, report);
  for (const char* file : {"json", "hgrm"}) {
    if (!args.Has(file)) continue;
    if (absl::Status status = CheckWritable(args.String(file, "")); !status.ok()) return status;
  }
  report.inputs = inputs->description;
  report.distinct_requests = source->size();
  for (const bench::LoadOptions& options : *loads) {
    auto level = RunLevel(*server, options, *source, report.model, args.String("version", ""));
    if (isatty(STDERR_FILENO)) std::cerr << "\r\033[K" << std::flush;
    if (!level.ok()) return level.status();
    report.levels.push_back(*std::move(level));
  }
  std::cout << BenchText(report);
  if (absl::Status status = Write(args, report); !status.ok()) return status;
  return Verdict(report);
}

}  // namespace

Command BenchCommand() {
  return {
      {.name = "bench",
       .summary = "load a model: throughput, latency percentiles, errors, where the time goes",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags = WithServerFlags({
           {"concurrency", "LEVELS",
            "Closed loop: so many requests are in flight all the time. Default: 1."},
           {"rate", "LEVELS",
            "Open loop: so many requests per second, at random (Poisson) times, whatever the "
            "server\n"
            "does. Latency counts from when a request was due, not from when it could be sent."},
           {"batch", "N", "Items in a request. Default: 1."},
           {"duration", "SECONDS", "Measured time of each level. Default: 10."},
           {"warmup", "SECONDS", "The same load before it, not measured. Default: 1."},
           {"input", "[NAME=]FILE",
            "Items to send, in turn: .npy, IDX images or raw elements as `espalier infer` reads "
            "them,\n"
            "or a directory of such files. Default: random values.",
            true},
           {"shape", "[NAME=]128,64",
            "Sizes of the dimensions behind the batch, where the model leaves them open.", true},
           {"version", "N", "Version of the model. Default: the one that the server serves."},
           {"streaming", "", "Use ModelStreamInfer, a stream per connection."},
           {"shared_memory", "system",
            "Tensors of requests and answers lie in shared memory of this machine, and only their "
            "places\n"
            "travel: what the server does without the bytes (espalierd "
            "--allow_system_shared_memory)."},
           {"timeout", "SECONDS", "Deadline of each request of the load. Default: 60."},
           {"priority", "N", "Request parameter `priority`."},
           {"queue_timeout", "MICROSECONDS", "Request parameter `timeout`: how long it may wait."},
           {"channels", "N", "Connections. Default: 4, or fewer with less concurrency."},
           {"threads", "N", "Threads of this client. Default: 1, good for some 20,000 requests/s."},
           {"max_outstanding", "N",
            "Open loop: beyond these requests in flight what is due is not sent but counted as an "
            "error.\nDefault: 10000."},
           {"seed", "N", "Of random values and times. Default: 1."},
           {"json", "FILE", "Write everything, with the histogram, as JSON."},
           {"hgrm", "FILE",
            "Write the last level's percentile distribution as HdrHistogram's tools read it."},
       }),
       .details =
           R"(LEVELS is a list, 1,8,64, or a range, FIRST:LAST:STEP or FIRST:LAST:xFACTOR: 1:64:x2.
Works with every server of the Open Inference Protocol; where it offers ModelStatistics, a second
table splits its time. Latency is of good answers; errors are counted by code. Every request has
its own id: exit code 1 if one was never answered, or an answer came twice.

Which of the two loops? The closed one shows the most that a server can do; its clients slow down
when the server does. Users do not: for the latency that they see, offer a rate (say 30 % of the
closed loop's throughput) in the open loop.

Examples:
  espalier bench mnist_diagonal16                            # latency of a single client
  espalier bench mnist_diagonal16 --concurrency 1:64:x2 --duration 5
  espalier bench mnist_diagonal16 --rate 2000 --input tests/data/mnist/t10k-images-idx3-ubyte.gz
  espalier bench nlp --shape ids=128 --shape mask=128 --batch 8 --json nlp.json)"},
      &Run};
}

}  // namespace espalier::cli
