#include "tests/engine/updates/simulated_file_system.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace espalier::updates::testing {
namespace {

constexpr size_t kBlockBytes = 512;

absl::Status Failed(int error, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat("simulated: ", path));
}

std::string NameIn(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

class SimulatedFile final : public File {
 public:
  SimulatedFile(SimulatedFileSystem& disk, SimulatedFileSystem::NodePtr node, bool writable,
                std::string path)
      : disk_(disk),
        node_(std::move(node)),
        path_(std::move(path)),
        writable_(writable),
        generation_(disk.generation_) {}

  absl::StatusOr<size_t> Append(absl::string_view bytes) override {
    const std::lock_guard lock(disk_.mutex_);
    bool half = false;
    const auto status = Begin(SimulatedFileSystem::Call::kAppend, half);
    if (!status.ok() && !half) return status;
    if (bytes.size() > disk_.most_bytes_ - std::min(disk_.most_bytes_, disk_.BytesLocked()))
      return absl::ErrnoToStatus(ENOSPC, "simulated");
    const size_t taken = half ? (bytes.size() + 1) / 2 : bytes.size();
    node_->bytes.append(bytes.data(), taken);
    if (!status.ok()) return status;
    return taken;
  }
  absl::StatusOr<size_t> ReadAt(uint64_t offset, void* to, size_t bytes) const override {
    const std::lock_guard lock(disk_.mutex_);
    if (auto status = Alive(); !status.ok()) return status;
    if (offset >= node_->bytes.size()) return 0;
    return node_->bytes.copy(static_cast<char*>(to), bytes, offset);
  }
  absl::StatusOr<uint64_t> Size() const override {
    const std::lock_guard lock(disk_.mutex_);
    if (auto status = Alive(); !status.ok()) return status;
    return node_->bytes.size();
  }
  absl::Status Truncate(uint64_t size) override {
    const std::lock_guard lock(disk_.mutex_);
    bool half = false;
    auto status = Begin(SimulatedFileSystem::Call::kOther, half);
    if (status.ok()) node_->bytes.resize(size);
    return status;
  }
  absl::Status Sync() override {
    const std::lock_guard lock(disk_.mutex_);
    bool half = false;
    auto status = Begin(SimulatedFileSystem::Call::kSync, half);
    if (!status.ok())
      node_->sync_failed = true;
    else if (!node_->sync_failed)
      node_->durable = node_->bytes;
    return status;
  }
  absl::Status Close() override {
    const std::lock_guard lock(disk_.mutex_);
    return Alive();
  }

 private:
  absl::Status Alive() const {
    return generation_ == disk_.generation_ ? disk_.Down() : Failed(EBADF, path_);
  }
  absl::Status Begin(SimulatedFileSystem::Call call, bool& half) {
    if (auto status = Alive(); !status.ok()) return status;
    if (!writable_) return Failed(EBADF, path_);
    return disk_.Count(call, half);
  }

  SimulatedFileSystem& disk_;
  const SimulatedFileSystem::NodePtr node_;
  const std::string path_;
  const bool writable_;
  const int64_t generation_;
};

SimulatedFileSystem::SimulatedFileSystem() : root_(std::make_shared<Node>()) {
  root_->folder = true;
}

void SimulatedFileSystem::FailAt(int64_t call, Fault fault) {
  const std::lock_guard lock(mutex_);
  fail_at_ = calls_ + call;
  fault_ = fault;
  reached_ = false;
}

void SimulatedFileSystem::Heal() {
  const std::lock_guard lock(mutex_);
  failing_ = false;
  fail_at_ = -1;
}

bool SimulatedFileSystem::crashed() const {
  const std::lock_guard lock(mutex_);
  return crashed_;
}

bool SimulatedFileSystem::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

int64_t SimulatedFileSystem::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

absl::Status SimulatedFileSystem::Down() const {
  return crashed_ ? absl::AbortedError("simulated: the process has crashed") : absl::OkStatus();
}

absl::Status SimulatedFileSystem::Count(Call call, bool& half) {
  if (auto status = Down(); !status.ok()) return status;
  const bool now = ++calls_ == fail_at_;
  reached_ = reached_ || now;
  if (!now && !failing_) return absl::OkStatus();
  switch (fault_) {
    case Fault::kNone:
      break;
    case Fault::kCrash:
      crashed_ = true;
      half = call == Call::kAppend;
      return Down();
    case Fault::kDead:
      failing_ = true;
      return absl::ErrnoToStatus(EIO, "simulated");
    case Fault::kIoError:
      return absl::ErrnoToStatus(EIO, "simulated");
    case Fault::kDiskFull:
      failing_ = true;
      if (call == Call::kOther) break;
      return absl::ErrnoToStatus(ENOSPC, "simulated");
    case Fault::kShortWrite:
      half = call == Call::kAppend;
      break;
  }
  return absl::OkStatus();
}

SimulatedFileSystem::NodePtr SimulatedFileSystem::Find(const std::string& path) const {
  NodePtr node = root_;
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    const auto next = node->entries.find(std::string(part));
    if (next == node->entries.end()) return nullptr;
    node = next->second;
  }
  return node;
}

absl::StatusOr<SimulatedFileSystem::NodePtr> SimulatedFileSystem::FindParent(
    const std::string& path) const {
  NodePtr parent = Find(FolderOf(path));
  if (parent == nullptr || !parent->folder) return Failed(ENOENT, path);
  return parent;
}

void SimulatedFileSystem::Change(NameOperation operation) {
  for (const NameChange& change : operation) {
    if (change.node == nullptr)
      change.folder->entries.erase(change.name);
    else
      change.folder->entries[change.name] = change.node;
  }
  unsynced_.push_back(std::move(operation));
}

void SimulatedFileSystem::ApplyDurably(const NameOperation& operation) {
  for (const NameChange& change : operation) {
    if (change.node == nullptr)
      change.folder->durable_entries.erase(change.name);
    else
      change.folder->durable_entries[change.name] = change.node;
  }
}

absl::StatusOr<std::unique_ptr<File>> SimulatedFileSystem::Open(const std::string& path,
                                                                OpenMode mode, int) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  NodePtr node = Find(path);
  if (mode == OpenMode::kCreate) {
    const auto parent = FindParent(path);
    if (!parent.ok()) return parent.status();
    if (node != nullptr) return Failed(EEXIST, path);
    bool half = false;
    if (auto status = Count(Call::kNeedsSpace, half); !status.ok()) return status;
    node = std::make_shared<Node>();
    Change({{*parent, NameIn(path), node}});
  }
  if (node == nullptr) return Failed(ENOENT, path);
  if (node->folder) return Failed(EISDIR, path);
  return std::make_unique<SimulatedFile>(*this, std::move(node), mode != OpenMode::kRead, path);
}

absl::Status SimulatedFileSystem::Move(const std::string& from, const std::string& to,
                                       bool replace) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  const NodePtr node = Find(from);
  const auto from_parent = FindParent(from), to_parent = FindParent(to);
  if (node == nullptr) return Failed(ENOENT, from);
  if (!to_parent.ok()) return to_parent.status();
  if (!replace && Find(to) != nullptr) return Failed(EEXIST, to);
  bool half = false;
  if (auto status = Count(Call::kNeedsSpace, half); !status.ok()) return status;
  Change({{*from_parent, NameIn(from), nullptr}, {*to_parent, NameIn(to), node}});
  return absl::OkStatus();
}

absl::Status SimulatedFileSystem::Rename(const std::string& from, const std::string& to) {
  return Move(from, to, true);
}

absl::Status SimulatedFileSystem::RenameNew(const std::string& from, const std::string& to) {
  return Move(from, to, false);
}

absl::Status SimulatedFileSystem::Remove(const std::string& path, bool folder) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  const NodePtr node = Find(path);
  if (node == nullptr) return Failed(ENOENT, path);
  if (node->folder != folder) return Failed(folder ? ENOTDIR : EISDIR, path);
  if (!node->entries.empty()) return Failed(ENOTEMPTY, path);
  bool half = false;
  if (auto status = Count(Call::kOther, half); !status.ok()) return status;
  Change({{*FindParent(path), NameIn(path), nullptr}});
  return absl::OkStatus();
}

absl::Status SimulatedFileSystem::Unlink(const std::string& path) { return Remove(path, false); }

absl::Status SimulatedFileSystem::RemoveFolder(const std::string& path) {
  return Remove(path, true);
}

absl::Status SimulatedFileSystem::MakeFolder(const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  const auto parent = FindParent(path);
  if (!parent.ok()) return parent.status();
  if (Find(path) != nullptr) return Failed(EEXIST, path);
  bool half = false;
  if (auto status = Count(Call::kNeedsSpace, half); !status.ok()) return status;
  auto node = std::make_shared<Node>();
  node->folder = true;
  Change({{*parent, NameIn(path), node}});
  return absl::OkStatus();
}

absl::Status SimulatedFileSystem::SyncFolder(const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  const NodePtr folder = Find(path);
  if (folder == nullptr) return Failed(ENOENT, path);
  bool half = false;
  if (auto status = Count(Call::kSync, half); !status.ok()) return status;
  const auto touches = [&](const NameOperation& operation) {
    return std::any_of(operation.begin(), operation.end(),
                       [&](const NameChange& change) { return change.folder == folder; });
  };
  std::vector<NameOperation> left;
  for (NameOperation& operation : unsynced_) {
    if (touches(operation))
      ApplyDurably(operation);
    else
      left.push_back(std::move(operation));
  }
  unsynced_ = std::move(left);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FolderEntry>> SimulatedFileSystem::List(const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  const NodePtr folder = Find(path);
  if (folder == nullptr || !folder->folder) return Failed(ENOENT, path);
  std::vector<FolderEntry> entries;
  for (const auto& [name, node] : folder->entries) entries.push_back({name, node->folder});
  return entries;
}

absl::StatusOr<bool> SimulatedFileSystem::Exists(const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (auto status = Down(); !status.ok()) return status;
  return Find(path) != nullptr;
}

template <typename Visit>
void SimulatedFileSystem::VisitAll(Node& node, const Visit& visit) {
  visit(node);
  for (const auto& [name, child] : node.entries) VisitAll(*child, visit);
}

void SimulatedFileSystem::Lose(Node& node, Loss loss, std::mt19937_64& random) {
  node.entries = node.durable_entries;
  node.sync_failed = false;
  std::string found = node.durable;
  if (loss == Loss::kTorn && node.bytes != node.durable) {
    // What was appended since, up to anywhere, its last block garbage; a cut may have happened.
    const size_t common = std::min(node.durable.size(), node.bytes.size());
    const size_t kept = common + random() % (node.bytes.size() - common + 1);
    found = node.bytes.substr(0, kept);
    const size_t garbage = std::min(kept - common, kBlockBytes);
    for (size_t i = kept - garbage; i < kept; ++i) found[i] = static_cast<char>(random());
  }
  node.bytes = node.durable = std::move(found);
}

void SimulatedFileSystem::Restart(Loss loss, uint64_t seed) {
  const std::lock_guard lock(mutex_);
  crashed_ = failing_ = false;
  fail_at_ = -1;
  ++generation_;
  if (loss == Loss::kNothing) return;
  std::mt19937_64 random(seed);
  for (const NameOperation& operation : unsynced_) {
    if (loss == Loss::kTorn && random() % 2 == 0) ApplyDurably(operation);
  }
  unsynced_.clear();
  VisitAll(*root_, [&](Node& node) { Lose(node, loss, random); });
}

uint64_t SimulatedFileSystem::BytesLocked() const {
  uint64_t bytes = 0;
  VisitAll(*root_, [&](Node& node) { bytes += node.bytes.size(); });
  return bytes;
}

uint64_t SimulatedFileSystem::bytes() const {
  const std::lock_guard lock(mutex_);
  return BytesLocked();
}

void SimulatedFileSystem::LimitBytes(uint64_t most) {
  const std::lock_guard lock(mutex_);
  most_bytes_ = most;
}

int SimulatedFileSystem::files() const {
  const std::lock_guard lock(mutex_);
  int files = 0;
  VisitAll(*root_, [&](Node& node) { files += node.folder ? 0 : 1; });
  return files;
}

std::string SimulatedFileSystem::Contents(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  return Find(path)->bytes;
}

void SimulatedFileSystem::Put(const std::string& path, const std::string& bytes) {
  const std::lock_guard lock(mutex_);
  NodePtr node = Find(path);
  if (node == nullptr) {
    node = std::make_shared<Node>();
    Find(FolderOf(path))->entries[NameIn(path)] = node;
    Find(FolderOf(path))->durable_entries[NameIn(path)] = node;
  }
  node->bytes = node->durable = bytes;
}

}  // namespace espalier::updates::testing
