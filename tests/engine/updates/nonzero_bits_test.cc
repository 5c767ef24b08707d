#include "engine/updates/nonzero_bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace espalier::updates {
namespace {

// Each with every width of vectors that this processor has.
template <typename Element>
class NonzeroBitsTest : public ::testing::Test {
 public:
  using Bits = typename Element::Bits;

  ~NonzeroBitsTest() override { LimitVectors(Vectors::kAvx512); }

  template <typename Check>
  static void WithAllVectors(Check check) {
    Vectors last = Vectors::kNone;
    for (const Vectors most : {Vectors::kNone, Vectors::kAvx2, Vectors::kAvx512}) {
      const Vectors used = LimitVectors(most);
      if (most != Vectors::kNone && used == last) continue;
      last = used;
      SCOPED_TRACE(static_cast<int>(used));
      check();
    }
  }

  // A third each of zeros, negative zeros (or zeros, of bytes) and any bits; dense stretches between.
  static std::vector<Bits> Elements(size_t count) {
    std::mt19937 random(7);
    std::vector<Bits> elements(count);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t kind = i / 100 % 3 == 2 ? 2 : random() % 3;
      if (kind == 1) elements[i] = Element::Zero(true);
      if (kind == 2) elements[i] = static_cast<Bits>(random() | 1);
    }
    return elements;
  }

  static constexpr size_t kCounts[] = {0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 1000, 4096};
};

using Elements = ::testing::Types<ByteElement, Float16Element, BFloat16Element, Float32Element>;
TYPED_TEST_SUITE(NonzeroBitsTest, Elements);

bool IsSet(const std::vector<uint64_t>& words, size_t i) { return words[i / 64] >> i % 64 & 1; }

TYPED_TEST(NonzeroBitsTest, ABitTellsWhetherAnElementIsZero) {
  for (const size_t count : this->kCounts) {
    const auto elements = this->Elements(count);
    this->WithAllVectors([&] {
      const auto words = NonzeroBits<TypeParam>(elements.data(), static_cast<int64_t>(count));
      ASSERT_EQ(words.size(), (count + 63) / 64);
      for (size_t i = 0; i < 64 * words.size(); ++i)
        ASSERT_EQ(IsSet(words, i), i < count && !TypeParam::IsZero(elements[i])) << i;
    });
  }
}

TYPED_TEST(NonzeroBitsTest, ABitTellsWhetherElementsDiffer) {
  for (const size_t count : this->kCounts) {
    const auto a = this->Elements(count);
    auto b = a;
    for (size_t i = 0; i < count; i += 3) b[i] = static_cast<typename TypeParam::Bits>(b[i] ^ i);
    this->WithAllVectors([&] {
      const auto words = DifferentBits<TypeParam>(a.data(), b.data(), static_cast<int64_t>(count));
      ASSERT_EQ(words.size(), (count + 63) / 64);
      for (size_t i = 0; i < 64 * words.size(); ++i)
        ASSERT_EQ(IsSet(words, i), i < count && a[i] != b[i]) << i;
    });
  }
}

TYPED_TEST(NonzeroBitsTest, SetElementsAreCopiedOneBehindTheOtherAndNothingElseIsWritten) {
  using Bits = typename TypeParam::Bits;
  for (const size_t count : this->kCounts) {
    const auto elements = this->Elements(count);
    const auto words = NonzeroBits<TypeParam>(elements.data(), static_cast<int64_t>(count));
    std::vector<Bits> expected;
    std::copy_if(elements.begin(), elements.end(), std::back_inserter(expected),
                 [](Bits bits) { return !TypeParam::IsZero(bits); });
    const size_t bytes = expected.size() * sizeof(Bits);
    this->WithAllVectors([&] {
      std::vector<char> out(1 + bytes + 64, '~');  // 1: not aligned
      ASSERT_EQ(Compact(words, elements.data(), out.data() + 1), out.data() + 1 + bytes);
      EXPECT_EQ(std::memcmp(out.data() + 1, expected.data(), bytes), 0);
      EXPECT_EQ(out.front(), '~');
      EXPECT_EQ(std::count(out.end() - 64, out.end(), '~'), 64);
    });
  }
}

}  // namespace
}  // namespace espalier::updates
