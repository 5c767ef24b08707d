#include "engine/updates/partial_delta.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/bytes.h"
#include "engine/updates/stored_file.h"

namespace espalier::updates {
namespace {

constexpr uint64_t kSumBytes = 4 + sizeof(Digest);
constexpr uint64_t kMaxSumsBytes = 64 << 20;
constexpr uint64_t kReadBytes = 1 << 20;

absl::string_view AsBytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

std::string SumsPathOf(const std::string& folder, const Digest& digest) {
  return absl::StrCat(folder, "/", Hex(digest), ".sums");
}

std::string PartPathOf(const std::string& folder, const Digest& digest) {
  return absl::StrCat(folder, "/", Hex(digest), ".part");
}

absl::StatusOr<std::unique_ptr<File>> OpenIfThere(FileSystem& files, const std::string& path) {
  auto file = files.Open(path, OpenMode::kChange);
  if (absl::IsNotFound(file.status())) return std::unique_ptr<File>();
  return file;
}

}  // namespace

std::string PartialDelta::WholePathOf(const std::string& folder, const Digest& digest) {
  return absl::StrCat(folder, "/", Hex(digest), ".whole");
}

absl::Status PartialDelta::Delete(FileSystem& files, const std::string& folder,
                                  const Digest& digest) {
  auto status = UnlinkIfThere(files, WholePathOf(folder, digest));
  status.Update(UnlinkIfThere(files, SumsPathOf(folder, digest)));
  status.Update(UnlinkIfThere(files, PartPathOf(folder, digest)));
  return status;
}

PartialDelta::PartialDelta(FileSystem& files, std::string folder, const Digest& digest,
                           uint64_t bytes, uint64_t piece_bytes)
    : files_(&files),
      folder_(std::move(folder)),
      digest_(digest),
      bytes_(bytes),
      piece_bytes_(piece_bytes) {}

PartialDelta::~PartialDelta() {
  if (part_ != nullptr && piece_ > 0) (void)EndPiece();
}

absl::StatusOr<PartialDelta> PartialDelta::Open(FileSystem& files, const std::string& folder,
                                                const Digest& digest, uint64_t bytes,
                                                uint64_t piece_bytes) {
  PartialDelta partial(files, folder, digest, bytes, piece_bytes);
  if (auto status = partial.Resume(); !status.ok()) {
    partial.part_.reset();
    return status;
  }
  return partial;
}

// How many bytes of the part are as their sums say; `whole_` has seen them.
absl::StatusOr<uint64_t> PartialDelta::CheckPieces(absl::string_view sums) {
  const auto size = part_->Size();
  if (!size.ok()) return size.status();
  uint64_t sound = 0, sums_used = kStoredHeadBytes;
  for (; sums.size() - sums_used >= kSumBytes; sums_used += kSumBytes) {
    ByteReader reader(sums.substr(sums_used, kSumBytes));
    const uint64_t piece = *reader.LittleEndian("size", 4);
    const uint64_t most = std::min({*size - sound, bytes_ - sound, piece_bytes_ + kReadBytes});
    if (piece == 0 || piece > most) break;
    std::string bytes(piece, '\0');
    if (auto status = ReadExactly(*part_, sound, bytes.data(), piece); !status.ok()) return status;
    if (AsBytes(Sha256Of(bytes)) != *reader.Raw("digest", sizeof(Digest))) break;
    whole_->Update(bytes);
    sound += piece;
  }
  if (sums_used < sums.size()) {
    if (auto status = sums_->Truncate(sums_used); !status.ok()) return status;
  }
  return sound;
}

// A new part and sums for it. The head of the sums is durable before anything follows it, so that a
// torn one is never taken for that of another version.
absl::Status PartialDelta::Begin() {
  if (auto status = Delete(*files_, folder_, digest_); !status.ok()) return status;
  auto part = files_->Open(PartPathOf(folder_, digest_), OpenMode::kCreate, 0600);
  if (!part.ok()) return part.status();
  const std::string path = SumsPathOf(folder_, digest_);
  auto head = AtomicFile::Create(path, 0600, *files_);
  if (!head.ok()) return head.status();
  auto status = head->Append(StoredHead(StoredKind::kPartialSums));
  if (status.ok()) status = head->Commit();
  if (!status.ok()) return status;
  auto sums = files_->Open(path, OpenMode::kChange);
  if (!sums.ok()) return sums.status();
  part_ = *std::move(part);
  sums_ = *std::move(sums);
  return absl::OkStatus();
}

absl::Status PartialDelta::Resume() {
  auto whole = OpenIfThere(*files_, WholePathOf(folder_, digest_));
  if (!whole.ok()) return whole.status();
  if (*whole != nullptr) {
    const auto size = (*whole)->Size();
    if (!size.ok()) return size.status();
    if (*size != bytes_) return Begin();
    offset_ = bytes_;
    whole_is_there_ = true;
    return absl::OkStatus();
  }
  const std::string path = SumsPathOf(folder_, digest_);
  auto part = OpenIfThere(*files_, PartPathOf(folder_, digest_));
  if (!part.ok()) return part.status();
  auto sums = OpenIfThere(*files_, path);
  if (!sums.ok()) return sums.status();
  if (*part == nullptr || *sums == nullptr) return Begin();
  const auto bytes = ReadWhole(*files_, path, kMaxSumsBytes);
  if (!bytes.ok()) return bytes.status();
  const auto head =
      ReadStoredHead(StoredKind::kPartialSums, bytes->substr(0, kStoredHeadBytes), path).status();
  if (absl::IsUnimplemented(head)) return head;
  if (!head.ok()) return Begin();
  part_ = *std::move(part);
  sums_ = *std::move(sums);
  const auto sound = CheckPieces(*bytes);
  if (!sound.ok()) return sound.status();
  offset_ = *sound;
  return part_->Truncate(offset_);
}

absl::Status PartialDelta::EndPiece() {
  ByteWriter sum;
  sum.LittleEndian(piece_, 4);
  sum.Raw(AsBytes(sum_->Finish()));
  piece_ = 0;
  return AppendAll(*sums_, sum.bytes());
}

absl::Status PartialDelta::Lost(const absl::Status& status) {
  part_.reset();
  return status;
}

absl::Status PartialDelta::Append(uint64_t offset, absl::string_view bytes) {
  if (part_ == nullptr)
    return absl::FailedPreconditionError("an earlier write failed: begin again");
  if (offset != offset_) {
    return absl::InvalidArgumentError(
        absl::StrCat("got bytes at offset ", offset, ", expected them at ", offset_));
  }
  if (bytes.size() > bytes_ - offset_) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", offset_ + bytes.size(), " bytes, ", bytes_, " were announced"));
  }
  while (!bytes.empty()) {
    const absl::string_view next = bytes.substr(0, std::min<uint64_t>(kReadBytes, bytes.size()));
    if (auto status = AppendAll(*part_, next); !status.ok()) return Lost(status);
    sum_->Update(next);
    whole_->Update(next);
    piece_ += next.size();
    offset_ += next.size();
    bytes.remove_prefix(next.size());
    if (piece_ < piece_bytes_) continue;
    if (auto status = EndPiece(); !status.ok()) return Lost(status);
  }
  return absl::OkStatus();
}

// The sums go before the sync: bytes whose sync failed can be read as if nothing had happened, and
// must never be believed again. Only a sync that succeeded makes a `.whole`.
absl::Status PartialDelta::Finish() {
  if (whole_is_there_) return files_->SyncFolder(folder_);
  if (part_ == nullptr)
    return absl::FailedPreconditionError("an earlier write failed: begin again");
  if (offset_ != bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", offset_, " bytes, ", bytes_, " were announced"));
  }
  piece_ = 0;
  const std::unique_ptr<File> part = std::move(part_);
  if (const Digest found = whole_->Finish(); found != digest_) {
    (void)Delete(*files_, folder_, digest_);
    return absl::InvalidArgumentError(absl::StrCat("the bytes have the digest ", ShortHex(found),
                                                   "…, ", ShortHex(digest_), "… was announced"));
  }
  sums_.reset();
  if (auto status = files_->Unlink(SumsPathOf(folder_, digest_)); !status.ok()) return status;
  auto status = part->Sync();
  if (status.ok()) {
    status = files_->Rename(PartPathOf(folder_, digest_), WholePathOf(folder_, digest_));
  }
  if (status.ok()) return files_->SyncFolder(folder_);
  (void)Delete(*files_, folder_, digest_);
  return status;
}

}  // namespace espalier::updates
