// signing.h — Ed25519 keys and signatures (OpenSSL), and who must have signed.
//
// Files    PEM as OpenSSL writes it (PKCS #8, SubjectPublicKeyInfo): `openssl pkey -in k.key -text`
//          reads them, and keys of `openssl genpkey -algorithm ed25519` work here.
// Message  A signature covers "espalier delta\0" and the message, so that no signature made for
//          something else can be passed off as one of a delta.
// Errors   InvalidArgument for what is no such key; PermissionDenied for a signature that is wrong
//          or missing.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/sha256.h"

struct evp_pkey_st;

namespace espalier::updates {

using KeyId = HalfDigest;  // the first half of SHA-256 of the 32 bytes of a public key
// The beginning of a key's id: which key to try. It proves nothing.
using KeyTag = std::array<uint8_t, 8>;
KeyTag TagOf(const KeyId& id);

struct Signature {
  KeyTag key{};
  std::array<uint8_t, 64> bytes{};
};

class PublicKey {
 public:
  static absl::StatusOr<PublicKey> FromPem(absl::string_view pem);
  absl::StatusOr<std::string> ToPem() const;
  const KeyId& id() const { return id_; }
  bool Verifies(absl::string_view message, const Signature& signature) const;

 private:
  friend class PrivateKey;

  std::shared_ptr<evp_pkey_st> key_;
  KeyId id_{};
};

class PrivateKey {
 public:
  static absl::StatusOr<PrivateKey> Generate();
  static absl::StatusOr<PrivateKey> FromPem(absl::string_view pem);
  absl::StatusOr<std::string> ToPem() const;  // unencrypted
  absl::StatusOr<PublicKey> Public() const;
  absl::StatusOr<Signature> Sign(absl::string_view message) const;

 private:
  std::shared_ptr<evp_pkey_st> key_;
};

// Whom to believe: at least `threshold` of `keys`, each counted once.
struct TrustPolicy {
  std::vector<PublicKey> keys;
  int threshold = 1;
};

// InvalidArgument when a key is there twice or the threshold is not 1 to the number of keys.
absl::Status CheckPolicy(const TrustPolicy& policy);

// The keys of the policy that signed. PermissionDenied below the threshold, and for a wrong
// signature by a key of the policy, however many others are right. Signatures by other keys do not
// count and do not harm.
absl::StatusOr<std::vector<KeyId>> CheckSignatures(absl::string_view message,
                                                   const std::vector<Signature>& signatures,
                                                   const TrustPolicy& policy);

}  // namespace espalier::updates
