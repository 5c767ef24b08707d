// activation.h — element-wise functions a linear kernel may apply in its epilogue.
#pragma once

#include <cstdint>

namespace espalier::kernels {

// One line per activation: enumerator, printed name. ONNX's Gelu default is kGeluErf.
//   relu x = max(x, 0)   gelu_erf x = x/2 · (1 + erf(x/√2))   gelu_tanh x = x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))
//   sigmoid x = 1/(1 + e^-x)   tanh x
#define ESPALIER_ACTIVATIONS(X) \
  X(kNone, "none")              \
  X(kRelu, "relu")              \
  X(kGeluErf, "gelu_erf")       \
  X(kGeluTanh, "gelu_tanh")     \
  X(kSigmoid, "sigmoid")        \
  X(kTanh, "tanh")

enum class Activation : uint8_t {
#define ESPALIER_ACTIVATION_ENUM(name, text) name,
  ESPALIER_ACTIVATIONS(ESPALIER_ACTIVATION_ENUM)
#undef ESPALIER_ACTIVATION_ENUM
};

constexpr const char* NameOf(Activation activation) {
  constexpr const char* kNames[] = {
#define ESPALIER_ACTIVATION_NAME(name, text) text,
      ESPALIER_ACTIVATIONS(ESPALIER_ACTIVATION_NAME)
#undef ESPALIER_ACTIVATION_NAME
  };
  return kNames[static_cast<uint8_t>(activation)];
}

}  // namespace espalier::kernels
