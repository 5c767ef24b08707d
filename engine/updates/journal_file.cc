#include "engine/updates/journal_file.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/formats/names.h"
#include "engine/updates/bytes.h"
#include "engine/updates/stored_file.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

constexpr size_t kPieceEntries = 65536;
// A gap is a varint of at most 10 bytes, an element at most 4.
constexpr uint64_t kMaxPieceBytes = kPieceEntries * (10 + 2 * 4);
// Speed counts here, not size: the lowest level already takes the exponents together.
constexpr int kZstdLevel = 1;

void WriteDigest(ByteWriter& out, const Digest& digest) {
  out.Raw({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

std::string SerializeHeader(const JournalEnds& ends, absl::Span<const ChangedTensor> tensors) {
  ByteWriter out;
  out.Varint(static_cast<uint64_t>(ends.from));
  out.Varint(static_cast<uint64_t>(ends.to));
  WriteDigest(out, ends.from_weights);
  WriteDigest(out, ends.to_weights);
  out.Varint(tensors.size());
  for (const ChangedTensor& tensor : tensors) {
    out.Varint(tensor.tensor);
    out.Varint(tensor.entries);
  }
  return out.Take();
}

// Bytes that hold every element of the piece: 1, 2 or 4.
int WidthOf(absl::Span<const JournalEntry> entries) {
  uint32_t any = 0;
  for (const JournalEntry& entry : entries) any |= entry.old_bits | entry.new_bits;
  return any < 0x100 ? 1 : any < 0x10000 ? 2 : 4;
}

// `next` is the position after the entry before.
absl::StatusOr<std::string> SerializePiece(absl::Span<const JournalEntry> entries, int64_t next) {
  const int width = WidthOf(entries);
  ByteWriter out;
  out.Reserve(entries.size() * static_cast<size_t>(2 + 2 * width));  // gaps are of one byte or two
  for (const JournalEntry& entry : entries) {
    out.Varint(static_cast<uint64_t>(entry.position - next));
    next = entry.position + 1;
  }
  for (const JournalEntry& entry : entries) out.LittleEndian(entry.old_bits, width);
  for (const JournalEntry& entry : entries) out.LittleEndian(entry.new_bits, width);
  const size_t size = out.size();
  const auto frame = ZstdCompress(out.Take(), kZstdLevel);
  if (!frame.ok()) return frame.status();
  ByteWriter piece;
  piece.Byte(static_cast<uint8_t>(width));
  piece.Varint(size);
  piece.Raw(*frame);
  return piece.Take();
}

// A piece, decompressed: gaps, old elements, new elements.
struct OpenedPiece {
  std::string bytes;
  size_t entries = 0, width = 0;

  const char* OldBits() const { return bytes.data() + bytes.size() - 2 * entries * width; }
  const char* NewBits() const { return OldBits() + entries * width; }
};

// Calls `each` with the index and position of each entry; what they changed to can be seen by then.
template <typename Each>
absl::Status OpenPiece(absl::string_view piece, size_t count, int64_t next, OpenedPiece& opened,
                       Each each) {
  ByteReader head(piece);
  const auto width = head.Byte("width");
  if (!width.ok()) return width.status();
  if (*width != 1 && *width != 2 && *width != 4)
    return absl::InvalidArgumentError(absl::StrCat("elements of ", *width, " bytes"));
  const auto size = head.Varint("size of a piece", kMaxPieceBytes);
  if (!size.ok()) return size.status();
  if (*size < 2 * count * *width)
    return absl::InvalidArgumentError(absl::StrCat(*size, " bytes for ", count, " elements"));
  opened.bytes = std::string();  // before the next one comes
  auto bytes = ZstdDecompress(piece.substr(head.offset()), *size);
  if (!bytes.ok()) return bytes.status();
  opened.bytes = *std::move(bytes);
  opened.entries = count;
  opened.width = *width;
  ByteReader reader(opened.bytes);
  for (size_t i = 0; i < count; ++i) {
    const auto gap = reader.Varint("gap", static_cast<uint64_t>(kMaxTensorBytes));
    if (!gap.ok()) return gap.status();
    const int64_t position = next + static_cast<int64_t>(*gap);
    if (position >= kMaxTensorBytes) return absl::InvalidArgumentError("a position is too large");
    next = position + 1;
    each(i, position);
  }
  const auto elements = reader.Raw("elements", 2 * count * *width);
  return elements.ok() ? reader.End("piece") : elements.status();
}

// The elements of a piece, whose positions are there, the rest of their words 0.
template <size_t kWidth>
void CopyElements(const OpenedPiece& opened, std::vector<JournalEntry>& entries) {
  const char *old_bits = opened.OldBits(), *new_bits = opened.NewBits();
  for (size_t i = 0; i < opened.entries; ++i) {
    JournalEntry entry{entries[i].position, 0, 0};
    std::memcpy(&entry.old_bits, old_bits + i * kWidth, kWidth);  // little-endian
    std::memcpy(&entry.new_bits, new_bits + i * kWidth, kWidth);
    entries[i] = entry;
  }
}

absl::StatusOr<Digest> ReadDigest(ByteReader& reader) {
  const auto raw = reader.Raw("digest", sizeof(Digest));
  if (!raw.ok()) return raw.status();
  Digest digest{};
  std::copy(raw->begin(), raw->end(), digest.begin());
  return digest;
}

struct Header {
  JournalEnds ends;
  std::vector<ChangedTensor> tensors;
};

absl::StatusOr<Header> ParseHeader(absl::string_view bytes) {
  constexpr uint64_t kMaxNumber = uint64_t{1} << 62;
  ByteReader reader(bytes);
  Header header;
  for (int64_t* number : {&header.ends.from, &header.ends.to}) {
    const auto value = reader.Varint("version", kMaxNumber);
    if (!value.ok()) return value.status();
    *number = static_cast<int64_t>(*value);
  }
  for (Digest* digest : {&header.ends.from_weights, &header.ends.to_weights}) {
    const auto value = ReadDigest(reader);
    if (!value.ok()) return value.status();
    *digest = *value;
  }
  const auto count = reader.Varint("number of tensors", kMaxTensors);
  if (!count.ok()) return count.status();
  for (uint64_t i = 0; i < *count; ++i) {
    const auto index = reader.Varint("tensor", kMaxTensors);
    if (!index.ok()) return index.status();
    const auto entries = reader.Varint("entries", static_cast<uint64_t>(kMaxTensorBytes));
    if (!entries.ok()) return entries.status();
    if (*entries == 0 || (i > 0 && *index <= header.tensors.back().tensor))
      return absl::InvalidArgumentError("tensors are not in order");
    header.tensors.push_back({*index, *entries});
  }
  if (auto status = reader.End("header"); !status.ok()) return status;
  return header;
}

std::string Named(const JournalEnds& ends) {
  return absl::StrCat("version ", ends.from, " (", ShortHex(ends.from_weights), "…) to ", ends.to,
                      " (", ShortHex(ends.to_weights), "…)");
}

}  // namespace

absl::Status JournalWriter::Begin(absl::Span<const ChangedTensor> tensors) {
  auto file = SealedWriter::Create(files_, path_, StoredKind::kJournal);
  if (!file.ok()) return file.status();
  file_.emplace(*std::move(file));
  uint64_t most = 0;
  for (const ChangedTensor& tensor : tensors) most = std::max(most, tensor.entries);
  piece_.reserve(std::min<uint64_t>(most, kPieceEntries));
  return file_->AppendBlock(SerializeHeader(ends_, tensors));
}

absl::Status JournalWriter::Append(size_t tensor, absl::Span<const JournalEntry> entries) {
  if (tensor != tensor_) {
    if (auto status = AppendPiece(); !status.ok()) return status;
    tensor_ = tensor;
    next_ = 0;
  }
  entries_ += static_cast<int64_t>(entries.size());
  while (!entries.empty()) {
    const auto taken = entries.subspan(0, kPieceEntries - piece_.size());
    piece_.insert(piece_.end(), taken.begin(), taken.end());
    entries.remove_prefix(taken.size());
    if (piece_.size() < kPieceEntries) break;
    if (auto status = AppendPiece(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status JournalWriter::AppendPiece() {
  if (piece_.empty()) return absl::OkStatus();
  const auto bytes = SerializePiece(piece_, next_);
  if (!bytes.ok()) return bytes.status();
  if (auto status = file_->AppendBlock(*bytes); !status.ok()) return status;
  const int64_t last = piece_.back().position;
  pieces_.push_back({tensor_, next_, last, file_->size() - bytes->size(), bytes->size(),
                     piece_.size(), Sha256Of(*bytes)});
  next_ = last + 1;
  piece_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const JournalOnDisk>> JournalWriter::Reopen() const {
  auto reader = SealedReader::Open(files_, path_, StoredKind::kJournal);
  if (!reader.ok()) return reader.status();
  return std::shared_ptr<const JournalOnDisk>(
      new JournalOnDisk(*std::move(reader), ends_, pieces_));
}

absl::StatusOr<uint64_t> JournalWriter::Commit() {
  if (auto status = AppendPiece(); !status.ok()) return status;
  return file_->Commit();
}

absl::StatusOr<JournalReader> JournalReader::Open(FileSystem& files, const std::string& path,
                                                  const JournalEnds& ends,
                                                  const JournalLimits& limits) {
  auto sealed = SealedReader::Open(files, path, StoredKind::kJournal);
  if (!sealed.ok()) return sealed.status();
  JournalReader reader(*std::move(sealed));
  const auto first = reader.reader_.NextBlock();
  if (!first.ok()) return first.status();
  auto header = ParseHeader(*first);
  if (!header.ok()) return Damaged(path, header.status().message());
  if (header->ends != ends) {
    return Damaged(path,
                   absl::StrCat("it leads from ", Named(header->ends), ", expected ", Named(ends)));
  }
  uint64_t left = static_cast<uint64_t>(limits.max_bytes) / sizeof(JournalEntry);
  for (const auto& [tensor, entries] : header->tensors) {
    if (entries > left) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the journal of ", Named(ends), " takes more than ", limits.max_bytes, " bytes"));
    }
    left -= entries;
  }
  reader.tensors_ = std::move(header->tensors);
  return reader;
}

absl::Status JournalReader::NextPiece(std::vector<JournalEntry>& entries) {
  const uint64_t of_tensor = tensors_[next_].entries;
  const auto piece = reader_.NextBlock(kMaxPieceBytes + 64);
  if (!piece.ok()) return piece.status();
  OpenedPiece opened;
  const size_t count = std::min<uint64_t>(kPieceEntries, of_tensor - read_);
  entries.resize(count);
  if (auto status = OpenPiece(*piece, count, position_, opened,
                              [&](size_t i, int64_t position) { entries[i].position = position; });
      !status.ok()) {
    return Damaged(reader_.path(), status.message());
  }
  (opened.width == 1   ? CopyElements<1>
   : opened.width == 2 ? CopyElements<2>
                       : CopyElements<4>)(opened, entries);
  read_ += count;
  position_ = entries.back().position + 1;
  if (read_ < of_tensor) return absl::OkStatus();
  ++next_;
  read_ = 0;
  position_ = 0;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const JournalOnDisk>> JournalOnDisk::Open(
    FileSystem& files, const std::string& path, const JournalEnds& ends,
    const JournalLimits& limits) {
  auto reader = JournalReader::Open(files, path, ends, limits);
  if (!reader.ok()) return reader.status();
  std::vector<JournalPiece> pieces;
  OpenedPiece opened;
  for (const auto& [tensor, entries] : reader->tensors_) {
    int64_t next = 0;
    for (uint64_t read = 0; read < entries;) {
      const auto block = reader->reader_.NextBlock(kMaxPieceBytes + 64);
      if (!block.ok()) return block.status();
      JournalPiece piece{.tensor = tensor, .next = next, .digest = Sha256Of(*block)};
      piece.offset = reader->reader_.block_offset();
      piece.bytes = block->size();
      piece.entries = std::min<uint64_t>(kPieceEntries, entries - read);
      if (auto status = OpenPiece(*block, piece.entries, next, opened,
                                  [&](size_t, int64_t position) { piece.last = position; });
          !status.ok()) {
        return Damaged(path, status.message());
      }
      next = piece.last + 1;
      read += piece.entries;
      pieces.push_back(piece);
    }
  }
  if (auto status = reader->End(); !status.ok()) return status;
  return std::shared_ptr<const JournalOnDisk>(
      new JournalOnDisk(std::move(reader->reader_), ends, std::move(pieces)));
}

absl::Status JournalOnDisk::CheckFits(const std::vector<TensorInfo>& tensors) const {
  for (const JournalPiece& piece : pieces_) {
    if (piece.tensor >= tensors.size()) {
      return absl::InvalidArgumentError(absl::StrCat("the journal changes tensor ", piece.tensor,
                                                     ", there are ", tensors.size()));
    }
    const TensorInfo& info = tensors[piece.tensor];
    if (piece.last < info.elements()) continue;
    return absl::InvalidArgumentError(absl::StrCat("the journal changes element ", piece.last,
                                                   " of tensor ", formats::Quoted(info.name),
                                                   ", which has ", info.elements()));
  }
  return absl::OkStatus();
}

absl::Status JournalOnDisk::Visit(size_t tensor, int64_t first, int64_t count, bool forward,
                                  VisitChange visit) const {
  const auto before = [](const JournalPiece& piece, const std::pair<size_t, int64_t>& place) {
    return std::pair(piece.tensor, piece.last) < place;
  };
  OpenedPiece opened;
  for (auto piece =
           std::lower_bound(pieces_.begin(), pieces_.end(), std::pair(tensor, first), before);
       piece != pieces_.end() && piece->tensor == tensor && piece->next < first + count; ++piece) {
    std::string block(piece->bytes, '\0');
    if (auto status = reader_.ReadAgain(piece->offset, block); !status.ok()) return status;
    if (Sha256Of(block) != piece->digest)
      return Damaged(reader_.path(), "it changed after it was opened");
    const auto status =
        OpenPiece(block, piece->entries, piece->next, opened, [&](size_t i, int64_t position) {
          if (position < first || position >= first + count) return;
          uint32_t element = 0;
          std::memcpy(&element, (forward ? opened.NewBits() : opened.OldBits()) + i * opened.width,
                      opened.width);
          visit(position, element);
        });
    if (!status.ok()) return Damaged(reader_.path(), status.message());
  }
  return absl::OkStatus();
}

}  // namespace espalier::updates
