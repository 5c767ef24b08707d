#include "engine/updates/manifest.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "engine/formats/names.h"
#include "engine/updates/bytes.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

// kRest and kExpires came with format 2, in which what they tell of is left out without them.
constexpr uint8_t kSchemaChanges = 1, kCompressedTable = 2, kRest = 4, kExpires = 8;
constexpr int kTableLevel = 19;
constexpr uint64_t kMaxDtypeBytes = 16;
constexpr int64_t kMaxEvents = int64_t{1} << 61;  // non-zeros and these can be added
// Clocks of publisher and receiver may differ by time zones set wrong, not by more.
constexpr int64_t kClockSkewSeconds = 24 * 3600;

// What tables are compressed with as their beginning: part of format 2, and never to change. Names of
// common libraries' layers in the order of a table, and what stands between them; the likeliest last.
constexpr absl::string_view kUsualNames =
    "model.embed_tokens.weight\nmodel.layers.0.input_layernorm.weight\n"
    "model.layers.0.mlp.down_proj.weight\nmodel.layers.0.mlp.gate_proj.weight\n"
    "model.layers.0.mlp.up_proj.weight\nmodel.layers.0.post_attention_layernorm.weight\n"
    "model.layers.0.self_attn.k_proj.weight\nmodel.layers.0.self_attn.o_proj.weight\n"
    "model.layers.0.self_attn.q_proj.weight\nmodel.layers.0.self_attn.v_proj.weight\n"
    "model.norm.weight\nlm_head.weight\n"
    "bn1.bias\nbn1.weight\nconv1.bias\nconv1.weight\nconv2.bias\nconv2.weight\n"
    "layer1.0.bn1.bias\nlayer1.0.bn1.weight\nlayer1.0.conv1.weight\nlayer1.0.downsample.0.weight\n"
    "embeddings.LayerNorm.bias\nembeddings.LayerNorm.weight\n"
    "embeddings.position_embeddings.weight\nembeddings.token_type_embeddings.weight\n"
    "embeddings.word_embeddings.weight\n"
    "encoder.layer.0.attention.output.LayerNorm.bias\n"
    "encoder.layer.0.attention.output.LayerNorm.weight\n"
    "encoder.layer.0.attention.output.dense.bias\n"
    "encoder.layer.0.attention.output.dense.weight\n"
    "encoder.layer.0.attention.self.key.bias\nencoder.layer.0.attention.self.key.weight\n"
    "encoder.layer.0.attention.self.query.bias\nencoder.layer.0.attention.self.query.weight\n"
    "encoder.layer.0.attention.self.value.bias\nencoder.layer.0.attention.self.value.weight\n"
    "encoder.layer.0.intermediate.dense.bias\nencoder.layer.0.intermediate.dense.weight\n"
    "encoder.layer.0.output.LayerNorm.bias\nencoder.layer.0.output.LayerNorm.weight\n"
    "encoder.layer.0.output.dense.bias\nencoder.layer.0.output.dense.weight\n"
    "pooler.dense.bias\npooler.dense.weight\nclassifier.bias\nclassifier.weight\n"
    "0.bias\n0.weight\n2.bias\n2.weight\n4.bias\n4.weight\n"
    "layers.0.bias\nlayers.0.weight\nlayers.1.bias\nlayers.1.weight\n"
    "linear1.bias\nlinear1.weight\nlinear2.bias\nlinear2.weight\n"
    "fc1.bias\nfc1.weight\nfc2.bias\nfc2.weight\nfc3.bias\nfc3.weight\n"
    "\3\3F16\3\3F32\5\3F32\3\4BF16";

// Column by column: what is alike stands together.
std::string SerializeTable(const std::vector<TensorDelta>& tensors) {
  ByteWriter out;
  for (const TensorDelta& delta : tensors) {
    out.Raw(delta.tensor.name);
    out.Byte('\n');
  }
  absl::string_view dtype;
  for (const TensorDelta& delta : tensors) {
    const TensorInfo& tensor = delta.tensor;
    const bool other = tensor.dtype != dtype;
    out.Varint(2 * tensor.dims.size() + (other ? 1 : 0));
    if (other) out.Text(tensor.dtype);
    dtype = tensor.dtype;
    for (const int64_t dim : tensor.dims) out.Varint(static_cast<uint64_t>(dim));
    if (tensor.kind() == ElementKind::kByte) out.Varint(static_cast<uint64_t>(tensor.bytes));
  }
  for (const TensorDelta& delta : tensors) {
    const auto& [changes, drops, grows, flips] = delta.counts.of;
    const bool others = (drops | grows | flips) != 0;
    out.Varint(2 * static_cast<uint64_t>(changes) + (others ? 1 : 0));
    if (!others) continue;
    for (const int64_t count : {drops, grows, flips}) out.Varint(static_cast<uint64_t>(count));
  }
  return out.Take();
}

// `before`: the one before it, or null.
void CheckTensor(const TensorDelta& delta, const TensorDelta* before, FieldReader& fields) {
  const TensorInfo& tensor = delta.tensor;
  if (!fields.ok()) return;
  if (auto status = formats::CheckName("a tensor", tensor.name); !status.ok())
    return fields.Fail(status.message());
  if (auto status = formats::CheckName("a dtype", tensor.dtype); !status.ok())
    return fields.Fail(status.message());
  if (before != nullptr && before->tensor.name >= tensor.name) {
    return fields.Fail(absl::StrCat("tensor ", formats::Quoted(tensor.name), " after ",
                                    formats::Quoted(before->tensor.name),
                                    ", expected ascending names without duplicates"));
  }
  const int64_t size = SizeOf(tensor.kind());
  int64_t elements = 1;
  for (const int64_t dim : tensor.dims) {
    if (__builtin_mul_overflow(elements, dim, &elements)) elements = kMaxTensorBytes + 1;
    if (elements > kMaxTensorBytes) break;
  }
  const bool sized = elements <= kMaxTensorBytes && tensor.bytes <= kMaxTensorBytes &&
                     (tensor.kind() == ElementKind::kByte || elements * size == tensor.bytes);
  if (!sized) {
    return fields.Fail(absl::StrCat("tensor ", tensor.ToString(), " has ", tensor.bytes,
                                    " bytes, which is not what its dims say"));
  }
  int64_t left = tensor.elements();
  for (const int64_t count : delta.counts.of) {
    if (count > left) {
      return fields.Fail(absl::StrCat("tensor ", tensor.ToString(), " has more events than its ",
                                      tensor.elements(), " elements"));
    }
    left -= count;
  }
  if (delta.counts.total() == 0)
    fields.Fail(absl::StrCat("tensor ", tensor.ToString(), " has no event"));
}

// The table of format 1, tensor by tensor.
void ParseRows(FieldReader& fields, uint64_t count, std::vector<TensorDelta>& tensors) {
  for (uint64_t i = 0; i < count && fields.ok(); ++i) {
    TensorDelta delta;
    delta.tensor.name = fields.Text("name of a tensor", formats::kMaxNameBytes);
    delta.tensor.dtype = fields.Text("dtype of a tensor", kMaxDtypeBytes);
    const uint64_t rank = fields.Varint("rank of a tensor", kMaxDims);
    for (uint64_t dim = 0; dim < rank; ++dim)
      delta.tensor.dims.push_back(fields.Count("dim of a tensor", kMaxTensorBytes));
    delta.tensor.bytes = fields.Count("bytes of a tensor", kMaxTensorBytes);
    for (int64_t& events : delta.counts.of) events = fields.Count("events of a tensor");
    CheckTensor(delta, tensors.empty() ? nullptr : &tensors.back(), fields);
    tensors.push_back(std::move(delta));
  }
}

// Bytes of a tensor whose dtype tells how many an element has; one that has too many, as many as no
// tensor has.
int64_t BytesOf(const TensorInfo& tensor) {
  int64_t bytes = SizeOf(tensor.kind());
  for (const int64_t dim : tensor.dims) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return kMaxTensorBytes + 1;
  }
  return bytes;
}

void ParseColumns(FieldReader& fields, absl::string_view table, uint64_t count,
                  std::vector<TensorDelta>& tensors) {
  for (uint64_t i = 0; i < count && fields.ok(); ++i) {
    const size_t at = fields.reader().offset(), end = table.find('\n', at);
    if (end == absl::string_view::npos || end - at > formats::kMaxNameBytes)
      return fields.Fail("the name of a tensor does not end");
    TensorDelta& delta = tensors.emplace_back();
    delta.tensor.name = std::string(fields.Raw("name of a tensor", end - at));
    (void)fields.Byte("end of a name");
  }
  std::string dtype;
  for (TensorDelta& delta : tensors) {
    const uint64_t rank = fields.Varint("rank of a tensor", 2 * kMaxDims + 1);
    if (rank % 2 != 0) dtype = fields.Text("dtype of a tensor", kMaxDtypeBytes);
    TensorInfo& tensor = delta.tensor;
    tensor.dtype = dtype;
    for (uint64_t dim = 0; dim < rank / 2 && fields.ok(); ++dim)
      tensor.dims.push_back(fields.Count("dim of a tensor", kMaxTensorBytes));
    tensor.bytes = tensor.kind() == ElementKind::kByte
                       ? fields.Count("bytes of a tensor", kMaxTensorBytes)
                       : BytesOf(tensor);
  }
  for (size_t i = 0; i < tensors.size() && fields.ok(); ++i) {
    auto& [changes, drops, grows, flips] = tensors[i].counts.of;
    const uint64_t first = fields.Varint("events of a tensor");
    changes = static_cast<int64_t>(first / 2);
    if (first % 2 != 0) {
      for (int64_t* of : {&drops, &grows, &flips}) *of = fields.Count("events of a tensor");
    }
    CheckTensor(tensors[i], i == 0 ? nullptr : &tensors[i - 1], fields);
  }
}

}  // namespace

EventCounts Manifest::counts() const {
  EventCounts counts;
  for (const TensorDelta& delta : tensors) counts += delta.counts;
  return counts;
}

HalfDigest JoinEnds(const Digest& base_files, const Digest& target_files) {
  Sha256 sha;
  sha.Update(base_files);
  sha.Update(target_files);
  return HalfOf(sha.Finish());
}

absl::StatusOr<std::string> SerializeManifest(const Manifest& manifest) {
  const std::string table = SerializeTable(manifest.tensors);
  auto compressed = ZstdCompress(table, kTableLevel, kUsualNames);
  if (!compressed.ok()) return compressed.status();
  const bool smaller = compressed->size() < table.size();
  const bool rest = (manifest.rest_bytes | manifest.rest_frame_bytes) != 0;
  const auto number = [](int64_t value) { return static_cast<uint64_t>(value); };
  const auto raw = [](const auto& digest) {
    return absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size());
  };
  ByteWriter out;
  out.Text(manifest.model);
  out.Byte(static_cast<uint8_t>((manifest.schema_changes ? kSchemaChanges : 0) |
                                (smaller ? kCompressedTable : 0) | (rest ? kRest : 0) |
                                (manifest.expires_seconds != 0 ? kExpires : 0)));
  out.Varint(number(manifest.base_version));
  out.Varint(number(manifest.target_version));
  out.Varint(number(manifest.sequence));
  out.Varint(number(manifest.created_seconds));
  if (manifest.expires_seconds != 0) out.Varint(number(manifest.expires_seconds));
  out.Varint(number(manifest.base_nonzeros));
  if (manifest.schema_changes) out.Varint(number(manifest.target_nonzeros));
  out.Raw(raw(manifest.base_weights));
  out.Raw(raw(manifest.target_weights));
  out.Raw(raw(manifest.files));
  out.Varint(manifest.body_bytes);
  if (rest) {
    out.Varint(manifest.rest_bytes);
    out.Varint(manifest.rest_frame_bytes);
  }
  out.Varint(manifest.tensors.size());
  if (smaller) out.Varint(table.size());
  out.Raw(smaller ? *compressed : table);
  return out.Take();
}

namespace {

// The fields before the table, in the order of each format.
void ParseFields1(FieldReader& fields, Manifest& manifest) {
  manifest.base_version = fields.Count("base version");
  manifest.target_version = fields.Count("target version");
  manifest.sequence = fields.Count("sequence");
  manifest.created_seconds = fields.Count("creation time");
  manifest.expires_seconds = fields.Count("expiry time");
  manifest.base_nonzeros = fields.Count("non-zeros of the base");
  manifest.target_nonzeros = fields.Count("non-zeros of the target");
  manifest.base_weights = HalfOf(fields.Bytes<32>("digest of the base's weights"));
  const Digest base_files = fields.Bytes<32>("digest of the base's files");
  manifest.target_weights = fields.Bytes<32>("digest of the target's weights");
  manifest.files = JoinEnds(base_files, fields.Bytes<32>("digest of the target's files"));
  (void)fields.Bytes<32>("digest of the architecture");  // its tensors are in the weights' digest
  manifest.body = fields.Bytes<32>("digest of the body");
  manifest.body_bytes = fields.Varint("size of the body");
  manifest.rest_bytes = fields.Varint("size of the rest", kMaxRestBytes);
  manifest.rest_frame_bytes = fields.Varint("compressed size of the rest", manifest.body_bytes);
}

void ParseFields2(FieldReader& fields, uint8_t flags, Manifest& manifest) {
  manifest.base_version = fields.Count("base version");
  manifest.target_version = fields.Count("target version");
  manifest.sequence = fields.Count("sequence");
  manifest.created_seconds = fields.Count("creation time");
  if (flags & kExpires) {
    manifest.expires_seconds = fields.Count("expiry time");
    if (manifest.expires_seconds == 0) fields.Fail("an expiry time of 0, which is told by no flag");
  }
  manifest.base_nonzeros = fields.Count("non-zeros of the base");
  if (manifest.schema_changes) manifest.target_nonzeros = fields.Count("non-zeros of the target");
  manifest.base_weights = fields.Bytes<16>("digest of the base's weights");
  manifest.target_weights = fields.Bytes<32>("digest of the target's weights");
  manifest.files = fields.Bytes<16>("digest of the files");
  manifest.body_bytes = fields.Varint("size of the body");
  if (flags & kRest) {
    manifest.rest_bytes = fields.Varint("size of the rest", kMaxRestBytes);
    manifest.rest_frame_bytes = fields.Varint("compressed size of the rest", manifest.body_bytes);
    if ((manifest.rest_bytes | manifest.rest_frame_bytes) == 0)
      fields.Fail("a rest of no bytes, which is told by no flag");
  }
}

}  // namespace

absl::StatusOr<Manifest> ParseManifest(absl::string_view bytes, uint16_t format_version) {
  const bool first_format = format_version == 1;
  ByteReader reader(bytes);
  FieldReader fields(reader);
  Manifest manifest;
  manifest.model = fields.Text("model", kMaxModelNameBytes);
  if (fields.ok()) {
    if (auto status = formats::CheckName("a model", manifest.model); !status.ok()) return status;
  }
  const uint8_t flags = fields.Byte("flags", first_format ? 3 : 15);
  manifest.schema_changes = flags & kSchemaChanges;
  if (first_format) {
    ParseFields1(fields, manifest);
  } else {
    ParseFields2(fields, flags, manifest);
  }
  if ((manifest.rest_bytes == 0) != (manifest.rest_frame_bytes == 0))
    fields.Fail("the rest has a size without a compressed size, or the reverse");
  const uint64_t count = fields.Varint("number of tensors", kMaxTensors);
  const bool compressed = flags & kCompressedTable;
  const uint64_t table_bytes =
      first_format || compressed ? fields.Varint("size of the table of tensors", kMaxManifestBytes)
                                 : reader.left();
  if (!fields.ok()) return fields.status();
  // What is left is the table. A compressed one is small beside what it says it holds only up to a
  // point: zstd's longest runs give 1 : 2^17.
  const absl::string_view rest = *reader.Raw("table of tensors", reader.left());
  std::string table(rest);
  if (compressed) {
    auto decompressed =
        ZstdDecompress(rest, table_bytes, first_format ? absl::string_view() : kUsualNames);
    if (!decompressed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("table of tensors: ", decompressed.status().message()));
    }
    table = *std::move(decompressed);
  } else if (table.size() != table_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("table of tensors: ", table.size(), " bytes, expected ", table_bytes));
  }
  ByteReader of_table(table);
  FieldReader table_fields(of_table);
  if (first_format) {
    ParseRows(table_fields, count, manifest.tensors);
  } else {
    ParseColumns(table_fields, table, count, manifest.tensors);
  }
  table_fields.End("table of tensors");
  if (!table_fields.ok()) return table_fields.status();
  int64_t events = 0;  // of each tensor 2^46 at most
  for (const TensorDelta& delta : manifest.tensors) {
    events += delta.counts.total();
    if (events > kMaxEvents) return absl::InvalidArgumentError("more events than can be counted");
  }
  const int64_t gained = manifest.counts().gained(), nonzeros = manifest.base_nonzeros + gained;
  if (!first_format && !manifest.schema_changes) manifest.target_nonzeros = nonzeros;
  if (!manifest.schema_changes && (nonzeros != manifest.target_nonzeros || nonzeros < 0)) {
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
