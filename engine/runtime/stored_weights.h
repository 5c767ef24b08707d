// stored_weights.h — weights that a version store knows, in the place of those of a model's file.
//
// Memory   Nothing of its own but a digest a tensor: elements go from the reader into the tensor.
// Errors   Read: InvalidArgument when the file's tensor has another dtype or shape. Verify: DataLoss.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/base/thread_annotations.h"
#include "engine/formats/weight_source.h"
#include "engine/updates/weight_digest.h"

namespace espalier::runtime {

class StoredWeights final : public formats::WeightSource {
 public:
  // `digest` is what the store says of them.
  StoredWeights(std::shared_ptr<const updates::TensorReader> reader, const updates::Digest& digest)
      : reader_(std::move(reader)), digest_(digest) {}

  bool Has(const std::string& initializer) const override;
  absl::Status Read(const std::string& initializer, Tensor& tensor) const override;
  // Whether the elements that were read, and those that nobody wanted, have the digest.
  absl::Status Verify() const override;

 private:
  absl::StatusOr<updates::Digest> DigestOfUnread(size_t tensor) const;

  const std::shared_ptr<const updates::TensorReader> reader_;
  const updates::Digest digest_;
  mutable std::mutex mutex_;
  mutable std::map<size_t, updates::Digest> read_ ABSL_GUARDED_BY(mutex_);  // by tensor
};

}  // namespace espalier::runtime
