#include "engine/updates/weight_digest.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <thread>

#include "engine/updates/bytes.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/segment_codec.h"

namespace espalier::updates {
namespace {

constexpr int64_t kBlockElements = 16 << 10, kMaxBlockElements = 64 << 10;

// A zero byte, bitmap and present elements of a block. `buffer` only grows.
template <typename Bits>
absl::string_view Present(const uint8_t* bytes, int64_t count, std::string& buffer) {
  std::vector<Bits> aligned;
  const Bits* elements = reinterpret_cast<const Bits*>(bytes);
  if (reinterpret_cast<uintptr_t>(bytes) % alignof(Bits) != 0) {
    aligned.resize(static_cast<size_t>(count));
    std::memcpy(aligned.data(), bytes, aligned.size() * sizeof(Bits));
    elements = aligned.data();
  }
  const std::vector<uint64_t> present = NonzeroBits<PlainElement<Bits>>(elements, count);
  buffer.resize(std::max(buffer.size(),
                         1 + static_cast<size_t>((count + 7) / 8 + count * int64_t{sizeof(Bits)})));
  buffer[0] = '\0';
  char* out = buffer.data() + 1;
  for (size_t byte = 0; byte < static_cast<size_t>((count + 7) / 8); ++byte)
    *out++ = static_cast<char>(present[byte / 8] >> (8 * (byte % 8)));
  const char* end = Compact(present, elements, out);
  return {buffer.data(), static_cast<size_t>(end - buffer.data())};
}

Digest DigestOfTensor(const TensorInfo& tensor, const Digest& root) {
  ByteWriter head;
  head.Byte(2);
  head.Text(tensor.name);
  head.Text(tensor.dtype);
  head.Varint(tensor.dims.size());
  for (const int64_t dim : tensor.dims) head.Varint(static_cast<uint64_t>(dim));
  Sha256 sha;
  sha.Update(head.bytes());
  sha.Update(root);
  return sha.Finish();
}

absl::StatusOr<Digest> DigestTensor(const TensorReader& reader, size_t index) {
  const TensorInfo& tensor = reader.tensors()[index];
  TensorDigester digester(tensor);
  for (int64_t first = 0; first < tensor.elements(); first += kSegmentElements) {
    auto status = reader.ReadWindows(
        index, first, std::min(kSegmentElements, tensor.elements() - first),
        [&](int64_t, const void* elements, int64_t count) { digester.Update(elements, count); });
    if (!status.ok()) return status;
  }
  return digester.Finish();
}

}  // namespace

int64_t BlockElements(const TensorInfo& tensor) {
  const int64_t row = std::max<int64_t>(tensor.row_elements(), 1);
  if (row > kMaxBlockElements) return kMaxBlockElements;
  return row * std::max<int64_t>(1, kBlockElements / row);
}

Digest BlockHasher::Hash(const void* elements, int64_t count, ElementKind kind) {
  const auto* bytes = static_cast<const uint8_t*>(elements);
  sha_.Update(SizeOf(kind) == 4   ? Present<uint32_t>(bytes, count, present_)
              : SizeOf(kind) == 2 ? Present<uint16_t>(bytes, count, present_)
                                  : Present<uint8_t>(bytes, count, present_));
  return sha_.Finish();
}

TensorDigester::TensorDigester(TensorInfo tensor)
    : tensor_(std::move(tensor)),
      block_elements_(BlockElements(tensor_)),
      element_bytes_(static_cast<size_t>(SizeOf(tensor_.kind()))) {}

void TensorDigester::AddBlock(const uint8_t* elements, int64_t count) {
  blocks_.push_back(hasher_.Hash(elements, count, tensor_.kind()));
}

void TensorDigester::Update(const void* elements, int64_t count) {
  const auto* next = static_cast<const uint8_t*>(elements);
  size_t left = static_cast<size_t>(count) * element_bytes_;
  const size_t block_bytes = static_cast<size_t>(block_elements_) * element_bytes_;
  if (!pending_.empty()) {
    const size_t taken = std::min(left, block_bytes - pending_.size());
    pending_.append(reinterpret_cast<const char*>(next), taken);
    next += taken;
    left -= taken;
    if (pending_.size() < block_bytes) return;
    AddBlock(reinterpret_cast<const uint8_t*>(pending_.data()), block_elements_);
    pending_.clear();
  }
  for (; left >= block_bytes; left -= block_bytes, next += block_bytes)
    AddBlock(next, block_elements_);
  pending_.append(reinterpret_cast<const char*>(next), left);
}

Digest TensorDigester::Content() {
  if (!pending_.empty()) {
    AddBlock(reinterpret_cast<const uint8_t*>(pending_.data()),
             static_cast<int64_t>(pending_.size() / element_bytes_));
    pending_.clear();
  }
  return MerkleRoot(blocks_);
}

Digest TensorDigester::Finish() { return DigestOfTensor(tensor_, Content()); }

Digest MerkleRoot(std::vector<Digest> level) {
  if (level.empty()) return Sha256Of(absl::string_view("\0", 1));
  Sha256 sha;
  while (level.size() > 1) {
    size_t kept = 0;
    for (size_t i = 0; i < level.size(); i += 2) {
      if (i + 1 < level.size()) {
        sha.Update("\1");
        sha.Update(level[i]);
        sha.Update(level[i + 1]);
        level[kept++] = sha.Finish();
      } else {
        level[kept++] = level[i];
      }
    }
    level.resize(kept);
  }
  return level[0];
}

Digest ModelDigest(const std::vector<Digest>& tensors) {
  ByteWriter head;
  head.Byte(3);
  head.Varint(tensors.size());
  Sha256 sha;
  sha.Update(head.bytes());
  for (const Digest& tensor : tensors) sha.Update(tensor);
  return sha.Finish();
}

Digest DigestOf(const std::vector<TensorInfo>& tensors, const BlockDigests& blocks) {
  std::vector<Digest> digests;
  for (size_t i = 0; i < tensors.size(); ++i)
    digests.push_back(DigestOfTensor(tensors[i], MerkleRoot(blocks.tensors[i])));
  return ModelDigest(digests);
}

absl::StatusOr<Digest> DigestOf(const TensorReader& reader, int threads) {
  const size_t count = reader.tensors().size();
  std::vector<Digest> digests(count);
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  absl::Status failure;
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < count;) {
      auto digest = DigestTensor(reader, i);
      if (digest.ok()) {
        digests[i] = *digest;
        continue;
      }
      const std::lock_guard lock(mutex);
      failure.Update(digest.status());
      next = count;
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads && static_cast<size_t>(i) < count; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (!failure.ok()) return failure;
  return ModelDigest(digests);
}

}  // namespace espalier::updates
