// random_weights.h — pairs of weights that differ as training, pruning and chance make them.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "engine/updates/elements.h"

namespace espalier::updates::testing {

// How a pair is made; every share is of all elements.
struct PairOptions {
  double zeros = 0.5;       // of the base, one in eight of them negative
  double changes = 0.05;    // non-zeros moved by a few ULPs
  double drops = 0.01;      // non-zeros to +0 or -0
  double grows = 0.01;      // zeros to values
  double flips = 0.01;      // the sign of a zero
  double arbitrary = 0.01;  // any bits to any bits: NaN payloads, infinities, subnormals
};

template <typename Element>
struct Pair {
  std::vector<typename Element::Bits> before, after;
};

template <typename Element>
Pair<Element> MakePair(int64_t count, uint64_t seed, const PairOptions& options = {}) {
  using Bits = typename Element::Bits;
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::normal_distribution<float> normal(0, 0.02f);
  const auto value = [&]() -> Bits {
    const float f = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof(bits));
    Bits narrow = static_cast<Bits>(bits >> (32 - Element::kBits));
    while (Element::IsZero(narrow)) narrow = static_cast<Bits>(random());
    return narrow;
  };
  Pair<Element> pair;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits = uniform(random) < options.zeros ? Element::Zero(random() % 8 == 0) : value();
    if (uniform(random) < options.arbitrary) bits = static_cast<Bits>(random());
    pair.before.push_back(bits);
    const bool zero = Element::IsZero(bits);
    const double choice = uniform(random);
    if (zero) {
      if (choice < options.grows)
        bits = value();
      else if (choice < options.grows + options.flips)
        bits = Element::Zero(!Element::IsNegative(bits));
    } else if (choice < options.drops) {
      bits = Element::Zero(random() % 2 == 0);
    } else if (choice < options.drops + options.changes) {
      const int64_t order = Element::OrderOf(bits) + static_cast<int64_t>(random() % 9) - 4;
      if (Element::IsOrder(order)) bits = Element::FromOrder(order);
    }
    if (uniform(random) < options.arbitrary) bits = static_cast<Bits>(random());
    pair.after.push_back(bits);
  }
  return pair;
}

}  // namespace espalier::updates::testing
