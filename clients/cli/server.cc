#include "clients/cli/server.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "clients/cli/table.h"
#include "engine/sparse/structure_report.h"

namespace espalier::cli {
namespace {

constexpr char kUnknown[] = "–";

std::string TextOf(const inference::ModelConfig& config, const std::string& key) {
  const auto found = config.parameters().find(key);
  return found == config.parameters().end() ? "" : found->second.string_value();
}

template <typename T>
std::optional<T> NumberOf(const inference::ModelConfig& config, const std::string& key) {
  const std::string text = TextOf(config, key);
  T value{};
  bool parsed = false;
  if constexpr (std::is_same_v<T, double>) {
    parsed = absl::SimpleAtod(text, &value);
  } else {
    parsed = absl::SimpleAtoi(text, &value);
  }
  return parsed ? std::optional<T>(value) : std::nullopt;
}

}  // namespace

std::vector<FlagSpec> WithServerFlags(std::vector<FlagSpec> flags) {
  std::vector<FlagSpec> all = {
      {"url", "HOST:PORT", "gRPC address of the server. Default: 127.0.0.1:8001."},
      {"deadline", "SECONDS", "Time that one call may take. Default: 60."},
  };
  all.insert(all.end(), flags.begin(), flags.end());
  return all;
}

absl::StatusOr<Server> Connect(const Args& args) {
  absl::StatusOr<double> seconds = args.Double("deadline", 60, 0.001, 86400);
  if (!seconds.ok()) return seconds.status();
  Server server{args.String("url", "127.0.0.1:8001"), nullptr};
  client::ClientOptions options;
  options.deadline = absl::Seconds(*seconds);
  absl::StatusOr<std::unique_ptr<client::Client>> client =
      client::Client::Create(server.url, options);
  if (!client.ok()) return WrongUsage(absl::StrCat("--url: ", client.status().message()));
  server.client = *std::move(client);
  return server;
}

absl::Status Server::Explain(const absl::Status& status) const {
  if (status.ok()) return status;
  // A server that answers "not ready" is Unavailable too; only an unreachable one is explained.
  absl::StatusOr<bool> live = absl::IsUnavailable(status) ? client->ServerLive() : true;
  if (absl::IsUnavailable(live.status())) {
    return absl::UnavailableError(
        absl::StrCat("no server at ", url, " (", status.message(),
                     "); start espalierd, or say where it is with --url HOST:PORT"));
  }
  return absl::Status(
      status.code(),
      absl::StrCat(url, ": ", absl::StatusCodeToString(status.code()), ": ", status.message()));
}

ModelFacts ModelFacts::From(const inference::ModelConfig& config) {
  ModelFacts facts;
  facts.layouts = TextOf(config, "layouts");
  facts.structures = TextOf(config, "structures");
  facts.sparsity = NumberOf<double>(config, "sparsity");
  facts.resident_bytes = NumberOf<int64_t>(config, "resident_weight_bytes");
  facts.dense_bytes = NumberOf<int64_t>(config, "dense_weight_bytes");
  return facts;
}

void ModelFacts::WriteJson(JsonWriter& json) const {
  if (!layouts.empty()) json.Key("layouts").String(layouts);
  if (!structures.empty()) json.Key("structures").String(structures);
  if (sparsity) json.Key("sparsity").Number(*sparsity);
  if (resident_bytes) json.Key("resident_weight_bytes").Int(*resident_bytes);
  if (dense_bytes) json.Key("dense_weight_bytes").Int(*dense_bytes);
}

std::string ModelFacts::StructuresText() const {
  return structures.empty() ? kUnknown : structures;
}
std::string ModelFacts::LayoutsText() const { return layouts.empty() ? kUnknown : layouts; }
std::string ModelFacts::SparsityText() const {
  return sparsity ? FormatPercent(*sparsity) : kUnknown;
}
std::string ModelFacts::MemoryText() const {
  if (!resident_bytes || !dense_bytes) return kUnknown;
  return absl::StrCat(sparse::HumanBytes(*resident_bytes), " of ",
                      sparse::HumanBytes(*dense_bytes));
}

}  // namespace espalier::cli
