#include "engine/planner/plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/sparse/structure_report.h"

namespace espalier::planner {
namespace {

// µs with three digits that mean something.
std::string Micros(const Candidate& candidate) {
  const int decimals = candidate.micros < 10 ? 2 : candidate.micros < 100 ? 1 : 0;
  return absl::StrFormat("%.*f%s", decimals, candidate.micros, candidate.measured ? "" : "?");
}

double Ratio(size_t part, size_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string CandidateJson(const Candidate& candidate) {
  return absl::StrFormat(R"({"layout": %s, "kernel": %s, "us": %.3f, "measured": %s, "bytes": %d})",
                         Quoted(sparse::ToString(candidate.spec)), Quoted(candidate.variant),
                         candidate.micros, candidate.measured ? "true" : "false",
                         candidate.weight_bytes);
}

std::string BucketJson(const BucketChoice& bucket) {
  std::string json = absl::StrFormat(
      R"({"batch": %d, "tokens": %d, "chosen": %s, "dense_us": %.3f, "speedup": %.3f)",
      bucket.batch, bucket.tokens, CandidateJson(bucket.chosen), bucket.dense_micros,
      bucket.speedup_over_dense());
  if (!bucket.runner_up.variant.empty()) {
    absl::StrAppend(&json, ", \"runner_up\": ", CandidateJson(bucket.runner_up));
  }
  if (!bucket.note.empty()) absl::StrAppend(&json, ", \"note\": ", Quoted(bucket.note));
  if (!bucket.paired.empty()) absl::StrAppend(&json, ", \"paired\": ", Quoted(bucket.paired));
  return json + "}";
}

}  // namespace

std::string ToTable(const ModelPlan& plan) {
  std::string text = absl::StrCat("plan: ", plan.source, " on ", plan.device, "\n");
  bool guessed = false;
  for (const LayerPlan& layer : plan.layers) {
    absl::StrAppendFormat(&text, "\n%s  [%d, %d]  %.1f %% zeros, %s  %s (%.1f %% of dense)\n",
                          layer.name, layer.out, layer.in, 100 * layer.sparsity, layer.structure,
                          sparse::HumanBytes(layer.weight_bytes),
                          Ratio(layer.weight_bytes, layer.dense_bytes));
    absl::StrAppendFormat(&text, "  %6s  %-14s  %-38s  %9s  %9s  %7s  %s\n", "batch", "layout",
                          "kernel", "us", "dense us", "gain", "runner-up");
    for (const BucketChoice& bucket : layer.buckets) {
      const std::string runner_up =
          bucket.runner_up.variant.empty()
              ? "none"
              : absl::StrCat(sparse::ToString(bucket.runner_up.spec), " ", Micros(bucket.runner_up),
                             " us (", bucket.runner_up.variant, ")");
      absl::StrAppendFormat(&text, "  %6d  %-14s  %-38s  %9s  %9.1f  %6.2fx  %s%s\n", bucket.batch,
                            sparse::ToString(bucket.chosen.spec), bucket.chosen.variant,
                            Micros(bucket.chosen), bucket.dense_micros, bucket.speedup_over_dense(),
                            runner_up, bucket.note.empty() ? "" : absl::StrCat(": ", bucket.note));
      if (!bucket.paired.empty()) absl::StrAppendFormat(&text, "  %6s  %s\n", "", bucket.paired);
      guessed = guessed || !bucket.chosen.measured ||
                (!bucket.runner_up.variant.empty() && !bucket.runner_up.measured);
    }
  }
  absl::StrAppendFormat(&text, "\nweights: %s, dense: %s (%.1f %%)\n",
                        sparse::HumanBytes(plan.weight_bytes), sparse::HumanBytes(plan.dense_bytes),
                        Ratio(plan.weight_bytes, plan.dense_bytes));
  if (guessed) absl::StrAppend(&text, "?: predicted by the cost model, not measured\n");
  return text;
}

std::string ToJson(const ModelPlan& plan) {
  std::string json = absl::StrCat("{\"source\": ", Quoted(plan.source),
                                  ", \"device\": ", Quoted(plan.device), ", \"layers\": [");
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    const LayerPlan& layer = plan.layers[i];
    absl::StrAppendFormat(
        &json,
        R"(%s{"name": %s, "out": %d, "in": %d, "sparsity": %.6f, "structure": %s, "bytes": %d, )"
        R"("dense_bytes": %d, "buckets": [)",
        i == 0 ? "" : ", ", Quoted(layer.name), layer.out, layer.in, layer.sparsity,
        Quoted(layer.structure), layer.weight_bytes, layer.dense_bytes);
    for (size_t b = 0; b < layer.buckets.size(); ++b) {
      absl::StrAppend(&json, b == 0 ? "" : ", ", BucketJson(layer.buckets[b]));
    }
    absl::StrAppend(&json, "]}");
  }
  return json + "]}";
}

}  // namespace espalier::planner
