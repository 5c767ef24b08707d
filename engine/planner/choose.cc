#include "engine/planner/choose.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace espalier::planner {
namespace {

// A set of options that read the same bytes: one resident copy of the weight.
struct Copy {
  std::vector<int> options;
  size_t bytes = 0;
};

std::vector<Copy> GroupCopies(const CostTable& table, const std::vector<int>& options) {
  std::vector<Copy> copies;
  for (int i : options) {
    auto copy = std::find_if(copies.begin(), copies.end(), [&](const Copy& c) {
      return SharesMemory(table.options[c.options[0]], table.options[i]);
    });
    if (copy == copies.end()) copy = copies.insert(copies.end(), Copy());
    copy->options.push_back(i);
    copy->bytes = std::max(copy->bytes, table.options[i].resident_bytes);
  }
  return copies;
}

int CheapestIn(const CostTable& table, size_t bucket, const std::vector<int>& options) {
  int best = options[0];
  for (int i : options) {
    if (table.costs[bucket][i].micros < table.costs[bucket][best].micros) best = i;
  }
  return best;
}

// What a set of options comes to when every bucket takes the cheapest of them.
struct Score {
  double log_micros = 0;  // summed over buckets: lower is faster on geometric average
  double worst = 0;       // largest micros / tolerable micros
  std::vector<int> choice;
};

Score ScoreOf(const CostTable& table, const std::vector<int>& options) {
  Score score;
  for (size_t b = 0; b < table.tokens.size(); ++b) {
    const int i = CheapestIn(table, b, options);
    const double micros = table.costs[b][i].micros;
    const double tolerable = TolerableMicros(table.DenseMicros(b), table.slack_micros);
    score.log_micros += std::log(micros);
    if (micros == kCannotRun) {
      score.worst = kCannotRun;
    } else if (tolerable != kCannotRun) {
      score.worst = std::max(score.worst, micros / tolerable);
    }
    score.choice.push_back(i);
  }
  return score;
}

bool Runs(const Score& score) { return score.worst != kCannotRun; }

// Nowhere ruled out before faster, and faster before slower. With several dense packings each
// may lose to another one somewhere; the one that loses least is then what "dense" can be.
bool Better(const Score& a, const Score& b) {
  const double a_excess = std::max(a.worst, 1.0), b_excess = std::max(b.worst, 1.0);
  if (a_excess != b_excess) return a_excess < b_excess;
  return a.log_micros < b.log_micros;
}

std::vector<int> ChooseSmallest(const CostTable& table, const std::vector<Copy>& copies) {
  size_t fewest = SIZE_MAX;
  for (const Copy& copy : copies) {
    if (Runs(ScoreOf(table, copy.options))) fewest = std::min(fewest, copy.bytes);
  }
  Score best;
  for (const Copy& copy : copies) {
    if (static_cast<double>(copy.bytes) > kSameBytes * static_cast<double>(fewest)) continue;
    Score score = ScoreOf(table, copy.options);
    if (!Runs(score)) continue;
    if (best.choice.empty() || score.log_micros < best.log_micros) best = std::move(score);
  }
  return best.choice;
}

std::vector<int> ChooseBalanced(const CostTable& table, const std::vector<Copy>& copies,
                                size_t dense_bytes) {
  Score single;
  for (const Copy& copy : copies) {
    Score score = ScoreOf(table, copy.options);
    if (!Runs(score)) continue;
    if (single.choice.empty() || Better(score, single)) single = std::move(score);
  }
  Score pair;
  for (size_t a = 0; a < copies.size(); ++a) {
    for (size_t b = a + 1; b < copies.size(); ++b) {
      if (copies[a].bytes + copies[b].bytes > dense_bytes) continue;
      std::vector<int> options = copies[a].options;
      options.insert(options.end(), copies[b].options.begin(), copies[b].options.end());
      Score score = ScoreOf(table, options);
      if (!Runs(score)) continue;
      if (pair.choice.empty() || Better(score, pair)) pair = std::move(score);
    }
  }
  if (pair.choice.empty()) return single.choice;
  if (single.choice.empty()) return pair.choice;
  const double buckets = static_cast<double>(table.tokens.size());
  const double gain = std::exp((single.log_micros - pair.log_micros) / buckets);
  const bool as_safe = std::max(pair.worst, 1.0) <= std::max(single.worst, 1.0);
  return as_safe && gain >= kSecondCopyGain ? pair.choice : single.choice;
}

// The options that read the same bytes as `option`.
std::vector<int> CopyOf(const CostTable& table, int option) {
  std::vector<int> options;
  for (size_t i = 0; i < table.options.size(); ++i) {
    if (SharesMemory(table.options[i], table.options[option])) {
      options.push_back(static_cast<int>(i));
    }
  }
  return options;
}

// The options that store no value at all.
std::vector<int> EmptyOptions(const CostTable& table, const std::vector<int>& options) {
  std::vector<int> empty;
  for (int i : options) {
    if (table.options[i].layout.stored == 0) empty.push_back(i);
  }
  return empty;
}

std::string MicrosText(double micros) { return absl::StrFormat("%.3g us", micros); }

std::vector<int> ChooseAmong(const CostTable& table, const std::vector<int>& options,
                             WeightMemory mode, bool deterministic, size_t dense_bytes) {
  if (deterministic) {
    // One option is a copy of its own: no other kernel may serve some of the buckets.
    std::vector<Copy> copies;
    for (int i : options) copies.push_back({{i}, table.options[i].resident_bytes});
    return mode == WeightMemory::kSmallest ? ChooseSmallest(table, copies)
                                           : ChooseBalanced(table, copies, 0);
  }
  const std::vector<Copy> copies = GroupCopies(table, options);
  switch (mode) {
    case WeightMemory::kSmallest:
      return ChooseSmallest(table, copies);
    case WeightMemory::kBalanced:
      return ChooseBalanced(table, copies, dense_bytes);
    case WeightMemory::kFastest:
      break;
  }
  const Score score = ScoreOf(table, options);
  return Runs(score) ? score.choice : std::vector<int>();
}

}  // namespace

double TolerableMicros(double dense_micros, double slack_micros) {
  return std::max(1.05 * dense_micros, dense_micros + slack_micros);
}

std::vector<CloseCall> CloseCalls(const CostTable& table) {
  std::vector<int> all;
  for (size_t i = 0; i < table.options.size(); ++i) all.push_back(static_cast<int>(i));
  const std::vector<Copy> copies = GroupCopies(table, all);
  double dense = kCannotRun;
  for (const Copy& copy : copies) {
    if (table.options[copy.options[0]].is_dense()) {
      dense = std::min(dense, ScoreOf(table, copy.options).log_micros);
    }
  }
  std::vector<CloseCall> calls;
  for (const Copy& copy : copies) {
    const Score score = ScoreOf(table, copy.options);
    const bool close = score.worst > 1 && score.worst <= kCloseCall;
    if (!close || table.options[copy.options[0]].is_dense() || score.log_micros >= dense) continue;
    for (size_t b = 0; b < table.tokens.size(); ++b) {
      const Cost& cost = table.costs[b][score.choice[b]];
      if (cost.measured > 0 &&
          cost.micros > TolerableMicros(table.DenseMicros(b), table.slack_micros)) {
        calls.push_back({b, score.choice[b]});
      }
    }
  }
  return calls;
}

std::string WhyNot(const CostTable& table, WeightMemory mode, bool deterministic,
                   const std::vector<int64_t>& batches, int chosen, int other) {
  const std::string layout = sparse::ToString(table.options[other].layout.spec);
  if (deterministic) return "deterministic: one batch-invariant kernel for all batches";
  if (table.options[chosen].layout.stored == 0) return "a weight of zeros takes one empty layout";
  if (mode == WeightMemory::kSmallest) {
    return absl::StrCat(layout, " takes more memory; weight_memory=balanced may choose it");
  }
  const Score score = ScoreOf(table, CopyOf(table, other));
  size_t worst = 0;
  double excess = 0;
  for (size_t b = 0; b < batches.size(); ++b) {
    const double micros = table.costs[b][score.choice[b]].micros;
    const double ratio = micros / TolerableMicros(table.DenseMicros(b), table.slack_micros);
    if (ratio > excess) excess = ratio, worst = b;
  }
  if (excess == kCannotRun) return absl::StrCat(layout, " does not run at every batch");
  const std::string keep = "; weight_memory=fastest keeps both";
  if (excess > 1) {
    return absl::StrCat(layout, " is ", MicrosText(table.costs[worst][score.choice[worst]].micros),
                        ", dense ", MicrosText(table.DenseMicros(worst)), " at batch ",
                        batches[worst], keep);
  }
  return absl::StrCat(layout, " is slower on average over the batches", keep);
}

Candidate DescribeOption(const CostTable& table, size_t bucket, int option) {
  const LayerOption& chosen = table.options[option];
  const Cost& cost = table.costs[bucket][option];
  return {chosen.layout.spec, chosen.variant->name, cost.micros, cost.measured > 0,
          chosen.resident_bytes};
}

std::vector<BucketChoice> DescribeChoice(const CostTable& table, WeightMemory mode,
                                         bool deterministic, const std::vector<int64_t>& batches,
                                         const std::vector<int>& choice) {
  std::vector<BucketChoice> buckets;
  for (size_t b = 0; b < choice.size(); ++b) {
    BucketChoice bucket;
    bucket.batch = batches[b];
    bucket.tokens = table.tokens[b];
    bucket.chosen = DescribeOption(table, b, choice[b]);
    const double dense = table.DenseMicros(b);
    bucket.dense_micros = dense == kCannotRun ? 0 : dense;
    int second = -1;
    for (int i = 0; i < static_cast<int>(table.options.size()); ++i) {
      if (i == choice[b] || table.costs[b][i].micros == kCannotRun) continue;
      if (second < 0 || table.costs[b][i].micros < table.costs[b][second].micros) second = i;
    }
    if (second >= 0) {
      bucket.runner_up = DescribeOption(table, b, second);
      if (table.costs[b][second].micros < table.costs[b][choice[b]].micros) {
        bucket.note = WhyNot(table, mode, deterministic, batches, choice[b], second);
      }
    }
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

std::vector<int> ChooseOptions(const CostTable& table, WeightMemory mode, bool deterministic,
                               size_t dense_bytes) {
  std::vector<int> options;
  for (size_t i = 0; i < table.options.size(); ++i) {
    if (!deterministic || table.options[i].variant->batch_invariant) {
      options.push_back(static_cast<int>(i));
    }
  }
  if (options.empty()) return {};
  if (std::vector<int> empty = EmptyOptions(table, options); !empty.empty()) {
    std::vector<int> choice =
        ChooseAmong(table, empty, WeightMemory::kBalanced, deterministic, /*dense_bytes=*/0);
    if (!choice.empty()) return choice;  // else this device has no kernel for them
  }
  return ChooseAmong(table, options, mode, deterministic, dense_bytes);
}

}  // namespace espalier::planner
