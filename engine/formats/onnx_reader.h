// onnx_reader.h — ONNX files (protobuf ModelProto) into a ModelGraph, with checks of our own: the file is a stranger's.
//
// Reads    IR versions 3 to 13, opsets 7 to 27 of ai.onnx; which ops run is decided by engine/graph.
// Refuses  (Unimplemented) other domains, model-local functions, control flow, string, complex and sub-byte tensors,
//          sequences, symbolic dimensions beside the first.
// Folds    initializers in every storage form (raw, typed, sparse, external) and Constant nodes into dense tensors;
//          an initializer that is also listed as an input is a constant.
// Ignores  what does not change an answer: value_info, documentation, metadata, training and quantisation notes.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/model_graph.h"
#include "engine/formats/reader.h"
#include "engine/formats/regular_file.h"

namespace espalier::formats {

// Whether a file that begins with `head` can be a ModelProto: protobuf has no magic number, so that
// this looks for a field that ModelProto has, of the right kind.
bool LooksLikeOnnx(absl::string_view head);

// External data is looked for in the folder of the file.
absl::StatusOr<ModelGraph> ReadOnnx(const RegularFile& file, const ReadLimits& limits);

// The same from memory. `source` names the model in messages; external data is looked for below
// `directory`, and refused when that is empty.
absl::StatusOr<ModelGraph> ReadOnnxBytes(absl::string_view bytes, const std::string& source,
                                         const std::string& directory, const ReadLimits& limits);

// The same with external data among `files`.
absl::StatusOr<ModelGraph> ReadOnnxInMemory(absl::string_view bytes, const std::string& source,
                                            const FilesInMemory& files, const ReadLimits& limits);

}  // namespace espalier::formats
