#include "engine/updates/delta_file.h"

#include <algorithm>
#include <set>
#include <utility>

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
constexpr uint64_t kVersionEnd = 8 + 2;  // behind magic and version
constexpr uint64_t kMaxFixedBytes = kVersionEnd + 10;
constexpr uint64_t kSizeBytes1 = 4;  // of the manifest's size, in format 1
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

absl::StatusOr<std::vector<Signature>> ReadSignatures(const ByteSource& source,
                                                      uint16_t format_version, uint64_t& offset) {
  const auto head = ReadBytes(source, offset, 1, "the signatures");
  if (!head.ok()) return head.status();
  const auto count = static_cast<uint8_t>((*head)[0]);
  if (count > kMaxSignatures) {
    return Invalid(source, absl::StrCat(count, " signatures, expected at most ", kMaxSignatures));
  }
  std::vector<Signature> signatures(count);
  // Format 1 has all of a key's id.
  const size_t key_bytes = format_version == 1 ? sizeof(KeyId) : sizeof(KeyTag);
  const uint64_t each = key_bytes + sizeof(Signature::bytes);
  const auto bytes = ReadBytes(source, offset + 1, count * each, "the signatures");
  if (!bytes.ok()) return bytes.status();
  for (size_t i = 0; i < count; ++i) {
    const char* from = bytes->data() + i * each;
    std::copy_n(from, signatures[i].key.size(), signatures[i].key.begin());
    std::copy_n(from + key_bytes, signatures[i].bytes.size(), signatures[i].bytes.begin());
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
      ReadBytes(*source, 0, std::min(kMaxFixedBytes, source->size()), "the head of a delta");
  if (!fixed.ok()) return fixed.status();
  if (!LooksLikeDelta(*fixed)) return Invalid(*source, "is no delta: it does not begin as one");
  if (fixed->size() < kVersionEnd) return Invalid(*source, "ends inside the head");
  ByteReader reader(*fixed);
  (void)reader.Raw("magic", kMagic.size());
  DeltaFile delta;
  delta.format_version_ = static_cast<uint16_t>(*reader.LittleEndian("version", 2));
  if (delta.format_version_ > kFormatVersion || delta.format_version_ == 0) {
    const std::string message = absl::StrCat("has format version ", delta.format_version_,
                                             ", this build reads 1 to ", kFormatVersion);
    return Named(*source, delta.format_version_ != 0 ? absl::UnimplementedError(message)
                                                     : absl::InvalidArgumentError(message));
  }
  const auto manifest_bytes = delta.format_version_ == 1
                                  ? reader.LittleEndian("size of the manifest", kSizeBytes1)
                                  : reader.Varint("size of the manifest", UINT64_MAX);
  if (!manifest_bytes.ok()) return Named(*source, manifest_bytes.status());
  if (*manifest_bytes > kMaxManifestBytes) {
    return Invalid(*source, absl::StrCat("has a manifest of ", *manifest_bytes,
                                         " bytes, expected at most ", kMaxManifestBytes));
  }
  const uint64_t begin = reader.offset();
  auto head = ReadBytes(*source, 0, begin + *manifest_bytes, "the manifest");
  if (!head.ok()) return head.status();
  auto manifest = ParseManifest(absl::string_view(*head).substr(begin), delta.format_version_);
  if (!manifest.ok()) return Named(*source, manifest.status());
  delta.manifest_ = *std::move(manifest);
  delta.signed_bytes_ = *std::move(head);
  uint64_t offset = delta.signed_bytes_.size();
  auto signatures = ReadSignatures(*source, delta.format_version_, offset);
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
  std::string message = signed_bytes_;
  if (!manifest_.body) {
    const auto body = BodyDigest();
    if (!body.ok()) return body.status();
    message.append(body->begin(), body->end());
  }
  auto signers = CheckSignatures(message, signatures_, policy);
  if (!signers.ok()) return Named(*source_, signers.status());
  return signers;
}

absl::StatusOr<Digest> DeltaFile::BodyDigest() const {
  Sha256 sha;
  std::string chunk;
  for (uint64_t offset = head_bytes(); offset < size(); offset += kChunkBytes) {
    chunk.resize(std::min(kChunkBytes, size() - offset));
    if (auto status = source_->ReadAt(offset, chunk.data(), chunk.size()); !status.ok())
      return status;
    sha.Update(chunk);
  }
  return sha.Finish();
}

absl::Status DeltaFile::CheckBody() const {
  if (!manifest_.body) return absl::OkStatus();
  const auto digest = BodyDigest();
  if (!digest.ok()) return digest.status();
  if (*digest == *manifest_.body) return absl::OkStatus();
  return Invalid(
      *source_, absl::StrCat("its body has the digest ", ShortHex(*digest), "…, the manifest says ",
                             ShortHex(*manifest_.body), "…: it was damaged or changed"));
}

namespace {

// Where a record is for, and its bytes; in format 1 the place as it is, later as a step from the one before.
absl::StatusOr<RecordRef> ReadRecordHead(ByteReader& reader, uint16_t format_version,
                                         const std::optional<RecordPlace>& before) {
  FieldReader fields(reader);
  RecordRef record{};
  if (format_version == 1) {
    record.tensor = fields.Varint("tensor of a record", kMaxTensors);
    record.segment = fields.Count("segment of a record");
    record.bytes = fields.Varint("size of a record", kMaxRecordBytes);
  } else {
    const uint64_t size = fields.Varint("size of a record", 2 * kMaxRecordBytes + 1);
    const int64_t step = size % 2 != 0 ? fields.Count("segment of a record") : 0;
    if (size % 2 != 0 && step == 0) fields.Fail("a place of a record that is told by no flag");
    const bool again = size % 2 != 0 && step % 2 != 0;
    if (again && !before) fields.Fail("the first record goes on with a tensor");
    record.tensor = !before ? 0 : before->tensor + (again ? 0 : 1);
    record.segment = again && before ? before->segment + 1 + step / 2 : step / 2;
    record.bytes = size / 2;
  }
  if (!fields.ok()) return fields.status();
  return record;
}

}  // namespace

absl::StatusOr<std::vector<RecordRef>> DeltaFile::Records() const {
  std::vector<RecordRef> records;
  std::optional<RecordPlace> before;
  uint64_t offset = head_bytes() + manifest_.rest_frame_bytes;
  while (offset < size()) {
    const auto head =
        ReadBytes(*source_, offset, std::min(kMaxRecordHeadBytes, size() - offset), "a record");
    if (!head.ok()) return head.status();
    ByteReader reader(*head);
    auto record = ReadRecordHead(reader, format_version_, before);
    if (!record.ok()) return Named(*source_, record.status());
    offset += reader.offset();
    record->offset = offset;
    const RecordPlace place{record->tensor, record->segment};
    if (place.tensor >= manifest_.tensors.size() ||
        place.segment >= SegmentsOf(manifest_.tensors[place.tensor].tensor)) {
      return Invalid(*source_,
                     absl::StrCat("a record is for segment ", place.segment, " of tensor ",
                                  place.tensor, ", which the manifest has not"));
    }
    const size_t next = before ? before->tensor + 1 : 0;
    if (before && place.tensor == before->tensor ? place.segment <= before->segment
                                                 : place.tensor != next) {
      return Invalid(*source_, absl::StrCat("segment ", place.segment, " of tensor ", place.tensor,
                                            " is not in order"));
    }
    if (record->bytes > size() - offset)
      return Invalid(*source_, absl::StrCat("ends inside a record of ", record->bytes, " bytes"));
    offset += record->bytes;
    before = place;
    records.push_back(*record);
  }
  const size_t present = before ? before->tensor + 1 : 0;
  if (present != manifest_.tensors.size()) {
    return Invalid(*source_, absl::StrCat("holds records of ", present, " tensors, expected ",
                                          manifest_.tensors.size()));
  }
  return records;
}

absl::StatusOr<std::string> DeltaFile::Read(const RecordRef& record) const {
  return ReadBytes(*source_, record.offset, record.bytes, "a record");
}

RecordForm DeltaFile::FormOf(size_t tensor) const {
  const TensorDelta& delta = manifest_.tensors[tensor];
  RecordForm form{.format_version = format_version_, .row_elements = delta.tensor.row_elements()};
  if (TableTellsCounts(delta.tensor)) form.counts = delta.counts;
  return form;
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

absl::StatusOr<std::string> SerializeHead(absl::string_view manifest, const Digest& body,
                                          const std::vector<PrivateKey>& keys) {
  if (manifest.size() > kMaxManifestBytes || keys.size() > kMaxSignatures) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a manifest of ", manifest.size(), " bytes and ", keys.size(),
                     " signatures, the limits are ", kMaxManifestBytes, " and ", kMaxSignatures));
  }
  ByteWriter head;
  head.Raw(kMagic);
  head.LittleEndian(kFormatVersion, 2);
  head.Text(manifest);
  const std::string message = absl::StrCat(
      head.bytes(), absl::string_view(reinterpret_cast<const char*>(body.data()), body.size()));
  std::string signatures(1, static_cast<char>(keys.size()));
  for (const PrivateKey& key : keys) {
    const auto signature = key.Sign(message);
    if (!signature.ok()) return signature.status();
    signatures.append(signature->key.begin(), signature->key.end());
    signatures.append(signature->bytes.begin(), signature->bytes.end());
  }
  return head.Take() + signatures;
}

// An odd size is followed by where to: odd again, so many segments on; even, that segment of the next
// tensor, whose first one it is as a rule.
std::string SerializeRecord(const std::optional<RecordPlace>& before, const RecordPlace& place,
                            absl::string_view record) {
  const bool again = before && before->tensor == place.tensor;
  const auto step = static_cast<uint64_t>(again ? 2 * (place.segment - before->segment - 1) + 1
                                                : 2 * place.segment);
  ByteWriter out;
  out.Varint(2 * record.size() + (step != 0 ? 1 : 0));
  if (step != 0) out.Varint(step);
  out.Raw(record);
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

absl::Status DeltaWriter::AddRecord(const RecordPlace& place, absl::string_view record) {
  return Append(SerializeRecord(std::exchange(last_, place), place, record));
}

absl::Status DeltaWriter::Finish(Manifest manifest, const std::vector<PrivateKey>& keys) {
  manifest.rest_bytes = rest_bytes_;
  manifest.rest_frame_bytes = rest_frame_bytes_;
  manifest.body_bytes = body_->size();
  if (auto status = CheckSigners(keys); !status.ok()) return status;
  const auto written = SerializeManifest(manifest);
  if (!written.ok()) return written.status();
  if (const auto read = ParseManifest(*written, kFormatVersion); !read.ok()) return read.status();
  const auto head = SerializeHead(*written, sha_->Finish(), keys);
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
