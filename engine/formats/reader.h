// reader.h — the list of model formats. A format is one line in reader.cc and one file beside it.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "engine/formats/model_graph.h"

namespace espalier::formats {

// Caps that are checked before memory is reserved. The defaults suit a server that reads files of
// strangers.
struct ReadLimits {
  int64_t max_file_bytes = int64_t{2}
                           << 30;  // the model file itself (protobuf's own limit is 2 GiB)
  int64_t max_parsed_bytes = int64_t{4}
                             << 30;  // the file as parsed objects, before constants are decoded
  int64_t max_tensor_bytes = int64_t{16} << 30;  // one constant, expanded
  int64_t max_total_bytes = int64_t{64} << 30;   // all constants of a model, expanded
  int64_t max_nodes = 1 << 20;
  // Sparse constants expand from nothing: a file of 100 bytes may ask for a tensor of 16 GiB.
  // Together they may take free_expanded_bytes, and beyond that max_expansion times the bytes of
  // their values (a sparsity of 99.99 %).
  int64_t free_expanded_bytes = int64_t{256} << 20;
  int64_t max_expansion = 10000;
};

// Reads the model at `path` (format by content, not by name). Files are read, never mapped, and a
// file that shrinks while it is read is an error, not a crash. Errors name file, node or tensor,
// expected and got: NotFound, InvalidArgument (malformed or hostile), Unimplemented (understood,
// unsupported), ResourceExhausted (limits); PermissionDenied and others as the file system says.
absl::StatusOr<ModelGraph> ReadModel(const std::string& path, const ReadLimits& limits = {});

// Files by their path below a folder that exists only here.
using FilesInMemory = std::map<std::string, std::string>;

// The same for the file `name` of `files`, which hold its external data too. `origin` stands for
// the folder in messages.
absl::StatusOr<ModelGraph> ReadModelInMemory(const FilesInMemory& files, const std::string& name,
                                             const std::string& origin,
                                             const ReadLimits& limits = {});

}  // namespace espalier::formats
