// server.h — what the commands that talk to a server share: flags, connection, facts of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cli/args.h"
#include "clients/cli/json_writer.h"
#include "clients/cpp/client.h"

namespace espalier::cli {

// --url and --deadline, followed by `flags`.
std::vector<FlagSpec> WithServerFlags(std::vector<FlagSpec> flags);

struct Server {
  std::string url;
  std::unique_ptr<client::Client> client;

  // `status` as the user should read it: an unreachable server is named, with what to do.
  absl::Status Explain(const absl::Status& status) const;
};

absl::StatusOr<Server> Connect(const Args& args);

// What a server tells of a model through ModelConfig parameters; another server leaves it all
// empty.
struct ModelFacts {
  std::string layouts, structures;  // held in memory; found in the zeros
  std::optional<double> sparsity;   // share of zeros in the weights
  std::optional<int64_t> resident_bytes, dense_bytes;

  static ModelFacts From(const inference::ModelConfig& config);
  void WriteJson(JsonWriter& json) const;  // the fields that are there, as keys of the open object
  // For tables; "–" for what is not known.
  std::string StructuresText() const;
  std::string LayoutsText() const;
  std::string SparsityText() const;
  std::string MemoryText() const;  // "270.4 KiB of 2.6 MiB": resident of dense
};

}  // namespace espalier::cli
