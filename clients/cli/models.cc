#include <iostream>

#include "clients/cli/command.h"
#include "clients/cli/server.h"
#include "clients/cli/table.h"

#include "absl/strings/str_cat.h"

namespace espalier::cli {
namespace {

using ModelIndex = inference::RepositoryIndexResponse::ModelIndex;

struct Row {
  ModelIndex index;
  ModelFacts facts;  // empty unless the model is ready
};

absl::StatusOr<std::vector<Row>> Collect(const Server& server, bool ready_only) {
  auto index = server.client->RepositoryIndex(ready_only);
  if (!index.ok()) return index.status();
  std::vector<Row> rows;
  for (const ModelIndex& model : index->models()) {
    Row row{model, {}};
    if (model.state() == "READY") {
      auto config = server.client->ModelConfig(model.name(), model.version());
      // Unloaded since the index was made: shown as indexed, without the facts.
      if (config.ok()) row.facts = ModelFacts::From(*config);
      if (!config.ok() && !absl::IsNotFound(config.status()) &&
          !absl::IsUnavailable(config.status())) {
        return config.status();
      }
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

void PrintTable(const std::vector<Row>& rows) {
  Table table(
      {"MODEL", ">VERSION", "STATE", "FOUND", "SERVED AS", ">SPARSITY", ">WEIGHTS OF DENSE"});
  std::string reasons;
  for (const Row& row : rows) {
    table.AddRow({row.index.name(), row.index.version(), row.index.state(),
                  row.facts.StructuresText(), row.facts.LayoutsText(), row.facts.SparsityText(),
                  row.facts.MemoryText()});
    if (row.index.reason().empty()) continue;
    absl::StrAppend(&reasons, "\n", row.index.name(),
                    row.index.version().empty() ? "" : " version ", row.index.version(), ": ",
                    row.index.reason());
  }
  std::cout << table.ToString();
  if (!reasons.empty()) std::cout << reasons << "\n";
}

void PrintJson(const std::vector<Row>& rows) {
  JsonWriter json;
  json.BeginArray();
  for (const Row& row : rows) {
    json.BeginObject()
        .Key("model")
        .String(row.index.name())
        .Key("version")
        .String(row.index.version());
    json.Key("state").String(row.index.state()).Key("reason").String(row.index.reason());
    row.facts.WriteJson(json);
    json.EndObject();
  }
  std::cout << json.EndArray().text() << "\n";
}

absl::Status Run(const Args& args) {
  absl::StatusOr<Server> server = Connect(args);
  if (!server.ok()) return server.status();
  absl::StatusOr<std::vector<Row>> rows = Collect(*server, args.Has("ready"));
  if (!rows.ok()) return server->Explain(rows.status());
  if (args.Has("json")) {
    PrintJson(*rows);
  } else if (rows->empty()) {
    std::cout << "no models" << (args.Has("ready") ? " are ready" : " in the repository") << "\n";
  } else {
    PrintTable(*rows);
  }
  return absl::OkStatus();
}

}  // namespace

Command ModelsCommand() {
  return {
      {.name = "models",
       .summary = "list the models of a server: state, layouts found, sparsity, memory",
       .flags = WithServerFlags({
           {"ready", "", "Only models that are ready to serve."},
           {"json", "", "Print JSON instead of a table."},
       }),
       .details =
           R"(FOUND is the structure in the zeros of the weights, SERVED AS how they are held, SPARSITY the
share of zeros, WEIGHTS OF DENSE the bytes that they take and would take with all zeros stored. A
model that could not be loaded is listed with the reason.

Examples:
  espalier models
  espalier models --url gpu-7:8001 --ready --json)"},
      &Run};
}

}  // namespace espalier::cli
