// delta_file.h — an .espd: head (manifest and signatures) and body (rest, records), FORMAT.md.
//
//   auto delta = DeltaFile::Open(source);            // the head is parsed, nothing is believed yet
//   delta->CheckSigned(policy); delta->CheckBody();  // now it is what was signed
//   auto records = delta->Records();                 // what the body holds, in order
//
// Limits   Manifest ≤ kMaxManifestBytes, ≤ kMaxSignatures signatures, records ≤ kMaxRecordBytes; all
//          checked before memory is reserved, and sizes also against the source's.
// Errors   InvalidArgument: no delta, or damaged, naming the part, expected and got; Unimplemented: a
//          newer format version; PermissionDenied: not signed as the policy asks.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/byte_source.h"
#include "engine/updates/manifest.h"
#include "engine/updates/signing.h"

namespace espalier::updates {

inline constexpr size_t kMaxSignatures = 64;
// A segment in mode kRaw takes 8 bytes an element and a few for its lists.
inline constexpr uint64_t kMaxRecordBytes = 8 * static_cast<uint64_t>(kSegmentElements) + 64;

bool LooksLikeDelta(absl::string_view head);

struct RecordRef {
  size_t tensor;    // in manifest().tensors
  int64_t segment;  // first element: segment · kSegmentElements
  uint64_t offset, bytes;
};

class DeltaFile {
 public:
  static absl::StatusOr<DeltaFile> Open(std::shared_ptr<const ByteSource> source);

  const Manifest& manifest() const { return manifest_; }
  const std::vector<Signature>& signatures() const { return signatures_; }
  uint64_t size() const { return source_->size(); }
  uint64_t head_bytes() const { return source_->size() - manifest_.body_bytes; }

  // Which keys of the policy signed. Reads the body, unless it is of format 1.
  absl::StatusOr<std::vector<KeyId>> CheckSigned(const TrustPolicy& policy) const;
  // Of format 1: reads the body and compares its digest. Later the signatures cover the body, and of a delta
  // that nobody signed only what it leads to tells whether it was damaged.
  absl::Status CheckBody() const;
  // Ascending by tensor and segment, each tensor of the manifest at least once, nothing else in the
  // body.
  absl::StatusOr<std::vector<RecordRef>> Records() const;
  absl::StatusOr<std::string> Read(const RecordRef& record) const;
  // How records for a tensor of the manifest are written.
  RecordForm FormOf(size_t tensor) const;
  // The compressed rest; empty when the target's is the base's.
  absl::StatusOr<std::string> RestFrame() const;

 private:
  DeltaFile() = default;
  absl::StatusOr<Digest> BodyDigest() const;

  uint16_t format_version_ = kFormatVersion;
  std::shared_ptr<const ByteSource> source_;
  std::string signed_bytes_;  // from the magic to the end of the manifest
  Manifest manifest_;
  std::vector<Signature> signatures_;
};

// Whether readers would take a delta signed with these: InvalidArgument for one that is there twice,
// ResourceExhausted for more than kMaxSignatures.
absl::Status CheckSigners(const std::vector<PrivateKey>& keys);
// The head of a delta with this manifest, serialized, and body, signed with each of the keys.
absl::StatusOr<std::string> SerializeHead(absl::string_view manifest, const Digest& body,
                                          const std::vector<PrivateKey>& keys);

// Which tensor of the manifest and which segment of it a record is for.
struct RecordPlace {
  size_t tensor = 0;
  int64_t segment = 0;
  auto operator<=>(const RecordPlace&) const = default;
};
// One record of a body, behind the one for `before`, if there is one.
std::string SerializeRecord(const std::optional<RecordPlace>& before, const RecordPlace& place,
                            absl::string_view record);

// Writes a delta to a file. The body goes to a temporary file first, because the head, which comes
// before it, holds its digest: memory does not depend on its size.
class DeltaWriter {
 public:
  static absl::StatusOr<DeltaWriter> Create(const std::string& path);
  // At most once, before any record.
  absl::Status AddRest(absl::string_view frame, uint64_t bytes);
  // In ascending order.
  absl::Status AddRecord(const RecordPlace& place, absl::string_view record);
  // Fills in what the manifest says of the body. The file appears complete, in place of what is at the path, and such
  // that DeltaFile::Open takes it, or not at all.
  absl::Status Finish(Manifest manifest, const std::vector<PrivateKey>& keys);
  uint64_t body_bytes() const { return body_->size(); }

 private:
  DeltaWriter() = default;
  absl::Status Append(absl::string_view bytes);

  std::unique_ptr<AtomicFile> file_, body_;
  std::unique_ptr<Sha256> sha_;
  uint64_t rest_bytes_ = 0, rest_frame_bytes_ = 0;
  std::optional<RecordPlace> last_;
};

}  // namespace espalier::updates
