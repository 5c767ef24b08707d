#include "clients/cli/idx.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/cpp/tensor.h"

namespace espalier::cli {
namespace {

constexpr unsigned char kUnsignedBytes = 0x08;
constexpr int kMaxRank = 4;
constexpr int64_t kChunkBytes = 1 << 20;

struct GzClose {
  void operator()(gzFile file) const { gzclose_r(file); }
};
// gzread passes plain files through, so one path reads both.
using GzHandle = std::unique_ptr<gzFile_s, GzClose>;

// Up to `wanted` bytes, fewer at the file's end. Grows with what arrives, not with what is
// announced.
absl::StatusOr<std::string> ReadBytes(gzFile file, int64_t wanted, const std::string& path) {
  std::string bytes;
  while (static_cast<int64_t>(bytes.size()) < wanted) {
    const size_t had = bytes.size();
    bytes.resize(had + std::min<int64_t>(kChunkBytes, wanted - static_cast<int64_t>(had)));
    const int got = gzread(file, bytes.data() + had, static_cast<unsigned>(bytes.size() - had));
    bytes.resize(had + std::max(got, 0));
    int code = Z_OK;
    const char* text = gzerror(file, &code);
    // Z_BUF_ERROR is a stream that was cut off.
    if (got < 0 || code == Z_BUF_ERROR)
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", text));
    if (got == 0) break;
  }
  return bytes;
}

absl::StatusOr<GzHandle> Open(const std::string& path) {
  GzHandle file(gzopen(path.c_str(), "rb"));
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  return file;
}

bool IsMagic(const std::string& magic) {
  return magic.size() == 4 && magic[0] == 0 && magic[1] == 0 && magic[2] == kUnsignedBytes &&
         magic[3] >= 1 && magic[3] <= kMaxRank;
}

}  // namespace

absl::StatusOr<IdxFile> ReadIdx(const std::string& path) {
  absl::StatusOr<GzHandle> file = Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<std::string> magic = ReadBytes(file->get(), 4, path);
  if (!magic.ok()) return magic.status();
  if (!IsMagic(*magic)) {
    return absl::InvalidArgumentError(absl::StrCat(path,
                                                   ": not an IDX file of unsigned bytes (expected "
                                                   "it to begin with 00 00 08 and a rank of 1 to ",
                                                   kMaxRank, ")"));
  }
  const int rank = (*magic)[3];
  absl::StatusOr<std::string> sizes = ReadBytes(file->get(), 4 * rank, path);
  if (!sizes.ok()) return sizes.status();
  if (sizes->size() != static_cast<size_t>(4 * rank)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": cut off inside the header"));
  }
  IdxFile idx;
  for (int i = 0; i < rank; ++i) {
    uint32_t size = 0;
    for (int j = 0; j < 4; ++j) size = size << 8 | static_cast<unsigned char>((*sizes)[4 * i + j]);
    idx.shape.push_back(size);
  }
  absl::StatusOr<int64_t> announced = client::ElementCount(idx.shape);
  if (!announced.ok() || *announced > kMaxIdxBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": announces [",
                                                     absl::StrJoin(idx.shape, ", "),
                                                     "] bytes; the limit is ", kMaxIdxBytes));
  }
  // One more than announced, to see whether the file ends where it should.
  absl::StatusOr<std::string> bytes = ReadBytes(file->get(), *announced + 1, path);
  if (!bytes.ok()) return bytes.status();
  if (static_cast<int64_t>(bytes->size()) != *announced) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": announces [", absl::StrJoin(idx.shape, ", "), "], ", *announced, " bytes; got ",
        static_cast<int64_t>(bytes->size()) > *announced ? "more" : absl::StrCat(bytes->size())));
  }
  idx.bytes = *std::move(bytes);
  return idx;
}

bool IsIdx(const std::string& path) {
  struct stat info;
  // A pipe can be read only once, so it is never looked into.
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  absl::StatusOr<GzHandle> file = Open(path);
  if (!file.ok()) return false;
  absl::StatusOr<std::string> magic = ReadBytes(file->get(), 4, path);
  return magic.ok() && IsMagic(*magic);
}

}  // namespace espalier::cli
