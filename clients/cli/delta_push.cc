#include <algorithm>
#include <iostream>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "clients/cli/command.h"
#include "clients/cli/delta_files.h"
#include "clients/cli/fleet_push.h"
#include "clients/cli/update_servers.h"
#include "engine/formats/regular_file.h"
#include "engine/updates/byte_source.h"
#include "engine/updates/sha256.h"

namespace espalier::cli {
namespace {

using client::UpdateClient;

constexpr uint64_t kHashBytes = 1 << 20;

struct Delta {
  std::shared_ptr<const updates::FileSource> source;
  std::string model;
  std::string sha256, weights;  // of the file; of the logical weights that it leads to
};

absl::StatusOr<Delta> ReadDelta(const std::string& path, const Args& args) {
  auto file = formats::RegularFile::Open(path);
  if (!file.ok()) return file.status();
  Delta delta;
  delta.source = std::make_shared<updates::FileSource>(*std::move(file));
  const auto head = updates::DeltaFile::Open(delta.source);
  if (!head.ok()) return head.status();
  delta.model = args.String("model", head->manifest().model);
  const updates::Digest& weights = head->manifest().target_weights;
  delta.weights.assign(weights.begin(), weights.end());
  updates::Sha256 sha;
  std::string piece;
  for (uint64_t at = 0; at < delta.source->size(); at += piece.size()) {
    piece.resize(std::min(kHashBytes, delta.source->size() - at));
    if (auto status = delta.source->ReadAt(at, piece.data(), piece.size()); !status.ok())
      return status;
    sha.Update(piece);
  }
  const updates::Digest digest = sha.Finish();
  delta.sha256.assign(digest.begin(), digest.end());
  return delta;
}

absl::StatusOr<v1::StagedVersion> Send(UpdateClient& client, const Delta& delta,
                                       const std::function<void(uint64_t)>& progress) {
  return client.Push({delta.model, delta.sha256, delta.source->size(),
                      [&](uint64_t offset, char* to, size_t bytes) {
                        return delta.source->ReadAt(offset, to, bytes);
                      }},
                     progress);
}

// What every server has staged, or serves already.
absl::StatusOr<std::vector<v1::StagedVersion>> StageEverywhere(const UpdateClients& clients,
                                                               const Delta& delta) {
  std::vector<v1::StagedVersion> staged(clients.size());
  std::vector<uint64_t> sent(clients.size());
  std::mutex mutex;
  Progress progress(clients.size() == 1 ? "pushing" : absl::StrCat("pushing to ", clients.size()));
  const auto status = InParallel(clients, [&](size_t i) {
    auto version = Send(*clients[i], delta, [&, i](uint64_t bytes) {
      const std::lock_guard lock(mutex);
      sent[i] = bytes;
      double all = 0;
      for (const uint64_t each : sent) all += static_cast<double>(each);
      progress.Report(all, static_cast<double>(delta.source->size() * clients.size()));
    });
    if (version.ok()) staged[i] = *std::move(version);
    return version.status();
  });
  if (!status.ok()) return status;
  return staged;
}

absl::Status Finish(const Args& args) {
  if (!args.positional().empty() || args.Has("no_activate") || args.Has("model"))
    return WrongUsage("--resume goes with --to, --token_file and --deadline only");
  const auto clients = ConnectUpdates(args, "to");
  if (!clients.ok()) return clients.status();
  return Resume(*clients, args.String("resume", ""),
                [&](const std::vector<std::string>& participants) {
                  return ConnectUpdatesTo(args, participants);
                });
}

absl::Status ActivateOne(UpdateClient& client, const Delta& delta, const v1::StagedVersion& staged,
                         const std::optional<v1::Probation>& probation) {
  const bool serves = staged.state() == v1::LIVE;
  if (!serves) {
    auto status = Explain(client, client.Activate(delta.model, staged.version(), probation));
    if (!status.ok()) return status;
  }
  std::cout << client.target() << ": version " << staged.version() << " of " << delta.model
            << (serves ? " serves already\n" : " serves\n");
  return absl::OkStatus();
}

absl::Status ActivateOnAll(UpdateClients clients, const std::vector<v1::StagedVersion>& staged,
                           const Delta& delta, absl::Duration expiry,
                           const std::optional<v1::Probation>& probation) {
  UpdateClients waiting;  // those that serve it already have nothing to decide
  for (size_t i = 0; i < clients.size(); ++i) {
    if (staged[i].state() != v1::LIVE) waiting.push_back(std::move(clients[i]));
  }
  if (waiting.empty()) {
    std::cout << "version " << staged.front().version() << " of " << delta.model
              << " serves on all " << staged.size() << " servers already\n";
    return absl::OkStatus();
  }
  return CommitOnAll(waiting,
                     {delta.model, staged.front().version(), delta.weights, expiry, probation});
}

absl::Status Run(const Args& args) {
  if (args.Has("resume")) return Finish(args);
  if (args.positional().empty()) return WrongUsage("expected DELTA, or --resume ID");
  const auto probation = ReadProbation(args);
  if (!probation.ok()) return probation.status();
  if (args.Has("no_activate") && *probation)
    return WrongUsage("--no_activate leaves nothing on probation");
  absl::Duration expiry;
  if (!absl::ParseDuration(args.String("expiry", "5m"), &expiry) || expiry < absl::Seconds(1) ||
      expiry > absl::Hours(24)) {
    return WrongUsage(absl::StrCat("--expiry: expected a duration from 1s to 24h, got '",
                                   args.String("expiry", ""), "'"));
  }
  const auto delta = ReadDelta(args.positional()[0], args);
  if (!delta.ok()) return delta.status();
  auto clients = ConnectUpdates(args, "to");
  if (!clients.ok()) return clients.status();
  if (clients->size() > 1 && *probation && CanaryTime(clients->size(), **probation) >= expiry) {
    return WrongUsage(absl::StrCat("--expiry: the canaries of ", clients->size(), " servers take ",
                                   absl::FormatDuration(CanaryTime(clients->size(), **probation)),
                                   ", nobody has it serve after ", absl::FormatDuration(expiry)));
  }
  const auto staged = StageEverywhere(*clients, *delta);
  if (!staged.ok()) return staged.status();
  if (args.Has("no_activate")) {
    for (size_t i = 0; i < clients->size(); ++i) {
      std::cout << (*clients)[i]->target() << ": version " << (*staged)[i].version() << " of "
                << delta->model << " is " << v1::VersionState_Name((*staged)[i].state()) << "\n";
    }
    return absl::OkStatus();
  }
  if (clients->size() == 1)
    return ActivateOne(*clients->front(), *delta, staged->front(), *probation);
  return ActivateOnAll(*std::move(clients), *staged, *delta, expiry, *probation);
}

}  // namespace

Command DeltaPushCommand() {
  std::vector<FlagSpec> flags = {
      {"model", "NAME", "The model that takes it. Default: the one that it was made for."},
      {"no_activate", "", "Only stage it: espalier delta activate has it serve."},
      {"expiry", "DURATION",
       "With several servers: nobody has it serve after so long. 1s to 24h. Default: 5m."},
      {"resume", "ID", "Finish a push to several servers that was cut off; no DELTA is needed."},
  };
  for (FlagSpec& flag : ProbationFlags()) flags.push_back(std::move(flag));
  return {
      {.name = "delta push",
       .summary = "sends a delta to servers and has it serve",
       .arguments = "[DELTA]",
       .max_positional = 1,
       .flags = WithUpdateFlags(std::move(flags), "to"),
       .details =
           R"(A broken connection goes on where it was cut; pushing again what a server has sends nothing. What
serves keeps serving until the new version is checked and ready.

Several servers take it all together or not at all. The first one decides, and what it decided stands:
a server that was away asks another one, and serves what it served until it knows. They must reach one
another under the addresses of --to, and have one token.

With --golden or --canary each of several servers tries the version before it promises to serve it, the first one
before the others; if it fails on one, none serves it. From then on each judges --probation for itself, and one on
which it fails goes back alone: espalier delta versions MODEL --url A,B,... shows which, espalier delta log why.

Examples:
  espalier delta push step.espd
  espalier delta push step.espd --to replicas.prod.svc:8003 --token_file token --probation 10m
  espalier delta push --resume 00112233445566778899aabbccddeeff --to replicas.prod.svc:8003
  espalier delta push step.espd --no_activate && espalier delta activate digits 7)"},
      &Run};
}

}  // namespace espalier::cli
