#include "clients/cli/images.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace espalier::cli {

std::string Describe(const TensorMetadata& metadata) {
  return absl::StrCat(metadata.name(), " ", metadata.datatype(), " [",
                      absl::StrJoin(metadata.shape(), ", "), "]");
}

absl::StatusOr<client::Tensor> ImageTensor(const IdxFile& images, int64_t first, int64_t count,
                                           const TensorMetadata& input) {
  std::vector<int64_t> shape(input.shape().begin(), input.shape().end());
  absl::StatusOr<int64_t> item =
      client::ElementCount(absl::MakeConstSpan(shape).subspan(shape.empty() ? 0 : 1));
  const bool takes_count = !shape.empty() && (shape.front() == -1 || shape.front() == count);
  if (input.datatype() != "FP32" || !takes_count || !item.ok() || *item != images.item_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("the model takes ", Describe(input), "; ", count,
                                                   " images are FP32 [", count, ", ",
                                                   images.item_bytes(), "]"));
  }
  shape.front() = count;
  std::vector<float> pixels(count * images.item_bytes());
  const auto* bytes =
      reinterpret_cast<const unsigned char*>(images.bytes.data()) + first * images.item_bytes();
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<float>(bytes[i]) / 255.0f;
  return client::MakeTensor<float>(input.name(), std::move(shape), pixels);
}

}  // namespace espalier::cli
