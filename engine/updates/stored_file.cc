#include "engine/updates/stored_file.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/bytes.h"

namespace espalier::updates {
namespace {

std::string Magic(StoredKind kind) {
  return absl::StrCat(
      "\x93"
      "ESV",
      std::string(1, static_cast<char>(kind)), "\r\n\n");
}

absl::string_view AsBytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

std::string StoredHead(StoredKind kind, uint16_t version) {
  ByteWriter head;
  head.Raw(Magic(kind));
  head.LittleEndian(version, 2);
  return head.Take();
}

absl::Status Damaged(absl::string_view path, absl::string_view how) {
  return absl::DataLossError(
      absl::StrCat(formats::Quoted(path, formats::kShownPathBytes), " is damaged: ", how));
}

absl::StatusOr<uint16_t> ReadStoredHead(StoredKind kind, absl::string_view head,
                                        absl::string_view path) {
  const std::string magic = Magic(kind);
  if (head.size() < kStoredHeadBytes || head.substr(0, magic.size()) != magic)
    return Damaged(path, "it does not begin as a file of its kind");
  const auto version =
      static_cast<uint16_t>(*ByteReader(head.substr(magic.size())).LittleEndian("version", 2));
  const uint16_t newest = NewestStoredVersion(kind);
  if (version >= 1 && version <= newest) return version;
  const std::string message =
      absl::StrCat(formats::Quoted(path, formats::kShownPathBytes), " has format version ", version,
                   ", this build reads ", newest == 1 ? "" : "up to ", newest);
  return version > newest ? absl::UnimplementedError(message) : absl::DataLossError(message);
}

std::string NumberedPath(absl::string_view folder, int64_t number, absl::string_view extension) {
  return absl::StrCat(folder, "/", number, extension);
}

absl::StatusOr<SealedWriter> SealedWriter::Create(FileSystem& files, const std::string& path,
                                                  StoredKind kind, uint16_t version) {
  auto file = AtomicFile::Create(path, 0600, files);
  if (!file.ok()) return file.status();
  SealedWriter writer(*std::move(file));
  if (auto status = writer.Append(StoredHead(kind, version)); !status.ok()) return status;
  return writer;
}

absl::Status SealedWriter::Append(absl::string_view bytes) {
  sha_->Update(bytes);
  return file_.Append(bytes);
}

absl::Status SealedWriter::AppendBlock(absl::string_view bytes) {
  if (bytes.size() > kMaxBlockBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a block of ", bytes.size(), " bytes, the limit is ", kMaxBlockBytes));
  }
  ByteWriter size;
  size.LittleEndian(bytes.size(), 4);
  if (auto status = Append(size.bytes()); !status.ok()) return status;
  return Append(bytes);
}

absl::StatusOr<uint64_t> SealedWriter::Commit() {
  if (auto status = file_.Append(AsBytes(sha_->Finish())); !status.ok()) return status;
  const uint64_t size = file_.size();
  if (auto status = file_.Commit(); !status.ok()) return status;
  return size;
}

absl::StatusOr<SealedReader> SealedReader::Open(FileSystem& files, const std::string& path,
                                                StoredKind kind) {
  auto file = files.Open(path, OpenMode::kRead);
  if (!file.ok()) return file.status();
  const auto size = (*file)->Size();
  if (!size.ok()) return size.status();
  SealedReader reader(*std::move(file), path, *size);
  const auto head = reader.Read(std::min(kStoredHeadBytes, *size));
  if (!head.ok()) return head.status();
  const auto version = ReadStoredHead(kind, *head, path);
  if (!version.ok()) return version.status();
  reader.version_ = *version;
  if (*size < kStoredHeadBytes + sizeof(Digest)) return Damaged(path, "it ends too early");
  return reader;
}

absl::StatusOr<std::string> SealedReader::Read(uint64_t bytes) {
  std::string result(bytes, '\0');
  auto status = ReadExactly(*file_, offset_, result.data(), bytes);
  if (!status.ok()) return status;
  sha_->Update(result);
  offset_ += bytes;
  return result;
}

absl::StatusOr<std::string> SealedReader::NextBlock(uint64_t max_bytes) {
  const uint64_t left = size_ - sizeof(Digest) - offset_;
  if (left < 4) return Damaged(path_, absl::StrCat("it ends inside a block, at byte ", offset_));
  const auto head = Read(4);
  if (!head.ok()) return head.status();
  const uint64_t bytes = *ByteReader(*head).LittleEndian("size", 4);
  if (bytes > left - 4 || bytes > max_bytes) {
    return Damaged(path_, absl::StrCat("a block of ", bytes, " bytes, expected at most ",
                                       std::min(left - 4, max_bytes)));
  }
  block_offset_ = offset_;
  return Read(bytes);
}

absl::Status SealedReader::ReadAgain(uint64_t offset, std::string& to) const {
  return ReadExactly(*file_, offset, to.data(), to.size());
}

absl::Status SealedReader::End() {
  if (offset_ + sizeof(Digest) != size_)
    return Damaged(path_, absl::StrCat("its end was expected at byte ", offset_));
  const Digest found = sha_->Finish();
  Digest expected;
  auto status = ReadExactly(*file_, offset_, expected.data(), expected.size());
  if (!status.ok()) return status;
  if (found == expected) return absl::OkStatus();
  return Damaged(path_, absl::StrCat("its bytes have the digest ", ShortHex(found),
                                     "…, it was written with ", ShortHex(expected), "…"));
}

}  // namespace espalier::updates
