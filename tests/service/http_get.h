// http_get.h — the body and headers that 127.0.0.1:<port><path> answers, over a plain socket.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace espalier::testing {

// A connected socket, or -1.
inline int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

inline std::string HttpGet(int port, const std::string& path) {
  const int fd = Connect(port);
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  std::string answer;
  char buffer[4096];
  if (fd >= 0 && send(fd, request.data(), request.size(), 0) > 0) {
    for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
      answer.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

}  // namespace espalier::testing
