#include "engine/sparse/layout_spec.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace espalier::sparse {
namespace {

constexpr Layout kLayouts[] = {
#define ESPALIER_LAYOUT_VALUE(name, text) Layout::name,
    ESPALIER_LAYOUTS(ESPALIER_LAYOUT_VALUE)
#undef ESPALIER_LAYOUT_VALUE
};

bool HasBlocks(Layout layout) { return layout == Layout::kBlockCsr || layout == Layout::kDiagonal; }

absl::Status Malformed(absl::string_view text, absl::string_view why) {
  // The text may be anything (a cache file, a flag): shortened and escaped before it is shown.
  return absl::InvalidArgumentError(
      absl::StrCat("layout \"", absl::CEscape(text.substr(0, 64)), "\": ", why,
                   "; expected dense, csr, block_csr(B), block_csr(RxC), diagonal(B) or "
                   "diagonal(RxC) with sides in [1, ",
                   kMaxBlockSide, "]"));
}

// A side has at most four digits, so SimpleAtoi sees nothing long, signed or padded.
bool ParseSide(absl::string_view text, int32_t* side) {
  if (text.empty() || text.size() > 4 || text[0] == '0') return false;
  for (char c : text) {
    if (!absl::ascii_isdigit(c)) return false;
  }
  return absl::SimpleAtoi(text, side) && *side <= kMaxBlockSide;
}

}  // namespace

std::string ToString(const LayoutSpec& spec) {
  std::string text = kernels::NameOf(spec.layout);
  if (!HasBlocks(spec.layout)) return text;
  absl::StrAppend(&text, "(", spec.block_rows);
  if (spec.block_cols != spec.block_rows) absl::StrAppend(&text, "x", spec.block_cols);
  return text + ")";
}

absl::StatusOr<LayoutSpec> ParseLayoutSpec(absl::string_view text) {
  for (const Layout layout : kLayouts) {
    absl::string_view rest = text;
    if (!absl::ConsumePrefix(&rest, kernels::NameOf(layout))) continue;
    if (!HasBlocks(layout)) {
      if (!rest.empty()) return Malformed(text, "nothing may follow the name");
      return LayoutSpec{layout, 1, 1};
    }
    if (!absl::ConsumePrefix(&rest, "(") || !absl::ConsumeSuffix(&rest, ")")) {
      return Malformed(text, "a block shape in parentheses must follow the name");
    }
    LayoutSpec spec{layout};
    const size_t x = rest.find('x');
    const absl::string_view rows = rest.substr(0, x);
    const absl::string_view cols = x == absl::string_view::npos ? rows : rest.substr(x + 1);
    if (!ParseSide(rows, &spec.block_rows) || !ParseSide(cols, &spec.block_cols)) {
      return Malformed(text, absl::StrCat("bad block shape"));
    }
    return spec;
  }
  return Malformed(text, "unknown layout");
}

}  // namespace espalier::sparse
