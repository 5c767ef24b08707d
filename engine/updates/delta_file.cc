#include "engine/updates/delta_file.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/bytes.h"

namespace espalier::updates {
namespace {

// A byte that is no text, the name, and line ends that a transfer in text mode would change.
constexpr absl::string_view kMagic(
    "\x93"
    "ESPD\r\n\n",
    8);
constexpr uint64_t kFixedBytes = 8 + 2 + 4;  // magic, version, size of the manifest
constexpr uint64_t kSignatureBytes = 16 + 64;
constexpr uint64_t kMaxRecordHeadBytes = 10 + 10 + 10;
constexpr uint64_t kChunkBytes = 1 << 20;

absl::Status Named(const ByteSource& source, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(formats::Shown(source.name(), formats::kShownPathBytes), ": ",
                                   status.message()));
}

absl::Status Invalid(const ByteSource& source, absl::string_view problem) {
  return Named(source, absl::InvalidArgumentError(problem));
}

absl::StatusOr<std::string> ReadBytes(const ByteSource& source, uint64_t offset, uint64_t bytes,
                                      absl::string_view what) {
  if (offset > source.size() || bytes > source.size() - offset) {
    return Invalid(source,
                   absl::StrCat("ends inside ", what, ": expected ", bytes, " bytes at offset ",
                                offset, ", the file has ", source.size()));
  }
  std::string result(bytes, '\0');
  if (auto status = source.ReadAt(offset, result.data(), bytes); !status.ok()) return status;
  return result;
}

absl::StatusOr<std::vector<Signature>> ReadSignatures(const ByteSource& source, uint64_t& offset) {
  const auto head = ReadBytes(source, offset, 1, "the signatures");
  if (!head.ok()) return head.status();
  const auto count = static_cast<uint8_t>((*head)[0]);
  if (count > kMaxSignatures) {
    return Invalid(source, absl::StrCat(count, " signatures, expected at most ", kMaxSignatures));
  }
  const auto bytes = ReadBytes(source, offset + 1, count * kSignatureBytes, "the signatures");
  if (!bytes.ok()) return bytes.status();
  std::vector<Signature> signatures(count);
  for (size_t i = 0; i < count; ++i) {
    const char* from = bytes->data() + i * kSignatureBytes;
    std::copy_n(from, 16, signatures[i].key.begin());
    std::copy_n(from + 16, 64, signatures[i].bytes.begin());
    for (size_t j = 0; j < i; ++j) {
      if (signatures[j].key == signatures[i].key)
        return Invalid(source, absl::StrCat("two signatures by key ", Hex(signatures[i].key)));
    }
  }
  offset += 1 + bytes->size();
  return signatures;
}

int64_t SegmentsOf(const TensorInfo& tensor) {
  return (tensor.elements() + kSegmentElements - 1) / kSegmentElements;
}

}  // namespace

bool LooksLikeDelta(absl::string_view head) { return head.substr(0, kMagic.size()) == kMagic; }

absl::StatusOr<DeltaFile> DeltaFile::Open(std::shared_ptr<const ByteSource> source) {
  const auto fixed =
      ReadBytes(*source, 0, std::min(kFixedBytes, source->size()), "the head of a delta");
  if (!fixed.ok()) return fixed.status();
  if (!LooksLikeDelta(*fixed)) return Invalid(*source, "is no delta: it does not begin as one");
  if (fixed->size() < kFixedBytes) return Invalid(*source, "ends inside the head");
  ByteReader reader(absl::string_view(*fixed).substr(kMagic.size()));
  const uint64_t version = *reader.LittleEndian("version", 2);
  const uint64_t manifest_bytes = *reader.LittleEndian("size of the manifest", 4);
  if (version != kFormatVersion) {
    const std::string message =
        absl::StrCat("has format version ", version, ", this build reads ", kFormatVersion);
    return Named(*source, version > kFormatVersion ? absl::UnimplementedError(message)
                                                   : absl::InvalidArgumentError(message));
  }
  if (manifest_bytes > kMaxManifestBytes) {
    return Invalid(*source, absl::StrCat("has a manifest of ", manifest_bytes,
                                         " bytes, expected at most ", kMaxManifestBytes));
  }
  auto head = ReadBytes(*source, 0, kFixedBytes + manifest_bytes, "the manifest");
  if (!head.ok()) return head.status();
  DeltaFile delta;
  auto manifest = ParseManifest(absl::string_view(*head).substr(kFixedBytes));
  if (!manifest.ok()) return Named(*source, manifest.status());
  delta.manifest_ = *std::move(manifest);
  delta.signed_bytes_ = *std::move(head);
  uint64_t offset = delta.signed_bytes_.size();
  auto signatures = ReadSignatures(*source, offset);
  if (!signatures.ok()) return signatures.status();
  delta.signatures_ = *std::move(signatures);
  if (source->size() - offset != delta.manifest_.body_bytes) {
    return Invalid(*source, absl::StrCat("has a body of ", source->size() - offset,
                                         " bytes, expected ", delta.manifest_.body_bytes));
  }
  delta.source_ = std::move(source);
  return delta;
}

absl::StatusOr<std::vector<KeyId>> DeltaFile::CheckSigned(const TrustPolicy& policy) const {
  auto signers = CheckSignatures(signed_bytes_, signatures_, policy);
  if (!signers.ok()) return Named(*source_, signers.status());
  return signers;
}

absl::Status DeltaFile::CheckBody() const {
  Sha256 sha;
  std::string chunk;
  for (uint64_t offset = head_bytes(); offset < size(); offset += kChunkBytes) {
    chunk.resize(std::min(kChunkBytes, size() - offset));
    if (auto status = source_->ReadAt(offset, chunk.data(), chunk.size()); !status.ok())
      return status;
    sha.Update(chunk);
  }
  const Digest digest = sha.Finish();
  if (digest == manifest_.body) return absl::OkStatus();
  return Invalid(*source_,
                 absl::StrCat("its body has the digest ", ShortHex(digest), "…, the manifest says ",
                              ShortHex(manifest_.body), "…: it was damaged or changed"));
}

absl::StatusOr<std::vector<RecordRef>> DeltaFile::Records() const {
  std::vector<RecordRef> records;
  uint64_t offset = head_bytes() + manifest_.rest_frame_bytes;
  while (offset < size()) {
    const auto head =
        ReadBytes(*source_, offset, std::min(kMaxRecordHeadBytes, size() - offset), "a record");
    if (!head.ok()) return head.status();
    ByteReader reader(*head);
    const auto tensor = reader.Varint("tensor of a record", kMaxTensors);
    if (!tensor.ok()) return Named(*source_, tensor.status());
    const auto segment = reader.Varint("segment of a record", UINT64_MAX >> 2);
    if (!segment.ok()) return Named(*source_, segment.status());
    const auto bytes = reader.Varint("size of a record", kMaxRecordBytes);
    if (!bytes.ok()) return Named(*source_, bytes.status());
    offset += reader.offset();
    const RecordRef record{*tensor, static_cast<int64_t>(*segment), offset, *bytes};
    if (record.tensor >= manifest_.tensors.size() ||
        record.segment >= SegmentsOf(manifest_.tensors[record.tensor].tensor)) {
      return Invalid(*source_,
                     absl::StrCat("a record is for segment ", record.segment, " of tensor ",
                                  record.tensor, ", which the manifest has not"));
    }
    const size_t expected = records.empty() ? 0 : records.back().tensor;
    const bool again = !records.empty() && record.tensor == records.back().tensor;
    const bool next = record.tensor == (records.empty() ? 0 : expected + 1);
    if (again ? record.segment <= records.back().segment : !next) {
      return Invalid(*source_, absl::StrCat("segment ", record.segment, " of tensor ",
                                            record.tensor, " is not in order"));
    }
    if (record.bytes > size() - offset)
      return Invalid(*source_, absl::StrCat("ends inside a record of ", record.bytes, " bytes"));
    offset += record.bytes;
    records.push_back(record);
  }
  const size_t present = records.empty() ? 0 : records.back().tensor + 1;
  if (present != manifest_.tensors.size()) {
    return Invalid(*source_, absl::StrCat("holds records of ", present, " tensors, expected ",
                                          manifest_.tensors.size()));
  }
  return records;
}

absl::StatusOr<std::string> DeltaFile::Read(const RecordRef& record) const {
  return ReadBytes(*source_, record.offset, record.bytes, "a record");
}

absl::StatusOr<std::string> DeltaFile::RestFrame() const {
  return ReadBytes(*source_, head_bytes(), manifest_.rest_frame_bytes, "the rest");
}

absl::Status CheckSigners(const std::vector<PrivateKey>& keys) {
  if (keys.size() > kMaxSignatures) {
    return absl::ResourceExhaustedError(
        absl::StrCat(keys.size(), " keys to sign with, expected at most ", kMaxSignatures));
  }
  std::set<KeyId> seen;
  for (const PrivateKey& key : keys) {
    const auto known = key.Public();
    if (!known.ok()) return known.status();
    if (!seen.insert(known->id()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("the key ", Hex(known->id()), " is given twice; it signs once"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> SerializeHead(const Manifest& manifest,
                                          const std::vector<PrivateKey>& keys) {
  const auto bytes = SerializeManifest(manifest);
  if (!bytes.ok()) return bytes.status();
  if (bytes->size() > kMaxManifestBytes || keys.size() > kMaxSignatures) {
    return absl::ResourceExhaustedError(absl::StrCat("a manifest of ", bytes->size(), " bytes and ",
                                                     keys.size(), " signatures, the limits are ",
                                                     kMaxManifestBytes, " and ", kMaxSignatures));
  }
  ByteWriter head;
  head.Raw(kMagic);
  head.LittleEndian(kFormatVersion, 2);
  head.LittleEndian(bytes->size(), 4);
  head.Raw(*bytes);
  std::string result = head.Take();
  std::string signatures(1, static_cast<char>(keys.size()));
  for (const PrivateKey& key : keys) {
    const auto signature = key.Sign(result);
    if (!signature.ok()) return signature.status();
    signatures.append(signature->key.begin(), signature->key.end());
    signatures.append(signature->bytes.begin(), signature->bytes.end());
  }
  return result + signatures;
}

std::string SerializeRecord(size_t tensor, int64_t segment, absl::string_view record) {
  ByteWriter out;
  out.Varint(tensor);
  out.Varint(static_cast<uint64_t>(segment));
  out.Text(record);
  return out.Take();
}

absl::StatusOr<DeltaWriter> DeltaWriter::Create(const std::string& path) {
  auto file = AtomicFile::Create(path);
  if (!file.ok()) return file.status();
  auto body = AtomicFile::Create(path + ".body");
  if (!body.ok()) return body.status();
  DeltaWriter writer;
  writer.file_ = std::make_unique<AtomicFile>(*std::move(file));
  writer.body_ = std::make_unique<AtomicFile>(*std::move(body));
  writer.sha_ = std::make_unique<Sha256>();
  return writer;
}

absl::Status DeltaWriter::Append(absl::string_view bytes) {
  sha_->Update(bytes);
  return body_->Append(bytes);
}

absl::Status DeltaWriter::AddRest(absl::string_view frame, uint64_t bytes) {
  rest_bytes_ = bytes;
  rest_frame_bytes_ = frame.size();
  return Append(frame);
}

absl::Status DeltaWriter::AddRecord(size_t tensor, int64_t segment, absl::string_view record) {
  return Append(SerializeRecord(tensor, segment, record));
}

absl::Status DeltaWriter::Finish(Manifest manifest, const std::vector<PrivateKey>& keys) {
  manifest.rest_bytes = rest_bytes_;
  manifest.rest_frame_bytes = rest_frame_bytes_;
  manifest.body_bytes = body_->size();
  manifest.body = sha_->Finish();
  if (auto status = CheckSigners(keys); !status.ok()) return status;
  const auto written = SerializeManifest(manifest);
  if (!written.ok()) return written.status();
  if (const auto read = ParseManifest(*written); !read.ok()) return read.status();
  const auto head = SerializeHead(manifest, keys);
  if (!head.ok()) return head.status();
  if (auto status = file_->Append(*head); !status.ok()) return status;
  std::string chunk;
  for (uint64_t offset = 0; offset < body_->size(); offset += chunk.size()) {
    chunk.resize(std::min(kChunkBytes, body_->size() - offset));
    if (auto status = body_->ReadAt(offset, chunk.data(), chunk.size()); !status.ok())
      return status;
    if (auto status = file_->Append(chunk); !status.ok()) return status;
  }
  return file_->Commit();
}

}  // namespace espalier::updates
