// shared_tensors.h — the tensors of requests and answers in system shared memory, so that a load is of the server and not
// of the bytes that would travel to it.
//
//   auto shared = SharedTensors::Create(client, requests, {{"y", 4096}});
//   (*shared)->Refer(3, message);  // requests[3]: no contents any more, but where they lie
//
// A region a request, as clients that know nothing of each other have them: its inputs, then room for its answer. Requests
// in flight at once that are the same write the same answer to the same place.
//
// Memory   POSIX shared memory objects under names that no other process has, gone with this.
// Errors   FailedPrecondition or Unimplemented, as the server says it, when it takes no tensors from shared memory;
//          NotFound from a server on another machine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cpp/client.h"

namespace espalier::bench {

class SharedTensors {
 public:
  struct Output {
    std::string name;
    uint64_t bytes = 0;  // in the answer to one request
  };

  // `client` outlives it; its requests are copied.
  static absl::StatusOr<std::unique_ptr<SharedTensors>> Create(
      client::Client& client, const std::vector<client::InferRequest>& requests,
      std::vector<Output> outputs);
  ~SharedTensors();
  SharedTensors(const SharedTensors&) = delete;
  SharedTensors& operator=(const SharedTensors&) = delete;

  // `message` is that of requests[i].
  void Refer(size_t i, inference::ModelInferRequest& message) const;

 private:
  struct Region {
    std::string name;  // the object's has a slash before it
    bool registered = false;
    std::vector<uint64_t> inputs_at, outputs_at;
    uint64_t bytes = 0;
  };

  SharedTensors(client::Client& client, std::vector<Output> outputs)
      : client_(client), outputs_(std::move(outputs)) {}
  absl::Status Add(const client::InferRequest& request);

  client::Client& client_;
  const std::vector<Output> outputs_;
  std::vector<Region> regions_;  // of the requests
};

}  // namespace espalier::bench
