// Ways between versions, their weights, and compaction.
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/updates/anchor_file.h"
#include "engine/updates/journal_chain.h"
#include "engine/updates/journal_file.h"
#include "engine/updates/version_graph.h"
#include "engine/updates/version_store.h"

namespace espalier::updates {

absl::StatusOr<std::vector<VersionStore::Edge>> VersionStore::EdgesAlong(
    const std::vector<int64_t>& path) const {
  std::vector<Edge> edges;
  for (size_t i = 1; i < path.size(); ++i) {
    const VersionRecord &from = *state_.Find(path[i - 1]), &to = *state_.Find(path[i]);
    const bool forward = to.parent == from.number && to.journal_bytes > 0;
    const VersionRecord &parent = forward ? from : to, &child = forward ? to : from;
    edges.push_back({from.number, to.number, forward, JournalPath(child.number),
                     JournalEnds{parent.number, child.number, parent.weights, child.weights}});
  }
  return edges;
}

absl::StatusOr<std::vector<VersionStore::Edge>> VersionStore::EdgesBetween(int64_t from,
                                                                           int64_t to) const {
  const std::lock_guard lock(mutex_);
  const auto path =
      WayTo(state_, from, [&](const VersionRecord& record) { return record.number == to; });
  if (path.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no way of journals from version ", from, " to ", to, " is kept here"));
  }
  return EdgesAlong(path);
}

absl::StatusOr<JournalChain> VersionStore::JournalsBetween(int64_t from, int64_t to) const {
  const std::shared_lock kept(files_kept_);
  const absl::StatusOr<std::vector<Edge>> edges = EdgesBetween(from, to);
  if (!edges.ok()) return edges.status();
  std::vector<JournalChain::Step> steps;
  for (const Edge& edge : *edges) {
    auto reader = JournalReader::Open(files_, edge.path, edge.ends, options_.journal_limits);
    if (!reader.ok()) return reader.status();
    steps.push_back({*std::move(reader), edge.forward});
  }
  return JournalChain(std::move(steps));
}

absl::StatusOr<std::vector<StoredDelta>> VersionStore::DeltasBetween(int64_t from,
                                                                     int64_t to) const {
  const std::shared_lock kept(files_kept_);
  const absl::StatusOr<std::vector<Edge>> edges = EdgesBetween(from, to);
  if (!edges.ok()) return edges.status();
  std::vector<StoredDelta> deltas;
  for (const Edge& edge : *edges) {
    if (!edge.forward) {
      return absl::FailedPreconditionError(absl::StrCat("version ", to, " was not made from ", from,
                                                        ": no deltas lead from one to the other"));
    }
    auto source = OpenedSource::Open(files_, DeltaPath(edge.to));
    if (!source.ok()) return source.status();
    deltas.push_back({edge.from, edge.to, *std::move(source)});
  }
  return deltas;
}

absl::StatusOr<std::shared_ptr<const TensorReader>> VersionStore::OpenRoot(
    const VersionRecord& root) const {
  if (root.anchor_bytes > 0) {
    auto anchor = AnchorReader::Open(files_, AnchorPath(root.number), root.number, root.weights);
    if (!anchor.ok()) return anchor.status();
    return std::shared_ptr<const TensorReader>(*std::move(anchor));
  }
  if (!options_.repository) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", root.number, " can only be read from the repository"));
  }
  return options_.repository(root.number);
}

absl::StatusOr<VersionStore::Rooted> VersionStore::OpenNearestRoot(int64_t number) const {
  std::set<int64_t> unreadable;
  absl::Status failure =
      absl::NotFoundError(absl::StrCat("no way leads to the weights of version ", number));
  for (;;) {
    Rooted rooted;
    VersionRecord root;
    {
      const std::lock_guard lock(mutex_);
      std::vector<int64_t> path = WayTo(state_, number, [&](const VersionRecord& record) {
        return IsRoot(record) && unreadable.count(record.number) == 0;
      });
      if (path.empty()) return failure;
      root = *state_.Find(path.back());
      auto found = EdgesAlong({path.rbegin(), path.rend()});
      if (!found.ok()) return found.status();
      rooted.edges = *std::move(found);
    }
    auto weights = OpenRoot(root);
    if (weights.ok()) {
      rooted.root = *std::move(weights);
      return rooted;
    }
    failure = weights.status();  // the repository may have it no more; another root may do
    unreadable.insert(root.number);
  }
}

absl::StatusOr<std::vector<TensorInfo>> VersionStore::Tensors(int64_t number) const {
  const std::shared_lock kept(files_kept_);
  const auto rooted = OpenNearestRoot(number);
  if (!rooted.ok()) return rooted.status();
  return rooted->root->tensors();
}

absl::StatusOr<std::shared_ptr<const JournalOnDisk>> VersionStore::OpenEdge(
    const Edge& edge) const {
  {
    const std::lock_guard lock(mutex_);
    const auto known = journals_.find(edge.ends.to);
    if (known != journals_.end() && known->second->ends() == edge.ends) return known->second;
  }
  auto journal = JournalOnDisk::Open(files_, edge.path, edge.ends, options_.journal_limits);
  if (!journal.ok()) return journal.status();
  const std::lock_guard lock(mutex_);
  return journals_[edge.ends.to] = *std::move(journal);
}

absl::StatusOr<std::shared_ptr<const TensorReader>> VersionStore::Weights(int64_t number) const {
  const std::shared_lock kept(files_kept_);
  auto rooted = OpenNearestRoot(number);
  if (!rooted.ok()) return rooted.status();
  std::vector<JournaledReader::Step> steps;
  for (const Edge& edge : rooted->edges) {
    auto journal = OpenEdge(edge);
    if (!journal.ok()) return journal.status();
    if (!(*journal)->empty()) steps.push_back({*std::move(journal), edge.forward});
  }
  if (steps.empty()) return std::move(rooted->root);
  return JournaledReader::Create(std::move(rooted->root), std::move(steps));
}

// The version that is to get an anchor; 0: none needs to. On probation it is the one before, which
// is known to be good.
int64_t VersionStore::AnchorDue() const {
  const auto way = WayTo(state_, state_.active, IsRoot);
  const auto edges = EdgesAlong(way);
  if (!edges.ok()) return 0;
  uint64_t bytes = 0;
  for (const Edge& edge : *edges) bytes += state_.Find(edge.ends.to)->journal_bytes;
  const uint64_t root_bytes = way.empty() ? 0 : state_.Find(way.back())->anchor_bytes;
  const int most = root_bytes > 0 ? options_.max_chain : options_.max_first_chain;
  const uint64_t most_bytes =
      root_bytes > 0 ? std::min(root_bytes, options_.max_chain_bytes) : options_.max_chain_bytes;
  if (edges->size() < static_cast<size_t>(most) && bytes <= most_bytes) return 0;
  const int64_t number = state_.probation ? state_.Find(state_.active)->replaced : state_.active;
  const VersionRecord* record = state_.Find(number);
  return record == nullptr || IsRoot(*record) ? 0 : number;
}

absl::Status VersionStore::Compact() {
  const std::lock_guard one(compaction_);
  int64_t anchor = 0;
  Digest digest{};
  {
    const std::lock_guard lock(mutex_);
    anchor = AnchorDue();
    if (anchor != 0) digest = state_.Find(anchor)->weights;
  }
  uint64_t anchor_bytes = 0;
  if (anchor != 0) {
    const auto weights = Weights(anchor);
    if (!weights.ok()) return weights.status();
    const auto bytes = WriteAnchor(files_, AnchorPath(anchor), anchor, digest, **weights);
    if (!bytes.ok()) return bytes.status();
    anchor_bytes = *bytes;
  }
  // No file of a version may come or go between the decision and the deletion.
  const std::unique_lock kept(files_kept_);
  std::vector<DoomedFile> doomed;
  {
    const std::lock_guard lock(mutex_);
    StoreState next = state_;
    if (VersionRecord* record = next.Find(anchor)) record->anchor_bytes = anchor_bytes;
    auto trimmed = Trim(next, {options_.keep_versions, options_.keep_bytes});
    if (!trimmed.ok()) return trimmed.status();
    doomed = *std::move(trimmed);
    if (next == state_) return absl::OkStatus();
    const AuditRecord event = Event(AuditAction::kCompacted, next, anchor,
                                    absl::StrCat(doomed.size(), " files are kept no more"));
    if (auto status = Commit(std::move(next), event); !status.ok()) return status;
    for (const DoomedFile& file : doomed) {
      if (file.kind == DoomedFile::Kind::kJournal) journals_.erase(file.number);
    }
  }
  // What fails here is deleted when the store is opened next.
  for (const DoomedFile& file : doomed) {
    const std::string path = file.kind == DoomedFile::Kind::kJournal  ? JournalPath(file.number)
                             : file.kind == DoomedFile::Kind::kAnchor ? AnchorPath(file.number)
                                                                      : DeltaPath(file.number);
    (void)files_.Unlink(path);
  }
  return absl::OkStatus();
}

void VersionStore::CompactInBackground() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      compaction_wanted_.wait(lock, [&] { return wanted_ || stopping_; });
      if (stopping_) return;
      wanted_ = false;
    }
    // A failure (a full disk, most likely) is met again, and told, by the next one.
    const auto scope = options_.compactor_scope ? options_.compactor_scope() : nullptr;
    (void)Compact();
  }
}

}  // namespace espalier::updates
