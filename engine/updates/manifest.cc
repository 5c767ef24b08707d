#include "engine/updates/manifest.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/formats/names.h"
#include "engine/updates/bytes.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

constexpr uint64_t kMaxCount = uint64_t{1} << 62;
constexpr uint8_t kSchemaChanges = 1, kCompressedTable = 2;
// The table is text for the most part and small beside the body; names of layers repeat.
constexpr int kTableLevel = 19;
// Clocks of publisher and receiver may differ by time zones set wrong, not by more.
constexpr int64_t kClockSkewSeconds = 24 * 3600;

void WriteDigest(ByteWriter& out, const Digest& digest) {
  out.Raw({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

std::string SerializeTable(const std::vector<TensorDelta>& tensors) {
  ByteWriter out;
  for (const TensorDelta& delta : tensors) {
    out.Text(delta.tensor.name);
    out.Text(delta.tensor.dtype);
    out.Varint(delta.tensor.dims.size());
    for (const int64_t dim : delta.tensor.dims) out.Varint(static_cast<uint64_t>(dim));
    out.Varint(static_cast<uint64_t>(delta.tensor.bytes));
    for (const int64_t count : delta.counts.of) out.Varint(static_cast<uint64_t>(count));
  }
  return out.Take();
}

// Reads fields in order; after a failure everything reads as nothing, and the first failure is told.
class FieldReader {
 public:
  explicit FieldReader(absl::string_view bytes) : reader_(bytes) {}

  uint64_t Varint(absl::string_view what, uint64_t most = kMaxCount) {
    return Take(status_.ok() ? reader_.Varint(what, most) : status_, uint64_t{0});
  }
  int64_t Count(absl::string_view what, uint64_t most = kMaxCount) {
    return static_cast<int64_t>(Varint(what, most));
  }
  uint8_t Byte(absl::string_view what) {
    return Take(status_.ok() ? reader_.Byte(what) : status_, uint8_t{0});
  }
  absl::string_view Raw(absl::string_view what, uint64_t bytes) {
    return Take(status_.ok() ? reader_.Raw(what, bytes) : status_, absl::string_view());
  }
  std::string Text(absl::string_view what, uint64_t most) {
    return std::string(
        Take(status_.ok() ? reader_.Text(what, most) : status_, absl::string_view()));
  }
  Digest ReadDigest(absl::string_view what) {
    Digest digest{};
    const absl::string_view raw = Raw(what, digest.size());
    std::copy(raw.begin(), raw.end(), digest.begin());
    return digest;
  }
  void End(absl::string_view what) {
    if (status_.ok()) status_ = reader_.End(what);
  }
  void Fail(absl::string_view problem) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(problem);
  }
  size_t left() const { return reader_.left(); }
  const absl::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }

 private:
  template <typename T>
  T Take(absl::StatusOr<T> value, T otherwise) {
    if (value.ok()) return *value;
    status_ = value.status();
    return otherwise;
  }

  ByteReader reader_;
  absl::Status status_;
};

void CheckTensor(const TensorDelta& delta, const std::vector<TensorDelta>& before,
                 FieldReader& reader) {
  const TensorInfo& tensor = delta.tensor;
  if (!reader.ok()) return;
  if (auto status = formats::CheckName("a tensor", tensor.name); !status.ok())
    return reader.Fail(status.message());
  if (auto status = formats::CheckName("a dtype", tensor.dtype); !status.ok())
    return reader.Fail(status.message());
  if (!before.empty() && before.back().tensor.name >= tensor.name) {
    return reader.Fail(absl::StrCat("tensor ", formats::Quoted(tensor.name), " after ",
                                    formats::Quoted(before.back().tensor.name),
                                    ", expected ascending names without duplicates"));
  }
  const int64_t size = SizeOf(tensor.kind());
  int64_t elements = 1;
  for (const int64_t dim : tensor.dims) {
    if (__builtin_mul_overflow(elements, dim, &elements)) elements = kMaxTensorBytes + 1;
    if (elements > kMaxTensorBytes) break;
  }
  const bool sized = elements <= kMaxTensorBytes &&
                     (tensor.kind() == ElementKind::kByte || elements * size == tensor.bytes);
  if (!sized) {
    return reader.Fail(absl::StrCat("tensor ", tensor.ToString(), " has ", tensor.bytes,
                                    " bytes, which is not what its dims say"));
  }
  int64_t left = tensor.elements();
  for (const int64_t count : delta.counts.of) {
    if (count > left) {
      return reader.Fail(absl::StrCat("tensor ", tensor.ToString(), " has more events than its ",
                                      tensor.elements(), " elements"));
    }
    left -= count;
  }
  if (delta.counts.total() == 0)
    reader.Fail(absl::StrCat("tensor ", tensor.ToString(), " has no event"));
}

absl::Status ParseTable(absl::string_view bytes, uint64_t count,
                        std::vector<TensorDelta>& tensors) {
  FieldReader reader(bytes);
  for (uint64_t i = 0; i < count && reader.ok(); ++i) {
    TensorDelta delta;
    delta.tensor.name = reader.Text("name of a tensor", formats::kMaxNameBytes);
    delta.tensor.dtype = reader.Text("dtype of a tensor", 16);
    const uint64_t rank = reader.Varint("rank of a tensor", kMaxDims);
    for (uint64_t dim = 0; dim < rank; ++dim)
      delta.tensor.dims.push_back(reader.Count("dim of a tensor", kMaxTensorBytes));
    delta.tensor.bytes = reader.Count("bytes of a tensor", kMaxTensorBytes);
    for (int64_t& events : delta.counts.of) events = reader.Count("events of a tensor");
    CheckTensor(delta, tensors, reader);
    tensors.push_back(std::move(delta));
  }
  reader.End("table of tensors");
  return reader.status();
}

}  // namespace

EventCounts Manifest::counts() const {
  EventCounts counts;
  for (const TensorDelta& delta : tensors) counts += delta.counts;
  return counts;
}

absl::StatusOr<std::string> SerializeManifest(const Manifest& manifest) {
  const std::string table = SerializeTable(manifest.tensors);
  auto compressed = ZstdCompress(table, kTableLevel);
  if (!compressed.ok()) return compressed.status();
  const bool smaller = compressed->size() < table.size();
  ByteWriter out;
  out.Text(manifest.model);
  out.Byte(static_cast<uint8_t>((manifest.schema_changes ? kSchemaChanges : 0) |
                                (smaller ? kCompressedTable : 0)));
  for (const int64_t value :
       {manifest.base_version, manifest.target_version, manifest.sequence, manifest.created_seconds,
        manifest.expires_seconds, manifest.base_nonzeros, manifest.target_nonzeros}) {
    out.Varint(static_cast<uint64_t>(value));
  }
  for (const Digest* digest :
       {&manifest.base.weights, &manifest.base.files, &manifest.target.weights,
        &manifest.target.files, &manifest.architecture, &manifest.body}) {
    WriteDigest(out, *digest);
  }
  out.Varint(manifest.body_bytes);
  out.Varint(manifest.rest_bytes);
  out.Varint(manifest.rest_frame_bytes);
  out.Varint(manifest.tensors.size());
  out.Varint(table.size());
  out.Raw(smaller ? *compressed : table);
  return out.Take();
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes) {
  FieldReader reader(bytes);
  Manifest manifest;
  manifest.model = reader.Text("model", kMaxModelNameBytes);
  if (reader.ok()) {
    if (auto status = formats::CheckName("a model", manifest.model); !status.ok()) return status;
  }
  const uint8_t flags = reader.Byte("flags");
  if (flags > (kSchemaChanges | kCompressedTable))
    reader.Fail(absl::StrCat("flags ", flags, ", expected 0 to 3"));
  manifest.schema_changes = flags & kSchemaChanges;
  manifest.base_version = reader.Count("base version");
  manifest.target_version = reader.Count("target version");
  manifest.sequence = reader.Count("sequence");
  manifest.created_seconds = reader.Count("creation time");
  manifest.expires_seconds = reader.Count("expiry time");
  manifest.base_nonzeros = reader.Count("non-zeros of the base");
  manifest.target_nonzeros = reader.Count("non-zeros of the target");
  manifest.base.weights = reader.ReadDigest("digest of the base's weights");
  manifest.base.files = reader.ReadDigest("digest of the base's files");
  manifest.target.weights = reader.ReadDigest("digest of the target's weights");
  manifest.target.files = reader.ReadDigest("digest of the target's files");
  manifest.architecture = reader.ReadDigest("digest of the architecture");
  manifest.body = reader.ReadDigest("digest of the body");
  manifest.body_bytes = reader.Varint("size of the body");
  manifest.rest_bytes = reader.Varint("size of the rest", kMaxRestBytes);
  manifest.rest_frame_bytes = reader.Varint("compressed size of the rest", manifest.body_bytes);
  if ((manifest.rest_bytes == 0) != (manifest.rest_frame_bytes == 0))
    reader.Fail("the rest has a size without a compressed size, or the reverse");
  const uint64_t count = reader.Varint("number of tensors", kMaxTensors);
  const uint64_t table_bytes = reader.Varint("size of the table of tensors", kMaxManifestBytes);
  if (!reader.ok()) return reader.status();
  // What is left is the table. A compressed one is small beside what it says it holds only up to a
  // point: zstd's longest runs give 1 : 2^17.
  const absl::string_view rest = reader.Raw("table of tensors", reader.left());
  std::string table(rest);
  if (flags & kCompressedTable) {
    auto decompressed = ZstdDecompress(rest, table_bytes);
    if (!decompressed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("table of tensors: ", decompressed.status().message()));
    }
    table = *std::move(decompressed);
  } else if (table.size() != table_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("table of tensors: ", table.size(), " bytes, expected ", table_bytes));
  }
  if (auto status = ParseTable(table, count, manifest.tensors); !status.ok()) return status;
  const int64_t gained = manifest.counts().gained();
  if (!manifest.schema_changes && manifest.base_nonzeros + gained != manifest.target_nonzeros) {
    return absl::InvalidArgumentError(absl::StrCat("from ", manifest.base_nonzeros, " to ",
                                                   manifest.target_nonzeros,
                                                   " non-zeros, but the events gain ", gained));
  }
  return manifest;
}

absl::Status CheckModel(const Manifest& manifest, absl::string_view model) {
  if (manifest.model == model) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the delta is for model ",
                                                    formats::Quoted(manifest.model), ", this is ",
                                                    formats::Quoted(model)));
}

absl::Status CheckFresh(const Manifest& manifest, int64_t now_seconds) {
  const auto text = [](int64_t seconds) {
    return absl::FormatTime(absl::RFC3339_sec, absl::FromUnixSeconds(seconds), absl::UTCTimeZone());
  };
  if (manifest.expires_seconds != 0 && now_seconds >= manifest.expires_seconds) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the delta expired at ", text(manifest.expires_seconds), ", it is ", text(now_seconds)));
  }
  if (manifest.created_seconds > now_seconds + kClockSkewSeconds) {
    return absl::FailedPreconditionError(
        absl::StrCat("the delta was made at ", text(manifest.created_seconds), ", it is ",
                     text(now_seconds), ": one of the clocks is wrong"));
  }
  return absl::OkStatus();
}

}  // namespace espalier::updates
