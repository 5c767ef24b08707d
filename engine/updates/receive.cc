#include "engine/updates/receive.h"

namespace espalier::updates {

absl::Status Receive(const DeltaFile& delta, const TensorReader& base, const Digest& base_weights,
                     const ReceivePolicy& policy, BlockDigests& blocks, JournalSink& sink) {
  const Manifest& manifest = delta.manifest();
  if (policy.trust) {
    if (const auto signers = delta.CheckSigned(*policy.trust); !signers.ok())
      return signers.status();
  }
  if (auto status = CheckFresh(manifest, policy.now_seconds); !status.ok()) return status;
  if (!policy.model.empty()) {
    if (auto status = CheckModel(manifest, policy.model); !status.ok()) return status;
  }
  if (auto status = CheckBase(manifest, base_weights); !status.ok()) return status;
  if (manifest.schema_changes) {
    return absl::FailedPreconditionError(
        "the delta changes which tensors there are, or their dtypes or dims: it can be applied to "
        "files, not to a model that is being served");
  }
  if (auto status = delta.CheckBody(); !status.ok()) return status;
  auto status = DecodeAndDigest(delta, base, policy.limits, policy.threads, blocks, sink,
                                policy.worker_scope);
  if (!status.ok()) return status;
  return CheckPromise(manifest, DigestOf(base.tensors(), blocks));
}

}  // namespace espalier::updates
