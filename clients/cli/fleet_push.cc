#include "clients/cli/fleet_push.h"

#include <atomic>
#include <iostream>
#include <random>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

namespace espalier::cli {
namespace {

using client::UpdateClient;

// Servers that are talked to at once.
constexpr size_t kAtOnce = 16;

std::string NewId() {
  std::random_device device;  // the system's, not a seeded one
  std::string bytes;
  while (bytes.size() < 16) bytes.push_back(static_cast<char>(device()));
  return absl::BytesToHexString(bytes);
}

std::string ResumeHint(const std::string& id, const UpdateClient& any) {
  return absl::StrCat("espalier delta push --resume ", id, " --to ", any.target());
}

void TellServes(const UpdateClient& client, const v1::Transaction& transaction) {
  std::cout << absl::StrCat(client.target(), ": version ", transaction.version(), " of ",
                            transaction.model(), " serves",
                            transaction.probation().seconds() > 0 ? ", on probation" : "", "\n")
            << std::flush;
}

// Who went back alone, later, is for the servers to say.
void TellWhereToLook(const UpdateClients& clients, const v1::Transaction& transaction) {
  if (transaction.probation().seconds() <= 0) return;
  const auto target = [](std::string* out, const auto& client) { out->append(client->target()); };
  std::cout << absl::StrCat(
                   "each server judges it for itself, and goes back alone if it fails there: "
                   "espalier delta versions ",
                   transaction.model(), " --url ", absl::StrJoin(clients, ",", target), "\n")
            << std::flush;
}

// What `client` has decided then. An error also when that is not carried out yet.
absl::StatusOr<v1::TransactionState> DecideOn(UpdateClient& client,
                                              const v1::Transaction& transaction, bool commit) {
  auto state = client.Decide(transaction, commit);
  if (!absl::IsFailedPrecondition(state.status())) return state;
  // It was decided otherwise, or cannot be carried out: the server knows which.
  const auto known = client.GetTransaction(transaction.id());
  const auto otherwise = commit ? v1::ABORTED : v1::COMMITTED;
  if (known.ok() && known->state() == otherwise) return otherwise;
  return state;
}

// What the first participant decided, told to all others; those that miss it will ask.
absl::Status TellOthers(const UpdateClients& clients, const v1::Transaction& transaction,
                        bool commit) {
  std::atomic<int> missed = 0;
  (void)InParallel(clients, [&](size_t i) {
    if (i == 0) return absl::OkStatus();
    const auto state = DecideOn(*clients[i], transaction, commit);
    if (!commit && absl::IsNotFound(state.status())) return absl::OkStatus();  // it never promised
    if (!state.ok()) {
      ++missed;
    } else if (*state == v1::COMMITTED) {
      TellServes(*clients[i], transaction);
    }
    return state.status();
  });
  if (commit) TellWhereToLook(clients, transaction);
  if (missed == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(missed.load(), " of ", clients.size(), " servers missed the decision to ",
                   commit ? "commit" : "abort",
                   ", which stands: they follow when they reach the first one; or run ",
                   ResumeHint(transaction.id(), *clients.front())));
}

// Nobody has committed. The first one decides that nobody will.
absl::Status Abort(const UpdateClients& clients, const v1::Transaction& transaction,
                   const absl::Status& why) {
  const auto state = DecideOn(*clients.front(), transaction, /*commit=*/false);
  if (state.ok() && *state == v1::COMMITTED) return TellOthers(clients, transaction, true);
  if (!state.ok() && !absl::IsNotFound(state.status())) {
    return absl::UnavailableError(absl::StrCat(
        why.message(), "; and the first server cannot be told to abort (", state.status().message(),
        "): it will at ", absl::FormatTime(absl::FromUnixSeconds(transaction.expires_seconds())),
        " by itself"));
  }
  (void)TellOthers(clients, transaction, false);
  return absl::AbortedError(
      absl::StrCat(why.message(), "; so no server has changed, the version stays staged"));
}

absl::Status Decide(const UpdateClients& clients, const v1::Transaction& transaction) {
  const auto state = DecideOn(*clients.front(), transaction, /*commit=*/true);
  if (!state.ok()) {
    const absl::Status explained = Explain(*clients.front(), state.status());
    return absl::Status(
        explained.code(),
        absl::StrCat(explained.message(), "; whether it has decided is not known: run ",
                     ResumeHint(transaction.id(), *clients.front())));
  }
  if (*state != v1::COMMITTED) {
    (void)TellOthers(clients, transaction, false);
    return absl::AbortedError("the transaction was aborted, or expired: no server has changed");
  }
  TellServes(*clients.front(), transaction);
  return TellOthers(clients, transaction, true);
}

// The first participant has lost what it knew, so it cannot decide any more; when none of the others
// has heard of a decision, none will come.
absl::Status ResumeWithoutFirst(const UpdateClients& clients, const v1::Transaction& transaction) {
  std::atomic<bool> committed = false;
  const auto heard = InParallel(clients, [&](size_t i) {
    if (i == 0) return absl::OkStatus();
    const auto state = clients[i]->GetTransaction(transaction.id());
    if (state.ok() && state->state() == v1::COMMITTED) committed = true;
    return absl::IsNotFound(state.status()) ? absl::OkStatus() : state.status();
  });
  if (!heard.ok()) {
    return absl::UnavailableError(absl::StrCat(
        clients.front()->target(),
        " should decide, but does not know the transaction; without it all others are needed: ",
        heard.message()));
  }
  const auto told = TellOthers(clients, transaction, committed);
  if (!told.ok() || committed) return told;
  return absl::AbortedError("the first server does not know it: no server has changed");
}

absl::StatusOr<v1::GetTransactionResponse> Find(const UpdateClients& clients,
                                                const std::string& id) {
  absl::Status first;
  for (const auto& client : clients) {
    auto found = client->GetTransaction(id);
    if (found.ok()) return found;
    first.Update(Explain(*client, found.status()));
  }
  return first;
}

}  // namespace

absl::Status InParallel(const UpdateClients& clients,
                        const std::function<absl::Status(size_t)>& work) {
  std::vector<absl::Status> results(clients.size());
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < std::min(kAtOnce, clients.size()); ++i) {
    threads.emplace_back([&] {
      for (size_t each; (each = next++) < clients.size();)
        results[each] = Explain(*clients[each], work(each));
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status first;
  for (const absl::Status& result : results) {
    if (result.ok()) continue;
    if (clients.size() > 1) std::cerr << "espalier: " << result.message() << "\n";
    first.Update(result);
  }
  return first;
}

absl::Duration CanaryTime(size_t servers, const v1::Probation& probation) {
  const size_t turns = 1 + (servers - 1 + kAtOnce - 1) / kAtOnce;
  return static_cast<double>(turns) * absl::Seconds(probation.canary_seconds());
}

absl::Status CommitOnAll(const UpdateClients& clients, const FleetVersion& version) {
  v1::Transaction transaction;
  transaction.set_id(NewId());
  transaction.set_model(version.model);
  transaction.set_version(version.version);
  transaction.set_weights(version.weights);
  for (const auto& client : clients) transaction.add_participants(client->target());
  transaction.set_expires_seconds(absl::ToUnixSeconds(absl::Now() + version.expiry));
  if (version.probation) *transaction.mutable_probation() = *version.probation;
  std::cerr << "espalier: transaction " << transaction.id() << "\n";
  // The first one before the others, so that whoever asks it finds that it knows.
  auto status = Explain(*clients.front(), clients.front()->Prepare(transaction, 0));
  if (status.ok()) {
    status = InParallel(clients, [&](size_t i) {
      return i == 0 ? absl::OkStatus() : clients[i]->Prepare(transaction, static_cast<int>(i));
    });
  }
  return status.ok() ? Decide(clients, transaction) : Abort(clients, transaction, status);
}

absl::Status Resume(const UpdateClients& clients, const std::string& id, const ConnectTo& connect) {
  const auto found = Find(clients, id);
  if (!found.ok()) return found.status();
  const v1::Transaction& transaction = found->transaction();
  if (transaction.participants_size() < 2)
    return absl::InternalError("the transaction has no participants");
  const auto participants =
      connect({transaction.participants().begin(), transaction.participants().end()});
  if (!participants.ok()) return participants.status();
  const auto first = participants->front()->GetTransaction(id);
  if (absl::IsNotFound(first.status())) return ResumeWithoutFirst(*participants, transaction);
  if (!first.ok()) return Explain(*participants->front(), first.status());
  if (first->state() == v1::COMMITTED) TellServes(*participants->front(), transaction);
  if (first->state() != v1::PREPARED)
    return TellOthers(*participants, transaction, first->state() == v1::COMMITTED);
  const auto prepared = InParallel(*participants, [&](size_t i) {
    const auto state = (*participants)[i]->GetTransaction(id);
    return state.ok() && state->state() == v1::ABORTED
               ? absl::AbortedError("it has aborted the transaction")
               : state.status();
  });
  return prepared.ok() ? Decide(*participants, transaction)
                       : Abort(*participants, transaction, prepared);
}

}  // namespace espalier::cli
