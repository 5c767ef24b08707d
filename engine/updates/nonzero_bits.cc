#include "engine/updates/nonzero_bits.h"

#include <algorithm>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#define ESPALIER_AVX2 __attribute__((target("avx2")))
#define ESPALIER_AVX512 __attribute__((target("avx512bw,avx512vbmi2,bmi2,popcnt")))
#endif

namespace espalier::updates {
namespace {

// The last, shorter word, and every word where there is no AVX2.
template <typename Predicate>
uint64_t WordOf(int64_t count, Predicate predicate) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= uint64_t{predicate(i)} << i;
  return word;
}

#ifdef __x86_64__
template <typename Bits>
ESPALIER_AVX2 __m256i Broadcast(Bits bits) {
  if constexpr (sizeof(Bits) == 1) return _mm256_set1_epi8(static_cast<char>(bits));
  if constexpr (sizeof(Bits) == 2) return _mm256_set1_epi16(static_cast<int16_t>(bits));
  return _mm256_set1_epi32(static_cast<int32_t>(bits));
}

template <typename Bits>
ESPALIER_AVX2 __m256i Equal(__m256i a, __m256i b) {
  if constexpr (sizeof(Bits) == 1) return _mm256_cmpeq_epi8(a, b);
  if constexpr (sizeof(Bits) == 2) return _mm256_cmpeq_epi16(a, b);
  return _mm256_cmpeq_epi32(a, b);
}

// 32 lanes of 0 or −1, in as many vectors as 32 elements take, as bits. Packing works on each half of
// a vector, so that the parts have to be put in order again.
template <typename Bits>
ESPALIER_AVX2 uint32_t Mask(const __m256i* lanes) {
  __m256i packed = lanes[0];
  if constexpr (sizeof(Bits) == 2) {
    packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(lanes[0], lanes[1]), 0xd8);
  } else if constexpr (sizeof(Bits) == 4) {
    packed = _mm256_packs_epi16(_mm256_packs_epi32(lanes[0], lanes[1]),
                                _mm256_packs_epi32(lanes[2], lanes[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  return static_cast<uint32_t>(_mm256_movemask_epi8(packed));
}

// Whole words: where a and b, masked, differ; without b: where a, masked, is not 0.
template <typename Bits, bool kHasB>
ESPALIER_AVX2 void FullWords(const Bits* a, const Bits* b, Bits mask, int64_t words,
                             uint64_t* out) {
  constexpr int kVectors = sizeof(Bits);  // for 32 elements
  const __m256i masks = Broadcast(mask);
  for (int64_t word = 0; word < words; ++word) {
    uint64_t equal = 0;
    for (int half = 0; half < 2; ++half) {
      __m256i lanes[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = 64 * word + 32 * half + v * (32 / kVectors);
        const auto load = [&](const Bits* from) ESPALIER_AVX2 {
          return _mm256_and_si256(masks,
                                  _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
        };
        lanes[v] = Equal<Bits>(load(a), kHasB ? load(b) : _mm256_setzero_si256());
      }
      equal |= uint64_t{Mask<Bits>(lanes)} << (32 * half);
    }
    out[word] = ~equal;
  }
}

// The same with a bit for each lane of a comparison: nothing has to be packed.
template <typename Bits, bool kHasB>
ESPALIER_AVX512 void FullWords512(const Bits* a, const Bits* b, Bits mask, int64_t words,
                                  uint64_t* out) {
  constexpr int kLanes = 64 / sizeof(Bits);
  for (int64_t word = 0; word < words; ++word) {
    uint64_t set = 0;
    for (int first = 0; first < 64; first += kLanes) {
      const int64_t at = 64 * word + first;
      __m512i lanes = _mm512_loadu_si512(a + at);
      if constexpr (kHasB) lanes = _mm512_xor_si512(lanes, _mm512_loadu_si512(b + at));
      if constexpr (sizeof(Bits) == 1) {
        set = _mm512_test_epi8_mask(lanes, _mm512_set1_epi8(static_cast<char>(mask)));
      } else if constexpr (sizeof(Bits) == 2) {
        set |=
            uint64_t{_mm512_test_epi16_mask(lanes, _mm512_set1_epi16(static_cast<int16_t>(mask)))}
            << first;
      } else {
        set |=
            uint64_t{_mm512_test_epi32_mask(lanes, _mm512_set1_epi32(static_cast<int32_t>(mask)))}
            << first;
      }
    }
    out[word] = set;
  }
}

// Whole words. What lies behind the last element is not written to.
template <typename Bits>
ESPALIER_AVX512 char* Compact512(const uint64_t* words, int64_t count, const Bits* from, char* to) {
  constexpr int kLanes = 64 / sizeof(Bits);
  for (int64_t first = 0; first < 64 * count; first += kLanes) {
    const uint64_t set = _bzhi_u64(words[first / 64] >> first % 64, kLanes);
    const auto found = static_cast<unsigned>(_mm_popcnt_u64(set));
    const uint64_t bytes = _bzhi_u64(~uint64_t{0}, found * static_cast<unsigned>(sizeof(Bits)));
    const __m512i lanes = _mm512_loadu_si512(from + first);
    __m512i packed;
    if constexpr (sizeof(Bits) == 1) {
      packed = _mm512_maskz_compress_epi8(set, lanes);
    } else if constexpr (sizeof(Bits) == 2) {
      packed = _mm512_maskz_compress_epi16(static_cast<__mmask32>(set), lanes);
    } else {
      packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(set), lanes);
    }
    _mm512_mask_storeu_epi8(to, bytes, packed);
    to += found * sizeof(Bits);
  }
  return to;
}

Vectors Widest() {
  static const Vectors widest =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi2") ? Vectors::kAvx512
      : __builtin_cpu_supports("avx2")                                            ? Vectors::kAvx2
                                                                                  : Vectors::kNone;
  return widest;
}
#else
Vectors Widest() { return Vectors::kNone; }
#endif

Vectors widest_allowed = Vectors::kAvx512;

Vectors InUse() { return std::min(widest_allowed, Widest()); }

template <typename Element>
constexpr typename Element::Bits MagnitudeMask() {
  if constexpr (Element::kSigned) return Element::kMagnitude;
  return static_cast<typename Element::Bits>(~typename Element::Bits{0});
}

// One bit for each element: where predicate(i) holds, which is what FullWords computes.
template <bool kHasB, typename Bits, typename Predicate>
std::vector<uint64_t> Words(const Bits* a, const Bits* b, Bits mask, int64_t count,
                            Predicate predicate) {
  std::vector<uint64_t> words(static_cast<size_t>((count + 63) / 64));
  int64_t i = 0;
#ifdef __x86_64__
  if (const Vectors vectors = InUse(); vectors != Vectors::kNone) {
    (vectors == Vectors::kAvx512 ? FullWords512<Bits, kHasB>
                                 : FullWords<Bits, kHasB>)(a, b, mask, count / 64, words.data());
    i = count / 64 * 64;
  }
#endif
  for (; i < count; i += 64) {
    words[static_cast<size_t>(i / 64)] =
        WordOf(count - i < 64 ? count - i : 64, [&](int64_t j) { return predicate(i + j); });
  }
  return words;
}

}  // namespace

template <typename Element>
std::vector<uint64_t> NonzeroBits(const typename Element::Bits* elements, int64_t count) {
  using Bits = typename Element::Bits;
  return Words<false, Bits>(elements, nullptr, MagnitudeMask<Element>(), count,
                            [&](int64_t i) { return !Element::IsZero(elements[i]); });
}

template <typename Element>
std::vector<uint64_t> DifferentBits(const typename Element::Bits* a,
                                    const typename Element::Bits* b, int64_t count) {
  using Bits = typename Element::Bits;
  return Words<true, Bits>(a, b, static_cast<Bits>(~Bits{0}), count,
                           [&](int64_t i) { return a[i] != b[i]; });
}

template <typename Bits>
char* Compact(const std::vector<uint64_t>& words, const Bits* elements, char* to) {
  size_t word = 0;
#ifdef __x86_64__
  // The last word may be of fewer than 64 elements.
  if (InUse() == Vectors::kAvx512 && !words.empty()) {
    word = words.size() - 1;
    to = Compact512(words.data(), static_cast<int64_t>(word), elements, to);
  }
#endif
  for (; word < words.size(); ++word) {
    const Bits* from = elements + 64 * word;
    if (words[word] == ~uint64_t{0}) {
      std::memcpy(to, from, 64 * sizeof(Bits));
      to += 64 * sizeof(Bits);
      continue;
    }
    for (uint64_t left = words[word]; left != 0; left &= left - 1) {
      std::memcpy(to, from + std::countr_zero(left), sizeof(Bits));
      to += sizeof(Bits);
    }
  }
  return to;
}

Vectors LimitVectors(Vectors most) {
  widest_allowed = most;
  return InUse();
}

int64_t CountBits(const std::vector<uint64_t>& words) {
  int64_t count = 0;
  for (const uint64_t word : words) count += BitsIn(word);
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
template char* Compact(const std::vector<uint64_t>&, const uint8_t*, char*);
template char* Compact(const std::vector<uint64_t>&, const uint16_t*, char*);
template char* Compact(const std::vector<uint64_t>&, const uint32_t*, char*);

}  // namespace espalier::updates
