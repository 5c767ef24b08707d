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

}  // namespace

std::string PartialDelta::PathOf(const std::string& folder, const Digest& digest) {
  return absl::StrCat(folder, "/", Hex(digest), ".part");
}

absl::Status PartialDelta::Delete(FileSystem& files, const std::string& folder,
                                  const Digest& digest) {
  auto status = UnlinkIfThere(files, PathOf(folder, digest));
  status.Update(UnlinkIfThere(files, SumsPathOf(folder, digest)));
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
  const std::string path = PathOf(folder, digest);
  auto part = files.Open(path, OpenMode::kChange);
  if (absl::IsNotFound(part.status())) part = files.Open(path, OpenMode::kCreate, 0600);
  if (!part.ok()) return part.status();
  partial.part_ = *std::move(part);
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

// Sums for an empty part. The head is durable before anything follows it, so that a torn one is never
// taken for that of another version.
absl::Status PartialDelta::StartSums() {
  auto file = AtomicFile::Create(SumsPathOf(folder_, digest_), 0600, *files_);
  if (!file.ok()) return file.status();
  auto status = file->Append(StoredHead(StoredKind::kPartialSums));
  return status.ok() ? file->Commit() : status;
}

absl::Status PartialDelta::Resume() {
  const std::string path = SumsPathOf(folder_, digest_);
  auto sums = ReadWhole(*files_, path, kMaxSumsBytes);
  if (!sums.ok() && !absl::IsNotFound(sums.status())) return sums.status();
  const auto head =
      sums.ok() ? CheckStoredHead(StoredKind::kPartialSums, sums->substr(0, kStoredHeadBytes), path)
                : sums.status();
  if (absl::IsUnimplemented(head)) return head;
  if (!head.ok()) {
    if (auto status = StartSums(); !status.ok()) return status;
  }
  auto file = files_->Open(path, OpenMode::kChange);
  if (!file.ok()) return file.status();
  sums_ = *std::move(file);
  if (head.ok()) {
    const auto sound = CheckPieces(*sums);
    if (!sound.ok()) return sound.status();
    offset_ = *sound;
  }
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

absl::Status PartialDelta::Finish() {
  if (part_ == nullptr)
    return absl::FailedPreconditionError("an earlier write failed: begin again");
  if (offset_ != bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("got ", offset_, " bytes, ", bytes_, " were announced"));
  }
  if (piece_ > 0) {
    if (auto status = EndPiece(); !status.ok()) return Lost(status);
  }
  const Digest found = whole_->Finish();
  absl::Status status;
  if (found != digest_) {
    status = absl::InvalidArgumentError(absl::StrCat("the bytes have the digest ", ShortHex(found),
                                                     "…, ", ShortHex(digest_), "… was announced"));
  } else {
    status = part_->Sync();
  }
  part_.reset();
  if (!status.ok()) {  // other bytes, or bytes that the disk has lost: none of them is of use
    (void)Delete(*files_, folder_, digest_);
    return status;
  }
  return files_->SyncFolder(folder_);
}

}  // namespace espalier::updates
