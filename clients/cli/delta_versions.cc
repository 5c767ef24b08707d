#include <iostream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/cli/command.h"
#include "clients/cli/delta_files.h"
#include "clients/cli/json_writer.h"
#include "clients/cli/table.h"
#include "clients/cli/update_servers.h"
#include "engine/formats/names.h"

namespace espalier::cli {
namespace {

std::string ShortHex(const std::string& bytes) {
  return absl::BytesToHexString(absl::string_view(bytes).substr(0, 8));
}

template <typename Signers>
std::string SignersText(const Signers& signers) {
  return absl::StrJoin(signers, " ", [](std::string* out, const std::string& key) {
    out->append(absl::BytesToHexString(key));
  });
}

std::string StateText(v1::VersionState state) {
  const std::string name = v1::VersionState_Name(state);
  return name.empty() ? absl::StrCat(static_cast<int>(state)) : name;
}

std::string NumberText(int64_t number) { return number == 0 ? "" : absl::StrCat(number); }

void PrintModel(const std::string& server, const v1::ModelVersions& model) {
  std::cout << formats::Shown(model.model()) << " at " << server << ": version " << model.serving()
            << " serves" << (model.on_probation() ? ", on probation until " : "");
  if (model.on_probation())
    std::cout << (model.probation_ends() == 0 ? "it is confirmed"
                                              : TimeText(model.probation_ends()));
  if (model.staged() != 0) std::cout << "; version " << model.staged() << " is ready";
  std::cout << "; a delta must have a sequence above " << model.accepted_sequence() << "\n";
  Table table({">VERSION", "STATE", ">FROM", ">SEQUENCE", "SINCE", ">DELTA", "WEIGHTS", "REASON"});
  for (const v1::Version& version : model.versions()) {
    table.AddRow(
        {absl::StrCat(version.version()), StateText(version.state()), NumberText(version.base()),
         NumberText(version.sequence()), TimeText(version.seconds()),
         version.delta_bytes() == 0 ? "" : SizeText(static_cast<double>(version.delta_bytes())),
         ShortHex(version.weights()), formats::Shown(version.reason(), 512)});
  }
  std::cout << table.ToString();
}

void WriteModel(const std::string& server, const v1::ModelVersions& model, JsonWriter& json) {
  json.BeginObject().Key("server").String(server).Key("model").String(model.model());
  json.Key("serving").Int(model.serving()).Key("staged").Int(model.staged());
  json.Key("on_probation").Bool(model.on_probation());
  json.Key("probation_ends").Int(model.probation_ends());
  json.Key("accepted_sequence").Int(model.accepted_sequence()).Key("versions").BeginArray();
  for (const v1::Version& version : model.versions()) {
    json.BeginObject().Key("version").Int(version.version());
    json.Key("state").String(StateText(version.state()));
    json.Key("weights").String(absl::BytesToHexString(version.weights()));
    json.Key("base").Int(version.base()).Key("sequence").Int(version.sequence());
    json.Key("since").Int(version.seconds()).Key("delta_bytes").Uint(version.delta_bytes());
    json.Key("delta_sha256").String(absl::BytesToHexString(version.delta_sha256()));
    json.Key("signers").String(SignersText(version.signers()));
    json.Key("reason").String(version.reason()).EndObject();
  }
  json.EndArray().EndObject();
}

absl::Status RunVersions(const Args& args) {
  const auto clients = ConnectUpdates(args);
  if (!clients.ok()) return clients.status();
  const std::string model = args.positional().empty() ? "" : args.positional()[0];
  JsonWriter json;
  json.BeginArray();
  bool first = true;
  const absl::Status status = ForEach(*clients, [&](client::UpdateClient& client) {
    const auto list = client.List(model);
    if (!list.ok()) return list.status();
    for (const v1::ModelVersions& versions : list->models()) {
      if (args.Has("json")) {
        WriteModel(client.target(), versions, json);
        continue;
      }
      if (!std::exchange(first, false)) std::cout << "\n";
      PrintModel(client.target(), versions);
    }
    return absl::OkStatus();
  });
  if (args.Has("json")) std::cout << json.EndArray().text() << "\n";
  return status;
}

void PrintLog(const v1::ReadAuditResponse& log) {
  Table table({">NO", "TIME", "WHAT", ">VERSION", "BEFORE", "AFTER", "SIGNED BY", "REASON"});
  for (const v1::AuditRecord& record : log.records()) {
    table.AddRow({absl::StrCat(record.sequence()), TimeText(record.seconds()),
                  formats::Shown(record.action()), NumberText(record.version()),
                  ShortHex(record.weights_before()), ShortHex(record.weights_after()),
                  SignersText(record.signers()), formats::Shown(record.reason(), 512)});
  }
  std::cout << table.ToString();
}

void PrintLogJson(const v1::ReadAuditResponse& log) {
  JsonWriter json;
  json.BeginArray();
  for (const v1::AuditRecord& record : log.records()) {
    json.BeginObject().Key("sequence").Int(record.sequence());
    json.Key("seconds").Int(record.seconds()).Key("action").String(record.action());
    json.Key("version").Int(record.version());
    json.Key("weights_before").String(absl::BytesToHexString(record.weights_before()));
    json.Key("weights_after").String(absl::BytesToHexString(record.weights_after()));
    json.Key("signers").String(SignersText(record.signers()));
    json.Key("reason").String(record.reason()).EndObject();
  }
  std::cout << json.EndArray().text() << "\n";
}

absl::Status RunLog(const Args& args) {
  const auto most = args.Int("most", 100, 1, 1000);
  if (!most.ok()) return most.status();
  const auto client = ConnectUpdate(args);
  if (!client.ok()) return client.status();
  const auto log = (*client)->Audit(args.positional()[0], static_cast<int>(*most));
  if (!log.ok()) return Explain(**client, log.status());
  if (args.Has("json")) {
    PrintLogJson(*log);
  } else {
    PrintLog(*log);
  }
  return absl::OkStatus();
}

absl::Status RunWatch(const Args& args) {
  const auto client = ConnectUpdate(args);
  if (!client.ok()) return client.status();
  const std::string model = args.positional().empty() ? "" : args.positional()[0];
  const auto status = (*client)->Watch(model, 0, [](const v1::WatchVersionsResponse& event) {
    std::cout << TimeText(event.seconds()) << "  " << formats::Shown(event.model()) << "  "
              << NumberText(event.version()) << "  " << StateText(event.state())
              << (event.reason().empty() ? "" : "  ") << formats::Shown(event.reason(), 512)
              << std::endl;  // seen at once, also by a program behind a pipe
    return static_cast<bool>(std::cout);
  });
  return Explain(**client, status);
}

}  // namespace

Command DeltaVersionsCommand() {
  return {{.name = "delta versions",
           .summary = "the versions of a server's models: which serves, which wait, which failed",
           .arguments = "[MODEL]",
           .max_positional = 1,
           .flags = WithUpdateFlags({{"json", "", "Print JSON instead of tables."}}),
           .details = R"(Of MODEL, or of all models that take updates.

Examples:
  espalier delta versions digits
  espalier delta versions digits --url replicas.prod.svc:8003 --token_file token)"},
          &RunVersions};
}

Command DeltaLogCommand() {
  return {
      {.name = "delta log",
       .summary = "what happened to a model's weights: who signed it, when, digests",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags = WithUpdateFlags({{"most", "N", "The newest so many, 1 to 1000. Default: 100."},
                                 {"json", "", "Print JSON instead of a table."}}),
       .details =
           R"(BEFORE and AFTER are the digests of the weights that served, in their first 16 digits. A gap in NO
means that records were lost.

Examples:
  espalier delta log digits --most 20)"},
      &RunLog};
}

Command DeltaWatchCommand() {
  return {{.name = "delta watch",
           .summary = "changes of versions as they happen, a line each, until you stop it",
           .arguments = "[MODEL]",
           .max_positional = 1,
           .flags = WithUpdateFlags({}),
           .details = R"(Begins with what the server still knows of, then waits.

Examples:
  espalier delta watch digits)"},
          &RunWatch};
}

}  // namespace espalier::cli
