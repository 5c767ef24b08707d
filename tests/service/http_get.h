// http_get.h — the body and headers that 127.0.0.1:<port><path> answers, over a plain socket.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace espalier::testing {

inline std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    char buffer[4096];
    if (send(fd, request.data(), request.size(), 0) > 0) {
      for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;)
        answer.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

}  // namespace espalier::testing
