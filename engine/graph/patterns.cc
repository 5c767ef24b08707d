#include "engine/graph/patterns.h"

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace espalier::graph {
namespace {

using formats::Node;

class GeluFinder {
 public:
  explicit GeluFinder(const formats::ModelGraph& graph) : graph_(graph) {
    for (const Node& node : graph.nodes) {
      if (!node.domain.empty()) continue;
      for (const std::string& output : node.outputs) producer_[output] = &node;
    }
  }

  // The approximation ("none", "tanh") and the x of the Gelu that ends in `node`.
  struct Gelu {
    std::string approximate, x;
  };
  std::optional<Gelu> Match(const Node& node) const {
    if (node.op_type != "Mul" || !node.domain.empty()) return std::nullopt;
    // The product is x · ½ · (1 + f): two values and a constant.
    const Product product = Flatten(node.outputs[0]);
    if (product.values.size() != 2 || !Near(product.constant, 0.5)) return std::nullopt;
    for (int i = 0; i < 2; ++i) {
      const std::string& x = product.values[1 - i];
      const std::optional<std::string> f = OtherTerm(product.values[i], 1.0);
      if (!f) continue;
      if (IsErf(*f, x)) return Gelu{"none", x};
      if (IsTanh(*f, x)) return Gelu{"tanh", x};
    }
    return std::nullopt;
  }

 private:
  struct Product {
    double constant = 1;
    std::vector<std::string> values;
  };

  // Constants of files are written with some digits of √2 or π only.
  static bool Near(double value, double expected) {
    return std::abs(value - expected) <= 1e-4 * expected;
  }

  const Node* MadeByOrNull(const std::string& value, const char* op) const {
    const auto it = producer_.find(value);
    return it != producer_.end() && it->second->op_type == op ? it->second : nullptr;
  }

  std::optional<double> Scalar(const std::string& value) const {
    const Tensor* tensor = nullptr;
    if (const auto it = graph_.initializers.find(value); it != graph_.initializers.end()) {
      tensor = &it->second;
    } else if (const Node* node = MadeByOrNull(value, "Constant")) {
      const auto attribute = node->attributes.find("value");
      if (attribute != node->attributes.end()) tensor = std::get_if<Tensor>(&attribute->second);
    }
    if (tensor == nullptr || tensor->elements() != 1 || tensor->dtype() == DType::kBytes) {
      return std::nullopt;
    }
    double scalar = 0;
    ConvertElements(tensor->data(), tensor->dtype(), &scalar, DType::kFloat64, 1);
    return scalar;
  }

  // A tree of Mul and Div as constant · values. A Gelu needs a handful of factors: deeper trees (a
  // hostile file may have a million) are cut off and match nothing.
  Product Flatten(const std::string& root) const {
    Product product;
    std::vector<std::string> open = {root};
    for (int steps = 0; !open.empty() && steps < 16; ++steps) {
      const std::string value = open.back();
      open.pop_back();
      if (const std::optional<double> scalar = Scalar(value)) {
        product.constant *= *scalar;
      } else if (const Node* mul = MadeByOrNull(value, "Mul"); mul && mul->inputs.size() == 2) {
        open.insert(open.end(), mul->inputs.begin(), mul->inputs.end());
      } else if (const Node* div = MadeByOrNull(value, "Div");
                 div && div->inputs.size() == 2 && Scalar(div->inputs[1])) {
        product.constant /= *Scalar(div->inputs[1]);
        open.push_back(div->inputs[0]);
      } else {
        product.values.push_back(value);
      }
    }
    if (!open.empty()) product.values.clear();
    return product;
  }

  // The other term of value = constant + term.
  std::optional<std::string> OtherTerm(const std::string& value, double constant) const {
    const Node* sum = MadeByOrNull(value, "Add");
    if (sum == nullptr || sum->inputs.size() != 2) return std::nullopt;
    for (int i = 0; i < 2; ++i) {
      const std::optional<double> scalar = Scalar(sum->inputs[i]);
      if (scalar && Near(*scalar, constant)) return sum->inputs[1 - i];
    }
    return std::nullopt;
  }

  bool IsErf(const std::string& value, const std::string& x) const {
    const Node* erf = MadeByOrNull(value, "Erf");
    if (erf == nullptr || erf->inputs.size() != 1) return false;
    const Product argument = Flatten(erf->inputs[0]);
    return argument.values == std::vector<std::string>{x} &&
           Near(argument.constant, std::sqrt(0.5));
  }

  bool IsTanh(const std::string& value, const std::string& x) const {
    const Node* tanh = MadeByOrNull(value, "Tanh");
    if (tanh == nullptr || tanh->inputs.size() != 1) return false;
    const Product argument = Flatten(tanh->inputs[0]);
    if (argument.values.size() != 1 || !Near(argument.constant, std::sqrt(2 / M_PI))) return false;
    const Node* sum = MadeByOrNull(argument.values[0], "Add");
    if (sum == nullptr || sum->inputs.size() != 2) return false;
    for (int i = 0; i < 2; ++i) {
      if (sum->inputs[i] == x && IsCubic(sum->inputs[1 - i], x)) return true;
    }
    return false;
  }

  // 0.044715 · x³, with a Pow or with products.
  bool IsCubic(const std::string& value, const std::string& x) const {
    const Product product = Flatten(value);
    if (!Near(product.constant, 0.044715)) return false;
    double power = 0;
    for (const std::string& factor : product.values) {
      const Node* pow = MadeByOrNull(factor, "Pow");
      if (factor == x) {
        power += 1;
      } else if (pow && pow->inputs.size() == 2 && pow->inputs[0] == x && Scalar(pow->inputs[1])) {
        power += *Scalar(pow->inputs[1]);
      } else {
        return false;
      }
    }
    return power == 3;
  }

  const formats::ModelGraph& graph_;
  absl::flat_hash_map<std::string, const Node*> producer_;
};

}  // namespace

void FusePatterns(formats::ModelGraph& graph) {
  // Found first, changed after: the finder looks at the nodes as they were.
  std::vector<std::pair<size_t, GeluFinder::Gelu>> found;
  const GeluFinder finder(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (auto gelu = finder.Match(graph.nodes[i])) found.emplace_back(i, *std::move(gelu));
  }
  for (auto& [i, gelu] : found) {
    Node& node = graph.nodes[i];
    node.op_type = "Gelu";
    node.domain = kFusedDomain;
    node.inputs = {gelu.x};
    node.attributes.clear();
    node.attributes.emplace("approximate", gelu.approximate);
  }
}

}  // namespace espalier::graph
