#include "engine/updates/anchor_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/bytes.h"
#include "engine/updates/manifest.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/segment_place.h"
#include "engine/updates/stored_file.h"
#include "engine/updates/weight_digest.h"

namespace espalier::updates {
namespace {

constexpr uint64_t kFooterBytes = 8 + sizeof(Digest);  // size of the index, digest of it
constexpr uint64_t kMaxNumber = uint64_t{1} << 62;

absl::string_view AsBytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

int64_t SegmentsOf(const TensorInfo& tensor) {
  return (tensor.elements() + kSegmentElements - 1) / kSegmentElements;
}

// The bitmap of elements with a bit set, then those elements.
std::string Pack(const std::string& elements, size_t width) {
  const size_t count = elements.size() / width;
  std::string packed((count + 7) / 8, '\0');
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, elements.data() + i * width, width);
    if (bits == 0) continue;
    packed[i / 8] = static_cast<char>(packed[i / 8] | 1 << (i % 8));
    packed.append(elements, i * width, width);
  }
  return packed;
}

void WriteTensorHead(ByteWriter& index, const TensorInfo& tensor) {
  index.Text(tensor.name);
  index.Text(tensor.dtype);
  index.Varint(tensor.dims.size());
  for (const int64_t dim : tensor.dims) index.Varint(static_cast<uint64_t>(dim));
  index.Varint(static_cast<uint64_t>(tensor.bytes));
}

absl::StatusOr<TensorInfo> ParseTensorHead(ByteReader& reader) {
  TensorInfo tensor;
  const auto name = reader.Text("name", formats::kMaxNameBytes);
  if (!name.ok()) return name.status();
  tensor.name = std::string(*name);
  const auto dtype = reader.Text("dtype", 16);
  if (!dtype.ok()) return dtype.status();
  tensor.dtype = std::string(*dtype);
  const auto rank = reader.Varint("rank", kMaxDims);
  if (!rank.ok()) return rank.status();
  for (uint64_t i = 0; i < *rank; ++i) {
    const auto dim = reader.Varint("dim", static_cast<uint64_t>(kMaxTensorBytes));
    if (!dim.ok()) return dim.status();
    tensor.dims.push_back(static_cast<int64_t>(*dim));
  }
  const auto bytes = reader.Varint("bytes", static_cast<uint64_t>(kMaxTensorBytes));
  if (!bytes.ok()) return bytes.status();
  tensor.bytes = static_cast<int64_t>(*bytes);
  return tensor;
}

// Writes the segments of one tensor and their index; returns its digest.
absl::StatusOr<Digest> WriteTensor(AtomicFile& file, const TensorReader& weights, size_t tensor,
                                   ByteWriter& index) {
  const TensorInfo& info = weights.tensors()[tensor];
  WriteTensorHead(index, info);
  TensorDigester digester(info);
  const auto width = static_cast<size_t>(SizeOf(info.kind()));
  std::string elements;
  for (int64_t segment = 0; segment < SegmentsOf(info); ++segment) {
    const int64_t count = SegmentSize(info, segment);
    elements.resize(static_cast<size_t>(count) * width);
    auto status = weights.Read(tensor, segment * kSegmentElements, count, elements.data());
    if (!status.ok()) return status;
    digester.Update(elements.data(), count);
    const std::string packed = Pack(elements, width);
    if (status = file.Append(packed); !status.ok()) return status;
    index.Varint(packed.size());
    index.Raw(AsBytes(Sha256Of(packed)));
  }
  return digester.Finish();
}

}  // namespace

absl::StatusOr<uint64_t> WriteAnchor(FileSystem& files, const std::string& path, int64_t number,
                                     const Digest& digest, const TensorReader& weights) {
  auto file = AtomicFile::Create(path, 0600, files);
  if (!file.ok()) return file.status();
  if (auto status = file->Append(StoredHead(StoredKind::kAnchor)); !status.ok()) return status;
  ByteWriter index;
  index.Varint(static_cast<uint64_t>(number));
  index.Raw(AsBytes(digest));
  index.Varint(weights.tensors().size());
  std::vector<Digest> digests;
  for (size_t tensor = 0; tensor < weights.tensors().size(); ++tensor) {
    const auto written = WriteTensor(*file, weights, tensor, index);
    if (!written.ok()) return written.status();
    digests.push_back(*written);
  }
  if (const Digest found = ModelDigest(digests); found != digest) {
    return absl::DataLossError(absl::StrCat("the weights of version ", number, " have the digest ",
                                            ShortHex(found), "…, expected ", ShortHex(digest),
                                            "…"));
  }
  ByteWriter footer;
  footer.LittleEndian(index.size(), 8);
  footer.Raw(AsBytes(Sha256Of(index.bytes())));
  if (auto status = file->Append(index.bytes()); !status.ok()) return status;
  if (auto status = file->Append(footer.bytes()); !status.ok()) return status;
  const uint64_t size = file->size();
  if (auto status = file->Commit(); !status.ok()) return status;
  return size;
}

absl::StatusOr<std::shared_ptr<const AnchorReader>> AnchorReader::Open(FileSystem& files,
                                                                       const std::string& path,
                                                                       int64_t number,
                                                                       const Digest& digest) {
  auto file = files.Open(path, OpenMode::kRead);
  if (!file.ok()) return file.status();
  const auto size = (*file)->Size();
  if (!size.ok()) return size.status();
  std::string head(std::min(kStoredHeadBytes, *size), '\0');
  auto status = ReadExactly(**file, 0, head.data(), head.size());
  if (!status.ok()) return status;
  if (status = ReadStoredHead(StoredKind::kAnchor, head, path).status(); !status.ok())
    return status;
  if (*size < kStoredHeadBytes + kFooterBytes) return Damaged(path, "it ends too early");
  std::string footer(kFooterBytes, '\0');
  const uint64_t footer_at = *size - kFooterBytes;
  status = ReadExactly(**file, footer_at, footer.data(), footer.size());
  if (!status.ok()) return status;
  const uint64_t index_bytes = *ByteReader(footer).LittleEndian("size of the index", 8);
  if (index_bytes > footer_at - kStoredHeadBytes || index_bytes > kMaxManifestBytes)
    return Damaged(path, absl::StrCat("its index has ", index_bytes, " bytes"));
  std::string index(index_bytes, '\0');
  status = ReadExactly(**file, footer_at - index_bytes, index.data(), index.size());
  if (!status.ok()) return status;
  if (AsBytes(Sha256Of(index)) != absl::string_view(footer).substr(8))
    return Damaged(path, "its index has another digest than it was written with");
  std::shared_ptr<AnchorReader> reader(new AnchorReader);
  reader->file_ = *std::move(file);
  reader->path_ = path;
  status = reader->ParseIndex(index, footer_at - index_bytes, number, digest);
  if (!status.ok()) return absl::IsDataLoss(status) ? status : Damaged(path, status.message());
  return std::shared_ptr<const AnchorReader>(std::move(reader));
}

absl::Status AnchorReader::ParseIndex(absl::string_view index, uint64_t end, int64_t number,
                                      const Digest& digest) {
  ByteReader reader(index);
  const auto found = reader.Varint("version", kMaxNumber);
  if (!found.ok()) return found.status();
  const auto found_digest = reader.Raw("digest", sizeof(Digest));
  if (!found_digest.ok()) return found_digest.status();
  if (static_cast<int64_t>(*found) != number || *found_digest != AsBytes(digest))
    return Damaged(path_, absl::StrCat("it is of another version than ", number));
  const auto count = reader.Varint("number of tensors", kMaxTensors);
  if (!count.ok()) return count.status();
  uint64_t offset = kStoredHeadBytes;
  for (uint64_t i = 0; i < *count; ++i) {
    auto tensor = ParseTensorHead(reader);
    if (!tensor.ok()) return tensor.status();
    std::vector<Segment> segments;
    for (int64_t s = 0; s < SegmentsOf(*tensor); ++s) {
      Segment segment;
      const auto bytes = reader.Varint("size of a segment", end - offset);
      if (!bytes.ok()) return bytes.status();
      const auto raw = reader.Raw("digest", sizeof(Digest));
      if (!raw.ok()) return raw.status();
      std::copy(raw->begin(), raw->end(), segment.digest.begin());
      segment.offset = offset;
      segment.bytes = *bytes;
      offset += *bytes;
      segments.push_back(segment);
    }
    tensors_.push_back(*std::move(tensor));
    segments_.push_back(std::move(segments));
  }
  if (offset != end) return absl::InvalidArgumentError("its segments do not fill it");
  return reader.End("index");
}

absl::Status AnchorReader::ReadSegment(size_t tensor, int64_t segment, Visit visit) const {
  const Segment& place = segments_[tensor][static_cast<size_t>(segment)];
  const TensorInfo& info = tensors_[tensor];
  const auto width = static_cast<size_t>(SizeOf(info.kind()));
  const int64_t count = SegmentSize(info, segment), first = segment * kSegmentElements;
  const auto bitmap = static_cast<size_t>((count + 7) / 8);
  std::string packed(place.bytes, '\0');
  auto status = ReadExactly(*file_, place.offset, packed.data(), packed.size());
  if (!status.ok()) return status;
  const absl::Status damaged =
      Damaged(path_, absl::StrCat("segment ", segment, " of tensor ", formats::Quoted(info.name)));
  if (Sha256Of(packed) != place.digest || packed.size() < bitmap) return damaged;
  std::string window;
  size_t next = bitmap;
  for (int64_t at = 0; at < count; at += kWindowElements) {
    const int64_t here = std::min(kWindowElements, count - at);
    window.assign(static_cast<size_t>(here) * width, '\0');
    for (int64_t begin = at; begin < at + here; begin += 64) {
      uint64_t present = 0;
      const auto byte = static_cast<size_t>(begin / 8);
      std::memcpy(&present, packed.data() + byte, std::min<size_t>(8, bitmap - byte));
      if (count - begin < 64) present &= (uint64_t{1} << (count - begin)) - 1;
      if (packed.size() - next < width * static_cast<size_t>(BitsIn(present))) return damaged;
      for (; present != 0; present &= present - 1, next += width) {
        const auto element = static_cast<size_t>(begin - at + std::countr_zero(present));
        std::memcpy(window.data() + element * width, packed.data() + next, width);
      }
    }
    visit(first + at, window.data(), here);
  }
  return next == packed.size() ? absl::OkStatus() : damaged;
}

absl::Status AnchorReader::ReadWindows(size_t tensor, int64_t first, int64_t count,
                                       Visit visit) const {
  const int64_t segment = first / kSegmentElements;
  if (first % kSegmentElements == 0 && count == SegmentSize(tensors_[tensor], segment))
    return ReadSegment(tensor, segment, visit);
  return TensorReader::ReadWindows(tensor, first, count, visit);
}

absl::Status AnchorReader::Read(size_t tensor, int64_t first, int64_t count, void* to) const {
  const auto width = static_cast<size_t>(SizeOf(tensors_[tensor].kind()));
  const int64_t end = first + count;
  for (int64_t segment = first / kSegmentElements; segment * kSegmentElements < end; ++segment) {
    auto status = ReadSegment(tensor, segment, [&](int64_t at, void* elements, int64_t here) {
      const int64_t begin = std::max(at, first), stop = std::min(at + here, end);
      if (begin >= stop) return;
      std::memcpy(static_cast<char*>(to) + static_cast<size_t>(begin - first) * width,
                  static_cast<char*>(elements) + static_cast<size_t>(begin - at) * width,
                  static_cast<size_t>(stop - begin) * width);
    });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace espalier::updates
