#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "clients/cli/command.h"
#include "clients/cli/delta_files.h"
#include "clients/cli/json_writer.h"
#include "clients/cli/table.h"
#include "engine/formats/names.h"
#include "engine/updates/journal.h"
#include "engine/updates/weight_digest.h"

namespace espalier::cli {
namespace {

using updates::DeltaFile;
using updates::EventKind;
using updates::Manifest;
using updates::TensorDelta;

int64_t CountOf(const updates::EventCounts& counts, EventKind kind) {
  return counts.of[static_cast<int>(kind)];
}

absl::StatusOr<std::vector<uint64_t>> BytesOfTensors(const DeltaFile& delta) {
  std::vector<uint64_t> bytes(delta.manifest().tensors.size());
  const auto records = delta.Records();
  if (!records.ok()) return records.status();
  for (const updates::RecordRef& record : *records) bytes[record.tensor] += record.bytes;
  return bytes;
}

void PrintHead(const DeltaFile& delta) {
  const Manifest& m = delta.manifest();
  const updates::EventCounts counts = m.counts();
  std::vector<std::string> signers;
  for (const updates::Signature& signature : delta.signatures())
    signers.push_back(updates::Hex(signature.key));
  std::cout << absl::StrFormat(
      "model       %s\nversion     %d to %d, sequence %d\ncreated     %s\nexpires     %s\n"
      "signed by   %s\nbase        weights %s\ntarget      weights %s\nfiles       %s\n"
      "size        %s: head %s, rest %s\nchanges     %d values, %d dropped, %d grown, %d signs of "
      "zeros\nnon-zeros   %d to %d%s\n",
      formats::Shown(m.model), m.base_version, m.target_version, m.sequence,
      TimeText(m.created_seconds), TimeText(m.expires_seconds),
      signers.empty() ? "nobody" : absl::StrJoin(signers, ", "), updates::ShortHex(m.base_weights),
      updates::ShortHex(m.target_weights), updates::ShortHex(m.files),
      SizeText(static_cast<double>(delta.size())),
      SizeText(static_cast<double>(delta.head_bytes())),
      m.rest_frame_bytes == 0 ? "as the base" : SizeText(static_cast<double>(m.rest_frame_bytes)),
      CountOf(counts, EventKind::kChange), CountOf(counts, EventKind::kDrop),
      CountOf(counts, EventKind::kGrow), CountOf(counts, EventKind::kFlip), m.base_nonzeros,
      m.target_nonzeros, m.schema_changes ? "\nschema      changes: for files only" : "");
}

void PrintTable(const DeltaFile& delta, const std::vector<uint64_t>& bytes) {
  Table table({"tensor", "dtype", ">elements", ">changed", ">dropped", ">grown", ">signs", ">bytes",
               ">bits/event"});
  for (size_t i = 0; i < bytes.size(); ++i) {
    const TensorDelta& tensor = delta.manifest().tensors[i];
    const auto count = [&](EventKind kind) { return absl::StrCat(CountOf(tensor.counts, kind)); };
    table.AddRow({formats::Shown(tensor.tensor.name), tensor.tensor.dtype,
                  absl::StrCat(tensor.tensor.elements()), count(EventKind::kChange),
                  count(EventKind::kDrop), count(EventKind::kGrow), count(EventKind::kFlip),
                  absl::StrCat(bytes[i]),
                  absl::StrFormat("%.1f", 8.0 * static_cast<double>(bytes[i]) /
                                              static_cast<double>(tensor.counts.total()))});
  }
  std::cout << "\n" << table.ToString();
}

void PrintJson(const DeltaFile& delta, const std::vector<uint64_t>& bytes) {
  const Manifest& m = delta.manifest();
  JsonWriter json;
  const auto digest = [&](const char* key, absl::Span<const uint8_t> value) {
    json.Key(key).String(updates::Hex(value));
  };
  const auto counts = [&](const updates::EventCounts& of) {
    json.Key("changes").Int(CountOf(of, EventKind::kChange));
    json.Key("drops").Int(CountOf(of, EventKind::kDrop));
    json.Key("grows").Int(CountOf(of, EventKind::kGrow));
    json.Key("flips").Int(CountOf(of, EventKind::kFlip));
  };
  json.BeginObject().Key("model").String(m.model);
  json.Key("base_version").Int(m.base_version).Key("version").Int(m.target_version);
  json.Key("sequence").Int(m.sequence).Key("created").Int(m.created_seconds);
  json.Key("expires").Int(m.expires_seconds);
  json.Key("signatures").BeginArray();
  for (const updates::Signature& signature : delta.signatures())
    json.String(updates::Hex(signature.key));
  json.EndArray();
  digest("base_weights", m.base_weights);
  digest("target_weights", m.target_weights);
  digest("files", m.files);
  json.Key("schema_changes").Bool(m.schema_changes);
  json.Key("base_nonzeros").Int(m.base_nonzeros).Key("target_nonzeros").Int(m.target_nonzeros);
  json.Key("bytes").Uint(delta.size()).Key("head_bytes").Uint(delta.head_bytes());
  json.Key("rest_bytes").Uint(m.rest_frame_bytes);
  counts(m.counts());
  json.Key("tensors").BeginArray();
  for (size_t i = 0; i < bytes.size(); ++i) {
    json.BeginObject().Key("name").String(m.tensors[i].tensor.name);
    json.Key("dtype").String(m.tensors[i].tensor.dtype);
    json.Key("elements").Int(m.tensors[i].tensor.elements());
    counts(m.tensors[i].counts);
    json.Key("bytes").Uint(bytes[i]).EndObject();
  }
  json.EndArray().EndObject();
  std::cout << json.text() << "\n";
}

absl::Status RunShow(const Args& args) {
  const auto delta = OpenDelta(args.positional()[0]);
  if (!delta.ok()) return delta.status();
  const auto bytes = BytesOfTensors(*delta);
  if (!bytes.ok()) return bytes.status();
  if (args.Has("json")) {
    PrintJson(*delta, *bytes);
    return absl::OkStatus();
  }
  PrintHead(*delta);
  if (!bytes->empty()) PrintTable(*delta, *bytes);
  return absl::OkStatus();
}

absl::Status CheckAgainst(const DeltaFile& delta, const Args& args) {
  const auto threads = Threads(args);
  if (!threads.ok()) return threads.status();
  const auto base = OpenCheckpoint(args.String("base", ""));
  if (!base.ok()) return base.status();
  const auto digest = updates::DigestOf(*base->files, *threads);
  if (!digest.ok()) return digest.status();
  if (auto status = CheckBase(delta.manifest(), *digest); !status.ok()) return status;
  std::cout << "base: the delta is made for it\n";
  if (const auto journal = DecodeJournal(delta, *base->files); !journal.ok())
    return journal.status();
  if (auto status = CheckTarget(delta, *base->files, *threads); !status.ok()) return status;
  std::cout << "target: the delta leads to the weights that it promises\n";
  return absl::OkStatus();
}

absl::Status RunVerify(const Args& args) {
  const auto delta = OpenDelta(args.positional()[0]);
  if (!delta.ok()) return delta.status();
  const auto keys = PublicKeys(args, "trust");
  if (!keys.ok()) return keys.status();
  const auto threshold =
      args.Int("threshold", 1, 1, std::max<int64_t>(1, static_cast<int64_t>(keys->size())));
  if (!threshold.ok()) return threshold.status();
  if (keys->empty()) {
    std::cout << "signatures: not checked (--trust KEY.pub checks them)\n";
  } else {
    const auto signers = delta->CheckSigned({*keys, static_cast<int>(*threshold)});
    if (!signers.ok()) return signers.status();
    for (const updates::KeyId& key : *signers)
      std::cout << "signatures: by " << updates::Hex(key) << "\n";
  }
  if (auto status = CheckFresh(delta->manifest(), NowSeconds()); !status.ok()) return status;
  std::cout << "expires: " << TimeText(delta->manifest().expires_seconds) << "\n";
  if (auto status = delta->CheckBody(); !status.ok()) return status;
  if (const auto records = delta->Records(); !records.ok()) return records.status();
  std::cout << "body: in order\n";
  return args.Has("base") ? CheckAgainst(*delta, args) : absl::OkStatus();
}

}  // namespace

Command DeltaShowCommand() {
  return {{.name = "delta show",
           .summary = "what a delta changes, for whom, until when",
           .arguments = "DELTA",
           .min_positional = 1,
           .max_positional = 1,
           .flags = {{"json", "", "Print JSON instead of a table."}},
           .details = R"(Nothing is verified: espalier delta verify does that.

Examples:
  espalier delta show step.espd)"},
          &RunShow};
}

Command DeltaVerifyCommand() {
  return {
      {.name = "delta verify",
       .summary = "whether a delta is signed, fresh, undamaged, and fits a base",
       .arguments = "DELTA",
       .min_positional = 1,
       .max_positional = 1,
       .flags = {{"trust", "FILE", "Public key that may sign.", true},
                 {"threshold", "N", "How many of the --trust keys must have signed. Default: 1."},
                 {"base", "PATH",
                  "Checkpoint to check it against: digests of base and target, every event."},
                 ThreadsFlag()},
       .details = R"(Examples:
  espalier delta verify step.espd --trust trainer.pub --base digits/1)"},
      &RunVerify};
}

}  // namespace espalier::cli
