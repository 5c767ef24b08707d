// update_servers.h — what the commands share that talk to update services: which servers, with which
// token, and how their errors read.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cli/args.h"
#include "clients/cpp/update_client.h"

namespace espalier::cli {

using UpdateClients = std::vector<std::unique_ptr<client::UpdateClient>>;

// --url (or what `servers` calls it), --token_file and --deadline, followed by `flags`.
std::vector<FlagSpec> WithUpdateFlags(std::vector<FlagSpec> flags,
                                      const std::string& servers = "url");

// Every address that each HOST:PORT of a comma-separated list stands for: a name with several (a
// headless service of Kubernetes) means all of them, by IPv4 if it has any. InvalidArgument for what
// is no HOST:PORT; Unavailable for a name that has none.
absl::StatusOr<std::vector<std::string>> ResolveServers(const std::string& list);

absl::StatusOr<UpdateClients> ConnectUpdates(const Args& args, const std::string& servers = "url");
// The same to addresses of servers.
absl::StatusOr<UpdateClients> ConnectUpdatesTo(const Args& args,
                                               const std::vector<std::string>& targets);
// For commands that make sense for one server only.
absl::StatusOr<std::unique_ptr<client::UpdateClient>> ConnectUpdate(const Args& args);

// Runs `work` for each in turn; all are tried, the first error is returned.
absl::Status ForEach(const UpdateClients& clients,
                     const std::function<absl::Status(client::UpdateClient&)>& work);

// `status` as the user should read it: which server, what to do.
absl::Status Explain(const client::UpdateClient& client, const absl::Status& status);

// --probation and the flags that say what it asks for.
std::vector<FlagSpec> ProbationFlags();
absl::StatusOr<std::optional<v1::Probation>> ReadProbation(const Args& args);

}  // namespace espalier::cli
