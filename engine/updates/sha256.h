// sha256.h — SHA-256, whole or in pieces.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

struct evp_md_ctx_st;

namespace espalier::updates {

using Digest = std::array<uint8_t, 32>;
// The first half of one: what it is of cannot be made to fit it afterwards, but two things can be made
// that share it, by 2^64 trials.
using HalfDigest = std::array<uint8_t, 16>;

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* bytes, size_t size);
  void Update(absl::string_view bytes) { Update(bytes.data(), bytes.size()); }
  void Update(const Digest& digest) { Update(digest.data(), digest.size()); }
  // What was put in since the last call; the next Update begins anew.
  Digest Finish();

 private:
  evp_md_ctx_st* context_;
};

Digest Sha256Of(absl::string_view bytes);
HalfDigest HalfOf(const Digest& digest);
std::string Hex(absl::Span<const uint8_t> digest);       // two digits a byte
std::string ShortHex(absl::Span<const uint8_t> digest);  // the first 16, for messages

}  // namespace espalier::updates
