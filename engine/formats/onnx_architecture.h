// onnx_architecture.h — what an ONNX model is apart from its weights, independent of names.
//
// Values and nodes are numbered in the order in which the nodes use them; inputs and outputs of the
// graph keep their names, which clients use. Documentation and metadata are left out.
#pragma once

#include <onnx/onnx_pb.h>

#include <string>
#include <vector>

namespace espalier::formats {

struct OnnxArchitecture {
  std::string head;                    // opsets, inputs and outputs
  std::vector<onnx::NodeProto> nodes;  // renamed
  std::vector<std::string> labels;     // of the nodes as they are called in the file
  std::vector<std::string> uses;       // names of initializers, in order of first use
  std::string Serialize() const;
};

OnnxArchitecture ArchitectureOf(const onnx::ModelProto& model);

// "" or the first difference, `was` being the old one.
std::string Difference(const OnnxArchitecture& was, const OnnxArchitecture& is);

}  // namespace espalier::formats
