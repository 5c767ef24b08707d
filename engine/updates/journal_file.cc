#include "engine/updates/journal_file.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
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

std::string SerializeHeader(const JournalEnds& ends, const Journal& journal) {
  ByteWriter out;
  out.Varint(static_cast<uint64_t>(ends.from));
  out.Varint(static_cast<uint64_t>(ends.to));
  WriteDigest(out, ends.from_weights);
  WriteDigest(out, ends.to_weights);
  out.Varint(journal.tensors.size());
  for (const TensorJournal& tensor : journal.tensors) {
    out.Varint(tensor.tensor);
    out.Varint(tensor.entries.size());
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
  for (const JournalEntry& entry : entries) {
    out.Varint(static_cast<uint64_t>(entry.position - next));
    next = entry.position + 1;
  }
  for (const JournalEntry& entry : entries) out.LittleEndian(entry.old_bits, width);
  for (const JournalEntry& entry : entries) out.LittleEndian(entry.new_bits, width);
  const auto frame = ZstdCompress(out.bytes(), kZstdLevel);
  if (!frame.ok()) return frame.status();
  ByteWriter piece;
  piece.Byte(static_cast<uint8_t>(width));
  piece.Varint(out.size());
  piece.Raw(*frame);
  return piece.Take();
}

absl::Status ParsePiece(absl::string_view piece, size_t count, int64_t next,
                        std::vector<JournalEntry>& entries) {
  ByteReader head(piece);
  const auto width = head.Byte("width");
  if (!width.ok()) return width.status();
  if (*width != 1 && *width != 2 && *width != 4)
    return absl::InvalidArgumentError(absl::StrCat("elements of ", *width, " bytes"));
  const auto size = head.Varint("size of a piece", kMaxPieceBytes);
  if (!size.ok()) return size.status();
  const auto bytes = ZstdDecompress(piece.substr(head.offset()), *size);
  if (!bytes.ok()) return bytes.status();
  ByteReader reader(*bytes);
  const size_t first = entries.size();
  for (size_t i = 0; i < count; ++i) {
    const auto gap = reader.Varint("gap", static_cast<uint64_t>(kMaxTensorBytes));
    if (!gap.ok()) return gap.status();
    const int64_t position = next + static_cast<int64_t>(*gap);
    if (position >= kMaxTensorBytes) return absl::InvalidArgumentError("a position is too large");
    entries.push_back({position, 0, 0});
    next = position + 1;
  }
  for (const auto field : {&JournalEntry::old_bits, &JournalEntry::new_bits}) {
    const auto elements = reader.Raw("elements", count * *width);
    if (!elements.ok()) return elements.status();
    const char* from = elements->data();
    for (size_t i = first; i < entries.size(); ++i, from += *width)
      std::memcpy(&(entries[i].*field), from, *width);  // little-endian, the rest is 0
  }
  return reader.End("piece");
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
  std::vector<std::pair<size_t, uint64_t>> tensors;  // index, entries
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
    if (*entries == 0 || (i > 0 && *index <= header.tensors.back().first))
      return absl::InvalidArgumentError("tensors are not in order");
    header.tensors.emplace_back(*index, *entries);
  }
  if (auto status = reader.End("header"); !status.ok()) return status;
  return header;
}

std::string Named(const JournalEnds& ends) {
  return absl::StrCat("version ", ends.from, " (", ShortHex(ends.from_weights), "…) to ", ends.to,
                      " (", ShortHex(ends.to_weights), "…)");
}

}  // namespace

absl::StatusOr<uint64_t> WriteJournal(FileSystem& files, const std::string& path,
                                      const JournalEnds& ends, const Journal& journal) {
  auto writer = SealedWriter::Create(files, path, StoredKind::kJournal);
  if (!writer.ok()) return writer.status();
  if (auto status = writer->AppendBlock(SerializeHeader(ends, journal)); !status.ok())
    return status;
  for (const TensorJournal& tensor : journal.tensors) {
    const absl::Span<const JournalEntry> entries(tensor.entries);
    int64_t next = 0;
    for (size_t first = 0; first < entries.size(); first += kPieceEntries) {
      const auto piece = entries.subspan(first, kPieceEntries);
      const auto bytes = SerializePiece(piece, next);
      if (!bytes.ok()) return bytes.status();
      if (auto status = writer->AppendBlock(*bytes); !status.ok()) return status;
      next = piece.back().position + 1;
    }
  }
  return writer->Commit();
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
  for (const auto& [index, entries] : header->tensors) {
    if (entries > left) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the journal of ", Named(ends), " takes more than ", limits.max_bytes, " bytes"));
    }
    left -= entries;
  }
  reader.tensors_ = std::move(header->tensors);
  return reader;
}

absl::StatusOr<TensorJournal> JournalReader::Next() {
  const auto& [index, entries] = tensors_[next_++];
  TensorJournal tensor{index, {}};
  int64_t next = 0;
  while (tensor.entries.size() < entries) {
    const auto piece = reader_.NextBlock(kMaxPieceBytes + 64);
    if (!piece.ok()) return piece.status();
    // Only what is there is believed of a count that nothing has checked yet.
    if (tensor.entries.empty()) tensor.entries.reserve(std::min<uint64_t>(entries, reader_.size()));
    const size_t count = std::min<uint64_t>(kPieceEntries, entries - tensor.entries.size());
    if (auto status = ParsePiece(*piece, count, next, tensor.entries); !status.ok())
      return Damaged(reader_.path(), status.message());
    next = tensor.entries.back().position + 1;
  }
  return tensor;
}

absl::StatusOr<Journal> ReadJournal(FileSystem& files, const std::string& path,
                                    const JournalEnds& ends, const JournalLimits& limits) {
  auto reader = JournalReader::Open(files, path, ends, limits);
  if (!reader.ok()) return reader.status();
  Journal journal;
  while (reader->next_tensor() != SIZE_MAX) {
    auto tensor = reader->Next();
    if (!tensor.ok()) return tensor.status();
    journal.tensors.push_back(*std::move(tensor));
  }
  if (auto status = reader->End(); !status.ok()) return status;
  return journal;
}

}  // namespace espalier::updates
