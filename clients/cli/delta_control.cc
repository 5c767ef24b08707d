#include <filesystem>
#include <iostream>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/cli/command.h"
#include "clients/cli/delta_files.h"
#include "clients/cli/file.h"
#include "clients/cli/table.h"
#include "clients/cli/update_servers.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/sha256.h"

namespace espalier::cli {
namespace {

constexpr int64_t kMaxVersion = int64_t{1} << 62;

absl::StatusOr<int64_t> VersionArgument(const Args& args, size_t index) {
  int64_t version = 0;
  if (absl::SimpleAtoi(args.positional()[index], &version) && version > 0) return version;
  return WrongUsage(
      absl::StrCat("expected a version number above zero, got '", args.positional()[index], "'"));
}

absl::Status RunActivate(const Args& args) {
  const auto version = VersionArgument(args, 1);
  if (!version.ok()) return version.status();
  const auto probation = ReadProbation(args);
  if (!probation.ok()) return probation.status();
  const auto clients = ConnectUpdates(args);
  if (!clients.ok()) return clients.status();
  return ForEach(*clients, [&](client::UpdateClient& client) {
    const auto status = client.Activate(args.positional()[0], *version, *probation);
    if (status.ok())
      std::cout << client.target() << ": version " << *version << " serves" << std::endl;
    return status;
  });
}

// After a rollback that only the servers `back` took, to the versions that they serve now.
void TellThatTheyDiffer(const Args& args, const UpdateClients& clients,
                        const std::map<std::string, int64_t>& back) {
  const std::string& model = args.positional()[0];
  Table table({"SERVER", "SERVES", "WENT BACK"});
  std::vector<std::string> others;
  for (const auto& client : clients) {
    const bool went = back.count(client->target()) > 0;
    if (!went) others.push_back(client->target());
    const auto list = client->List(model);
    table.AddRow({client->target(),
                  list.ok() && list->models_size() == 1
                      ? absl::StrCat(list->models(0).serving())
                      : absl::StrCat("unknown, ", absl::StatusCodeToString(list.status().code())),
                  went ? "yes" : "no"});
  }
  std::cout << table.ToString() << std::flush;
  std::cerr
      << "espalier: warning: only " << back.size() << " of " << clients.size()
      << " servers went back, and the others may serve another version. To mend it, when they "
         "can again:\n  espalier delta rollback "
      << model << " --to " << back.begin()->second << " --url " << absl::StrJoin(others, ",")
      << (args.Has("token_file") ? " --token_file " : "") << args.String("token_file", "") << "\n";
}

absl::Status RunRollback(const Args& args) {
  const auto to = args.Int("to", 0, 1, kMaxVersion);
  if (!to.ok()) return to.status();
  const auto clients = ConnectUpdates(args);
  if (!clients.ok()) return clients.status();
  std::map<std::string, int64_t> back;
  const auto status = ForEach(*clients, [&](client::UpdateClient& client) {
    const auto version = client.Rollback(args.positional()[0],
                                         args.String("reason", "espalier delta rollback"), *to);
    if (!version.ok()) return version.status();
    std::cout << client.target() << ": version " << *version << " serves" << std::endl;
    back[client.target()] = *version;
    return absl::OkStatus();
  });
  if (!status.ok() && !back.empty()) TellThatTheyDiffer(args, *clients, back);
  return status;
}

absl::Status RunConfirm(const Args& args) {
  const auto version = VersionArgument(args, 1);
  if (!version.ok()) return version.status();
  const auto clients = ConnectUpdates(args);
  if (!clients.ok()) return clients.status();
  return ForEach(*clients, [&](client::UpdateClient& client) {
    const auto status = client.Confirm(args.positional()[0], *version);
    if (status.ok())
      std::cout << client.target() << ": version " << *version << " is confirmed" << std::endl;
    return status;
  });
}

// Writes what FetchDeltas sends, a file each, checked against its header.
class FetchedFiles {
 public:
  FetchedFiles(std::string folder, std::string model)
      : folder_(std::move(folder)), model_(std::move(model)) {}

  absl::Status Take(const v1::FetchDeltasResponse& part) {
    if (part.has_header()) return Begin(part.header());
    if (!file_) return absl::InternalError("the server sent bytes of no delta");
    if (part.chunk().size() > header_.bytes() - file_->size()) {
      return absl::InternalError(
          absl::StrCat("the server sent more than the ", header_.bytes(), " bytes that it said"));
    }
    sha_.Update(part.chunk());
    return file_->Append(part.chunk());
  }

  // After the last part.
  absl::Status End() {
    if (!file_) return absl::OkStatus();
    const updates::Digest digest = sha_.Finish();
    if (file_->size() != header_.bytes() ||
        absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()) !=
            header_.sha256()) {
      return absl::DataLossError(absl::StrCat("the delta to version ", header_.to_version(),
                                              " did not arrive as the server said"));
    }
    if (auto status = file_->Commit(); !status.ok()) return status;
    std::cout << path_ << ": version " << header_.from_version() << " to " << header_.to_version()
              << ", " << SizeText(static_cast<double>(header_.bytes())) << std::endl;
    file_.reset();
    ++count_;
    return absl::OkStatus();
  }

  int count() const { return count_; }

 private:
  absl::Status Begin(const v1::DeltaHeader& header) {
    if (auto status = End(); !status.ok()) return status;
    header_ = header;
    path_ = absl::StrCat(folder_, "/", model_, "-", header.to_version(), ".espd");
    if (auto status = CheckReplaceable(path_); !status.ok()) return status;
    auto file = updates::AtomicFile::Create(path_);
    if (!file.ok()) return file.status();
    file_.emplace(*std::move(file));
    return absl::OkStatus();
  }

  const std::string folder_, model_;
  v1::DeltaHeader header_;
  std::string path_;
  std::optional<updates::AtomicFile> file_;
  updates::Sha256 sha_;
  int count_ = 0;
};

absl::Status RunFetch(const Args& args) {
  const std::string& model = args.positional()[0];
  const auto from = args.Int("from", 0, 1, kMaxVersion);
  if (!from.ok()) return from.status();
  if (*from == 0) return WrongUsage("--from is missing: the version that you have");
  const std::string folder = args.String("output", ".");
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(absl::StrCat(folder, " is no directory"));
  }
  // The model's name becomes part of file names.
  if (model.find('/') != std::string::npos || model.empty() || model.front() == '.')
    return WrongUsage(absl::StrCat("'", model, "' is no model name"));
  const auto client = ConnectUpdate(args);
  if (!client.ok()) return client.status();
  FetchedFiles files(folder, model);
  const auto status = (*client)->Fetch(
      model, *from, [&](const v1::FetchDeltasResponse& part) { return files.Take(part); });
  if (!status.ok()) return Explain(**client, status);
  if (auto end = files.End(); !end.ok()) return Explain(**client, end);
  if (files.count() == 0) std::cout << "version " << *from << " is the one that serves\n";
  return absl::OkStatus();
}

}  // namespace

Command DeltaActivateCommand() {
  return {{.name = "delta activate",
           .summary = "has a staged version serve",
           .arguments = "MODEL VERSION",
           .min_positional = 2,
           .max_positional = 2,
           .flags = WithUpdateFlags(ProbationFlags()),
           .details = R"(What espalier delta push does after it, unless --no_activate says not to.

Examples:
  espalier delta activate digits 7 --probation 10m --canary 0.05 --canary_duration 1m)"},
          &RunActivate};
}

Command DeltaRollbackCommand() {
  return {
      {.name = "delta rollback",
       .summary = "back to a version that served before, at once",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags = WithUpdateFlags(
           {{"to", "VERSION", "One that served before. Default: what the active one replaced."},
            {"reason", "TEXT", "For the log."}}),
       .details =
           R"(Needs no delta: servers keep the versions that served, and the ways back. Several servers go back
one by one: when some cannot, a table and a warning say which, and the command that mends it.

Examples:
  espalier delta rollback digits --reason "accuracy dropped"
  espalier delta rollback digits --to 3 --url a:8003,b:8003)"},
      &RunRollback};
}

Command DeltaConfirmCommand() {
  return {{.name = "delta confirm",
           .summary = "ends the probation of the version that serves",
           .arguments = "MODEL VERSION",
           .min_positional = 2,
           .max_positional = 2,
           .flags = WithUpdateFlags({}),
           .details = R"(It is not rolled back by itself any more.

Examples:
  espalier delta confirm digits 7)"},
          &RunConfirm};
}

Command DeltaFetchCommand() {
  return {
      {.name = "delta fetch",
       .summary = "the deltas that lead from a version to the one that a server serves",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags = WithUpdateFlags(
           {{"from", "VERSION", "The version that you have. Needed."},
            {"output", "FOLDER", "Where to write them. Default: here.", false, 'o'}}),
       .details =
           R"(Writes MODEL-VERSION.espd files, to be pushed or applied in their order. Files of an earlier fetch
are replaced; a link or a device in their place is not.

Examples:
  espalier delta fetch digits --from 3 -o deltas/)"},
      &RunFetch};
}

}  // namespace espalier::cli
