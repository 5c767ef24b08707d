#include "engine/updates/fleet_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/updates/bytes.h"
#include "engine/updates/store_state.h"
#include "engine/updates/stored_file.h"

namespace espalier::updates {
namespace {

using absl::FailedPreconditionError;
using absl::InvalidArgumentError;
using absl::StrCat;

constexpr size_t kMaxIdBytes = 64;
constexpr size_t kMaxTransactions = FleetLog::kKept + 1;
constexpr uint64_t kMaxSeconds = uint64_t{1} << 62;

absl::Status CheckTransaction(const FleetTransaction& transaction) {
  const std::string& id = transaction.id;
  const bool plain = std::all_of(id.begin(), id.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '_' || c == '-';
  });
  if (id.empty() || id.size() > kMaxIdBytes || !plain)
    return InvalidArgumentError(
        StrCat("the id of a transaction has 1 to ", kMaxIdBytes, " letters, digits, '_' and '-'"));
  const size_t count = transaction.participants.size();
  if (count < 1 || count > FleetLog::kMaxParticipants) {
    return InvalidArgumentError(
        StrCat(count, " participants, expected 1 to ", FleetLog::kMaxParticipants));
  }
  for (const std::string& address : transaction.participants) {
    if (address.empty() || address.size() > FleetLog::kMaxAddressBytes) {
      return InvalidArgumentError(StrCat("a participant's address of ", address.size(),
                                         " bytes, expected 1 to ", FleetLog::kMaxAddressBytes));
    }
  }
  if (transaction.self < 0 || transaction.self >= static_cast<int64_t>(count)) {
    return InvalidArgumentError(
        StrCat("this server is participant ", transaction.self, ", expected 0 to ", count - 1));
  }
  if (transaction.version < 1 || transaction.version > kMaxVersionNumber)
    return InvalidArgumentError(StrCat("version ", transaction.version));
  return CheckTerms(transaction.probation);
}

constexpr uint16_t kWithProbations = 2;

bool HasProbation(const FleetTransaction& transaction) {
  return transaction.probation != ProbationOptions();
}

std::string Serialize(const std::vector<FleetTransaction>& transactions, uint16_t version) {
  ByteWriter out;
  out.Varint(transactions.size());
  for (const FleetTransaction& transaction : transactions) {
    out.Text(transaction.id);
    out.Varint(static_cast<uint64_t>(transaction.version));
    out.Varint(transaction.participants.size());
    for (const std::string& address : transaction.participants) out.Text(address);
    out.Varint(static_cast<uint64_t>(transaction.self));
    out.Varint(static_cast<uint64_t>(transaction.expires_seconds));
    out.Byte(static_cast<uint8_t>(transaction.decision));
    out.Byte(transaction.done ? 1 : 0);
    if (version >= kWithProbations) SerializeTerms(out, transaction.probation);
  }
  return out.Take();
}

absl::StatusOr<std::vector<FleetTransaction>> Parse(absl::string_view bytes, uint16_t version) {
  ByteReader reader(bytes);
  FieldReader fields(reader);
  std::vector<FleetTransaction> transactions(fields.Varint("transactions", kMaxTransactions));
  for (FleetTransaction& transaction : transactions) {
    transaction.id = fields.Text("id", kMaxIdBytes);
    transaction.version = fields.Count("version", kMaxVersionNumber);
    transaction.participants.resize(fields.Varint("participants", FleetLog::kMaxParticipants));
    for (std::string& address : transaction.participants)
      address = fields.Text("address", FleetLog::kMaxAddressBytes);
    transaction.self = fields.Count("self", FleetLog::kMaxParticipants);
    transaction.expires_seconds = fields.Count("expiry", kMaxSeconds);
    transaction.decision = static_cast<FleetDecision>(fields.Byte("decision", 2));
    transaction.done = fields.Flag("done");
    if (version >= kWithProbations) transaction.probation = fields.Take(ParseTerms(reader));
    if (!fields.ok()) break;
    if (auto status = CheckTransaction(transaction); !status.ok()) return status;
  }
  fields.End("transactions");
  if (!fields.ok()) return fields.status();
  return transactions;
}

}  // namespace

const char* NameOf(FleetDecision decision) {
  constexpr const char* kNames[] = {"UNDECIDED", "COMMIT", "ABORT"};
  return kNames[static_cast<uint8_t>(decision)];
}

absl::StatusOr<std::unique_ptr<FleetLog>> FleetLog::Open(FileSystem& files,
                                                         const std::string& path) {
  if (auto status = EnsureFolder(files, FolderOf(path)); !status.ok()) return status;
  std::unique_ptr<FleetLog> log(new FleetLog(files, path));
  const auto there = files.Exists(path);
  if (!there.ok()) return there.status();
  if (!*there) return log;
  auto reader = SealedReader::Open(files, path, StoredKind::kFleet);
  if (!reader.ok()) return reader.status();
  const auto block = reader->NextBlock();
  if (!block.ok()) return block.status();
  if (auto status = reader->End(); !status.ok()) return status;
  auto transactions = Parse(*block, reader->version());
  if (!transactions.ok()) return Damaged(path, transactions.status().message());
  const std::lock_guard lock(log->mutex_);
  log->transactions_ = *std::move(transactions);
  return log;
}

absl::Status FleetLog::Commit(std::vector<FleetTransaction> next) {
  while (next.size() > kKept) {
    const auto done = std::find_if(next.begin(), next.end(), [](const auto& t) { return t.done; });
    if (done == next.end()) break;
    next.erase(done);
  }
  const uint16_t version =
      std::any_of(next.begin(), next.end(), HasProbation) ? kWithProbations : 1;
  auto writer = SealedWriter::Create(files_, path_, StoredKind::kFleet, version);
  if (!writer.ok()) return writer.status();
  if (auto status = writer->AppendBlock(Serialize(next, version)); !status.ok()) return status;
  if (auto bytes = writer->Commit(); !bytes.ok()) return bytes.status();
  transactions_ = std::move(next);
  return absl::OkStatus();
}

absl::Status FleetLog::Prepare(FleetTransaction transaction, int64_t now_seconds) {
  if (auto status = CheckTransaction(transaction); !status.ok()) return status;
  transaction.decision = FleetDecision::kUndecided;
  transaction.done = false;
  const std::lock_guard lock(mutex_);
  for (const FleetTransaction& known : transactions_) {
    if (known.id == transaction.id) {
      if (known == transaction) return absl::OkStatus();
      return FailedPreconditionError(StrCat("transaction ", known.id, " is known, ",
                                            NameOf(known.decision), ", for version ", known.version,
                                            " of ", known.participants.size(), " participants"));
    }
    if (!known.done) {
      return FailedPreconditionError(StrCat("transaction ", known.id, " for version ",
                                            known.version, " is ", NameOf(known.decision),
                                            " and not done: one at a time"));
    }
  }
  if (transaction.expires_seconds <= now_seconds)
    return FailedPreconditionError(StrCat("transaction ", transaction.id, " has expired"));
  std::vector<FleetTransaction> next = transactions_;
  next.push_back(std::move(transaction));
  return Commit(std::move(next));
}

absl::StatusOr<FleetTransaction> FleetLog::Decide(const std::string& id, FleetDecision decision,
                                                  int64_t now_seconds) {
  const std::lock_guard lock(mutex_);
  std::vector<FleetTransaction> next = transactions_;
  const auto found =
      std::find_if(next.begin(), next.end(), [&](const auto& t) { return t.id == id; });
  if (found == next.end()) return absl::NotFoundError(StrCat("no transaction ", id, " is known"));
  FleetTransaction decided = *found;
  if (decided.decision == FleetDecision::kUndecided) {
    const bool late = decided.decides() && now_seconds >= decided.expires_seconds;
    decided.decision = late ? FleetDecision::kAbort : decision;
    decided.done = decided.decision == FleetDecision::kAbort;
    *found = decided;
    if (auto status = Commit(std::move(next)); !status.ok()) return status;
  }
  if (decided.decision == decision) return decided;
  return FailedPreconditionError(StrCat(
      "transaction ", id, " was decided: ", NameOf(decided.decision), ", not ", NameOf(decision)));
}

absl::Status FleetLog::Done(const std::string& id) {
  const std::lock_guard lock(mutex_);
  std::vector<FleetTransaction> next = transactions_;
  for (FleetTransaction& transaction : next) transaction.done |= transaction.id == id;
  return next == transactions_ ? absl::OkStatus() : Commit(std::move(next));
}

absl::StatusOr<FleetTransaction> FleetLog::Find(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  for (const FleetTransaction& transaction : transactions_) {
    if (transaction.id == id) return transaction;
  }
  return absl::NotFoundError(StrCat("no transaction ", id, " is known"));
}

std::optional<FleetTransaction> FleetLog::Committed(int64_t version) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(transactions_.rbegin(), transactions_.rend(), [&](const auto& t) {
    return t.version == version && t.decision == FleetDecision::kCommit;
  });
  if (found == transactions_.rend()) return std::nullopt;
  return *found;
}

std::optional<FleetTransaction> FleetLog::Pending() const {
  const std::lock_guard lock(mutex_);
  for (const FleetTransaction& transaction : transactions_) {
    if (!transaction.done) return transaction;
  }
  return std::nullopt;
}

}  // namespace espalier::updates
