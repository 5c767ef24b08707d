// listen_address.h — host:port of the listeners, checked before anything listens.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace espalier::service {

// InvalidArgument, naming the flag, unless it is host:port with a port that exists (gRPC takes 99999
// for 34463) and a host that has an address.
absl::Status CheckAddress(const std::string& address, absl::string_view flag);

// Whether nobody but this machine reaches an address that CheckAddress took: all that its host
// stands for is loopback.
bool IsLoopback(const std::string& address);

// Unavailable, with what to do about it.
absl::Status CannotListen(absl::string_view what, absl::string_view address,
                          absl::string_view flag);

}  // namespace espalier::service
