// delta_files.h — what the delta commands share: checkpoints, deltas, keys, progress.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cli/args.h"
#include "engine/updates/checkpoint.h"
#include "engine/updates/delta_file.h"
#include "engine/updates/signing.h"

namespace espalier::cli {

struct NamedCheckpoint {
  std::string model;    // its directory's name, or the file's or folder's own
  int64_t version = 0;  // of a version directory, else 0
  std::unique_ptr<updates::Checkpoint> files;
};

// An .onnx file, a version or model directory with one, a .safetensors file, or a folder of them.
absl::StatusOr<NamedCheckpoint> OpenCheckpoint(const std::string& path);

absl::StatusOr<updates::DeltaFile> OpenDelta(const std::string& path);

// Keys from the files that the flag names.
absl::StatusOr<std::vector<updates::PrivateKey>> PrivateKeys(const Args& args,
                                                             absl::string_view flag);
absl::StatusOr<std::vector<updates::PublicKey>> PublicKeys(const Args& args,
                                                           absl::string_view flag);

// --threads, or one for each CPU that this process may use.
absl::StatusOr<int> Threads(const Args& args);
FlagSpec ThreadsFlag();

int64_t NowSeconds();
std::string TimeText(int64_t seconds);  // UTC; "never" for 0
std::string SizeText(double bytes);     // "1.5 MiB"

// A line on standard error once a second, rewritten in place on a terminal; nothing for work that
// takes less.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  void Report(double done, double total);

 private:
  std::string what_;
  bool terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace espalier::cli
