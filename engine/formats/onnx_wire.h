// onnx_wire.h — what a serialized message will cost, before protobuf spends it.
//
// Protobuf trusts its input: two bytes on the wire ("a node, empty") become a 200-byte object, and
// a file of some tens of MB can take all memory of the machine. This walk follows the schema over
// the bytes, allocates nothing, and adds up what the parse would reserve. It also says where a
// damaged file breaks, which protobuf's parser does not.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"

namespace espalier::formats {

// Levels of nested messages in an ONNX file. A plain model needs 8 (model, graph, node, attribute,
// sparse tensor, tensor, external data, and one to spare for unknown fields); each level of control
// flow takes 3 more, and such a file should get as far as the message that control flow is not
// supported. The parser gets the same limit.
inline constexpr int kMaxOnnxNesting = 64;

// Bytes that parsing `wire` as a `type` takes, within a factor of two. InvalidArgument, with byte
// offset and field, for a malformed message; ResourceExhausted as soon as the sum exceeds
// `max_bytes`.
absl::StatusOr<int64_t> ParsedBytes(absl::string_view wire,
                                    const google::protobuf::Descriptor& type, int64_t max_bytes);

}  // namespace espalier::formats
