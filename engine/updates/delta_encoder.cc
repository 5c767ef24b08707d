#include "engine/updates/delta_encoder.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/weight_digest.h"

namespace espalier::updates {
namespace {

int64_t CountNonzeros(ElementKind kind, const void* elements, int64_t count) {
  return VisitElement(kind, [&](auto element) {
    using Element = decltype(element);
    return CountBits(
        NonzeroBits<Element>(static_cast<const typename Element::Bits*>(elements), count));
  });
}

// One piece of work: a segment to encode, or a tensor of one side to digest.
struct Job {
  enum class Kind { kEncode, kDigestOld, kDigestNew } kind;
  size_t tensor;  // of the side that it is about; kEncode: of the old one
  int64_t segment = 0;
};

struct Encoded {
  size_t tensor = 0;
  int64_t segment = 0;
  std::string record;
  EventCounts counts;
};

class WeightEncoder {
 public:
  WeightEncoder(const TensorReader& old_weights, const TensorReader& new_weights,
                const TensorMap& map, const RecordSink& sink, const WeightEncoderOptions& options)
      : old_(old_weights), new_(new_weights), map_(map), sink_(sink), options_(options) {}

  absl::StatusOr<EncodedWeights> Run() {
    if (auto status = CheckMap(); !status.ok()) return status;
    PlanJobs();
    old_digests_.resize(old_.tensors().size());
    new_digests_.resize(new_.tensors().size());
    std::vector<std::thread> others;
    for (int i = 1; i < options_.threads; ++i) others.emplace_back([this] { Work(); });
    Work();
    for (std::thread& other : others) other.join();
    if (!failure_.ok()) return failure_;
    result_.base = ModelDigest(old_digests_);
    result_.target = ModelDigest(new_digests_);
    return std::move(result_);
  }

 private:
  absl::Status CheckMap() const {
    for (size_t i = 0; i < map_.size(); ++i) {
      if (map_[i] < 0) continue;
      const TensorInfo& before = old_.tensors()[i];
      const TensorInfo& after = new_.tensors()[static_cast<size_t>(map_[i])];
      if (before.dtype == after.dtype && before.dims == after.dims) continue;
      return absl::InvalidArgumentError(absl::StrCat("tensor ", before.ToString(), " became ",
                                                     after.ToString(),
                                                     ": dtype and dims must stay as they are"));
    }
    return absl::OkStatus();
  }

  void PlanJobs() {
    for (size_t i = 0; i < old_.tensors().size(); ++i) {
      const TensorInfo& tensor = old_.tensors()[i];
      jobs_.push_back({Job::Kind::kDigestOld, i});
      for (int64_t s = 0; s * kSegmentElements < tensor.elements(); ++s)
        jobs_.push_back({Job::Kind::kEncode, i, s});
      total_ += 2 * tensor.elements();
    }
    for (size_t i = 0; i < new_.tensors().size(); ++i) {
      jobs_.push_back({Job::Kind::kDigestNew, i});
      total_ += new_.tensors()[i].elements();
    }
  }

  // Elements of a segment before and after, kept from one to the next: new memory of this size is
  // new pages from the kernel each time.
  struct Buffers {
    std::vector<char> before, after;
  };

  void Work() {
    Buffers buffers;
    for (;;) {
      size_t index;
      {
        const std::lock_guard lock(mutex_);
        if (!failure_.ok() || next_job_ == jobs_.size()) return;
        index = next_job_++;
      }
      const absl::Status status = jobs_[index].kind == Job::Kind::kEncode
                                      ? Encode(index, buffers)
                                      : DigestTensor(jobs_[index]);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex_);
      failure_.Update(status);
    }
  }

  absl::Status DigestTensor(const Job& job) {
    const bool is_old = job.kind == Job::Kind::kDigestOld;
    const TensorReader& reader = is_old ? old_ : new_;
    const TensorInfo& tensor = reader.tensors()[job.tensor];
    TensorDigester digester(tensor);
    std::vector<char> elements;
    int64_t nonzeros = 0;
    for (int64_t first = 0; first < tensor.elements(); first += kPieceElements) {
      const int64_t count = std::min(kPieceElements, tensor.elements() - first);
      elements.resize(static_cast<size_t>(count * SizeOf(tensor.kind())));
      if (auto status = reader.Read(job.tensor, first, count, elements.data()); !status.ok())
        return status;
      digester.Update(elements.data(), count);
      nonzeros += CountNonzeros(tensor.kind(), elements.data(), count);
      Report(count);
    }
    const std::lock_guard lock(mutex_);
    (is_old ? old_digests_ : new_digests_)[job.tensor] = digester.Finish();
    (is_old ? result_.base_nonzeros : result_.target_nonzeros) += nonzeros;
    return absl::OkStatus();
  }

  absl::Status Encode(size_t index, Buffers& buffers) {
    const Job& job = jobs_[index];
    const TensorInfo& tensor = old_.tensors()[job.tensor];
    Encoded encoded{job.tensor, job.segment, "", {}};
    const int64_t first = job.segment * kSegmentElements;
    const int64_t count = std::min(kSegmentElements, tensor.elements() - first);
    if (map_[job.tensor] >= 0) {
      const auto bytes = static_cast<size_t>(count * SizeOf(tensor.kind()));
      for (std::vector<char>* buffer : {&buffers.before, &buffers.after})
        buffer->resize(std::max(buffer->size(), bytes));
      auto status = old_.Read(job.tensor, first, count, buffers.before.data());
      if (!status.ok()) return status;
      status = new_.Read(static_cast<size_t>(map_[job.tensor]), first, count, buffers.after.data());
      if (!status.ok()) return status;
      EncodeOptions encode = options_.encode;
      encode.row_elements = tensor.row_elements();
      encode.counts_are_known = TableTellsCounts(tensor);
      auto record = EncodeSegment(tensor.kind(), buffers.before.data(), buffers.after.data(), count,
                                  encoded.counts, encode);
      if (!record.ok()) return record.status();
      encoded.record = *std::move(record);
    }
    Report(count);
    const std::lock_guard lock(mutex_);
    finished_[index] = std::move(encoded);
    return Emit();
  }

  // Hands what is finished without a gap before it to the sink. Called with the mutex held.
  absl::Status Emit() {
    for (;; ++next_emitted_) {
      if (next_emitted_ == jobs_.size()) return absl::OkStatus();
      if (jobs_[next_emitted_].kind != Job::Kind::kEncode) continue;
      const auto found = finished_.find(next_emitted_);
      if (found == finished_.end()) return absl::OkStatus();
      const Encoded encoded = std::move(found->second);
      finished_.erase(found);
      if (encoded.record.empty()) continue;
      if (result_.tensors.empty() || last_tensor_ != encoded.tensor) {
        result_.tensors.push_back({old_.tensors()[encoded.tensor], {}});
        last_tensor_ = encoded.tensor;
      }
      result_.tensors.back().counts += encoded.counts;
      auto status = sink_(result_.tensors.size() - 1, encoded.segment, encoded.record);
      if (!status.ok()) return status;
    }
  }

  void Report(int64_t elements) {
    const std::lock_guard lock(mutex_);
    done_ += elements;
    if (options_.progress) options_.progress(done_, total_);
  }

  // Digests are read in pieces that stay in a core's second-level cache.
  static constexpr int64_t kPieceElements = 128 << 10;

  const TensorReader& old_;
  const TensorReader& new_;
  const TensorMap& map_;
  const RecordSink& sink_;
  const WeightEncoderOptions& options_;
  std::vector<Job> jobs_;
  int64_t total_ = 0;

  std::mutex mutex_;  // guards what follows
  size_t next_job_ = 0, next_emitted_ = 0, last_tensor_ = 0;
  int64_t done_ = 0;
  std::map<size_t, Encoded> finished_;
  std::vector<Digest> old_digests_, new_digests_;
  EncodedWeights result_;
  absl::Status failure_;
};

}  // namespace

absl::StatusOr<EncodedWeights> EncodeWeights(const TensorReader& old_weights,
                                             const TensorReader& new_weights, const TensorMap& map,
                                             const RecordSink& sink,
                                             const WeightEncoderOptions& options) {
  return WeightEncoder(old_weights, new_weights, map, sink, options).Run();
}

}  // namespace espalier::updates
