// partial_delta.h — a delta that is being received: any number of pieces, over any number of
// connections and restarts.
//
//   <folder>/<SHA-256 of the whole file>.part     what has come, in order
//   <folder>/<SHA-256 of the whole file>.sums     size and SHA-256 of each piece of it
//   <folder>/<SHA-256 of the whole file>.whole    in place of both: all of it, and durable
//
// No piece is synced before the end: after a crash Open compares the pieces with their sums and
// goes on behind the last one that is whole. Names are made of digits and letters of a digest alone.
// Errors   InvalidArgument: more bytes than announced, not at the offset, or another digest in the
//          end; what the file system says. After an error of the file system the object is of no
//          more use: open it again.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/updates/file_system.h"
#include "engine/updates/sha256.h"

namespace espalier::updates {

class PartialDelta {
 public:
  // Continues what is there, or begins. A piece ends at `piece_bytes` or more.
  static absl::StatusOr<PartialDelta> Open(FileSystem& files, const std::string& folder,
                                           const Digest& digest, uint64_t bytes,
                                           uint64_t piece_bytes);
  PartialDelta(PartialDelta&&) = default;
  PartialDelta& operator=(PartialDelta&&) = default;
  ~PartialDelta();  // notes the last, shorter piece

  uint64_t offset() const { return offset_; }  // where to go on
  uint64_t bytes() const { return bytes_; }    // announced
  absl::Status Append(uint64_t offset, absl::string_view bytes);
  // All has come, has the digest, and is durable. With another digest both files are deleted.
  absl::Status Finish();

  static std::string WholePathOf(const std::string& folder, const Digest& digest);
  // Whatever there is of it.
  static absl::Status Delete(FileSystem& files, const std::string& folder, const Digest& digest);

 private:
  PartialDelta(FileSystem& files, std::string folder, const Digest& digest, uint64_t bytes,
               uint64_t piece_bytes);
  absl::Status Resume();
  absl::StatusOr<uint64_t> CheckPieces(absl::string_view sums);
  absl::Status Begin();
  absl::Status EndPiece();
  absl::Status Lost(const absl::Status& status);

  FileSystem* files_;
  std::string folder_;
  Digest digest_;
  uint64_t bytes_, piece_bytes_, offset_ = 0, piece_ = 0;
  bool whole_is_there_ = false;
  std::unique_ptr<File> part_, sums_;
  std::unique_ptr<Sha256> whole_ = std::make_unique<Sha256>(), sum_ = std::make_unique<Sha256>();
};

}  // namespace espalier::updates
