#include "service/listen_address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace espalier::service {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// "[::1]:80" → "::1".
std::string HostOf(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return host;
}

// Returns getaddrinfo's error.
int Resolve(const std::string& host, Addresses* to) {
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, nullptr, &found);
  if (error == 0) to->reset(found);
  return error;
}

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(v4.sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

}  // namespace

absl::Status CheckAddress(const std::string& address, absl::string_view flag) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(absl::string_view(address).substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--", flag, " is '", address, "', expected host:port with a port from 0 to 65535"));
  }
  const std::string host = HostOf(address);
  Addresses found;
  if (const int error = Resolve(host, &found); error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, " is '", address, "': host '", host,
                                                   "' has no address: ", gai_strerror(error)));
  }
  return absl::OkStatus();
}

bool IsLoopback(const std::string& address) {
  Addresses found;
  if (Resolve(HostOf(address), &found) != 0) return false;
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    if (!IsLoopback(*each->ai_addr)) return false;
  }
  return true;
}

absl::Status CannotListen(absl::string_view what, absl::string_view address,
                          absl::string_view flag) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen for ", what, " on ", address,
                   ": is the port taken, perhaps by another espalierd? Choose another with --",
                   flag, " (port 0 takes a free one)"));
}

}  // namespace espalier::service
