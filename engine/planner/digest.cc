#include "engine/planner/digest.h"

#include <elf.h>
#include <link.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/sparse/weight_elements.h"

namespace espalier::planner {
namespace {

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  }
  void Update(const void* data, size_t bytes) { EVP_DigestUpdate(context_.get(), data, bytes); }
  std::string Hex() {
    unsigned char digest[32];
    EVP_DigestFinal_ex(context_.get(), digest, nullptr);
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

// One bit per element, row after row without gaps, in words of 64.
template <typename Bits>
void HashPattern(const Bits* values, int64_t count, Sha256& sha) {
  std::vector<uint64_t> words(1024);
  for (int64_t i = 0; i < count;) {
    size_t used = 0;
    for (; used < words.size() && i < count; ++used) {
      const int64_t n = std::min<int64_t>(64, count - i);
      uint64_t word = 0;
      for (int64_t bit = 0; bit < n; ++bit) {
        word |= uint64_t{sparse::IsNonzero(values[i + bit])} << bit;
      }
      words[used] = word;
      i += n;
    }
    sha.Update(words.data(), used * sizeof(uint64_t));
  }
}

// dl_iterate_phdr visits the program itself first.
int FindBuildId(dl_phdr_info* info, size_t, void* result) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const char* note = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
    const char* end = note + header.p_memsz;
    while (note + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) fields;
      std::memcpy(&fields, note, sizeof(fields));
      const auto aligned = [](size_t n) { return (n + 3) / 4 * 4; };
      const char* name = note + sizeof(fields);
      const char* content = name + aligned(fields.n_namesz);
      if (fields.n_type == NT_GNU_BUILD_ID && fields.n_namesz == 4 &&
          std::memcmp(name, "GNU", 4) == 0) {
        *static_cast<std::string*>(result) =
            absl::BytesToHexString(absl::string_view(content, fields.n_descsz));
        return 1;
      }
      note = content + aligned(fields.n_descsz);
    }
  }
  return 1;  // the other objects are libraries
}

}  // namespace

std::string Sha256Hex(absl::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes.data(), bytes.size());
  return sha.Hex();
}

std::string PatternDigest(const TensorView& weight) {
  Sha256 sha;
  const std::string head = absl::StrCat(ToString(weight.shape), " ", NameOf(weight.dtype), "\n");
  sha.Update(head.data(), head.size());
  sparse::WithBitsType(weight.dtype, [&](auto tag) {
    HashPattern(weight.As<decltype(tag)>(), weight.elements(), sha);
  });
  return sha.Hex();
}

std::string BuildId() {
  std::string id;
  dl_iterate_phdr(FindBuildId, &id);
  return id.empty() ? "version " ESPALIER_VERSION : id;
}

}  // namespace espalier::planner
