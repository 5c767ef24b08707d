// weight_digest.h — the digest of a model's logical weights: SHA-256 over blocks of rows, joined in
// a Merkle tree, so that checking an update costs only the blocks that it touched.
//
//   block    SHA-256(00 · which elements have a bit set, one bit each · those elements)
//   node     SHA-256(01 · left · right); an odd one at the end of a level moves up as it is
//   tensor   SHA-256(02 · name · dtype · rank · dims · root)      no block at all: root = SHA-256(00)
//   model    SHA-256(03 · number of tensors · tensors, ascending by name)
//
// Zeros take a bit each, so that a tensor with 90 % zeros is hashed six times (bf16) to eight times
// (f32) as fast as its dense bytes; −0 has a bit set and is told from +0. FORMAT.md has the bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/updates/sha256.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

// Elements of a block: as many whole rows as fit into 16 Ki elements, at least one; rows above 64 Ki
// elements are cut.
int64_t BlockElements(const TensorInfo& tensor);

// The leaves of a model's tree, by tensor and by block: 32 bytes for 16 Ki elements.
struct BlockDigests {
  std::vector<std::vector<Digest>> tensors;
};

class BlockHasher {
 public:
  // All elements of one block.
  Digest Hash(const void* elements, int64_t count, ElementKind kind);

 private:
  std::string present_;  // scratch
  Sha256 sha_;
};

// One tensor, its elements in order and in pieces of any size.
class TensorDigester {
 public:
  explicit TensorDigester(TensorInfo tensor);
  void Update(const void* elements, int64_t count);
  // All elements were given. Without the name: equal contents of equal dtype and dims are equal.
  Digest Content();
  Digest Finish();

 private:
  void AddBlock(const uint8_t* elements, int64_t count);

  TensorInfo tensor_;
  int64_t block_elements_;
  size_t element_bytes_;
  std::string pending_;  // elements of a block that is not full yet
  BlockHasher hasher_;
  std::vector<Digest> blocks_;
};

Digest MerkleRoot(std::vector<Digest> level);
Digest ModelDigest(const std::vector<Digest>& tensors);
Digest DigestOf(const std::vector<TensorInfo>& tensors, const BlockDigests& blocks);

// Reads everything. `threads` tensors at a time.
absl::StatusOr<Digest> DigestOf(const TensorReader& reader, int threads = 1);

}  // namespace espalier::updates
