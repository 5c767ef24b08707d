#include "clients/cli/bench_report.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "clients/cli/json_writer.h"
#include "clients/cli/table.h"
#include "grpcpp/support/status.h"

namespace espalier::cli {
namespace {

using absl::StrAppend;
using absl::StrCat;

struct NamedPercentile {
  const char* title;
  const char* key;
  double percent;
};
constexpr NamedPercentile kPercentiles[] = {
    {">P50", "p50", 50}, {">P90", "p90", 90},       {">P95", "p95", 95},
    {">P99", "p99", 99}, {">P99.9", "p99_9", 99.9},
};

double Micros(double nanos) { return nanos / 1e3; }
double Micros(int64_t nanos) { return static_cast<double>(nanos) / 1e3; }

std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

std::string PerSecond(double value) {
  return absl::StrFormat(value < 100 ? "%.1f" : "%.0f", value);
}

std::string LoadText(const bench::LoadOptions& options) {
  return options.rate > 0 ? StrCat(options.rate, "/s") : StrCat(options.concurrency);
}

std::string ClientTable(const BenchReport& report) {
  std::vector<std::string> titles = {
      report.levels.front().options.rate > 0 ? ">RATE" : ">CONCURRENCY", ">REQUESTS/S"};
  if (report.batch > 1) titles.push_back(">ITEMS/S");
  for (const NamedPercentile& percentile : kPercentiles) titles.push_back(percentile.title);
  for (const char* title : {">MAX", ">MEAN", ">ERRORS"}) titles.push_back(title);
  Table table(titles);
  for (const BenchLevel& level : report.levels) {
    const bench::LoadResult& result = level.result;
    std::vector<std::string> row = {LoadText(level.options), PerSecond(result.throughput())};
    if (report.batch > 1) {
      row.push_back(PerSecond(result.throughput() * static_cast<double>(report.batch)));
    }
    const bool any = result.latency.count() > 0;
    for (const NamedPercentile& percentile : kPercentiles) {
      row.push_back(any ? FormatMicros(Micros(result.latency.Percentile(percentile.percent)))
                        : "–");
    }
    row.push_back(any ? FormatMicros(Micros(result.latency.max())) : "–");
    row.push_back(any ? FormatMicros(Micros(result.latency.mean())) : "–");
    row.push_back(StrCat(result.failure.count() + result.withheld));
    table.AddRow(std::move(row));
  }
  return table.ToString();
}

std::string ServerTable(const BenchReport& report) {
  Table table({report.levels.front().options.rate > 0 ? ">RATE" : ">CONCURRENCY", ">QUEUE",
               ">COMPUTE INPUT", ">COMPUTE INFER", ">COMPUTE OUTPUT", ">IN SERVER",
               ">ITEMS/EXECUTION", ">EXECUTIONS"});
  for (const BenchLevel& level : report.levels) {
    if (!level.server) return "";
    const ServerCounters& server = *level.server;
    const auto each = [&](uint64_t nanos) { return FormatMicros(server.MicrosEach(nanos)); };
    table.AddRow({LoadText(level.options), each(server.queue_nanos), each(server.input_nanos),
                  each(server.infer_nanos), each(server.output_nanos), each(server.request_nanos),
                  absl::StrFormat("%.1f", server.mean_batch()), StrCat(server.executions)});
  }
  return StrCat("\nMeans of a request, as the server counts them (all clients together):\n",
                table.ToString());
}

// What deserves a line of its own: errors, and reasons not to trust the numbers.
std::string Remarks(const BenchLevel& level) {
  const bench::LoadResult& result = level.result;
  const bench::Ledger& ledger = result.ledger;
  std::string text;
  for (const auto& [code, error] : result.errors) {
    StrAppend(&text, "  ", error.count, " × ", CodeName(code), ", e.g. ", error.example, "\n");
  }
  if (result.withheld > 0) {
    StrAppend(&text, "  ", result.withheld, " not sent: ", level.options.max_outstanding,
              " were in flight already (--max-outstanding)\n");
  }
  if (!ledger.Balances()) {
    StrAppend(&text, "  of ", ledger.sent, " requests sent ", ledger.answered, " were answered, ",
              ledger.unanswered, " never; ", ledger.unasked,
              " answers had the id of no request in flight, ", ledger.without_id, " had none\n");
  }
  const double share = result.client_cpus / level.options.threads;
  if (share > 0.9) {
    StrAppend(&text, absl::StrFormat("  the client used %.0f %% of its %d thread(s): it may be the "
                                     "bottleneck, try more --threads\n",
                                     100 * share, level.options.threads));
  }
  return text.empty() ? "" : StrCat("\nAt ", LoadText(level.options), ":\n", text);
}

void WriteLatency(const bench::HdrHistogram& histogram, JsonWriter& json) {
  json.BeginObject().Key("count").Uint(histogram.count());
  json.Key("min").Number(Micros(histogram.min())).Key("mean").Number(Micros(histogram.mean()));
  for (const NamedPercentile& percentile : kPercentiles) {
    json.Key(percentile.key).Number(Micros(histogram.Percentile(percentile.percent)));
  }
  json.Key("max").Number(Micros(histogram.max())).EndObject();
}

void WriteServer(const ServerCounters& server, JsonWriter& json) {
  json.BeginObject().Key("requests").Uint(server.successes).Key("failures").Uint(server.failures);
  json.Key("inferences").Uint(server.inferences).Key("executions").Uint(server.executions);
  json.Key("mean_batch").Number(server.mean_batch());
  json.Key("request_us").Number(server.MicrosEach(server.request_nanos));
  json.Key("queue_us").Number(server.MicrosEach(server.queue_nanos));
  json.Key("compute_input_us").Number(server.MicrosEach(server.input_nanos));
  json.Key("compute_infer_us").Number(server.MicrosEach(server.infer_nanos));
  json.Key("compute_output_us").Number(server.MicrosEach(server.output_nanos));
  json.Key("executions_by_batch").BeginObject();
  for (const auto& [batch, count] : server.executions_by_batch) {
    json.Key(StrCat(batch)).Uint(count);
  }
  json.EndObject().EndObject();
}

void WriteLevel(const BenchLevel& level, JsonWriter& json) {
  const bench::LoadOptions& options = level.options;
  const bench::LoadResult& result = level.result;
  json.BeginObject();
  if (options.rate > 0) {
    json.Key("rate").Number(options.rate);
  } else {
    json.Key("concurrency").Int(options.concurrency);
  }
  json.Key("channels").Int(options.channels);
  json.Key("seconds").Number(result.seconds).Key("warmup_seconds").Number(options.warmup_seconds);
  json.Key("requests_per_second").Number(result.throughput());
  json.Key("client_cpus").Number(result.client_cpus);
  json.Key("latency_us");
  WriteLatency(result.latency, json);
  json.Key("since_sent_us");
  WriteLatency(result.since_sent, json);
  json.Key("send_delay_us");
  WriteLatency(result.send_delay, json);
  json.Key("failure_us");
  WriteLatency(result.failure, json);
  json.Key("errors").BeginObject();
  for (const auto& [code, error] : result.errors) {
    json.Key(CodeName(code)).BeginObject().Key("count").Uint(error.count);
    json.Key("example").String(error.example).EndObject();
  }
  json.EndObject().Key("withheld").Uint(result.withheld);
  json.Key("ledger").BeginObject().Key("sent").Uint(result.ledger.sent);
  json.Key("answered").Uint(result.ledger.answered);
  json.Key("unanswered").Uint(result.ledger.unanswered);
  json.Key("unasked").Uint(result.ledger.unasked);
  json.Key("without_id").Uint(result.ledger.without_id);
  json.Key("balances").Bool(result.ledger.Balances()).EndObject();
  if (level.server) {
    json.Key("server");
    WriteServer(*level.server, json);
  }
  json.Key("histogram_us").BeginArray();
  for (const bench::HdrHistogram::Bucket& bucket : result.latency.Buckets()) {
    json.BeginArray().Number(Micros(bucket.highest)).Uint(bucket.count).EndArray();
  }
  json.EndArray().EndObject();
}

}  // namespace

std::string BenchText(const BenchReport& report) {
  const bench::LoadOptions& options = report.levels.back().options;  // with most connections
  std::string text = StrCat(
      report.model, report.version.empty() ? "" : " version ", report.version, " at ", report.url,
      report.server_name.empty()
          ? ""
          : StrCat(" (", report.server_name, " ", report.server_version, ")"),
      "\n", report.distinct_requests, " distinct requests of batch ", report.batch, ", ",
      report.inputs, "; ", options.streaming ? "streamed, " : "", options.channels,
      options.channels == 1 ? " connection" : " connections", "; ", options.duration_seconds,
      " s after ", options.warmup_seconds, " s of warm-up\n\n");
  StrAppend(&text, ClientTable(report), ServerTable(report));
  for (const BenchLevel& level : report.levels) StrAppend(&text, Remarks(level));
  return text;
}

std::string BenchJson(const BenchReport& report) {
  JsonWriter json;
  json.BeginObject().Key("command").String(report.command).Key("date").String(report.date);
  json.Key("commit").String(report.commit).Key("client_version").String(report.client_version);
  json.Key("device").String(report.device).Key("url").String(report.url);
  json.Key("server").BeginObject().Key("name").String(report.server_name);
  json.Key("version").String(report.server_version).EndObject();
  json.Key("model").String(report.model).Key("version").String(report.version);
  json.Key("layouts").String(report.layouts).Key("inputs").String(report.inputs);
  json.Key("batch").Int(report.batch).Key("distinct_requests").Uint(report.distinct_requests);
  const bench::LoadOptions& options = report.levels.front().options;
  json.Key("streaming").Bool(options.streaming).Key("threads").Int(options.threads);
  json.Key("levels").BeginArray();
  for (const BenchLevel& level : report.levels) WriteLevel(level, json);
  return json.EndArray().EndObject().text() + "\n";
}

std::string BenchHgrm(const BenchLevel& level) {
  const bench::HdrHistogram& latency = level.result.latency;
  const double total = static_cast<double>(latency.count());
  std::string text = absl::StrFormat("%12s %14s %10s %14s\n\n", "Value", "Percentile", "TotalCount",
                                     "1/(1-Percentile)");
  uint64_t seen = 0;
  for (const bench::HdrHistogram::Bucket& bucket : latency.Buckets()) {
    seen += bucket.count;
    const double share = static_cast<double>(seen) / total;
    const std::string inverse = share < 1 ? absl::StrFormat("%14.2f", 1 / (1 - share)) : "";
    absl::StrAppendFormat(&text, "%12.3f %14.12f %10u %s\n", Micros(bucket.highest), share, seen,
                          inverse);
  }
  absl::StrAppendFormat(&text, "#[Mean = %12.3f]\n#[Max = %12.3f, Total count = %12u]\n",
                        Micros(latency.mean()), Micros(latency.max()), latency.count());
  return text;
}

}  // namespace espalier::cli
