#include "engine/updates/nonzero_bits.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace espalier::updates {
namespace {

// The last, shorter word, and every word where there is no SSE2.
template <typename Bits, typename Predicate>
uint64_t WordOf(int64_t count, Predicate predicate) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= uint64_t{predicate(i)} << i;
  return word;
}

#ifdef __SSE2__
// 16 lanes of 0 or −1, one byte an element, from as many vectors as 16 elements take.
template <typename Bits, typename Compare>
__m128i Sixteen(Compare compare) {
  if constexpr (sizeof(Bits) == 1) {
    return compare(0);
  } else if constexpr (sizeof(Bits) == 2) {
    return _mm_packs_epi16(compare(0), compare(1));
  } else {
    return _mm_packs_epi16(_mm_packs_epi32(compare(0), compare(1)),
                           _mm_packs_epi32(compare(2), compare(3)));
  }
}

template <typename Bits>
__m128i Equal(__m128i a, __m128i b) {
  if constexpr (sizeof(Bits) == 1) return _mm_cmpeq_epi8(a, b);
  if constexpr (sizeof(Bits) == 2) return _mm_cmpeq_epi16(a, b);
  return _mm_cmpeq_epi32(a, b);
}

__m128i Load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

template <typename Bits>
__m128i Broadcast(Bits bits) {
  if constexpr (sizeof(Bits) == 1) return _mm_set1_epi8(static_cast<char>(bits));
  if constexpr (sizeof(Bits) == 2) return _mm_set1_epi16(static_cast<int16_t>(bits));
  return _mm_set1_epi32(static_cast<int32_t>(bits));
}

// equal(i): lanes of the i-th 16 bytes, −1 where the answer is no.
template <typename Bits, typename Lanes>
uint64_t FullWord(Lanes equal) {
  constexpr int kVectors = static_cast<int>(sizeof(Bits));  // for 16 elements
  uint64_t word = 0;
  for (int part = 0; part < 4; ++part) {
    const __m128i lanes = Sixteen<Bits>([&](int i) { return equal(part * kVectors + i); });
    word |= uint64_t{static_cast<uint16_t>(~_mm_movemask_epi8(lanes))} << (16 * part);
  }
  return word;
}
#endif

template <typename Element>
constexpr typename Element::Bits MagnitudeMask() {
  if constexpr (Element::kSigned) return Element::kMagnitude;
  return static_cast<typename Element::Bits>(~typename Element::Bits{0});
}

}  // namespace

template <typename Element>
std::vector<uint64_t> NonzeroBits(const typename Element::Bits* elements, int64_t count) {
  using Bits = typename Element::Bits;
  std::vector<uint64_t> words(static_cast<size_t>((count + 63) / 64));
  int64_t i = 0;
#ifdef __SSE2__
  const __m128i mask = Broadcast(MagnitudeMask<Element>()), zero = _mm_setzero_si128();
  for (; i + 64 <= count; i += 64) {
    const auto* from = reinterpret_cast<const char*>(elements + i);
    words[static_cast<size_t>(i / 64)] = FullWord<Bits>(
        [&](int v) { return Equal<Bits>(_mm_and_si128(Load(from + 16 * v), mask), zero); });
  }
#endif
  for (; i < count; i += 64) {
    words[static_cast<size_t>(i / 64)] =
        WordOf<Bits>(count - i < 64 ? count - i : 64,
                     [&](int64_t j) { return !Element::IsZero(elements[i + j]); });
  }
  return words;
}

template <typename Element>
std::vector<uint64_t> DifferentBits(const typename Element::Bits* a,
                                    const typename Element::Bits* b, int64_t count) {
  using Bits = typename Element::Bits;
  std::vector<uint64_t> words(static_cast<size_t>((count + 63) / 64));
  int64_t i = 0;
#ifdef __SSE2__
  for (; i + 64 <= count; i += 64) {
    const auto* left = reinterpret_cast<const char*>(a + i);
    const auto* right = reinterpret_cast<const char*>(b + i);
    words[static_cast<size_t>(i / 64)] = FullWord<Bits>(
        [&](int v) { return Equal<Bits>(Load(left + 16 * v), Load(right + 16 * v)); });
  }
#endif
  for (; i < count; i += 64) {
    words[static_cast<size_t>(i / 64)] = WordOf<Bits>(
        count - i < 64 ? count - i : 64, [&](int64_t j) { return a[i + j] != b[i + j]; });
  }
  return words;
}

int64_t CountBits(const std::vector<uint64_t>& words) {
  int64_t count = 0;
  for (const uint64_t word : words) count += std::popcount(word);
  return count;
}

template std::vector<uint64_t> NonzeroBits<ByteElement>(const uint8_t*, int64_t);
template std::vector<uint64_t> NonzeroBits<Float16Element>(const uint16_t*, int64_t);
template std::vector<uint64_t> NonzeroBits<BFloat16Element>(const uint16_t*, int64_t);
template std::vector<uint64_t> NonzeroBits<Float32Element>(const uint32_t*, int64_t);
template std::vector<uint64_t> NonzeroBits<PlainElement<uint8_t>>(const uint8_t*, int64_t);
template std::vector<uint64_t> NonzeroBits<PlainElement<uint16_t>>(const uint16_t*, int64_t);
template std::vector<uint64_t> NonzeroBits<PlainElement<uint32_t>>(const uint32_t*, int64_t);
template std::vector<uint64_t> DifferentBits<ByteElement>(const uint8_t*, const uint8_t*, int64_t);
template std::vector<uint64_t> DifferentBits<Float16Element>(const uint16_t*, const uint16_t*,
                                                             int64_t);
template std::vector<uint64_t> DifferentBits<BFloat16Element>(const uint16_t*, const uint16_t*,
                                                              int64_t);
template std::vector<uint64_t> DifferentBits<Float32Element>(const uint32_t*, const uint32_t*,
                                                             int64_t);

}  // namespace espalier::updates
