#include "clients/cli/delta_files.h"

#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cli/file.h"
#include "clients/cli/model_file.h"
#include "engine/formats/regular_file.h"

namespace espalier::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxKeyFileBytes = 64 << 10;
constexpr std::chrono::seconds kBetweenReports{1};

bool HasSafetensors(const fs::path& folder) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") return true;
  }
  return false;
}

template <typename Key>
absl::StatusOr<std::vector<Key>> Keys(const Args& args, absl::string_view flag) {
  std::vector<Key> keys;
  for (const std::string& path : args.All(flag)) {
    const auto pem = ReadFile(path, kMaxKeyFileBytes);
    if (!pem.ok()) return pem.status();
    auto key = Key::FromPem(*pem);
    if (!key.ok()) {
      return absl::Status(key.status().code(), absl::StrCat(path, ": ", key.status().message()));
    }
    keys.push_back(*std::move(key));
  }
  return keys;
}

}  // namespace

absl::StatusOr<NamedCheckpoint> OpenCheckpoint(const std::string& path) {
  NamedCheckpoint checkpoint;
  std::error_code error;
  fs::path found = fs::path(path).lexically_normal();
  if (!found.has_filename()) found = found.parent_path();
  const bool folder = fs::is_directory(found, error) && HasSafetensors(found);
  checkpoint.model = fs::absolute(found).stem().string();
  std::string file = found.string();
  if (folder) {
    checkpoint.model = fs::absolute(found).filename().string();
  } else if (!absl::EndsWith(file, ".safetensors")) {
    const auto model = FindModel(path);
    if (!model.ok()) return model.status();
    file = model->path;
    checkpoint.model = model->name;
    // Of a model in a repository, whose version directory has the file.
    if (!model->directory.empty()) {
      const std::string version = fs::absolute(file).parent_path().filename().string();
      if (!absl::SimpleAtoi(version, &checkpoint.version)) checkpoint.version = 0;
    }
  }
  auto files = updates::Checkpoint::Open(file);
  if (!files.ok()) return files.status();
  checkpoint.files = *std::move(files);
  return checkpoint;
}

absl::StatusOr<updates::DeltaFile> OpenDelta(const std::string& path) {
  auto file = formats::RegularFile::Open(path);
  if (!file.ok()) return file.status();
  return updates::DeltaFile::Open(std::make_shared<updates::FileSource>(*std::move(file)));
}

absl::StatusOr<std::vector<updates::PrivateKey>> PrivateKeys(const Args& args,
                                                             absl::string_view flag) {
  return Keys<updates::PrivateKey>(args, flag);
}

absl::StatusOr<std::vector<updates::PublicKey>> PublicKeys(const Args& args,
                                                           absl::string_view flag) {
  return Keys<updates::PublicKey>(args, flag);
}

absl::StatusOr<int> Threads(const Args& args) {
  cpu_set_t usable;
  const int cpus = sched_getaffinity(0, sizeof(usable), &usable) == 0 ? CPU_COUNT(&usable) : 1;
  const auto threads = args.Int("threads", cpus, 1, 1024);
  if (!threads.ok()) return threads.status();
  return static_cast<int>(*threads);
}

FlagSpec ThreadsFlag() { return {"threads", "N", "Default: one for each usable CPU."}; }

int64_t NowSeconds() { return absl::ToUnixSeconds(absl::Now()); }

std::string TimeText(int64_t seconds) {
  if (seconds == 0) return "never";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixSeconds(seconds),
                          absl::UTCTimeZone());
}

std::string SizeText(double bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f bytes", bytes)
                   : absl::StrFormat("%.1f %s", bytes, kUnits[unit]);
}

Progress::Progress(std::string what)
    : what_(std::move(what)),
      terminal_(isatty(STDERR_FILENO) != 0),
      next_(std::chrono::steady_clock::now() + kBetweenReports) {}

Progress::~Progress() {
  if (shown_) std::fputs(terminal_ ? "\r\033[K" : "", stderr);
}

void Progress::Report(double done, double total) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + kBetweenReports;
  shown_ = true;
  std::fprintf(stderr, "%s%s: %.0f %%%s", terminal_ ? "\r" : "", what_.c_str(),
               total > 0 ? 100 * done / total : 0, terminal_ ? "\033[K" : "\n");
  std::fflush(stderr);
}

}  // namespace espalier::cli
