#include "tests/bench/cuda/linear_cases.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace espalier::bench {
namespace {

using kernels::Activation;
using kernels::Layout;

LayerSpec Layer(Layout layout, int64_t out, int64_t in, int32_t block, double density,
                Activation activation = Activation::kNone, DType dtype = DType::kBFloat16) {
  return {{layout, dtype, out, in, block, block, density, false, 11}, activation};
}

// "diagonal/64/0.1/12608/3072/768/gelu_tanh/cold"
Case ParseCase(const std::string& text) {
  std::stringstream stream(text);
  std::vector<std::string> fields;
  for (std::string field; std::getline(stream, field, '/');) fields.push_back(field);
  if (fields.size() != 8) {
    std::fprintf(stderr, "%s: expected LAYOUT/BLOCK/DENSITY/TOKENS/OUT/IN/ACTIVATION/STATE\n",
                 text.c_str());
    std::exit(2);
  }
  Layout layout = Layout::kBlockCsr;
  for (Layout l : {Layout::kCsr, Layout::kDiagonal}) layout = fields[0] == NameOf(l) ? l : layout;
  Activation activation = Activation::kNone;
  for (Activation a : {Activation::kRelu, Activation::kGeluErf, Activation::kGeluTanh}) {
    activation = fields[6] == NameOf(a) ? a : activation;
  }
  const LayerSpec layer = Layer(layout, std::stoll(fields[4]), std::stoll(fields[5]),
                                std::stoi(fields[1]), std::stod(fields[2]), activation);
  return {"case", {layer}, std::stoll(fields[3]), fields[7] == "cold"};
}

}  // namespace

std::vector<Case> Suite(const std::string& name) {
  std::vector<Case> cases;
  if (name.find('/') != std::string::npos) return {ParseCase(name)};
  constexpr int64_t kWide = 10240;
  if (name == "bars") {
    for (int32_t b : {128, 64, 32, 16}) {
      cases.push_back({"bar", {Layer(Layout::kDiagonal, kWide, kWide, b, 0.1)}, kWide, true});
      cases.push_back({"bar", {Layer(Layout::kBlockCsr, kWide, kWide, b, 0.1)}, kWide, true});
    }
  }
  if (name == "skinny") {
    for (int32_t b : {64, 32, 128, 16}) {
      for (int64_t tokens : {1, 16}) {
        for (bool cold : {true, false}) {
          cases.push_back(
              {"skinny", {Layer(Layout::kDiagonal, kWide, kWide, b, 0.1)}, tokens, cold});
        }
        cases.push_back({"skinny", {Layer(Layout::kBlockCsr, kWide, kWide, b, 0.1)}, tokens, true});
      }
    }
  }
  if (name == "scattered") {
    for (Layout layout : {Layout::kDiagonal, Layout::kCsr}) {
      for (int64_t tokens : {1, 16}) {
        for (bool cold : {true, false})
          cases.push_back({"scattered", {Layer(layout, kWide, kWide, 1, 0.1)}, tokens, cold});
      }
      for (double density : {0.1, 0.05, 0.01}) {
        cases.push_back({"scattered", {Layer(layout, kWide, kWide, 1, density)}, 1024, true});
      }
    }
  }
  if (name == "expand") {
    const auto add = [&](Layout layout, int64_t width, double density,
                         std::initializer_list<int64_t> tokens) {
      for (int64_t m : tokens)
        cases.push_back({"expand", {Layer(layout, width, width, 1, density)}, m, true});
    };
    for (Layout layout : {Layout::kCsr, Layout::kDiagonal}) {
      add(layout, kWide, 0.1, {8, 16, 32, 64, 128, 1024});
      add(layout, kWide, 0.05, {16, 1024});
      add(layout, kWide, 0.01, {1024});
      add(layout, 4096, 0.1, {16, 64, 1024});
      add(layout, 4096, 0.01, {1024});
    }
  }
  if (name == "two_four") {
    for (int64_t width : {int64_t{4096}, kWide}) {
      const auto add = [&](Layout layout, double density, int64_t tokens) {
        cases.push_back({"two_four", {Layer(layout, width, width, 1, density)}, tokens, true});
      };
      for (double density : {0.1, 0.05, 0.01}) {
        for (int64_t tokens : {1024, 4096, 10240}) add(Layout::kDiagonal, density, tokens);
      }
      for (double density : {0.1, 0.05}) add(Layout::kCsr, density, 4096);
    }
  }
  if (name == "gather_mma") {
    for (Layout layout : {Layout::kDiagonal, Layout::kCsr}) {
      for (int64_t width : {int64_t{4096}, kWide}) {
        for (int64_t tokens : {8, 16, 32, 128, 1024, 4096, 10240})
          cases.push_back({"gather_mma", {Layer(layout, width, width, 1, 0.01)}, tokens, true});
        for (int64_t tokens : {8, 16, 32}) {
          for (double density : {0.1, 0.05})
            cases.push_back(
                {"gather_mma", {Layer(layout, width, width, 1, density)}, tokens, true});
        }
      }
    }
  }
  if (name == "fp32") {
    for (int32_t b : {1, 16, 32, 64, 128}) {
      for (int64_t tokens : {1, 16, 64, 1024}) {
        const LayerSpec layer =
            Layer(Layout::kDiagonal, 4096, 4096, b, 0.1, Activation::kRelu, DType::kFloat32);
        cases.push_back({"fp32", {layer}, tokens, true});
      }
    }
    for (int64_t tokens : {1, 16, 1024}) {
      const LayerSpec layer =
          Layer(Layout::kCsr, 4096, 4096, 1, 0.1, Activation::kRelu, DType::kFloat32);
      cases.push_back({"fp32", {layer}, tokens, true});
    }
  }
  if (name == "vit" || name == "vit64") {
    for (int32_t b : name == "vit" ? std::vector<int32_t>{64, 32, 16} : std::vector<int32_t>{64}) {
      for (int64_t tokens : {12608, 1576}) {
        const LayerSpec up = Layer(Layout::kDiagonal, 3072, 768, b, 0.1, Activation::kGeluTanh);
        const LayerSpec down = Layer(Layout::kDiagonal, 768, 3072, b, 0.1);
        cases.push_back({"vit_up", {up}, tokens, true});
        cases.push_back({"vit_down", {down}, tokens, true});
        cases.push_back({"vit_pair", {up, down}, tokens, true});
      }
    }
  }
  if (name == "grid") {
    for (int32_t b : {64, 128, 32, 16}) {
      for (int64_t tokens : {64, 256, 1024, 4096}) {
        for (double density : {0.2, 0.05}) {
          cases.push_back(
              {"grid", {Layer(Layout::kDiagonal, 4096, 4096, b, density)}, tokens, true});
        }
      }
    }
  }
  if (name == "curves") {
    for (int32_t b : {1, 32, 64}) {
      for (int64_t tokens : {1, 64, 1024}) {
        for (double density : {0.5, 0.2, 0.1, 0.05, 0.02, 0.01}) {
          cases.push_back(
              {"curve", {Layer(Layout::kDiagonal, 4096, 4096, b, density)}, tokens, true});
        }
      }
    }
    for (int64_t tokens : {1, 64, 1024}) {
      for (double density : {0.5, 0.2, 0.1, 0.05, 0.02, 0.01})
        cases.push_back({"curve", {Layer(Layout::kCsr, 4096, 4096, 1, density)}, tokens, true});
    }
  }
  if (name == "network") {
    std::vector<LayerSpec> layers(
        100, Layer(Layout::kDiagonal, 10000, 10000, 64, 0.1, Activation::kRelu));
    cases.push_back({"network", layers, 10000, true});
  }
  return cases;
}

}  // namespace espalier::bench
