// simulated_file_system.h — a disk in memory that fails at a chosen call, and forgets at a crash what
// was not made durable.
//
//   SimulatedFileSystem disk;
//   disk.FailAt(17, Fault::kCrash);            // the 17th call that changes something
//   … work: from then on every call fails and changes nothing …
//   disk.Restart(Loss::kUnsynced, seed);       // what a new process finds
//
// Durable  Bytes of a file: as of its last good Sync. Names: an operation on names is atomic, also
//          across folders, and durable once a folder that it touched was synced.
// After a Sync that failed, the bytes that it was to save are lost for good, although reads still
// see them and later Syncs of that file succeed, as Linux has it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "engine/updates/file_system.h"

namespace espalier::updates::testing {

enum class Fault {
  kNone,
  kCrash,       // the call does half of what a write was to do, anything else nothing
  kIoError,     // EIO, once
  kDead,        // EIO, this call and all that follow until Heal()
  kDiskFull,    // ENOSPC for all that needs space, until Heal()
  kShortWrite,  // a write takes half; other calls succeed
};

enum class Loss {
  kNothing,   // the process was killed, the machine goes on
  kUnsynced,  // power loss, and nothing that was not durable has reached the disk
  kTorn,      // power loss: any part of it has, the last block of a file is garbage
};

class SimulatedFileSystem final : public FileSystem {
 public:
  SimulatedFileSystem();

  // Counted from the next call on, from 1.
  void FailAt(int64_t call, Fault fault);
  void Heal();
  // A disk of this size: writes beyond it are ENOSPC.
  void LimitBytes(uint64_t most);
  void Restart(Loss loss, uint64_t seed = 0);
  bool crashed() const;
  bool reached() const;  // the call to fail at was made
  int64_t calls() const;
  // Bytes of all files that have a name, and how many files.
  uint64_t bytes() const;
  int files() const;
  // Of a file that exists, for golden files and to damage.
  std::string Contents(const std::string& path) const;
  void Put(const std::string& path, const std::string& bytes);

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode,
                                             int permissions) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RenameNew(const std::string& from, const std::string& to) override;
  absl::Status Unlink(const std::string& path) override;
  absl::Status MakeFolder(const std::string& path) override;
  absl::Status RemoveFolder(const std::string& path) override;
  absl::Status SyncFolder(const std::string& path) override;
  absl::StatusOr<std::vector<FolderEntry>> List(const std::string& path) override;
  absl::StatusOr<bool> Exists(const std::string& path) override;

 private:
  friend class SimulatedFile;
  struct Node {
    bool folder = false;
    std::string bytes, durable;
    bool sync_failed = false;
    std::map<std::string, std::shared_ptr<Node>> entries, durable_entries;
  };
  using NodePtr = std::shared_ptr<Node>;
  struct NameChange {
    NodePtr folder;
    std::string name;
    NodePtr node;  // null: the name goes
  };
  using NameOperation = std::vector<NameChange>;
  enum class Call { kAppend, kNeedsSpace, kSync, kOther };

  // Counts a call that changes something. What it is to do: all, half (a write), or fail.
  absl::Status Count(Call call, bool& half);
  absl::Status Down() const;
  NodePtr Find(const std::string& path) const;
  absl::StatusOr<NodePtr> FindParent(const std::string& path) const;
  void Change(NameOperation operation);
  absl::Status Move(const std::string& from, const std::string& to, bool replace);
  absl::Status Remove(const std::string& path, bool folder);
  static void ApplyDurably(const NameOperation& operation);
  static void Lose(Node& node, Loss loss, std::mt19937_64& random);
  template <typename Visit>
  static void VisitAll(Node& node, const Visit& visit);

  mutable std::mutex mutex_;
  NodePtr root_;
  std::vector<NameOperation> unsynced_;
  uint64_t BytesLocked() const;

  int64_t calls_ = 0, fail_at_ = -1, generation_ = 0;
  uint64_t most_bytes_ = UINT64_MAX;
  Fault fault_ = Fault::kNone;
  bool failing_ = false, crashed_ = false, reached_ = false;
};

}  // namespace espalier::updates::testing
