#include "engine/runtime/stored_weights.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace espalier::runtime {
namespace {

using updates::TensorInfo;

// How safetensors names a dtype.
std::string NameInFile(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "F16";
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
    case DType::kBool:
    case DType::kBFloat16:
      return NameOf(dtype);
    default: {  // INT8, UINT64: I8, U64
      const absl::string_view name = NameOf(dtype);
      return absl::StrCat(name.substr(0, 1), name.substr(name.find_first_of("123468")));
    }
  }
}

}  // namespace

bool StoredWeights::Has(const std::string& initializer) const {
  return updates::FindTensor(reader_->tensors(), initializer) >= 0;
}

absl::Status StoredWeights::Read(const std::string& initializer, Tensor& tensor) const {
  const int64_t found = updates::FindTensor(reader_->tensors(), initializer);
  const auto index = static_cast<size_t>(found);
  const TensorInfo& info = reader_->tensors()[index];
  const auto& shape = tensor.shape();
  if (info.dtype != NameInFile(tensor.dtype()) ||
      info.bytes != static_cast<int64_t>(tensor.bytes()) ||
      !std::equal(info.dims.begin(), info.dims.end(), shape.begin(), shape.end())) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights of an update: got ", info.ToString(), ", the model's file has it as ",
                     NameOf(tensor.dtype()), " [", absl::StrJoin(shape, ", "), "]"));
  }
  auto status = reader_->Read(index, 0, info.elements(), tensor.data());
  if (!status.ok()) return status;
  updates::TensorDigester digester(info);
  digester.Update(tensor.data(), info.elements());
  const updates::Digest digest = digester.Finish();
  const std::lock_guard lock(mutex_);
  read_[index] = digest;
  return absl::OkStatus();
}

absl::StatusOr<updates::Digest> StoredWeights::DigestOfUnread(size_t tensor) const {
  constexpr int64_t kPiece = 1 << 20;  // elements
  const TensorInfo& info = reader_->tensors()[tensor];
  updates::TensorDigester digester(info);
  std::vector<char> piece;
  for (int64_t at = 0; at < info.elements(); at += kPiece) {
    const int64_t count = std::min(kPiece, info.elements() - at);
    piece.resize(static_cast<size_t>(count) * static_cast<size_t>(SizeOf(info.kind())));
    if (auto status = reader_->Read(tensor, at, count, piece.data()); !status.ok()) return status;
    digester.Update(piece.data(), count);
  }
  return digester.Finish();
}

absl::Status StoredWeights::Verify() const {
  std::map<size_t, updates::Digest> read;
  {
    const std::lock_guard lock(mutex_);
    read = read_;
  }
  std::vector<updates::Digest> tensors;
  for (size_t i = 0; i < reader_->tensors().size(); ++i) {
    const auto known = read.find(i);
    const auto digest =
        known != read.end() ? absl::StatusOr<updates::Digest>(known->second) : DigestOfUnread(i);
    if (!digest.ok()) return digest.status();
    tensors.push_back(*digest);
  }
  const updates::Digest got = updates::ModelDigest(tensors);
  if (got == digest_) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the weights have the digest ", updates::ShortHex(got),
                                          "…, expected ", updates::ShortHex(digest_),
                                          "…: a file of the repository changed, or the disk"));
}

}  // namespace espalier::runtime
