// The magicless frame format, 4 bytes less a frame, is in the experimental part of the API, which a
// static link is asked for; the shared library of every distribution has it.
#define ZSTD_STATIC_LINKING_ONLY
#include "engine/updates/zstd.h"

#include <zstd.h>

#include <algorithm>
#include <bit>
#include <memory>

#include "absl/strings/str_cat.h"

namespace espalier::updates {
namespace {

using Compressor = std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)>;
using Decompressor = std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)>;

// Distances reach over the reference and the bytes themselves. 2^31 is zstd's limit on 64 bits.
int WindowLog(uint64_t bytes) {
  return std::clamp<int>(std::bit_width(bytes), ZSTD_WINDOWLOG_MIN, 31);
}

absl::Status Failed(absl::string_view what, size_t code) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", ZSTD_getErrorName(code)));
}

}  // namespace

absl::StatusOr<std::string> ZstdCompress(absl::string_view bytes, int level,
                                         absl::string_view reference) {
  const Compressor context(ZSTD_createCCtx(), ZSTD_freeCCtx);
  if (!context) return absl::ResourceExhaustedError("no memory to compress");
  ZSTD_CCtx* c = context.get();
  ZSTD_CCtx_setParameter(c, ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, 0);
  ZSTD_CCtx_setParameter(c, ZSTD_c_format, ZSTD_f_zstd1_magicless);
  if (!reference.empty()) {
    ZSTD_CCtx_setParameter(c, ZSTD_c_windowLog, WindowLog(reference.size() + bytes.size()));
    ZSTD_CCtx_setParameter(c, ZSTD_c_enableLongDistanceMatching, 1);
    ZSTD_CCtx_refPrefix(c, reference.data(), reference.size());
  }
  std::string frame(ZSTD_compressBound(bytes.size()), '\0');
  const size_t size = ZSTD_compress2(c, frame.data(), frame.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(size)) return Failed("cannot compress", size);
  frame.resize(size);
  return frame;
}

absl::StatusOr<std::string> ZstdDecompress(absl::string_view frame, uint64_t size,
                                           absl::string_view reference) {
  const Decompressor context(ZSTD_createDCtx(), ZSTD_freeDCtx);
  if (!context) return absl::ResourceExhaustedError("no memory to decompress");
  ZSTD_DCtx* d = context.get();
  ZSTD_DCtx_setParameter(d, ZSTD_d_format, ZSTD_f_zstd1_magicless);
  ZSTD_DCtx_setParameter(d, ZSTD_d_windowLogMax, WindowLog(reference.size() + size));
  // The whole result has its place: no window beside it.
  ZSTD_DCtx_setParameter(d, ZSTD_d_stableOutBuffer, 1);
  if (!reference.empty()) ZSTD_DCtx_refPrefix(d, reference.data(), reference.size());
  std::string bytes(size, '\0');
  ZSTD_inBuffer in{frame.data(), frame.size(), 0};
  ZSTD_outBuffer out{bytes.data(), bytes.size(), 0};
  size_t left = 1;
  while (left != 0) {
    const size_t consumed = in.pos, produced = out.pos;
    left = ZSTD_decompressStream(d, &out, &in);
    if (ZSTD_isError(left)) return Failed("damaged compressed data", left);
    // No progress: the frame wants more input, or more room than it announced.
    if (left != 0 && in.pos == consumed && out.pos == produced) {
      return absl::InvalidArgumentError(
          in.pos == in.size ? "compressed data ends early"
                            : absl::StrCat("compressed data holds more than ", size, " bytes"));
    }
  }
  if (out.pos != out.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressed data holds ", out.pos, " bytes, expected ", size));
  }
  if (in.pos != in.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("compressed data is followed by ", in.size - in.pos, " bytes"));
  }
  return bytes;
}

}  // namespace espalier::updates
