#include "engine/updates/sha256.h"

#include <openssl/evp.h>

#include <algorithm>

#include "absl/strings/escaping.h"

namespace espalier::updates {

// OpenSSL's digest fails only without memory or without SHA-256; neither leaves anything to go on
// with, so that Finish gives what is there.
Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  EVP_DigestInit_ex(context_, EVP_sha256(), nullptr);
}

Sha256::~Sha256() { EVP_MD_CTX_free(context_); }

void Sha256::Update(const void* bytes, size_t size) { EVP_DigestUpdate(context_, bytes, size); }

Digest Sha256::Finish() {
  Digest digest{};
  EVP_DigestFinal_ex(context_, digest.data(), nullptr);
  EVP_DigestInit_ex(context_, nullptr, nullptr);
  return digest;
}

Digest Sha256Of(absl::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes);
  return sha.Finish();
}

HalfDigest HalfOf(const Digest& digest) {
  HalfDigest half{};
  std::copy_n(digest.begin(), half.size(), half.begin());
  return half;
}

std::string Hex(absl::Span<const uint8_t> digest) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

std::string ShortHex(absl::Span<const uint8_t> digest) { return Hex(digest).substr(0, 16); }

}  // namespace espalier::updates
