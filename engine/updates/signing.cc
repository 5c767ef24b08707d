#include "engine/updates/signing.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/updates/sha256.h"

namespace espalier::updates {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Context = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

constexpr size_t kMaxPemBytes = 16 << 10;
constexpr size_t kPublicKeyBytes = 32;

std::string Tagged(absl::string_view message) {
  return absl::StrCat(absl::string_view("espalier delta\0", 15), message);
}

absl::StatusOr<std::string> Text(const Bio& bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);  // NOLINT(google-runtime-int): OpenSSL's
  if (size <= 0) return absl::InternalError("OpenSSL cannot write the key");
  return std::string(data, static_cast<size_t>(size));
}

// Never asks at the terminal for the password of an encrypted key.
int NoPassword(char*, int, int, void*) { return -1; }

absl::StatusOr<std::shared_ptr<EVP_PKEY>> ReadPem(absl::string_view pem, bool is_private) {
  const char* what = is_private ? "private" : "public";
  if (pem.size() > kMaxPemBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", what, " key has ", pem.size(), " bytes, expected PEM below 16 KiB"));
  }
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  EVP_PKEY* key = is_private ? PEM_read_bio_PrivateKey(bio.get(), nullptr, &NoPassword, nullptr)
                             : PEM_read_bio_PUBKEY(bio.get(), nullptr, &NoPassword, nullptr);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("not a ", what, " key in PEM (expected -----BEGIN ",
                     is_private ? "PRIVATE" : "PUBLIC", " KEY-----, unencrypted)"));
  }
  std::shared_ptr<EVP_PKEY> owned(key, EVP_PKEY_free);
  if (EVP_PKEY_id(key) != EVP_PKEY_ED25519) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", what, " key of another kind, expected Ed25519"));
  }
  return owned;
}

}  // namespace

KeyTag TagOf(const KeyId& id) {
  KeyTag tag{};
  std::copy_n(id.begin(), tag.size(), tag.begin());
  return tag;
}

absl::StatusOr<PublicKey> PublicKey::FromPem(absl::string_view pem) {
  const auto key = ReadPem(pem, false);
  if (!key.ok()) return key.status();
  PublicKey result;
  result.key_ = *key;
  uint8_t raw[kPublicKeyBytes];
  size_t size = sizeof(raw);
  if (EVP_PKEY_get_raw_public_key(key->get(), raw, &size) != 1 || size != sizeof(raw))
    return absl::InternalError("OpenSSL cannot read the public key");
  const Digest digest = Sha256Of({reinterpret_cast<const char*>(raw), size});
  std::copy_n(digest.begin(), result.id_.size(), result.id_.begin());
  return result;
}

absl::StatusOr<std::string> PublicKey::ToPem() const {
  const Bio bio(BIO_new(BIO_s_mem()), BIO_free);
  if (PEM_write_bio_PUBKEY(bio.get(), key_.get()) != 1)
    return absl::InternalError("OpenSSL cannot write the public key");
  return Text(bio);
}

bool PublicKey::Verifies(absl::string_view message, const Signature& signature) const {
  const std::string tagged = Tagged(message);
  const Context context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  return EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1 &&
         EVP_DigestVerify(context.get(), signature.bytes.data(), signature.bytes.size(),
                          reinterpret_cast<const uint8_t*>(tagged.data()), tagged.size()) == 1;
}

absl::StatusOr<PrivateKey> PrivateKey::Generate() {
  EVP_PKEY* key = EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519");
  if (key == nullptr) return absl::InternalError("OpenSSL cannot make an Ed25519 key");
  PrivateKey result;
  result.key_ = std::shared_ptr<EVP_PKEY>(key, EVP_PKEY_free);
  return result;
}

absl::StatusOr<PrivateKey> PrivateKey::FromPem(absl::string_view pem) {
  const auto key = ReadPem(pem, true);
  if (!key.ok()) return key.status();
  PrivateKey result;
  result.key_ = *key;
  return result;
}

absl::StatusOr<std::string> PrivateKey::ToPem() const {
  const Bio bio(BIO_new(BIO_s_mem()), BIO_free);
  if (PEM_write_bio_PKCS8PrivateKey(bio.get(), key_.get(), nullptr, nullptr, 0, nullptr, nullptr) !=
      1) {
    return absl::InternalError("OpenSSL cannot write the private key");
  }
  return Text(bio);
}

absl::StatusOr<PublicKey> PrivateKey::Public() const {
  PublicKey with_private;
  with_private.key_ = key_;
  const auto pem = with_private.ToPem();
  if (!pem.ok()) return pem.status();
  return PublicKey::FromPem(*pem);
}

absl::StatusOr<Signature> PrivateKey::Sign(absl::string_view message) const {
  const auto own = Public();
  if (!own.ok()) return own.status();
  Signature signature;
  signature.key = TagOf(own->id());
  const std::string tagged = Tagged(message);
  const Context context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  size_t size = signature.bytes.size();
  if (EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()) != 1 ||
      EVP_DigestSign(context.get(), signature.bytes.data(), &size,
                     reinterpret_cast<const uint8_t*>(tagged.data()), tagged.size()) != 1 ||
      size != signature.bytes.size()) {
    return absl::InternalError("OpenSSL cannot sign");
  }
  return signature;
}

absl::Status CheckPolicy(const TrustPolicy& policy) {
  std::vector<KeyId> seen;
  for (const PublicKey& key : policy.keys) {
    if (std::find(seen.begin(), seen.end(), key.id()) != seen.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the key ", Hex(key.id()), " is given twice; each counts once"));
    }
    seen.push_back(key.id());
  }
  if (policy.threshold < 1 || policy.threshold > static_cast<int>(policy.keys.size())) {
    return absl::InvalidArgumentError(absl::StrCat("a threshold of ", policy.threshold,
                                                   ", expected 1 to the number of keys, ",
                                                   policy.keys.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<KeyId>> CheckSignatures(absl::string_view message,
                                                   const std::vector<Signature>& signatures,
                                                   const TrustPolicy& policy) {
  if (auto status = CheckPolicy(policy); !status.ok()) return status;
  std::vector<KeyId> signers;
  for (const PublicKey& key : policy.keys) {
    const auto found = std::find_if(signatures.begin(), signatures.end(),
                                    [&](const Signature& s) { return s.key == TagOf(key.id()); });
    if (found == signatures.end()) continue;
    if (!key.Verifies(message, *found)) {
      return absl::PermissionDeniedError(
          absl::StrCat("the signature by key ", Hex(key.id()),
                       " is wrong: the delta was damaged, or changed after it was signed"));
    }
    signers.push_back(key.id());
  }
  if (static_cast<int>(signers.size()) < policy.threshold) {
    return absl::PermissionDeniedError(
        absl::StrCat("signed by ", signers.size(), " of the ", policy.keys.size(),
                     " trusted keys, expected at least ", policy.threshold, "; it carries ",
                     signatures.size(), signatures.size() == 1 ? " signature" : " signatures"));
  }
  return signers;
}

}  // namespace espalier::updates
