#include "tests/engine/graph/onnx_reference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>

namespace espalier::testing {
namespace {

using formats::Node;

[[noreturn]] void Die(const std::string& text) {
  std::fprintf(stderr, "onnx_reference: %s\n", text.c_str());
  std::abort();
}

int64_t Count(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

template <typename T>
T Get(const Node& node, const std::string& name, T otherwise) {
  const auto it = node.attributes.find(name);
  return it == node.attributes.end() ? otherwise : std::get<T>(it->second);
}

// Coordinates of flat index i, and back with broadcasting (coordinates aligned at the end, dims of
// 1 read at 0).
std::vector<int64_t> Unravel(int64_t i, const Shape& shape) {
  std::vector<int64_t> at(shape.size());
  for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
    at[axis] = i % shape[axis];
    i /= shape[axis];
  }
  return at;
}
double At(const Values& v, const std::vector<int64_t>& at) {
  int64_t index = 0;
  const size_t offset = at.size() - v.shape.size();
  for (size_t axis = 0; axis < v.shape.size(); ++axis) {
    index = index * v.shape[axis] + (v.shape[axis] == 1 ? 0 : at[offset + axis]);
  }
  return v.data[index];
}

Values Broadcast(const Values& a, const Values& b, const std::function<double(double, double)>& f) {
  Values y;
  y.shape.resize(std::max(a.shape.size(), b.shape.size()), 1);
  for (const Values* v : {&a, &b}) {
    const size_t offset = y.shape.size() - v->shape.size();
    for (size_t i = 0; i < v->shape.size(); ++i) {
      if (v->shape[i] != 1) y.shape[offset + i] = v->shape[i];
    }
  }
  y.data.resize(Count(y.shape));
  for (size_t i = 0; i < y.data.size(); ++i) {
    const auto at = Unravel(static_cast<int64_t>(i), y.shape);
    y.data[i] = f(At(a, at), At(b, at));
  }
  return y;
}

Values Map(Values x, const std::function<double(double)>& f) {
  for (double& v : x.data) v = f(v);
  return x;
}

Values Transposed(const Values& x, std::vector<int64_t> perm) {
  if (perm.empty()) {
    perm.resize(x.shape.size());
    std::iota(perm.rbegin(), perm.rend(), 0);
  }
  Values y;
  for (int64_t axis : perm) y.shape.push_back(x.shape[axis]);
  y.data.resize(x.data.size());
  for (size_t i = 0; i < y.data.size(); ++i) {
    const auto at = Unravel(static_cast<int64_t>(i), y.shape);
    std::vector<int64_t> from(at.size());
    for (size_t axis = 0; axis < perm.size(); ++axis) from[perm[axis]] = at[axis];
    y.data[i] = At(x, from);
  }
  return y;
}

// [.., n, k] × [k, m] or [k].
Values Product(const Values& a, const Values& b) {
  const bool vector = b.shape.size() == 1;
  const int64_t k = b.shape[0], m = vector ? 1 : b.shape[1], rows = Count(a.shape) / k;
  Values y;
  y.shape = a.shape;
  y.shape.pop_back();
  if (!vector) y.shape.push_back(m);
  y.data.resize(rows * m);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < m; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += a.data[r * k + i] * b.data[i * m + c];
      y.data[r * m + c] = sum;
    }
  }
  return y;
}

Values Gemm(const Node& node, const std::vector<const Values*>& in) {
  const double alpha = Get(node, "alpha", 1.0f), beta = Get(node, "beta", 1.0f);
  const Values a = Get<int64_t>(node, "transA", 0) ? Transposed(*in[0], {}) : *in[0];
  const Values b = Get<int64_t>(node, "transB", 0) ? Transposed(*in[1], {}) : *in[1];
  Values y = Map(Product(a, b), [&](double v) { return alpha * v; });
  if (in.size() < 3 || in[2] == nullptr) return y;
  return Broadcast(y, *in[2], [&](double p, double c) { return p + beta * c; });
}

Values Softmax(Values x, int64_t axis, bool flatten) {
  const int64_t rank = static_cast<int64_t>(x.shape.size());
  if (axis < 0) axis += rank;
  int64_t outer = 1, n = x.shape[axis], inner = 1;
  for (int64_t i = 0; i < axis; ++i) outer *= x.shape[i];
  for (int64_t i = axis + 1; i < rank; ++i) (flatten ? n : inner) *= x.shape[i];
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t j = 0; j < inner; ++j) {
      double* row = &x.data[o * n * inner + j];
      double top = row[0], sum = 0;
      for (int64_t i = 0; i < n; ++i) top = std::max(top, row[i * inner]);
      for (int64_t i = 0; i < n; ++i) sum += std::exp(row[i * inner] - top);
      for (int64_t i = 0; i < n; ++i) row[i * inner] = std::exp(row[i * inner] - top) / sum;
    }
  }
  return x;
}

Values LayerNorm(const Node& node, const std::vector<const Values*>& in) {
  Values y = *in[0];
  int64_t axis = Get<int64_t>(node, "axis", -1);
  if (axis < 0) axis += static_cast<int64_t>(y.shape.size());
  const double epsilon = Get(node, "epsilon", 1e-5f);
  int64_t n = 1;
  for (size_t i = axis; i < y.shape.size(); ++i) n *= y.shape[i];
  for (size_t row = 0; row < y.data.size(); row += n) {
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < n; ++i) mean += y.data[row + i] / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i)
      variance += std::pow(y.data[row + i] - mean, 2) / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i)
      y.data[row + i] = (y.data[row + i] - mean) / std::sqrt(variance + epsilon);
  }
  y = Broadcast(y, *in[1], std::multiplies<>());
  return in.size() > 2 && in[2] != nullptr ? Broadcast(y, *in[2], std::plus<>()) : y;
}

Values Reshape(const Node& node, const Values& x, const Values& target) {
  Values y = x;
  y.shape.clear();
  int64_t known = 1, inferred = -1;
  for (size_t i = 0; i < target.data.size(); ++i) {
    int64_t dim = static_cast<int64_t>(target.data[i]);
    if (dim == 0 && !Get<int64_t>(node, "allowzero", 0)) dim = x.shape[i];
    if (dim == -1) {
      inferred = static_cast<int64_t>(i);
    } else {
      known *= dim;
    }
    y.shape.push_back(dim);
  }
  if (inferred >= 0) y.shape[inferred] = static_cast<int64_t>(x.data.size()) / known;
  return y;
}

Values Flatten(const Node& node, Values x) {
  int64_t axis = Get<int64_t>(node, "axis", 1), left = 1;
  if (axis < 0) axis += static_cast<int64_t>(x.shape.size());
  for (int64_t i = 0; i < axis; ++i) left *= x.shape[i];
  x.shape = {left, static_cast<int64_t>(x.data.size()) / left};
  return x;
}

double RoundTo(double value, int64_t onnx_type) {
  switch (onnx_type) {
    case 1:
      return static_cast<float>(value);
    case 10:
      return Float16ToFloat(FloatToFloat16(static_cast<float>(value)));
    case 16:
      return BFloat16ToFloat(FloatToBFloat16(static_cast<float>(value)));
    case 9:
      return value != 0;
    case 11:
      return value;
    default:
      return std::trunc(value);
  }
}

Values Evaluate(const formats::ModelGraph& graph, const Node& node,
                const std::vector<const Values*>& in) {
  const std::string& op = node.op_type;
  const auto erf_gelu = [](double v) { return v / 2 * std::erfc(-v / std::sqrt(2.0)); };
  const auto tanh_gelu = [](double v) {
    return v / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  };
  if (op == "Add") return Broadcast(*in[0], *in[1], std::plus<>());
  if (op == "Sub") return Broadcast(*in[0], *in[1], std::minus<>());
  if (op == "Mul") return Broadcast(*in[0], *in[1], std::multiplies<>());
  if (op == "Div") return Broadcast(*in[0], *in[1], std::divides<>());
  if (op == "Pow")
    return Broadcast(*in[0], *in[1], [](double a, double b) { return std::pow(a, b); });
  if (op == "Erf") return Map(*in[0], [](double v) { return std::erf(v); });
  if (op == "Relu") return Map(*in[0], [](double v) { return v < 0 ? 0 : v; });
  if (op == "Sigmoid") return Map(*in[0], [](double v) { return 1 / (1 + std::exp(-v)); });
  if (op == "Tanh") return Map(*in[0], [](double v) { return std::tanh(v); });
  if (op == "Gelu") {
    return Get<std::string>(node, "approximate", "none") == "tanh" ? Map(*in[0], tanh_gelu)
                                                                   : Map(*in[0], erf_gelu);
  }
  if (op == "MatMul") return Product(*in[0], *in[1]);
  if (op == "Gemm") return Gemm(node, in);
  if (op == "Softmax") {
    const bool flatten = graph.opset < 13;
    return Softmax(*in[0], Get<int64_t>(node, "axis", flatten ? 1 : -1), flatten);
  }
  if (op == "LayerNormalization") return LayerNorm(node, in);
  if (op == "Reshape") return Reshape(node, *in[0], *in[1]);
  if (op == "Flatten") return Flatten(node, *in[0]);
  if (op == "Transpose") return Transposed(*in[0], Get<std::vector<int64_t>>(node, "perm", {}));
  if (op == "Identity" || op == "Dropout") return *in[0];
  if (op == "Cast")
    return Map(*in[0], [&](double v) { return RoundTo(v, Get<int64_t>(node, "to", 1)); });
  if (op == "Constant") return ToValues(std::get<Tensor>(node.attributes.at("value")).view());
  Die("unknown op " + op);
}

}  // namespace

Values ToValues(const TensorView& tensor) {
  auto wide = Convert(tensor, DType::kFloat64);
  if (!wide.ok()) Die(std::string(wide.status().message()));
  return {tensor.shape,
          std::vector<double>(wide->As<double>(), wide->As<double>() + wide->elements())};
}

std::map<std::string, Values> EvaluateReference(const formats::ModelGraph& graph,
                                                std::map<std::string, Values> inputs) {
  std::map<std::string, Values>& values = inputs;
  for (const auto& [name, tensor] : graph.initializers) values[name] = ToValues(tensor.view());
  for (const Node& node : graph.nodes) {
    std::vector<const Values*> in;
    for (const std::string& name : node.inputs)
      in.push_back(name.empty() ? nullptr : &values.at(name));
    values[node.outputs[0]] = Evaluate(graph, node, in);
  }
  std::map<std::string, Values> outputs;
  for (const formats::ValueInfo& output : graph.outputs)
    outputs[output.name] = values.at(output.name);
  return outputs;
}

Tensor MakeTensor(DType dtype, const Shape& shape, const std::vector<double>& data) {
  if (Count(shape) != static_cast<int64_t>(data.size()))
    Die("MakeTensor: data does not fit the shape");
  auto converted = Convert({DType::kFloat64, shape, data.data()}, dtype);
  if (!converted.ok()) Die(std::string(converted.status().message()));
  return *std::move(converted);
}

Node MakeNode(const std::string& op, std::vector<std::string> inputs,
              std::vector<std::string> outputs, const Attributes& attributes) {
  Node node = {outputs[0] + "_node", op, "", std::move(inputs), std::move(outputs), {}};
  for (const auto& [name, value] : attributes) {
    std::visit([&, key = &name](const auto& v) { node.attributes.emplace(*key, v); }, value);
  }
  return node;
}

formats::ModelGraph MakeGraph(const Shape& input_shape, DType dtype) {
  formats::ModelGraph graph;
  graph.source = "test.onnx";
  graph.opset = 21;
  graph.inputs.push_back({"x", dtype, input_shape});
  graph.outputs.push_back({"y", dtype, {}});
  return graph;
}

std::vector<double> RandomData(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<double> data(count);
  for (double& v : data) v = uniform(generator);
  return data;
}

}  // namespace espalier::testing
