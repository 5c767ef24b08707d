// memory_weights.h — weights in memory, and deltas between them as strings.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/updates/delta_encoder.h"
#include "engine/updates/delta_file.h"
#include "engine/updates/journal.h"
#include "engine/updates/tensor_info.h"

namespace espalier::updates::testing {

class MemoryWeights final : public TensorReader {
 public:
  // Tensors may be added in any order.
  template <typename Bits>
  void Add(std::string name, std::string dtype, std::vector<int64_t> dims,
           const std::vector<Bits>& elements) {
    TensorInfo info{std::move(name), std::move(dtype), std::move(dims),
                    static_cast<int64_t>(elements.size() * sizeof(Bits))};
    const auto at =
        std::lower_bound(infos_.begin(), infos_.end(), info,
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
    const auto index = at - infos_.begin();
    infos_.insert(at, std::move(info));
    data_.insert(data_.begin() + index, std::string(reinterpret_cast<const char*>(elements.data()),
                                                    elements.size() * sizeof(Bits)));
  }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override {
    const auto size = static_cast<size_t>(SizeOf(infos_[tensor].kind()));
    std::memcpy(to, data_[tensor].data() + static_cast<size_t>(first) * size,
                static_cast<size_t>(count) * size);
    return absl::OkStatus();
  }
  // Every other tensor, so that both ways to the elements are used.
  const void* InMemory(size_t tensor, int64_t first) const override {
    if (tensor % 2 != 0) return nullptr;
    return data_[tensor].data() + first * SizeOf(infos_[tensor].kind());
  }
  std::string& data(size_t tensor) { return data_[tensor]; }
  bool operator==(const MemoryWeights& other) const {
    return infos_ == other.infos_ && data_ == other.data_;
  }
  void Apply(const Journal& journal) {
    for (const TensorJournal& tensor : journal.tensors)
      ApplyTo(data_[tensor.tensor].data(), infos_[tensor.tensor].kind(), tensor.entries);
  }
  void Undo(const Journal& journal) {
    for (const TensorJournal& tensor : journal.tensors)
      UndoIn(data_[tensor.tensor].data(), infos_[tensor.tensor].kind(), tensor.entries);
  }

 private:
  std::vector<TensorInfo> infos_;
  std::vector<std::string> data_;
};

// A manifest and its body, to be signed, or to be tampered with first.
struct Draft {
  Manifest manifest;
  std::string body;

  // The size of the body is brought up to date.
  void Seal() { manifest.body_bytes = body.size(); }
  std::string Bytes(const std::vector<PrivateKey>& keys = {}) const {
    return Bytes(SerializeManifest(manifest).value(), keys);
  }
  // With these bytes in place of the manifest's.
  std::string Bytes(absl::string_view serialized, const std::vector<PrivateKey>& keys) const {
    auto head = SerializeHead(serialized, Sha256Of(body), keys);
    EXPECT_TRUE(head.ok()) << head.status();
    return *head + body;
  }
};

inline Draft MakeDraft(const MemoryWeights& from, const MemoryWeights& to,
                       const EncodeOptions& encode = {}) {
  Draft draft;
  TensorMap map;
  for (size_t i = 0; i < from.tensors().size(); ++i) map.push_back(static_cast<int64_t>(i));
  WeightEncoderOptions options;
  options.encode = encode;
  std::optional<RecordPlace> last;
  auto encoded = EncodeWeights(
      from, to, map,
      [&](size_t tensor, int64_t segment, absl::string_view record) {
        const RecordPlace place{tensor, segment};
        draft.body += SerializeRecord(std::exchange(last, place), place, record);
        return absl::OkStatus();
      },
      options);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  Manifest& manifest = draft.manifest;
  manifest.model = "digits";
  manifest.base_version = 3;
  manifest.target_version = 4;
  manifest.sequence = 17;
  manifest.created_seconds = 1'800'000'000;
  manifest.base_weights = HalfOf(encoded->base);
  manifest.target_weights = encoded->target;
  manifest.base_nonzeros = encoded->base_nonzeros;
  manifest.target_nonzeros = encoded->target_nonzeros;
  manifest.tensors = encoded->tensors;
  draft.Seal();
  return draft;
}

inline absl::StatusOr<DeltaFile> OpenBytes(std::string bytes) {
  return DeltaFile::Open(std::make_shared<MemorySource>("x.espd", std::move(bytes)));
}

}  // namespace espalier::updates::testing
