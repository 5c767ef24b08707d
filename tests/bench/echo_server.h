// echo_server.h — the least that gRPC can do with a ModelInfer message: take it raw, answer bytes.
#pragma once

#include <string>

namespace espalier::bench {

// Serves until the process is killed. Same API as the server's (raw callback method). Answers each
// request with `answer_bytes` bytes, or with the request's own when that is 0. Writes its port to
// `port_file`.
int RunEchoServer(size_t answer_bytes, const std::string& port_file);

}  // namespace espalier::bench
