#include "engine/formats/model_graph.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/formats/names.h"

namespace espalier::formats {
namespace {

constexpr size_t kGiven = SIZE_MAX;  // produced by no node: an input or a constant

// Value name → index of the node that produces it, or kGiven. The keys live in the graph.
using Producers = absl::flat_hash_map<absl::string_view, size_t>;

absl::Status CheckNodeNames(const std::vector<Node>& nodes) {
  absl::flat_hash_set<absl::string_view> names;
  for (const Node& node : nodes) {
    if (auto status = CheckName("a node", node.name); !status.ok()) return status;
    if (names.insert(node.name).second) continue;
    return absl::InvalidArgumentError(absl::StrCat("two nodes are named ", Quoted(node.name)));
  }
  return absl::OkStatus();
}

absl::StatusOr<Producers> FindProducers(const ModelGraph& graph) {
  Producers producers;
  for (const ValueInfo& input : graph.inputs) {
    if (auto status = CheckName("an input", input.name); !status.ok()) return status;
    if (!producers.emplace(input.name, kGiven).second) {
      return absl::InvalidArgumentError(absl::StrCat("two inputs are named ", Quoted(input.name)));
    }
  }
  for (const auto& [name, tensor] : graph.initializers) {
    if (auto status = CheckName("a constant", name); !status.ok()) return status;
    if (!producers.emplace(name, kGiven).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(Quoted(name), " is both an input and a constant"));
    }
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    bool named = false;
    for (const std::string& output : node.outputs) {
      if (output.empty()) continue;
      named = true;
      if (auto status = CheckName("an output", output); !status.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(Describe(node), ": ", status.message()));
      }
      const auto [entry, added] = producers.emplace(output, i);
      if (added) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          Describe(node), " produces ", Quoted(output), ", which is already ",
          entry->second == kGiven ? "an input or a constant"
                                  : "produced by " + Describe(graph.nodes[entry->second])));
    }
    if (!named) return absl::InvalidArgumentError(absl::StrCat(Describe(node), " has no output"));
  }
  return producers;
}

absl::Status CheckOutputs(const ModelGraph& graph, const Producers& producers) {
  if (graph.outputs.empty()) return absl::InvalidArgumentError("the graph has no outputs");
  absl::flat_hash_set<absl::string_view> names;
  for (const ValueInfo& output : graph.outputs) {
    if (!names.insert(output.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two outputs are named ", Quoted(output.name)));
    }
    if (!producers.contains(output.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("output ", Quoted(output.name), " is produced by no node"));
    }
  }
  return absl::OkStatus();
}

// `open[i]` is the number of inputs of node i that were never produced. Walks from a waiting node
// to one that it waits for until a node comes up again: the walk from there on is the cycle.
absl::Status CycleError(const std::vector<Node>& nodes, const Producers& producers,
                        const std::vector<int64_t>& open) {
  const auto waiting = [&](size_t i) { return open[i] > 0; };
  size_t at = 0;
  while (!waiting(at)) ++at;
  std::vector<size_t> walk;
  absl::flat_hash_map<size_t, size_t> position;
  while (position.emplace(at, walk.size()).second) {
    walk.push_back(at);
    for (const std::string& input : nodes[at].inputs) {
      const size_t producer = input.empty() ? kGiven : producers.at(input);
      if (producer == kGiven || !waiting(producer)) continue;
      at = producer;
      break;
    }
  }
  constexpr size_t kShown = 8;
  std::vector<std::string> names;
  for (size_t i = walk.size(); i-- > position[at] && names.size() < kShown;)
    names.push_back(Describe(nodes[walk[i]]));
  const size_t length = walk.size() - position[at];
  if (length > kShown) names.push_back(absl::StrCat("… ", length - kShown, " more"));
  names.push_back(names.front());
  return absl::InvalidArgumentError(
      absl::StrCat("the graph has a cycle: ", absl::StrJoin(names, " → ")));
}

// Kahn's algorithm, always taking the ready node that comes first in the file.
absl::Status SortNodes(std::vector<Node>& nodes, const Producers& producers) {
  std::vector<int64_t> open(nodes.size(), 0);
  std::vector<std::vector<size_t>> consumers(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (size_t k = 0; k < nodes[i].inputs.size(); ++k) {
      const std::string& input = nodes[i].inputs[k];
      if (input.empty()) continue;
      const auto producer = producers.find(input);
      if (producer == producers.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat(Describe(nodes[i]), " reads ", Quoted(input), " as input ", k,
                         ", which is no input, constant or output of a node"));
      }
      if (producer->second == kGiven) continue;
      ++open[i];
      consumers[producer->second].push_back(i);
    }
  }
  std::priority_queue<size_t, std::vector<size_t>, std::greater<size_t>> ready;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (open[i] == 0) ready.push(i);
  }
  std::vector<size_t> order;
  while (!ready.empty()) {
    order.push_back(ready.top());
    ready.pop();
    for (size_t consumer : consumers[order.back()]) {
      if (--open[consumer] == 0) ready.push(consumer);
    }
  }
  if (order.size() < nodes.size()) return CycleError(nodes, producers, open);
  std::vector<Node> sorted;
  sorted.reserve(nodes.size());
  for (size_t i : order) sorted.push_back(std::move(nodes[i]));
  nodes = std::move(sorted);
  return absl::OkStatus();
}

}  // namespace

std::string Describe(const Node& node) {
  return absl::StrCat("node ", Quoted(node.name), " (", Shown(node.op_type), ")");
}

absl::Status FinishGraph(ModelGraph& graph) {
  if (auto status = CheckNodeNames(graph.nodes); !status.ok()) return status;
  const auto producers = FindProducers(graph);
  if (!producers.ok()) return producers.status();
  if (auto status = CheckOutputs(graph, *producers); !status.ok()) return status;
  return SortNodes(graph.nodes, *producers);
}

}  // namespace espalier::formats
