#include "engine/updates/audit_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/stored_file.h"

namespace espalier::updates {
namespace {

constexpr uint64_t kHeadBytes = kStoredHeadBytes + sizeof(Digest);  // the chain so far
constexpr uint64_t kMaxRecordBytes = 8192;
constexpr uint64_t kMaxSigners = 64;
constexpr uint64_t kMaxNumber = uint64_t{1} << 62;

absl::string_view AsBytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

void CopyTo(absl::string_view from, Digest& digest) {
  std::copy(from.begin(), from.end(), digest.begin());
}

std::string OldPath(const std::string& path) { return path + ".old"; }

Digest ChainWith(const Digest& chain, absl::string_view framed) {
  Sha256 sha;
  sha.Update(chain);
  sha.Update(framed);
  return sha.Finish();
}

// size · record · SHA-256(chain so far · size · record); `chain` becomes the last.
std::string Frame(const AuditRecord& record, Digest& chain) {
  ByteWriter bytes, framed;
  SerializeAudit(bytes, record);
  framed.LittleEndian(bytes.size(), 4);
  framed.Raw(bytes.bytes());
  chain = ChainWith(chain, framed.bytes());
  framed.Raw(AsBytes(chain));
  return framed.Take();
}

}  // namespace

const char* NameOf(AuditAction action) {
  constexpr const char* kNames[kAuditActions + 1] = {
      "",          "base",      "refused",     "verified",    "staged",    "canary",
      "activated", "confirmed", "rolled back", "quarantined", "compacted", "lost"};
  return kNames[static_cast<uint8_t>(action)];
}

void SerializeAudit(ByteWriter& out, const AuditRecord& record) {
  out.Varint(static_cast<uint64_t>(record.sequence));
  out.Varint(static_cast<uint64_t>(record.seconds));
  out.Byte(static_cast<uint8_t>(record.action));
  out.Varint(static_cast<uint64_t>(record.number));
  out.Raw(AsBytes(record.before));
  out.Raw(AsBytes(record.after));
  const size_t signers = std::min<size_t>(record.signers.size(), kMaxSigners);
  out.Varint(signers);
  for (size_t i = 0; i < signers; ++i)
    out.Raw({reinterpret_cast<const char*>(record.signers[i].data()), record.signers[i].size()});
  out.Text(absl::string_view(record.reason).substr(0, kMaxReasonBytes));
}

absl::StatusOr<AuditRecord> ParseAudit(ByteReader& reader) {
  AuditRecord record;
  for (int64_t* number : {&record.sequence, &record.seconds}) {
    const auto value = reader.Varint("number", kMaxNumber);
    if (!value.ok()) return value.status();
    *number = static_cast<int64_t>(*value);
  }
  const auto action = reader.Byte("action");
  if (!action.ok()) return action.status();
  if (*action == 0 || *action > kAuditActions)
    return absl::InvalidArgumentError(absl::StrCat("action ", *action, " is not known"));
  record.action = static_cast<AuditAction>(*action);
  const auto number = reader.Varint("version", kMaxNumber);
  if (!number.ok()) return number.status();
  record.number = static_cast<int64_t>(*number);
  for (Digest* digest : {&record.before, &record.after}) {
    const auto raw = reader.Raw("digest", sizeof(Digest));
    if (!raw.ok()) return raw.status();
    CopyTo(*raw, *digest);
  }
  const auto signers = reader.Varint("number of signers", kMaxSigners);
  if (!signers.ok()) return signers.status();
  for (uint64_t i = 0; i < *signers; ++i) {
    const auto raw = reader.Raw("key", sizeof(KeyId));
    if (!raw.ok()) return raw.status();
    record.signers.emplace_back();
    std::copy(raw->begin(), raw->end(), record.signers.back().begin());
  }
  const auto reason = reader.Text("reason", kMaxReasonBytes);
  if (!reason.ok()) return reason.status();
  record.reason = std::string(*reason);
  return record;
}

absl::StatusOr<AuditLog::Scan> AuditLog::ScanFile(FileSystem& files, const std::string& path,
                                                  uint64_t max_bytes) {
  const auto bytes = ReadWhole(files, path, max_bytes + kHeadBytes + kMaxRecordBytes);
  if (!bytes.ok()) return bytes.status();
  Scan scan;
  scan.size = bytes->size();
  auto status =
      ReadStoredHead(StoredKind::kAuditLog, bytes->substr(0, kStoredHeadBytes), path).status();
  if (absl::IsUnimplemented(status)) return status;
  if (!status.ok() || bytes->size() < kHeadBytes) return scan;  // nothing of it is sound
  CopyTo(absl::string_view(*bytes).substr(kStoredHeadBytes, sizeof(Digest)), scan.chain);
  scan.sound_bytes = kHeadBytes;
  for (;;) {
    const absl::string_view rest = absl::string_view(*bytes).substr(scan.sound_bytes);
    ByteReader reader(rest);
    const auto size = reader.LittleEndian("size", 4);
    if (!size.ok() || *size > kMaxRecordBytes) return scan;
    const auto raw = reader.Raw("record", *size);
    const auto chain = raw.ok() ? reader.Raw("chain", sizeof(Digest)) : raw;
    if (!chain.ok()) return scan;
    const Digest expected = ChainWith(scan.chain, rest.substr(0, 4 + *size));
    if (*chain != AsBytes(expected)) return scan;
    ByteReader record_reader(*raw);
    auto record = ParseAudit(record_reader);
    if (!record.ok()) return scan;
    scan.records.push_back(*std::move(record));
    scan.chain = expected;
    scan.sound_bytes += reader.offset();
  }
}

absl::StatusOr<AuditLog> AuditLog::Open(FileSystem& files, std::string path, uint64_t max_bytes) {
  AuditLog log(files, std::move(path), max_bytes);
  const auto there = files.Exists(log.path_);
  if (!there.ok()) return there.status();
  if (const auto old = files.Exists(OldPath(log.path_)); old.ok() && *old) {
    const auto scan = ScanFile(files, OldPath(log.path_), max_bytes);
    if (!scan.ok()) return scan.status();
    log.chain_ = scan->chain;
    if (!scan->records.empty()) log.last_sequence_ = scan->records.back().sequence;
  }
  if (!*there) {
    if (auto status = log.StartFile(); !status.ok()) return status;
    return log;
  }
  const auto scan = ScanFile(files, log.path_, max_bytes);
  if (!scan.ok()) return scan.status();
  log.damaged_bytes_ = scan->size - scan->sound_bytes;
  if (!scan->records.empty()) log.last_sequence_ = scan->records.back().sequence;
  if (scan->sound_bytes == 0) {
    if (auto status = log.StartFile(); !status.ok()) return status;
    return log;
  }
  log.chain_ = scan->chain;
  log.size_ = scan->sound_bytes;
  log.suspect_ = log.damaged_bytes_ > 0;
  return log;
}

// An empty log that continues the chain, in place of what is there.
absl::Status AuditLog::StartFile() {
  auto file = AtomicFile::Create(path_, 0600, *files_);
  if (!file.ok()) return file.status();
  auto status = file->Append(StoredHead(StoredKind::kAuditLog));
  if (status.ok()) status = file->Append(AsBytes(chain_));
  if (status.ok()) status = file->Commit();
  if (!status.ok()) return status;
  size_ = kHeadBytes;
  suspect_ = false;
  file_.reset();
  return absl::OkStatus();
}

absl::Status AuditLog::WriteAnew() {
  file_.reset();
  const auto sound = files_->Open(path_, OpenMode::kRead);
  if (absl::IsNotFound(sound.status())) return StartFile();  // it became the old one, no further
  if (!sound.ok()) return sound.status();
  std::string bytes(size_, '\0');
  auto status = ReadExactly(**sound, 0, bytes.data(), bytes.size());
  if (!status.ok()) return status;
  auto file = AtomicFile::Create(path_, 0600, *files_);
  if (!file.ok()) return file.status();
  status = file->Append(bytes);
  if (status.ok()) status = file->Commit();
  if (status.ok()) suspect_ = false;
  return status;
}

absl::Status AuditLog::Rotate() {
  file_.reset();
  suspect_ = true;
  if (auto status = files_->Rename(path_, OldPath(path_)); !status.ok()) return status;
  size_ = kHeadBytes;
  return StartFile();
}

absl::Status AuditLog::Append(absl::Span<const AuditRecord> records) {
  if (records.empty()) return absl::OkStatus();
  if (suspect_) {
    if (auto status = WriteAnew(); !status.ok()) return status;
  }
  std::string bytes;
  Digest chain = chain_;
  for (const AuditRecord& record : records) bytes += Frame(record, chain);
  if (size_ > kHeadBytes && size_ + bytes.size() > max_bytes_ / 2) {
    if (auto status = Rotate(); !status.ok()) return status;
  }
  if (file_ == nullptr) {
    auto file = files_->Open(path_, OpenMode::kChange);
    if (!file.ok()) return file.status();
    file_ = *std::move(file);
  }
  suspect_ = true;
  if (auto status = AppendAll(*file_, bytes); !status.ok()) return status;
  if (auto status = file_->Sync(); !status.ok()) return status;
  suspect_ = false;
  chain_ = chain;
  size_ += bytes.size();
  last_sequence_ = records.back().sequence;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<AuditRecord>> AuditLog::Read(size_t most) const {
  std::vector<AuditRecord> records;
  for (const std::string& path : {OldPath(path_), path_}) {
    auto scan = ScanFile(*files_, path, max_bytes_);
    if (absl::IsNotFound(scan.status())) continue;
    if (!scan.ok()) return scan.status();
    records.insert(records.end(), std::make_move_iterator(scan->records.begin()),
                   std::make_move_iterator(scan->records.end()));
  }
  if (records.size() > most)
    records.erase(records.begin(), records.end() - static_cast<ptrdiff_t>(most));
  return records;
}

}  // namespace espalier::updates
