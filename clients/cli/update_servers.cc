#include "clients/cli/update_servers.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "clients/cli/file.h"
#include "engine/formats/names.h"

namespace espalier::cli {
namespace {

constexpr char kDefaultServer[] = "127.0.0.1:8003";
constexpr int64_t kMaxTokenBytes = 64 << 10;
constexpr size_t kMaxServers = 256;

std::string TextOf(const addrinfo& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ai_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address.ai_addr);
  return absl::StrCat("[", inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text)), "]");
}

// The addresses of one HOST:PORT. A name has those of one family only: both lead to the same hosts.
absl::StatusOr<std::vector<std::string>> Resolve(const std::string& server) {
  const size_t colon = server.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(absl::string_view(server).substr(colon + 1), &port) || port < 1 ||
      port > 65535) {
    return WrongUsage(absl::StrCat("expected HOST:PORT, like ", kDefaultServer, ", got '",
                                   formats::Shown(server), "'"));
  }
  std::string host = server.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::UnavailableError(
        absl::StrCat("host '", formats::Shown(host), "' has no address: ", gai_strerror(error)));
  }
  std::vector<std::string> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    if (!addresses.empty()) break;
    for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
      if (each->ai_family == family) addresses.push_back(absl::StrCat(TextOf(*each), ":", port));
    }
  }
  freeaddrinfo(found);
  return addresses;
}

absl::StatusOr<std::string> ReadToken(const Args& args) {
  if (!args.Has("token_file")) return std::string();
  auto content = ReadFile(args.String("token_file", ""), kMaxTokenBytes);
  if (!content.ok()) return content.status();
  const std::string token(absl::StripAsciiWhitespace(*content));
  // gRPC ends the program over a header that is none.
  if (token.empty() || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return absl::InvalidArgumentError(
        absl::StrCat(args.String("token_file", ""),
                     " has no token: expected printable characters without spaces"));
  }
  return token;
}

absl::StatusOr<double> Seconds(const Args& args, absl::string_view flag) {
  const std::string text = args.String(flag, "0s");
  if (text == "forever") return std::numeric_limits<double>::infinity();
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration) || duration < absl::ZeroDuration()) {
    return WrongUsage(
        absl::StrCat("--", flag, ": expected a duration like 10m or 90s, got '", text, "'"));
  }
  return absl::ToDoubleSeconds(duration);
}

// As the server does, in the words of the command line.
absl::Status CheckHasEffect(const v1::Probation& probation) {
  const bool share = probation.canary_share() > 0, duration = probation.canary_seconds() > 0;
  if (share && !duration)
    return WrongUsage("--canary does nothing without --canary_duration: how long it lasts");
  if (duration && !share)
    return WrongUsage("--canary_duration does nothing without --canary: its share of the requests");
  const bool judges = probation.max_error_rate() > 0 || probation.max_latency_ratio() > 0;
  if (!judges || share || probation.seconds() > 0) return absl::OkStatus();
  return WrongUsage(
      absl::StrCat(probation.max_error_rate() > 0 ? "--max_error_rate" : "--max_latency_ratio",
                   " does nothing without --probation or --canary"));
}

}  // namespace

std::vector<FlagSpec> WithUpdateFlags(std::vector<FlagSpec> flags, const std::string& servers) {
  std::vector<FlagSpec> all = {
      {servers, "HOST:PORT[,...]",
       absl::StrCat(
           "Update addresses of servers (espalierd --update_address). A name with several\n"
           "addresses means all of them. Default: ",
           kDefaultServer, ".")},
      {"token_file", "FILE", "File with the servers' token (espalierd --update_token_file)."},
      {"deadline", "SECONDS", "Time that one call may take. Default: 60."},
  };
  all.insert(all.end(), flags.begin(), flags.end());
  return all;
}

absl::StatusOr<std::vector<std::string>> ResolveServers(const std::string& list) {
  std::vector<std::string> all;
  for (const absl::string_view server : absl::StrSplit(list, ',')) {
    auto addresses = Resolve(std::string(absl::StripAsciiWhitespace(server)));
    if (!addresses.ok()) return addresses.status();
    for (std::string& address : *addresses) {
      if (std::find(all.begin(), all.end(), address) == all.end())
        all.push_back(std::move(address));
    }
  }
  if (all.size() > kMaxServers) {
    return absl::ResourceExhaustedError(
        absl::StrCat(all.size(), " servers, expected at most ", kMaxServers));
  }
  return all;
}

absl::StatusOr<UpdateClients> ConnectUpdates(const Args& args, const std::string& servers) {
  const auto targets = ResolveServers(args.String(servers, kDefaultServer));
  if (IsWrongUsage(targets.status()))
    return WrongUsage(absl::StrCat("--", servers, ": ", targets.status().message()));
  return targets.ok() ? ConnectUpdatesTo(args, *targets) : targets.status();
}

absl::StatusOr<UpdateClients> ConnectUpdatesTo(const Args& args,
                                               const std::vector<std::string>& targets) {
  const auto seconds = args.Double("deadline", 60, 0.001, 86400);
  if (!seconds.ok()) return seconds.status();
  const auto token = ReadToken(args);
  if (!token.ok()) return token.status();
  UpdateClients clients;
  for (const std::string& target : targets) {
    auto client = client::UpdateClient::Create(target, {*token, absl::Seconds(*seconds)});
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
  }
  return clients;
}

absl::StatusOr<std::unique_ptr<client::UpdateClient>> ConnectUpdate(const Args& args) {
  auto clients = ConnectUpdates(args);
  if (!clients.ok()) return clients.status();
  if (clients->size() == 1) return std::move(clients->front());
  return WrongUsage(
      absl::StrCat("--url stands for ", clients->size(), " servers; this command needs one"));
}

absl::Status ForEach(const UpdateClients& clients,
                     const std::function<absl::Status(client::UpdateClient&)>& work) {
  absl::Status first;
  for (const auto& client : clients) first.Update(Explain(*client, work(*client)));
  return first;
}

absl::Status Explain(const client::UpdateClient& client, const absl::Status& status) {
  if (status.ok()) return status;
  std::string hint;
  if (absl::IsUnavailable(status)) {
    hint = "; is there an espalierd with --update_address?";
  } else if (absl::IsUnimplemented(status)) {
    hint = "; is that the address for updates (--update_address), not the one for inference?";
  }
  return absl::Status(status.code(),
                      absl::StrCat(client.target(), ": ", absl::StatusCodeToString(status.code()),
                                   ": ", formats::Shown(status.message(), 2048), hint));
}

std::vector<FlagSpec> ProbationFlags() {
  return {
      {"probation", "DURATION",
       "Rolled back by itself if it fails within so long, then confirmed: 10m; forever: until\n"
       "espalier delta confirm. Default: the server's."},
      {"canary", "SHARE",
       "Before that, only so much of the requests: 0.05. With --canary_duration. Default: 0, no\n"
       "canary."},
      {"canary_duration", "DURATION", "For so long: 1m."},
      {"max_error_rate", "SHARE",
       "Fails with more failed requests than the old version had, by this share. With --probation\n"
       "or --canary. Default: any."},
      {"max_latency_ratio", "RATIO",
       "Fails when it computes longer than the old version, times this. With --probation or\n"
       "--canary. Default: any."},
      {"golden", "", "The requests in <model>/golden/ must pass before it serves."},
  };
}

absl::StatusOr<std::optional<v1::Probation>> ReadProbation(const Args& args) {
  const std::vector<FlagSpec> flags = ProbationFlags();
  if (std::none_of(flags.begin(), flags.end(),
                   [&](const FlagSpec& flag) { return args.Has(flag.name); })) {
    return std::nullopt;
  }
  v1::Probation probation;
  const auto seconds = Seconds(args, "probation");
  if (!seconds.ok()) return seconds.status();
  probation.set_seconds(*seconds);
  const auto canary_seconds = Seconds(args, "canary_duration");
  if (!canary_seconds.ok()) return canary_seconds.status();
  probation.set_canary_seconds(*canary_seconds);
  const auto share = args.Double("canary", 0, 0, 1);
  if (!share.ok()) return share.status();
  probation.set_canary_share(*share);
  const auto errors = args.Double("max_error_rate", 0, 0, 1);
  if (!errors.ok()) return errors.status();
  probation.set_max_error_rate(*errors);
  const auto latency = args.Double("max_latency_ratio", 0, 0, 1e6);
  if (!latency.ok()) return latency.status();
  probation.set_max_latency_ratio(*latency);
  probation.set_golden_requests(args.Has("golden"));
  if (auto status = CheckHasEffect(probation); !status.ok()) return status;
  return probation;
}

}  // namespace espalier::cli
