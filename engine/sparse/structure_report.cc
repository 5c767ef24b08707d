#include "engine/sparse/structure_report.h"

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace espalier::sparse {
namespace {

std::string Percent(double share) {
  // 99.96 % must not read as 100.0 %, nor 0.01 % as 0.0 %: what is not whole does not look whole.
  const double percent = share * 100;
  if (percent > 0 && percent < 0.1) return "<0.1 %";
  if (percent < 100 && percent > 99.9) return ">99.9 %";
  return absl::StrFormat("%.1f %%", percent);
}

const LayoutOption& DenseOption(const WeightStructure& structure) {
  return *std::find_if(structure.layouts.begin(), structure.layouts.end(),
                       [](const LayoutOption& o) { return o.spec.layout == Layout::kDense; });
}

// --- table
// ----------------------------------------------------------------------------------------

using Row = std::vector<std::string>;

constexpr absl::string_view kIndent = "    ";
constexpr size_t kLineWidth = 100;

Row Header() {
  return {"TENSOR",    "SHAPE",          "DTYPE", "SPARSITY",   "STRUCTURE",
          "DIAGONALS", "DEAD ROWS/COLS", "-0.0",  "SUBNORMALS", "AT MOST N:M"};
}

Row TensorRow(const NamedStructure& tensor) {
  const WeightStructure& s = tensor.structure;
  std::string diagonals = absl::StrCat(s.diagonals, "/", std::max(s.out, s.in));
  if (s.diagonals > 0) absl::StrAppend(&diagonals, ", ", Percent(s.diagonal_fill), " full");
  return {absl::CEscape(tensor.name),
          absl::StrCat("[", s.out, ", ", s.in, "]"),
          NameOf(s.dtype),
          Percent(s.sparsity()),
          s.found,
          std::move(diagonals),
          absl::StrCat(s.dead_rows, "/", s.dead_cols),
          absl::StrCat(s.negative_zeros),
          absl::StrCat(s.subnormals),
          s.n_of_m_m == 0 ? "-" : absl::StrCat(s.n_of_m_n, ":", s.n_of_m_m)};
}

std::string LayoutLines(const WeightStructure& s) {
  const LayoutOption& dense = DenseOption(s);
  std::map<Layout, int> reported;
  std::string text, line(kIndent);
  for (const LayoutOption& option : s.layouts) {
    const bool always = option.spec.layout == Layout::kDense || option.spec.layout == Layout::kCsr;
    if (!always && option.bytes >= dense.bytes) continue;
    if (reported[option.spec.layout]++ >= kReportedPerLayout) continue;
    std::string part = absl::StrCat(&option == &s.layouts.front() ? "*" : "", ToString(option.spec),
                                    " ", HumanBytes(option.bytes));
    if (!always && option.fill < 1) absl::StrAppend(&part, " (", Percent(option.fill), " full)");
    if (line.size() > kIndent.size() && line.size() + part.size() > kLineWidth) {
      absl::StrAppend(&text, line, "\n");
      line.assign(kIndent.data(), kIndent.size());
    }
    absl::StrAppend(&line, line.size() > kIndent.size() ? "   " : "", part);
  }
  return absl::StrCat(text, line, "\n");
}

std::string Notes(const WeightStructure& s) {
  std::string notes;
  if (s.nonfinite > 0) {
    absl::StrAppend(&notes, kIndent, "warning: ", s.nonfinite, " values are infinite or NaN\n");
  }
  if (s.subnormals > 0) {
    absl::StrAppend(&notes, kIndent, "note: ", s.subnormals,
                    " values are subnormal: zero in effect, slow to compute with unless "
                    "flush_subnormals makes them zeros\n");
  }
  if (s.found == "diagonal(1)" || absl::StartsWith(s.found, "band")) {
    absl::StrAppend(&notes, kIndent, "offsets: ", s.diagonal_runs, " runs, longest ",
                    s.longest_run);
    if (s.aligned_run > 1) absl::StrAppend(&notes, ", all in aligned runs of ", s.aligned_run);
    absl::StrAppend(&notes, "; col - row from ", -s.bandwidth_lower, " to ", s.bandwidth_upper,
                    "\n");
  }
  return notes;
}

void AppendRow(const Row& row, const std::vector<size_t>& widths, std::string* text) {
  for (size_t i = 0; i < row.size(); ++i) {
    if (i > 0) absl::StrAppend(text, "  ");
    absl::StrAppend(text, row[i]);
    if (i + 1 < row.size()) text->append(widths[i] - row[i].size(), ' ');
  }
  absl::StrAppend(text, "\n");
}

struct Totals {
  size_t dense = 0, best = 0;
};

Totals TotalsOf(absl::Span<const NamedStructure> tensors) {
  Totals totals;
  for (const NamedStructure& tensor : tensors) {
    totals.dense += DenseOption(tensor.structure).bytes;
    totals.best += tensor.structure.layouts.front().bytes;
  }
  return totals;
}

// --- JSON
// -----------------------------------------------------------------------------------------

// Length of the well-formed UTF-8 sequence at the start of `text`, 0 when there is none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0x80   ? 1
                        : first < 0xc2 ? 0
                        : first < 0xe0 ? 2
                        : first < 0xf0 ? 3
                        : first < 0xf5 ? 4
                                       : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and code points above U+10FFFF.
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) ||
      (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90)) {
    return 0;
  }
  return length;
}

std::string JsonString(absl::string_view text) {
  std::string json = "\"";
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    const char c = text[0];
    if (length == 0) {
      absl::StrAppend(&json, "\\ufffd");
    } else if (c == '"' || c == '\\') {
      absl::StrAppend(&json, "\\", text.substr(0, 1));
    } else if (length == 1 && static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&json, absl::StrFormat("\\u%04x", c));
    } else {
      absl::StrAppend(&json, text.substr(0, length));
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return json + "\"";
}

std::string LayoutsJson(const WeightStructure& s) {
  return absl::StrJoin(s.layouts, ", ", [](std::string* json, const LayoutOption& o) {
    absl::StrAppend(json, "{\"layout\": ", JsonString(ToString(o.spec)), ", \"count\": ", o.count,
                    ", \"stored\": ", o.stored, ", \"bytes\": ", o.bytes, ", \"fill\": ", o.fill,
                    "}");
  });
}

std::string TensorJson(const NamedStructure& tensor) {
  const WeightStructure& s = tensor.structure;
  return absl::StrCat(
      absl::StrCat("{\"name\": ", JsonString(tensor.name), ", \"out\": ", s.out, ", \"in\": ", s.in,
                   ", \"dtype\": ", JsonString(NameOf(s.dtype)), ", \"sparsity\": ", s.sparsity(),
                   ", \"found\": ", JsonString(s.found), ", \"nonzeros\": ", s.nonzeros),
      absl::StrCat(", \"negative_zeros\": ", s.negative_zeros, ", \"subnormals\": ", s.subnormals,
                   ", \"nonfinite\": ", s.nonfinite, ", \"dead_rows\": ", s.dead_rows,
                   ", \"dead_cols\": ", s.dead_cols, ", \"diagonals\": ", s.diagonals,
                   ", \"diagonal_fill\": ", s.diagonal_fill),
      absl::StrCat(", \"diagonal_runs\": ", s.diagonal_runs, ", \"longest_run\": ", s.longest_run,
                   ", \"aligned_run\": ", s.aligned_run, ", \"bandwidth_lower\": ",
                   s.bandwidth_lower, ", \"bandwidth_upper\": ", s.bandwidth_upper,
                   ", \"two_of_four\": ", s.two_of_four ? "true" : "false"),
      absl::StrCat(", \"n_of_m\": [", s.n_of_m_n, ", ", s.n_of_m_m, "], \"layouts\": [",
                   LayoutsJson(s), "]}"));
}

}  // namespace

std::string HumanBytes(size_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  // 1023.95 would print as 1024.0.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string StructureTable(absl::Span<const NamedStructure> tensors) {
  if (tensors.empty()) return "no weights\n";
  std::vector<Row> rows = {Header()};
  for (const NamedStructure& tensor : tensors) rows.push_back(TensorRow(tensor));
  std::vector<size_t> widths(rows[0].size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  AppendRow(rows[0], widths, &text);
  for (size_t i = 0; i < tensors.size(); ++i) {
    AppendRow(rows[i + 1], widths, &text);
    absl::StrAppend(&text, LayoutLines(tensors[i].structure), Notes(tensors[i].structure));
  }
  const Totals totals = TotalsOf(tensors);
  absl::StrAppend(&text, "total: dense ", HumanBytes(totals.dense), ", smallest layouts ",
                  HumanBytes(totals.best), "\n");
  return text;
}

std::string StructureJson(absl::Span<const NamedStructure> tensors) {
  const Totals totals = TotalsOf(tensors);
  const std::string list =
      absl::StrJoin(tensors, ",\n  ", [](std::string* json, const NamedStructure& tensor) {
        absl::StrAppend(json, TensorJson(tensor));
      });
  return absl::StrCat("{\"tensors\": [\n  ", list, "],\n\"dense_bytes\": ", totals.dense,
                      ", \"best_bytes\": ", totals.best, "}\n");
}

}  // namespace espalier::sparse
