// update_access.h — who may change weights: the token that callers of the update service show, and
// the keys that must have signed a delta.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/signing.h"

namespace espalier::service {

// A shared secret, of which no comparison tells how much of it was right.
class AccessToken {
 public:
  // One that lets everybody in.
  AccessToken() = default;
  // The content of a file without spaces around it: 16 to 1024 printable ASCII characters, none of
  // them a space. InvalidArgument, NotFound or PermissionDenied.
  static absl::StatusOr<AccessToken> Read(const std::string& path);

  bool required() const { return !token_.empty(); }
  // What Check wants to see; empty when it wants nothing.
  std::string authorization() const { return required() ? "Bearer " + token_ : ""; }
  // Unauthenticated unless `authorization` is "Bearer <token>". Empty: the caller sent none.
  absl::Status Check(absl::string_view authorization) const;

 private:
  std::string token_;
};

// Public keys (PEM) of the files, and of the *.pub and *.pem in the directories, among `paths`.
absl::StatusOr<updates::TrustPolicy> ReadTrust(const std::vector<std::string>& paths,
                                               int threshold);

}  // namespace espalier::service
