#include "engine/updates/segment_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/updates/bytes.h"
#include "engine/updates/counted_model.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/packed_segment.h"
#include "engine/updates/word_coder.h"
#include "tests/engine/updates/first_format.h"
#include "tests/engine/updates/random_weights.h"

namespace espalier::updates {
namespace {

using ::testing::HasSubstr;
using testing::MakePair;
using testing::Pair;
using testing::PairOptions;

template <typename Element>
constexpr ElementKind kKindOf = std::is_same_v<Element, ByteElement>       ? ElementKind::kByte
                                : std::is_same_v<Element, Float16Element>  ? ElementKind::kFloat16
                                : std::is_same_v<Element, BFloat16Element> ? ElementKind::kBFloat16
                                                                           : ElementKind::kFloat32;

template <typename Element>
class SegmentCodecTest : public ::testing::Test {
 public:
  using Bits = typename Element::Bits;

  static std::string Encode(const Pair<Element>& pair, const EncodeOptions& options = {}) {
    EventCounts counts;
    auto record = EncodeSegment(kKindOf<Element>, pair.before.data(), pair.after.data(),
                                static_cast<int64_t>(pair.before.size()), counts, options);
    EXPECT_TRUE(record.ok()) << record.status();
    return record.ok() ? *record : "";
  }
  // In pieces, as a reader gives them.
  static PackedSegment Packed(const std::vector<Bits>& elements) {
    const auto count = static_cast<int64_t>(elements.size());
    PackedSegment packed(ElementKind::kByte, elements.data(),
                         std::min<int64_t>(64, count));  // of before
    packed.Begin(kKindOf<Element>, count);
    for (int64_t at = 0; at < count; at += 1024)
      packed.Append(elements.data() + at, std::min<int64_t>(1024, count - at));
    return packed;
  }
  // What the record makes of the base.
  static std::vector<Bits> Decode(std::vector<Bits> base, absl::string_view record,
                                  const RecordForm& form) {
    std::vector<Edit> edits;
    EventCounts counts;
    const auto status = DecodeSegment(kKindOf<Element>, Packed(base), record, form, edits, counts);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(static_cast<int64_t>(edits.size()), counts.total());
    for (size_t i = 0; i < edits.size(); ++i) {
      EXPECT_TRUE(i == 0 || edits[i - 1].position < edits[i].position);
      EXPECT_EQ(base[edits[i].position], edits[i].old_bits);
      base[edits[i].position] = static_cast<Bits>(edits[i].new_bits);
    }
    return base;
  }
  static void ExpectRoundTrip(const Pair<Element>& pair) {
    // Each mode by itself, with raw beside those that are not for all lists; all to choose from.
    for (const auto& [modes, row_elements] :
         std::vector<std::pair<uint8_t, int64_t>>{{1, 1},
                                                  {2, 1},
                                                  {4, 1},
                                                  {8 + 1, 1},
                                                  {16 + 1, 1},
                                                  {16 + 1, 10},
                                                  {32 + 1, 10},
                                                  {32 + 1, 100'000},
                                                  {64 + 1, 1},
                                                  {64 + 1, 10},
                                                  {128 + 1, 1},
                                                  {127, 10},
                                                  {255, 10}}) {
      const std::string record = Encode(pair, {.modes = modes, .row_elements = row_elements});
      if (pair.before == pair.after) {
        EXPECT_EQ(record, "");
      } else {
        EXPECT_EQ(Decode(pair.before, record, {.row_elements = row_elements}), pair.after)
            << "modes " << int{modes} << ", rows of " << row_elements;
        if (modes >= 128) continue;
        const int64_t width = RowWidth(row_elements, static_cast<int64_t>(pair.before.size()));
        EXPECT_EQ(Decode(pair.before, testing::InFirstFormat(record, width), {.format_version = 1}),
                  pair.after)
            << "format 1, modes " << int{modes} << ", rows of " << row_elements;
      }
    }
  }
};

using Elements = ::testing::Types<ByteElement, Float16Element, BFloat16Element, Float32Element>;
TYPED_TEST_SUITE(SegmentCodecTest, Elements);

TYPED_TEST(SegmentCodecTest, APackedSegmentGivesBackAnyRange) {
  const auto pair = MakePair<TypeParam>(5000, 77);
  const auto packed = TestFixture::Packed(pair.before);
  EXPECT_EQ(packed.size(), 5000);
  EXPECT_EQ(packed.nonzero(), NonzeroBits<TypeParam>(pair.before.data(), 5000));
  std::vector<typename TypeParam::Bits> range(5000);
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 5000}, {0, 0}, {63, 64}, {64, 130}, {999, 3001}, {4999, 5000}}) {
    packed.Unpack(begin, end, range.data());
    EXPECT_TRUE(
        std::equal(range.begin(), range.begin() + (end - begin), pair.before.begin() + begin))
        << begin << " to " << end;
  }
  for (uint32_t i = 0; i < 5000; ++i) ASSERT_EQ(packed.template At<TypeParam>(i), pair.before[i]);
}

TYPED_TEST(SegmentCodecTest, EveryModeRestoresWhatTrainingAndChanceChange) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    PairOptions options;
    options.zeros = static_cast<double>(seed % 5) / 4;
    options.changes = seed % 3 == 0 ? 0.9 : 0.03;
    options.arbitrary = seed % 4 == 0 ? 0.3 : 0;
    const int64_t count =
        seed < 20 ? static_cast<int64_t>(seed * 7) : 1000 + 61 * static_cast<int64_t>(seed);
    SCOPED_TRACE(seed);
    this->ExpectRoundTrip(MakePair<TypeParam>(count, seed, options));
  }
}

TYPED_TEST(SegmentCodecTest, ListsAboveTheTrialKeepTheirModeAndTheirEvents) {
  const auto pair = MakePair<TypeParam>(200'000, 7, {.changes = 0.5});
  EXPECT_EQ(this->Decode(pair.before, this->Encode(pair), {}), pair.after);
}

TYPED_TEST(SegmentCodecTest, NoChangeTakesNothingAndAllChangedComesBack) {
  auto pair = MakePair<TypeParam>(
      3000, 1, {.changes = 0, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  EXPECT_EQ(this->Encode(pair), "");
  for (auto& bits : pair.after) bits = static_cast<typename TypeParam::Bits>(~bits);
  this->ExpectRoundTrip(pair);
  std::swap(pair.before, pair.after);
  this->ExpectRoundTrip(pair);
}

// Every 16-bit pattern to every tenth other one, so that each corner of the type is met.
TEST(SegmentCodecFloatTest, EveryPatternOfASixteenBitFloatIsRestoredExactly) {
  for (uint32_t step : {1u, 0x8000u, 0x7f80u, 0xffffu, 6553u}) {
    Pair<BFloat16Element> wide;
    Pair<Float16Element> narrow;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      wide.before.push_back(static_cast<uint16_t>(bits));
      wide.after.push_back(static_cast<uint16_t>(bits + step));
    }
    narrow.before = wide.before;
    narrow.after = wide.after;
    SegmentCodecTest<BFloat16Element>::ExpectRoundTrip(wide);
    SegmentCodecTest<Float16Element>::ExpectRoundTrip(narrow);
  }
}

TEST(SegmentCodecFloatTest, CornersOfFloat32AreRestoredExactly) {
  const std::vector<uint32_t> corners = {0x00000000, 0x80000000, 0x00000001, 0x80000001,
                                         0x007fffff, 0x00800000, 0x7f7fffff, 0xff7fffff,
                                         0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
                                         0xffffffff, 0x7fffffff, 0x3f800000, 0xbf800000};
  Pair<Float32Element> pair;
  for (const uint32_t from : corners) {
    for (const uint32_t to : corners) {
      pair.before.push_back(from);
      pair.after.push_back(to);
    }
  }
  SegmentCodecTest<Float32Element>::ExpectRoundTrip(pair);
}

TEST(SegmentCodecFloatTest, ZerosKeepTheirSign) {
  Pair<Float32Element> pair{{0, 0x80000000, 0x3f800000, 0xbf800000, 0x3f800000, 0xbf800000},
                            {0x80000000, 0, 0, 0x80000000, 0x80000000, 0}};
  SegmentCodecTest<Float32Element>::ExpectRoundTrip(pair);
  EventCounts counts;
  ASSERT_TRUE(
      EncodeSegment(ElementKind::kFloat32, pair.before.data(), pair.after.data(), 6, counts).ok());
  EXPECT_EQ(counts, (EventCounts{{0, 4, 0, 2}}));
}

// One ULP at 1 % of a bf16 tensor: what is expected of the codec on the commonest delta.
TEST(SegmentCodecSizeTest, OneUlpAtOnePercentTakesLessThanTenBitsAChange) {
  const auto pair = MakePair<BFloat16Element>(
      400'000, 3,
      {.zeros = 0.9, .changes = 0.1, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  EventCounts counts;
  const auto record =
      EncodeSegment(ElementKind::kBFloat16, pair.before.data(), pair.after.data(), 400'000, counts);
  ASSERT_TRUE(record.ok());
  EXPECT_LT(8.0 * static_cast<double>(record->size()) / static_cast<double>(counts.total()), 10.0);
  int modes[kEventKinds];
  ASSERT_TRUE(ReadModes(*record, {}, modes).ok());
  EXPECT_GE(modes[0], static_cast<int>(Mode::kRange));
}

// Less than what a decoder reads ahead may be missing unnoticed here: what is signed covers that.
TEST(SegmentCodecRecordTest, ACodedListThatWasCutIsRefused) {
  const auto changes = MakePair<BFloat16Element>(
      5000, 9, {.changes = 0.9, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  const auto drops = MakePair<BFloat16Element>(
      5000, 9, {.changes = 0, .drops = 0.5, .grows = 0, .flips = 0, .arbitrary = 0});
  for (uint8_t m = 0; m < kModes; ++m) {
    const bool is_of_drops = static_cast<Mode>(m) == Mode::kThreshold;
    const auto& pair = is_of_drops ? drops : changes;
    const PackedSegment base(ElementKind::kBFloat16, pair.before.data(), 5000);
    const std::string record =
        SegmentCodecTest<BFloat16Element>::Encode(pair, {.modes = static_cast<uint8_t>(1 << m)});
    const auto expect_refused = [&](const std::string& cut, uint16_t format_version) {
      std::vector<Edit> edits;
      EventCounts counts;
      EXPECT_EQ(DecodeSegment(ElementKind::kBFloat16, base, cut, {.format_version = format_version},
                              edits, counts)
                    .code(),
                absl::StatusCode::kInvalidArgument)
          << "mode " << int{m} << ", format " << format_version << ", " << cut.size();
    };
    for (size_t cut = 10; cut + 10 < record.size(); cut += 37) {
      const std::string shorter = record.substr(0, record.size() - cut);
      expect_refused(shorter, 2);
      if (m != 0 && !is_of_drops && !IsMixed(static_cast<Mode>(m)))
        expect_refused(testing::InFirstFormat(shorter, 5000), 1);
    }
  }
}

// What magnitude pruning drops: a threshold tells it all, but for those of its own magnitude; and a few
// that a threshold misses cost a few bits.
TEST(SegmentCodecSizeTest, TheSmallestThatDropTakeNextToNothing) {
  auto pair = MakePair<BFloat16Element>(
      50'000, 13, {.zeros = 0.5, .changes = 0, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  int64_t drops = 0;
  const auto drop_below = [&](uint16_t magnitude) {
    drops = 0;
    for (size_t i = 0; i < pair.before.size(); ++i) {
      const bool drops_now = !BFloat16Element::IsZero(pair.before[i]) &&
                             (pair.before[i] & 0x7fff) + (i % 7 == 0 ? 40 : 0) < magnitude;
      pair.after[i] = drops_now ? 0 : pair.before[i];
      drops += drops_now;
    }
  };
  std::vector<uint16_t> magnitudes;
  for (const uint16_t bits : pair.before) {
    if (!BFloat16Element::IsZero(bits)) magnitudes.push_back(bits & 0x7fff);
  }
  std::nth_element(magnitudes.begin(), magnitudes.begin() + 1000, magnitudes.end());
  drop_below(magnitudes[1000]);
  ASSERT_GT(drops, 500);
  const std::string record = SegmentCodecTest<BFloat16Element>::Encode(pair);
  int modes[kEventKinds];
  ASSERT_TRUE(ReadModes(record, {}, modes).ok());
  EXPECT_EQ(modes[1], static_cast<int>(Mode::kThreshold));
  EXPECT_LT(8.0 * static_cast<double>(record.size()) / static_cast<double>(drops), 2.0);
}

// Format 1 told the width of rows and the options of a counted list.
TEST(SegmentCodecRecordTest, RowsOfFormat1AreChecked) {
  const std::vector<uint32_t> base = {0x3f800000, 0, 0x40000000, 0x80000000};
  const auto decode = [&](uint8_t mode, absl::string_view payload) {
    ByteWriter record;
    record.Varint(1);
    record.Byte(mode);
    record.Text(payload);
    record.Raw(std::string(3, '\0'));
    std::vector<Edit> edits;
    EventCounts counts;
    return std::string(DecodeSegment(ElementKind::kFloat32,
                                     PackedSegment(ElementKind::kFloat32, base.data(), 4),
                                     record.bytes(), {.format_version = 1}, edits, counts)
                           .message());
  };
  for (const uint8_t mode : {uint8_t{4}, uint8_t{5}, uint8_t{6}}) {
    EXPECT_THAT(decode(mode, std::string(3, '\0')), HasSubstr("rows of no elements"));
    EXPECT_THAT(decode(mode, std::string("\xff\xff\xff\x7f\0", 5)), HasSubstr("width of a row"));
  }
  EXPECT_THAT(decode(4, "\4\x64x"), HasSubstr("coded bits"));
  EXPECT_THAT(decode(6, std::string("\4\x08\0", 3)), HasSubstr("options"));
  EXPECT_THAT(decode(6, std::string("\4\0\x64x", 4)), HasSubstr("coded bits"));
  EXPECT_THAT(decode(6, std::string("\4\0\0", 3)), HasSubstr("holds 0 events"));
  EXPECT_THAT(decode(7, "x"), HasSubstr("mode 7 is not known"));
}

// Columns that never move, and rows of one size and leaning: what only a mixed mode sees.
TEST(SegmentCodecSizeTest, RowsAndColumnsPredictChanges) {
  auto pair = MakePair<Float32Element>(
      40'000, 5, {.zeros = 0, .changes = 0, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  std::mt19937_64 random(6);
  for (size_t i = 0; i < pair.before.size(); ++i) {
    pair.before[i] = (pair.before[i] & 0x807fffff) | 0x3c000000;
    const size_t row = i / 100, column = i % 100;
    pair.after[i] = pair.before[i];
    if (column % 4 == 0 || row % 4 == 0) continue;
    const uint64_t size = 16 << (row % 2 * 4 + column % 3 * 2);
    pair.after[i] += static_cast<uint32_t>(size + random() % size);
  }
  const auto bytes = [&](uint8_t modes) {
    return SegmentCodecTest<Float32Element>::Encode(pair, {.modes = modes, .row_elements = 100})
        .size();
  };
  EXPECT_LT(bytes(16), 0.9 * static_cast<double>(bytes(15)));
  EXPECT_EQ(bytes(63), bytes(16));
}

// Columns that rarely move beside others that often do, by steps of an ULP: what a count sees sooner
// than the last few flags do.
TEST(SegmentCodecSizeTest, HowOftenAColumnChangedPredictsItsChanges) {
  auto pair = MakePair<BFloat16Element>(
      200'000, 11, {.zeros = 0, .changes = 0, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  std::mt19937_64 random(12);
  bool often[100];
  for (bool& column : often) column = random() % 10 == 0;
  for (size_t i = 0; i < pair.before.size(); ++i) {
    pair.before[i] = static_cast<uint16_t>((pair.before[i] & 0x807f) | 0x3c00);
    const bool changes = random() % (often[i % 100] ? 4 : 100) == 0;
    pair.after[i] = static_cast<uint16_t>(pair.before[i] + changes);
  }
  const auto bytes = [&](uint8_t modes) {
    return SegmentCodecTest<BFloat16Element>::Encode(pair, {.modes = modes, .row_elements = 100})
        .size();
  };
  EXPECT_LT(bytes(64), 0.97 * static_cast<double>(bytes(16)));
  EXPECT_LT(bytes(64), 0.93 * static_cast<double>(bytes(15)));
  EXPECT_EQ(bytes(127), bytes(64));
}

// Whatever an encoder chooses: it tells, and a decoder follows. Runs of changes make counts overflow.
TYPED_TEST(SegmentCodecTest, CountedChangesAreReadBackWithEveryOption) {
  using Bits = typename TypeParam::Bits;
  constexpr uint32_t kWidth = 7, kRows = 600;
  const auto changes_at = [](uint32_t row, uint32_t column) {
    if (row % 5 == 4) return false;
    return column == 0 || (column == 1 && row < 300) || (row * 31 + column * 17) % 11 == 0;
  };
  const auto old_bits = [](uint32_t row, uint32_t column) {
    return static_cast<Bits>(TypeParam::Zero(false) + 1 + ((row * 131 + column * 37) & 0x7e));
  };
  for (uint64_t bits = 0; bits <= CountedOptions::kMostBits; ++bits) {
    const auto options = CountedOptions::FromBits(bits);
    ASSERT_EQ(options.bits(), bits);
    const auto visit = [&](auto& coder, auto each) {
      const auto model = std::make_unique<CountedChanges<TypeParam>>(kWidth, options);
      for (uint32_t row = 0; row < kRows; ++row) {
        if (!model->RowChanges(coder, row % 5 != 4)) continue;
        for (uint32_t column = 0; column < kWidth; ++column) {
          each(row, column,
               model->Changes(coder, column, old_bits(row, column), changes_at(row, column)));
        }
      }
    };
    WordEncoder encoder;
    visit(encoder, [](uint32_t, uint32_t, bool) {});
    const std::string coded = encoder.TakeCoded();
    // Decoded with no more than what the decoder is told.
    WordDecoder decoder(coded, "");
    int read = 0;
    visit(decoder, [&](uint32_t row, uint32_t column, bool changed) {
      ++read;
      ASSERT_EQ(changed, changes_at(row, column)) << "options " << bits << ", row " << row;
    });
    EXPECT_EQ(read, static_cast<int>(kWidth * (options.rows ? kRows / 5 * 4 : kRows)));
    EXPECT_TRUE(decoder.finished());
  }
}

// Adam's first step of an embedding's row: one length in units of its own, whatever each weight's is.
TEST(SegmentCodecSizeTest, AStepOfTheLastOnesLengthTakesLessThanFourBits) {
  auto pair = MakePair<Float32Element>(
      40'000, 8, {.zeros = 0, .changes = 0, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  std::mt19937_64 random(9);
  for (size_t i = 0; i < pair.before.size(); ++i) {
    const float step = random() % 2 ? 3.7e-5f : -3.7e-5f;
    float weight;
    std::memcpy(&weight, &pair.before[i], sizeof(weight));
    weight += step;
    std::memcpy(&pair.after[i], &weight, sizeof(weight));
  }
  const auto record =
      SegmentCodecTest<Float32Element>::Encode(pair, {.modes = 63, .row_elements = 100});
  int modes[kEventKinds];
  ASSERT_TRUE(ReadModes(record, {}, modes).ok());
  EXPECT_EQ(modes[0], static_cast<int>(Mode::kMixedRepeats));
  EXPECT_LT(8.0 * static_cast<double>(record.size()) / 40'000, 4.0);
}

// One change in a hundred: asking for each non-zero would take longer than the changes do.
TEST(SegmentCodecSizeTest, AMixedModeIsNotTakenForFewChanges) {
  const auto pair = MakePair<Float32Element>(
      100'000, 10, {.zeros = 0, .changes = 0.01, .drops = 0, .grows = 0, .flips = 0});
  int modes[kEventKinds];
  ASSERT_TRUE(
      ReadModes(SegmentCodecTest<Float32Element>::Encode(pair, {.row_elements = 100}), {}, modes)
          .ok());
  EXPECT_LT(modes[0], static_cast<int>(Mode::kMixed));
}

TEST(SegmentCodecSizeTest, AFewEventsAreNotChargedForModels) {
  Pair<BFloat16Element> pair = MakePair<BFloat16Element>(
      100'000, 4, {.changes = 0, .drops = 0, .grows = 0, .flips = 0, .arbitrary = 0});
  for (size_t i = 0, changed = 0; changed < 3; i += 999) {
    if (BFloat16Element::IsZero(pair.before[i])) continue;
    pair.after[i] = static_cast<uint16_t>(pair.before[i] + 1);
    ++changed;
  }
  EXPECT_LT(SegmentCodecTest<BFloat16Element>::Encode(pair).size(), 24u);
}

}  // namespace
}  // namespace espalier::updates
