#include "engine/updates/version_graph.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace espalier::updates {
namespace {

// Refused and quarantined versions that are remembered by number; older ones by digest.
constexpr size_t kRememberedFailures = 64;

using Kind = DoomedFile::Kind;

bool Served(const VersionRecord& record) {
  return record.state == UpdateState::kSuperseded || record.state == UpdateState::kRolledBack;
}

bool Failed(const VersionRecord& record) {
  return record.state == UpdateState::kRefused || record.state == UpdateState::kQuarantined;
}

// Waits, and may still be activated.
bool Waits(const VersionRecord& record, const StoreState& state) {
  const bool waiting = record.state == UpdateState::kVerified ||
                       record.state == UpdateState::kStaged || record.state == UpdateState::kCanary;
  return waiting && (record.repository || record.sequence > state.accepted_sequence);
}

// The last that served, newest first, as many as are kept.
std::vector<int64_t> LastServed(const StoreState& state, const Retention& retention) {
  std::vector<const VersionRecord*> served;
  for (const VersionRecord& record : state.versions) {
    if (Served(record)) served.push_back(&record);
  }
  std::sort(served.begin(), served.end(), [](const auto* a, const auto* b) {
    return std::pair(a->activation, a->number) > std::pair(b->activation, b->number);
  });
  std::vector<int64_t> kept;
  uint64_t bytes = 0;
  for (const VersionRecord* record : served) {
    bytes += record->journal_bytes + record->delta_bytes;
    if (kept.size() >= static_cast<size_t>(retention.versions) || bytes > retention.bytes) break;
    kept.push_back(record->number);
  }
  return kept;
}

struct Kept {
  std::set<int64_t> versions, anchors;
};

void KeepWay(const std::vector<int64_t>& way, Kept& kept) {
  kept.versions.insert(way.begin(), way.end());
}

void KeepWithRoot(const StoreState& state, int64_t number, Kept& kept) {
  kept.versions.insert(number);
  const auto way = WayTo(state, number, IsRoot);
  if (way.empty()) return;
  KeepWay(way, kept);
  if (!state.Find(way.back())->repository) kept.anchors.insert(way.back());
}

Kept Choose(const StoreState& state, const Retention& retention) {
  Kept kept;
  KeepWithRoot(state, state.active, kept);
  std::vector<int64_t> served = LastServed(state, retention);
  if (const int64_t replaced = state.Find(state.active)->replaced;
      state.Find(replaced) != nullptr && Served(*state.Find(replaced)))
    served.push_back(replaced);
  for (const int64_t number : served) {
    KeepWithRoot(state, number, kept);
    KeepWay(WayTo(state, state.active,
                  [&](const VersionRecord& record) { return record.number == number; }),
            kept);
  }
  for (const VersionRecord& record : state.versions) {
    if (Waits(record, state)) KeepWithRoot(state, record.number, kept);
  }
  return kept;
}

// The numbers of failed versions that are remembered though nothing needs their files.
std::set<int64_t> Remembered(const StoreState& state) {
  std::set<int64_t> numbers;
  for (auto record = state.versions.rbegin(); record != state.versions.rend(); ++record) {
    if (Failed(*record) && numbers.size() < kRememberedFailures) numbers.insert(record->number);
  }
  return numbers;
}

void Retire(StoreState& state, const VersionRecord& record) {
  state.used_up = std::max(state.used_up, record.number);
  if (record.state != UpdateState::kQuarantined) return;
  if (state.quarantined.size() == kMaxQuarantinedDigests)
    state.quarantined.erase(state.quarantined.begin());
  state.quarantined.push_back(record.weights);
}

void Drop(Kind kind, int64_t number, uint64_t& bytes, std::vector<DoomedFile>& doomed) {
  if (bytes == 0) return;
  doomed.push_back({kind, number});
  bytes = 0;
}

}  // namespace

bool IsRoot(const VersionRecord& record) { return record.repository || record.anchor_bytes > 0; }

std::vector<int64_t> WayTo(const StoreState& state, int64_t from,
                           const std::function<bool(const VersionRecord&)>& goal) {
  if (state.Find(from) == nullptr) return {};
  std::multimap<int64_t, int64_t> children;
  for (const VersionRecord& record : state.versions) {
    if (record.journal_bytes > 0) children.emplace(record.parent, record.number);
  }
  std::map<int64_t, int64_t> before = {{from, 0}};
  std::deque<int64_t> next = {from};
  while (!next.empty()) {
    const VersionRecord& record = *state.Find(next.front());
    next.pop_front();
    if (goal(record)) {
      std::vector<int64_t> way;
      for (int64_t number = record.number; number != 0; number = before[number])
        way.push_back(number);
      std::reverse(way.begin(), way.end());
      return way;
    }
    const auto visit = [&](int64_t number) {
      if (state.Find(number) != nullptr && before.emplace(number, record.number).second)
        next.push_back(number);
    };
    if (record.journal_bytes > 0) visit(record.parent);
    const auto [first, last] = children.equal_range(record.number);
    for (auto child = first; child != last; ++child) visit(child->second);
  }
  return {};
}

void ForgetUnreachable(StoreState& state) {
  std::set<int64_t> lost;
  for (const VersionRecord& record : state.versions) {
    const bool there = record.state == UpdateState::kVerified
                           ? record.delta_bytes > 0
                           : !WayTo(state, record.number, IsRoot).empty();
    if (!there && !Failed(record)) lost.insert(record.number);
  }
  for (const VersionRecord& record : state.versions) {
    if (lost.count(record.number) > 0) Retire(state, record);
  }
  std::erase_if(state.versions,
                [&](const VersionRecord& record) { return lost.count(record.number) > 0; });
}

absl::StatusOr<std::vector<DoomedFile>> Trim(StoreState& state, const Retention& retention) {
  const Kept kept = Choose(state, retention);
  const std::set<int64_t> remembered = Remembered(state);
  std::vector<DoomedFile> doomed;
  std::vector<VersionRecord> versions;
  for (VersionRecord& record : state.versions) {
    const bool stays = kept.versions.count(record.number) > 0;
    if (!stays || kept.versions.count(record.parent) == 0)
      Drop(Kind::kJournal, record.number, record.journal_bytes, doomed);
    // A verified delta has no journal yet: its file is what it is kept for.
    if (!stays || (record.journal_bytes == 0 && record.state != UpdateState::kVerified))
      Drop(Kind::kDelta, record.number, record.delta_bytes, doomed);
    if (kept.anchors.count(record.number) == 0)
      Drop(Kind::kAnchor, record.number, record.anchor_bytes, doomed);
    if (stays || record.repository || remembered.count(record.number) > 0)
      versions.push_back(std::move(record));
    else
      Retire(state, record);
  }
  state.versions = std::move(versions);
  for (const int64_t number : kept.versions) {
    if (WayTo(state, number, IsRoot).empty()) {
      return absl::InternalError(
          absl::StrCat("version ", number, " would be kept without a way to its weights"));
    }
  }
  return doomed;
}

}  // namespace espalier::updates
