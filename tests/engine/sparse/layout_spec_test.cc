#include "engine/sparse/layout_spec.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::sparse {
namespace {

TEST(LayoutSpecTest, PrintsAndParsesBack) {
  const std::pair<LayoutSpec, const char*> cases[] = {
      {{Layout::kDense, 1, 1}, "dense"},
      {{Layout::kCsr, 1, 1}, "csr"},
      {{Layout::kBlockCsr, 16, 16}, "block_csr(16)"},
      {{Layout::kBlockCsr, 16, 32}, "block_csr(16x32)"},
      {{Layout::kBlockCsr, 16, 1}, "block_csr(16x1)"},
      {{Layout::kDiagonal, 1, 1}, "diagonal(1)"},
      {{Layout::kDiagonal, 4096, 4096}, "diagonal(4096)"},
      {{Layout::kDiagonal, 8, 4}, "diagonal(8x4)"},
  };
  for (const auto& [spec, text] : cases) {
    EXPECT_EQ(ToString(spec), text);
    auto parsed = ParseLayoutSpec(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, spec);
  }
}

TEST(LayoutSpecTest, EverySideUpToTheLimitSurvivesTheRoundTrip) {
  for (int32_t side = 1; side <= kMaxBlockSide; ++side) {
    const LayoutSpec spec = {Layout::kBlockCsr, side, kMaxBlockSide + 1 - side};
    ASSERT_EQ(*ParseLayoutSpec(ToString(spec)), spec);
  }
}

TEST(LayoutSpecTest, RefusesWhatIsNotALayout) {
  for (const char* text : {"",
                           "Dense",
                           "dense ",
                           " dense",
                           "dense(1)",
                           "csr(1)",
                           "csrx",
                           "block_csr",
                           "block_csr()",
                           "block_csr(16",
                           "block_csr16)",
                           "block_csr(16))",
                           "block_csr(0)",
                           "block_csr(-4)",
                           "block_csr(+4)",
                           "block_csr( 4)",
                           "block_csr(04)",
                           "block_csr(4x)",
                           "block_csr(x4)",
                           "block_csr(4x4x4)",
                           "block_csr(4X8)",
                           "block_csr(4097)",
                           "block_csr(4x4097)",
                           "block_csr(99999999999999999999)",
                           "block_csr(1e1)",
                           "diagonal",
                           "diagonal(1.0)",
                           "two_four"}) {
    EXPECT_EQ(ParseLayoutSpec(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(LayoutSpecTest, TheMessageShowsHostileTextShortenedAndEscaped) {
  const std::string hostile = "\x1b[2J" + std::string(100000, 'a');
  const std::string message(ParseLayoutSpec(hostile).status().message());
  EXPECT_LT(message.size(), 400u);
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_THAT(message, testing::HasSubstr("expected dense, csr, block_csr(B)"));
}

}  // namespace
}  // namespace espalier::sparse
