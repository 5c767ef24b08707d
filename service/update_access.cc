#include "service/update_access.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace espalier::service {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMinTokenBytes = 16, kMaxTokenBytes = 1024;
// A PEM of an Ed25519 key takes 113 bytes; many may stand in a bundle by mistake.
constexpr size_t kMaxFileBytes = 64 << 10;

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, " cannot be read"));
  }
  std::string content(kMaxFileBytes + 1, '\0');
  content.resize(std::fread(content.data(), 1, content.size(), file.get()));
  if (std::ferror(file.get()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, " cannot be read"));
  }
  if (content.size() > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is larger than the ", kMaxFileBytes, " bytes that it may have"));
  }
  return content;
}

// The files that `path` stands for, in order.
absl::StatusOr<std::vector<std::string>> KeyFiles(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool is_key = absl::EndsWith(name, ".pub") || absl::EndsWith(name, ".pem");
    if (is_key && !absl::StartsWith(name, ".")) files.push_back(it->path().string());
  }
  if (error) {
    return absl::PermissionDeniedError(absl::StrCat(path, " cannot be listed: ", error.message()));
  }
  if (files.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " holds no *.pub and no *.pem"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

absl::StatusOr<AccessToken> AccessToken::Read(const std::string& path) {
  auto content = ReadSmallFile(path);
  if (!content.ok()) return content.status();
  AccessToken token;
  token.token_ = std::string(absl::StripAsciiWhitespace(*content));
  const std::string& text = token.token_;
  const bool printable = std::all_of(text.begin(), text.end(), absl::ascii_isgraph);
  if (text.size() < kMinTokenBytes || text.size() > kMaxTokenBytes || !printable) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has no token: expected ", kMinTokenBytes, " to ", kMaxTokenBytes,
        " printable characters without spaces, as `openssl rand -hex 32` makes them; got ",
        text.size(), printable ? "" : ", not all of them printable"));
  }
  return token;
}

absl::Status AccessToken::Check(absl::string_view authorization) const {
  if (!required()) return absl::OkStatus();
  if (authorization.empty()) {
    return absl::UnauthenticatedError(
        "no token: send the metadata 'authorization: Bearer TOKEN' (espalier: --token_file)");
  }
  const bool is_bearer = absl::ConsumePrefix(&authorization, "Bearer ");
  // As many steps whatever is right and whatever is wrong; a shorter one is compared with itself.
  unsigned char differs = authorization.size() == token_.size() && is_bearer ? 0 : 1;
  const absl::string_view other = differs != 0 ? absl::string_view(token_) : authorization;
  for (size_t i = 0; i < token_.size(); ++i)
    differs |= static_cast<unsigned char>(token_[i] ^ other[i]);
  if (differs == 0) return absl::OkStatus();
  return absl::UnauthenticatedError("the token is not this server's");
}

absl::StatusOr<updates::TrustPolicy> ReadTrust(const std::vector<std::string>& paths,
                                               int threshold) {
  updates::TrustPolicy policy;
  policy.threshold = threshold;
  for (const std::string& path : paths) {
    const auto files = KeyFiles(path);
    if (!files.ok()) return files.status();
    for (const std::string& file : *files) {
      const auto pem = ReadSmallFile(file);
      if (!pem.ok()) return pem.status();
      auto key = updates::PublicKey::FromPem(*pem);
      if (!key.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(file, ": ", key.status().message()));
      }
      policy.keys.push_back(*std::move(key));
    }
  }
  if (auto status = updates::CheckPolicy(policy); !status.ok()) return status;
  return policy;
}

}  // namespace espalier::service
