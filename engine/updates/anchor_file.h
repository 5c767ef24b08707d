// anchor_file.h — a full copy of a version's logical weights on disk, from which a chain of journals
// can start when the versions before it are gone.
//
// Bytes    One bit an element, and the elements that have a bit set: −0 is kept, +0 costs a bit.
// Reading  Any range, in segments of kSegmentElements, each compared with its digest. Thread-safe.
// Memory   A segment: its bitmap, its non-zeros and a window of its elements.
// Errors   DataLoss: damaged, naming file and tensor; Unimplemented: newer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/updates/file_system.h"
#include "engine/updates/sha256.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates {

// Durable when it returns; says how many bytes the file has. DataLoss, and no file, when the weights
// do not have this digest.
absl::StatusOr<uint64_t> WriteAnchor(FileSystem& files, const std::string& path, int64_t number,
                                     const Digest& digest, const TensorReader& weights);

class AnchorReader final : public TensorReader {
 public:
  // DataLoss when it is of another version or digest.
  static absl::StatusOr<std::shared_ptr<const AnchorReader>> Open(FileSystem& files,
                                                                  const std::string& path,
                                                                  int64_t number,
                                                                  const Digest& digest);
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override;
  absl::Status ReadWindows(size_t tensor, int64_t first, int64_t count, Visit visit) const override;

 private:
  struct Segment {
    uint64_t offset = 0, bytes = 0;
    Digest digest{};
  };
  AnchorReader() = default;
  absl::Status ParseIndex(absl::string_view index, uint64_t end, int64_t number,
                          const Digest& digest);
  absl::Status ReadSegment(size_t tensor, int64_t segment, Visit visit) const;

  std::unique_ptr<File> file_;
  std::string path_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::vector<Segment>> segments_;  // of each tensor
};

}  // namespace espalier::updates
