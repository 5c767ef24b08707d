#include "engine/formats/onnx_architecture.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <map>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

// The same message gives the same bytes: ONNX has no maps, so that only unknown fields could differ.
std::string Bytes(const google::protobuf::Message& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&coded);
  coded.Trim();
  return bytes;
}

std::string HeadOf(const onnx::ModelProto& model,
                   const absl::flat_hash_set<std::string>& constants) {
  std::map<std::string, int64_t> opsets;
  for (const auto& import : model.opset_import()) {
    opsets[import.domain() == "ai.onnx" ? "" : import.domain()] = import.version();
  }
  std::vector<std::string> parts;
  for (const auto& [domain, version] : opsets)
    parts.push_back(absl::StrCat("opset ", Quoted(domain), " ", version));
  const auto value = [&](const char* role, onnx::ValueInfoProto info) {
    info.clear_doc_string();
    parts.push_back(absl::StrCat(role, " ", Quoted(info.name()), " ", info.ShortDebugString()));
  };
  // An initializer that is also listed as an input is a constant.
  for (const auto& input : model.graph().input()) {
    if (!constants.contains(input.name())) value("input", input);
  }
  for (const auto& output : model.graph().output()) value("output", output);
  return absl::StrJoin(parts, "\n");
}

// Attributes of the old and new node by name; the first that differs.
std::string AttributeDifference(const onnx::NodeProto& was, const onnx::NodeProto& is) {
  std::map<std::string, const onnx::AttributeProto*> before, after;
  for (const auto& attribute : was.attribute()) before[attribute.name()] = &attribute;
  for (const auto& attribute : is.attribute()) after[attribute.name()] = &attribute;
  const auto text = [](const onnx::AttributeProto* attribute) {
    return attribute == nullptr ? std::string("absent") : Shown(attribute->ShortDebugString(), 60);
  };
  for (const auto& [name, attribute] : before) {
    const auto found = after.find(name);
    const auto* other = found == after.end() ? nullptr : found->second;
    if (other != nullptr && Bytes(*attribute) == Bytes(*other)) continue;
    return absl::StrCat("attribute ", Quoted(name), " is ", text(other), ", was ", text(attribute));
  }
  for (const auto& [name, attribute] : after) {
    if (!before.count(name))
      return absl::StrCat("attribute ", Quoted(name), " is ", text(attribute), ", was absent");
  }
  return "its attributes are in another order";
}

std::string NodeDifference(const onnx::NodeProto& was, const onnx::NodeProto& is) {
  if (was.op_type() != is.op_type() || was.domain() != is.domain()) {
    return absl::StrCat("is the op ", Quoted(is.op_type()), ", was ", Quoted(was.op_type()));
  }
  const auto same = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  if (!same(was.input(), is.input()) || !same(was.output(), is.output()))
    return "takes or gives other values than before";
  return AttributeDifference(was, is);
}

}  // namespace

std::string OnnxArchitecture::Serialize() const {
  std::string text = absl::StrCat(head, "\n");
  for (const onnx::NodeProto& node : nodes) {
    const std::string bytes = Bytes(node);
    absl::StrAppend(&text, bytes.size(), "\n", bytes);
  }
  return text;
}

OnnxArchitecture ArchitectureOf(const onnx::ModelProto& model) {
  const onnx::GraphProto& graph = model.graph();
  absl::flat_hash_set<std::string> constants;
  for (const auto& tensor : graph.initializer()) constants.insert(tensor.name());
  for (const auto& tensor : graph.sparse_initializer()) constants.insert(tensor.values().name());
  OnnxArchitecture architecture;
  architecture.head = HeadOf(model, constants);
  absl::flat_hash_map<std::string, std::string> renamed;
  for (const auto& input : graph.input()) {
    if (!constants.contains(input.name())) renamed[input.name()] = input.name();
  }
  for (const auto& output : graph.output()) renamed[output.name()] = output.name();
  // "%" begins no name that an exporter writes for an input or output.
  const auto rename = [&](const std::string& name) {
    if (name.empty()) return name;
    if (constants.contains(name) && !renamed.contains(name)) architecture.uses.push_back(name);
    return renamed.try_emplace(name, absl::StrCat("%", renamed.size())).first->second;
  };
  for (const onnx::NodeProto& node : graph.node()) {
    architecture.labels.push_back(absl::StrCat("node ", architecture.labels.size(), " ",
                                               Quoted(node.name()), " (", Shown(node.op_type()),
                                               ")"));
    onnx::NodeProto& copy = architecture.nodes.emplace_back(node);
    copy.clear_name();
    copy.clear_doc_string();
    for (auto& input : *copy.mutable_input()) input = rename(input);
    for (auto& output : *copy.mutable_output()) output = rename(output);
  }
  return architecture;
}

std::string Difference(const OnnxArchitecture& was, const OnnxArchitecture& is) {
  if (was.head != is.head) {
    const std::vector<std::string> before = absl::StrSplit(was.head, '\n'),
                                   after = absl::StrSplit(is.head, '\n');
    for (size_t i = 0; i < std::max(before.size(), after.size()); ++i) {
      const std::string a = i < before.size() ? before[i] : "nothing";
      const std::string b = i < after.size() ? after[i] : "nothing";
      if (a != b) return absl::StrCat(Shown(b, 200), ", was ", Shown(a, 200));
    }
  }
  for (size_t i = 0; i < std::min(was.nodes.size(), is.nodes.size()); ++i) {
    if (Bytes(was.nodes[i]) != Bytes(is.nodes[i]))
      return absl::StrCat(is.labels[i], " ", NodeDifference(was.nodes[i], is.nodes[i]));
  }
  if (was.nodes.size() != is.nodes.size()) {
    return absl::StrCat("has ", is.nodes.size(), " nodes, had ", was.nodes.size());
  }
  return "";
}

}  // namespace espalier::formats
