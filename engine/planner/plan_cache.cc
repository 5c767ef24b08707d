#include "engine/planner/plan_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/planner/digest.h"

namespace espalier::planner {
namespace {

constexpr absl::string_view kMagic = "espalier-layer-costs 1";
constexpr absl::string_view kMagicName = "espalier-layer-costs ";
constexpr int64_t kMaxFileBytes = int64_t{1} << 20;

// layout, kernel, tokens.
using CostKey = std::tuple<std::string, std::string, int64_t>;
struct CostRecord {
  size_t resident_bytes = 0;
  double micros = 0;
};
using Records = std::map<CostKey, CostRecord>;

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd() < 0) return absl::ErrnoToStatus(errno, path);
  struct stat info;
  if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, path);
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError("not a regular file");
  if (info.st_size > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(info.st_size, " bytes, expected at most ", kMaxFileBytes));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t n = read(file.fd(), &text[filled], text.size() - filled);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, path);
    if (n == 0) break;
    filled += static_cast<size_t>(n);
  }
  text.resize(filled);
  return text;
}

// Instead of a time: the kernel was tried, and does not run this problem on this device.
constexpr absl::string_view kRefused = "refused";

absl::Status ParseCost(absl::string_view line, Records& records) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ');
  int64_t bytes = 0, tokens = 0;
  double micros = kCannotRun;
  const bool refused = fields.size() == 6 && fields[5] == kRefused;
  if (fields.size() != 6 || fields[0] != "cost" || !sparse::ParseLayoutSpec(fields[1]).ok() ||
      !absl::SimpleAtoi(fields[3], &bytes) || bytes < 0 || !absl::SimpleAtoi(fields[4], &tokens) ||
      tokens < 1 ||
      (!refused &&
       (!absl::SimpleAtod(fields[5], &micros) || !std::isfinite(micros) || micros <= 0))) {
    return absl::InvalidArgumentError(absl::StrCat("bad line '", line, "'"));
  }
  records[{std::string(fields[1]), std::string(fields[2]), tokens}] = {static_cast<size_t>(bytes),
                                                                       micros};
  return absl::OkStatus();
}

absl::StatusOr<Records> Parse(absl::string_view text, absl::string_view key) {
  const size_t first_line = text.find('\n');
  if (first_line == absl::string_view::npos || !absl::StartsWith(text, kMagicName)) {
    return absl::InvalidArgumentError("not a file of layer costs");
  }
  if (text.substr(0, first_line) != kMagic) {
    return absl::InvalidArgumentError(absl::StrCat("format '",
                                                   text.substr(0, std::min<size_t>(first_line, 64)),
                                                   "', expected '", kMagic, "'"));
  }
  const size_t end = text.rfind("\nend ");
  if (end == absl::string_view::npos || text.back() != '\n') {
    return absl::InvalidArgumentError("truncated");
  }
  const absl::string_view body = text.substr(0, end + 1);
  if (text.substr(end + 1) != absl::StrCat("end ", Sha256Hex(body), "\n")) {
    return absl::InvalidArgumentError("checksum does not match");
  }
  const std::vector<absl::string_view> lines = absl::StrSplit(absl::StripSuffix(body, "\n"), '\n');
  if (lines.size() < 2 || lines[1] != absl::StrCat("key ", key)) {
    return absl::InvalidArgumentError("made for another layer");
  }
  Records records;
  for (size_t i = 2; i < lines.size(); ++i) {
    if (absl::Status status = ParseCost(lines[i], records); !status.ok()) return status;
  }
  return records;
}

absl::Status WriteAtomically(const std::string& path, absl::string_view text) {
  static std::atomic<int> serial = 0;  // two models of one process may share a layer
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".", ++serial, ".tmp");
  {
    const File file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file.fd() < 0) return absl::ErrnoToStatus(errno, temporary);
    while (!text.empty()) {
      const ssize_t n = write(file.fd(), text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        const int error = errno;
        unlink(temporary.c_str());
        return absl::ErrnoToStatus(error, temporary);
      }
      text.remove_prefix(static_cast<size_t>(n));
    }
    if (fsync(file.fd()) != 0) {
      const int error = errno;
      unlink(temporary.c_str());
      return absl::ErrnoToStatus(error, temporary);
    }
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    return absl::ErrnoToStatus(error, path);
  }
  return absl::OkStatus();
}

std::string PathOf(const std::string& directory, const std::string& key) {
  return absl::StrCat(directory, "/", key, ".costs");
}

// What a good file holds; nothing when there is none.
absl::StatusOr<Records> ReadRecords(const std::string& directory, const std::string& key) {
  const std::string path = PathOf(directory, key);
  auto text = ReadSmallFile(path);
  if (absl::IsNotFound(text.status())) return Records();
  auto records = text.ok() ? Parse(*text, key) : text.status();
  if (records.ok()) return records;
  return absl::DataLossError(absl::StrCat(path, ": ", records.status().message()));
}

// What the process knows of layers by key. A layer takes some 10 KB; the oldest go first.
class MemoryPlans {
 public:
  Records Find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(key);
    return found == records_.end() ? Records() : found->second;
  }
  void Put(const std::string& key, Records records) {
    const std::lock_guard lock(mutex_);
    if (!records_.insert_or_assign(key, std::move(records)).second) return;
    order_.push_back(key);
    if (order_.size() <= kMaxLayers) return;
    records_.erase(order_.front());
    order_.pop_front();
  }

 private:
  static constexpr size_t kMaxLayers = 1024;
  std::mutex mutex_;
  std::map<std::string, Records> records_;
  std::deque<std::string> order_;
};

MemoryPlans& InMemory() {
  static auto& plans = *new MemoryPlans;
  return plans;
}

CostKey KeyOfCost(const LayerOption& option, int64_t tokens) {
  return {sparse::ToString(option.layout.spec), option.variant->name, tokens};
}

}  // namespace

PlanCache::PlanCache(std::string directory, const Device& device)
    : directory_(std::move(directory)),
      identity_(absl::StrCat("device ", device.Description(), "\nthreads ", device.threads(),
                             "\nbuild ", BuildId(), "\n")) {}

std::string PlanCache::KeyOf(const std::string& pattern_digest) const {
  return Sha256Hex(absl::StrCat(kMagic, "\npattern ", pattern_digest, "\n", identity_));
}

absl::StatusOr<bool> PlanCache::Load(const std::string& key, CostTable& table) const {
  if (directory_.empty()) return false;
  const bool memory = directory_ == kPlansInMemory;
  const auto records = memory ? InMemory().Find(key) : ReadRecords(directory_, key);
  if (!records.ok()) return records.status();
  bool found = false;
  for (size_t b = 0; b < table.tokens.size(); ++b) {
    for (size_t i = 0; i < table.options.size(); ++i) {
      const auto record = records->find(KeyOfCost(table.options[i], table.tokens[b]));
      if (record == records->end() || table.costs[b][i].predicted == kCannotRun) continue;
      table.costs[b][i].measured = record->second.micros;
      table.options[i].resident_bytes = record->second.resident_bytes;
      found = true;
    }
  }
  table.Calibrate();
  return found;
}

absl::Status PlanCache::Store(const std::string& key, const CostTable& table) const {
  if (directory_.empty()) return absl::OkStatus();
  const bool memory = directory_ == kPlansInMemory;
  std::error_code error;
  if (!memory) std::filesystem::create_directories(directory_, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", directory_, ": ", error.message()));
  }
  auto known = memory ? InMemory().Find(key) : ReadRecords(directory_, key);
  Records records = known.ok() ? *std::move(known) : Records();
  for (size_t b = 0; b < table.tokens.size(); ++b) {
    for (size_t i = 0; i < table.options.size(); ++i) {
      if (table.costs[b][i].measured <= 0) continue;
      records[KeyOfCost(table.options[i], table.tokens[b])] = {table.options[i].resident_bytes,
                                                               table.costs[b][i].measured};
    }
  }
  if (memory) {
    InMemory().Put(key, std::move(records));
    return absl::OkStatus();
  }
  std::string text = absl::StrCat(kMagic, "\nkey ", key, "\n");
  for (const auto& [cost_key, record] : records) {
    const auto& [layout, variant, tokens] = cost_key;
    absl::StrAppendFormat(
        &text, "cost %s %s %d %d %s\n", layout, variant, record.resident_bytes, tokens,
        record.micros == kCannotRun ? std::string(kRefused)
                                    : absl::StrFormat("%.3f", std::max(record.micros, 0.001)));
  }
  absl::StrAppend(&text, "end ", Sha256Hex(text), "\n");
  return WriteAtomically(PathOf(directory_, key), text);
}

}  // namespace espalier::planner
