#include "clients/cli/advice.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "clients/cli/json_writer.h"
#include "clients/cli/table.h"
#include "engine/sparse/structure_report.h"

namespace espalier::cli {
namespace {

std::string Percent(double share) { return FormatNumber(std::round(share * 1e4) / 100) + " %"; }

std::string Times(double gain) { return absl::StrFormat("%.2fx", gain); }

// The layouts that run, each once, in the order of the batches.
std::string Layouts(const AdvicePoint& point) {
  std::vector<std::string> names;
  for (const AdviceBatch& batch : point.batches) {
    const std::string name = ToString(batch.chosen.spec);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return absl::StrJoin(names, ", ");
}

bool AllMeasured(const AdvicePoint& point) {
  return std::all_of(point.batches.begin(), point.batches.end(),
                     [](const AdviceBatch& batch) { return batch.chosen.measured; });
}

std::string Rows(const std::vector<AdvicePoint>& points, bool measured, int best, bool layouts) {
  std::vector<std::string> titles = {"  pattern", ">zeros"};
  const bool weights = !points.empty() && points[0].kept >= 0;
  if (weights) titles.push_back(">kept");
  titles.push_back(">memory");
  for (const AdviceBatch& batch : points[0].batches)
    titles.push_back(absl::StrCat(">batch ", batch.batch));
  titles.push_back(">all");
  titles.push_back(layouts ? "runs as" : "");
  Table table(titles);
  for (size_t i = 0; i < points.size(); ++i) {
    const AdvicePoint& point = points[i];
    std::vector<std::string> cells = {
        absl::StrCat(static_cast<int>(i) == best ? "* " : "  ", ToString(point.pattern)),
        Percent(point.zeros)};
    if (weights) cells.push_back(Percent(point.kept));
    cells.push_back(absl::StrFormat("%.0f %%", 100 * point.weight_bytes / point.dense_bytes));
    for (size_t b = 0; b < point.batches.size(); ++b) {
      const bool guessed = measured && !point.batches[b].chosen.measured;
      cells.push_back(Times(point.Gain(b)) + (guessed ? "?" : ""));
    }
    cells.push_back(Times(point.Gain()) + (measured && !AllMeasured(point) ? "?" : ""));
    cells.push_back(layouts ? Layouts(point) : "");
    table.AddRow(std::move(cells));
  }
  return table.ToString();
}

std::string Batches(const AdvicePoint& point) {
  std::vector<std::string> parts;
  for (size_t b = 0; b < point.batches.size(); ++b) {
    parts.push_back(absl::StrCat(Times(point.Gain(b)), " at batch ", point.batches[b].batch));
  }
  return absl::StrJoin(parts, ", ");
}

// For each pattern, the least sparsity from which it pays.
std::string PaysFrom(const std::vector<AdvicePoint>& points) {
  std::vector<std::string> parts;
  std::vector<sparse::Pattern> seen;
  for (const AdvicePoint& point : points) {
    if (std::find(seen.begin(), seen.end(), point.pattern) != seen.end()) continue;
    seen.push_back(point.pattern);
    const AdvicePoint* least = nullptr;
    for (const AdvicePoint& other : points) {
      if (!(other.pattern == point.pattern) || other.Gain() < kWorthPruning) continue;
      if (least == nullptr || other.asked < least->asked) least = &other;
    }
    parts.push_back(absl::StrCat(
        ToString(point.pattern),
        least == nullptr ? " nowhere here" : absl::StrCat(" from ", Percent(least->asked))));
  }
  return absl::StrJoin(parts, ", ");
}

std::string Verdict(const Advice& advice, const std::vector<AdvicePoint>& points) {
  const int best = Recommend(points, advice.wanted);
  if (best < 0) {
    return absl::StrFormat(
        "Do not prune for speed: nothing here is %.1fx as fast as dense. Try a higher sparsity, "
        "other "
        "batch sizes, or a structured pattern (diagonal(B), block(B)).\n",
        kWorthPruning);
  }
  const AdvicePoint& point = points[best];
  std::string text =
      absl::StrCat("Prune to ", ToString(point.pattern), " with ", Percent(point.zeros),
                   " zeros: ", Times(point.Gain()), " as fast as dense (", Batches(point), ") in ",
                   absl::StrFormat("%.0f %%", 100 * point.weight_bytes / point.dense_bytes),
                   " of the memory.\n");
  if (point.Gain() < advice.wanted) {
    absl::StrAppend(&text, "Nothing tried reaches the ", FormatNumber(advice.wanted),
                    "x that were asked for; this is the fastest.\n");
  } else {
    absl::StrAppend(&text,
                    point.kept >= 0 ? "It keeps the most of the weights, of what brings "
                                    : "It is the fastest at the least sparsity that brings ",
                    FormatNumber(advice.wanted), "x (--faster).\n");
  }
  return absl::StrCat(text, "Pays (", FormatNumber(kWorthPruning),
                      "x over all batches): ", PaysFrom(points), ".\n");
}

void CandidateJson(const planner::Candidate& candidate, JsonWriter& json) {
  json.BeginObject().Key("layout").String(ToString(candidate.spec));
  json.Key("kernel").String(candidate.variant).Key("us").Number(candidate.micros);
  json.Key("measured").Bool(candidate.measured);
  json.Key("bytes").Uint(candidate.weight_bytes).EndObject();
}

void PointJson(const AdvicePoint& point, bool with_kernels, JsonWriter& json) {
  json.BeginObject().Key("pattern").String(ToString(point.pattern));
  json.Key("asked").Number(point.asked).Key("zeros").Number(point.zeros);
  if (point.kept >= 0) json.Key("kept").Number(point.kept);
  json.Key("gain").Number(point.Gain());
  json.Key("bytes").Number(point.weight_bytes).Key("dense_bytes").Number(point.dense_bytes);
  json.Key("batches").BeginArray();
  for (size_t b = 0; b < point.batches.size(); ++b) {
    const AdviceBatch& batch = point.batches[b];
    json.BeginObject().Key("batch").Int(batch.batch).Key("gain").Number(point.Gain(b));
    json.Key("us").Number(batch.chosen.micros).Key("dense_us").Number(batch.dense_micros);
    if (with_kernels) {
      json.Key("chosen");
      CandidateJson(batch.chosen, json);
      if (!batch.sparse.variant.empty()) {
        json.Key("sparse");
        CandidateJson(batch.sparse, json);
      }
    }
    json.EndObject();
  }
  json.EndArray().EndObject();
}

}  // namespace

double AdvicePoint::Gain(size_t batch) const {
  const double micros = batches[batch].chosen.micros;
  return micros > 0 ? batches[batch].dense_micros / micros : 1;
}

double AdvicePoint::Gain() const {
  double sum = 0;
  for (size_t b = 0; b < batches.size(); ++b) sum += std::log(Gain(b));
  return batches.empty() ? 1 : std::exp(sum / static_cast<double>(batches.size()));
}

std::vector<AdvicePoint> Together(const std::vector<AdviceLayer>& layers) {
  std::vector<AdvicePoint> all;
  if (layers.empty()) return all;
  for (size_t p = 0; p < layers[0].points.size(); ++p) {
    AdvicePoint sum = layers[0].points[p];
    double elements = 0, zeros = 0, kept = 0;
    sum.weight_bytes = sum.dense_bytes = 0;
    for (AdviceBatch& batch : sum.batches) {
      batch.chosen.micros = batch.dense_micros = 0;
      batch.chosen.measured = true;
    }
    for (const AdviceLayer& layer : layers) {
      const AdvicePoint& point = layer.points[p];
      const double count = static_cast<double>(layer.count);
      const double size = count * static_cast<double>(layer.out) * static_cast<double>(layer.in);
      elements += size;
      zeros += size * point.zeros;
      kept += size * point.kept;
      sum.weight_bytes += count * point.weight_bytes;
      sum.dense_bytes += count * point.dense_bytes;
      for (size_t b = 0; b < sum.batches.size(); ++b) {
        sum.batches[b].chosen.micros += count * point.batches[b].chosen.micros;
        sum.batches[b].dense_micros += count * point.batches[b].dense_micros;
        sum.batches[b].chosen.measured &= point.batches[b].chosen.measured;
      }
    }
    sum.zeros = zeros / elements;
    sum.kept = kept / elements;
    all.push_back(std::move(sum));
  }
  return all;
}

int Recommend(const std::vector<AdvicePoint>& points, double wanted) {
  // The less, the better.
  const auto cost = [](const AdvicePoint& point) {
    return std::make_pair(point.kept >= 0 ? -point.kept : point.asked, -point.Gain());
  };
  int best = -1, fastest = -1;
  for (int i = 0; i < static_cast<int>(points.size()); ++i) {
    const double gain = points[i].Gain();
    if (fastest < 0 || gain > points[fastest].Gain()) fastest = i;
    if (gain < std::max(wanted, kWorthPruning)) continue;
    if (best < 0 || cost(points[i]) < cost(points[best])) best = i;
  }
  if (best >= 0) return best;
  return fastest >= 0 && points[fastest].Gain() >= kWorthPruning ? fastest : -1;
}

std::string AdviceTable(const Advice& advice) {
  const std::vector<AdvicePoint> together = Together(advice.layers);
  const bool measured = advice.source == "measured";
  std::string text = absl::StrCat(advice.source, measured ? " on " : " for ", advice.device, ", ",
                                  advice.precision, ", weight_memory ", advice.weight_memory, "\n",
                                  advice.basis, "\n");
  const int best = Recommend(together, advice.wanted);
  const bool single = advice.layers.size() == 1;
  bool guessed = false;
  for (const AdviceLayer& layer : advice.layers) {
    absl::StrAppend(&text, "\n", layer.out, " x ", layer.in);
    if (layer.count > 1) absl::StrAppend(&text, ", ", layer.count, " layers");
    absl::StrAppend(&text, ": speed over dense\n",
                    Rows(layer.points, measured, single ? best : -1, true));
    for (const AdvicePoint& point : layer.points)
      guessed = guessed || (measured && !AllMeasured(point));
  }
  if (!single) {
    absl::StrAppend(&text, "\nall layers, their times and bytes added\n",
                    Rows(together, measured, best, false));
  }
  if (guessed) {
    absl::StrAppend(&text, "?: from the cost model; more --measure_seconds would measure it\n");
  }
  return absl::StrCat(text, "\n", Verdict(advice, together));
}

std::string AdviceJson(const Advice& advice) {
  JsonWriter json;
  json.BeginObject().Key("source").String(advice.source).Key("device").String(advice.device);
  json.Key("basis").String(advice.basis).Key("commit").String(advice.commit);
  json.Key("date").String(advice.date).Key("precision").String(advice.precision);
  json.Key("weight_memory").String(advice.weight_memory).Key("layers").BeginArray();
  for (const AdviceLayer& layer : advice.layers) {
    json.BeginObject().Key("out").Int(layer.out).Key("in").Int(layer.in);
    json.Key("count").Int(layer.count).Key("points").BeginArray();
    for (const AdvicePoint& point : layer.points) PointJson(point, true, json);
    json.EndArray().EndObject();
  }
  const std::vector<AdvicePoint> together = Together(advice.layers);
  json.EndArray().Key("together").BeginArray();
  for (const AdvicePoint& point : together) PointJson(point, false, json);
  json.EndArray().Key("advice").BeginObject();
  const int best = Recommend(together, advice.wanted);
  json.Key("prune").Bool(best >= 0).Key("wanted_gain").Number(advice.wanted);
  if (best >= 0) {
    json.Key("pattern").String(ToString(together[best].pattern));
    json.Key("zeros").Number(together[best].zeros).Key("gain").Number(together[best].Gain());
    json.Key("memory").Number(together[best].weight_bytes / together[best].dense_bytes);
    json.Key("reaches_wanted").Bool(together[best].Gain() >= advice.wanted);
  }
  return json.EndObject().EndObject().text() + "\n";
}

}  // namespace espalier::cli
