#include "service/push_delta.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/runtime/infer_request.h"
#include "engine/runtime/worker_pool.h"
#include "proto/espalier/v1/update.grpc.pb.h"
#include "service/rpc_scope.h"
#include "service/update_messages.h"

namespace espalier::service {
namespace {

using FileKey = std::pair<std::string, updates::Digest>;  // model, SHA-256

absl::StatusOr<FileKey> ReadHeader(const v1::PushHeader& header) {
  if (auto status = CheckModelName(header.model()); !status.ok()) return status;
  auto digest = ReadDigest("sha256", header.sha256());
  if (!digest.ok()) return digest.status();
  return FileKey(header.model(), *digest);
}

// The version of a model that came as a delta, is `wanted`, and waits or serves; none when there is none.
// FailedPrecondition when it had its time.
template <typename Wanted>
absl::StatusOr<std::optional<updates::VersionRecord>> FindVersion(
    const runtime::UpdateManager& manager, const std::string& of_model, Wanted wanted) {
  using enum updates::UpdateState;
  const auto models = manager.List(of_model);
  if (!models.ok()) return models.status();
  for (const runtime::ModelVersions& model : *models) {
    for (const updates::VersionRecord& version : model.store.versions) {
      if (version.parent == 0 || !wanted(version)) continue;
      const auto state = version.state;
      if (state == kStaged || state == kCanary || state == kLive) return version;
      if (state == kSuperseded || state == kRolledBack || state == kQuarantined) {
        return absl::FailedPreconditionError(
            absl::StrCat("this delta was sent before: version ", version.number, " is ",
                         NameOf(state), version.reason.empty() ? "" : ": ", version.reason));
      }
    }
  }
  return std::nullopt;
}

// That came with this file.
absl::StatusOr<std::optional<updates::VersionRecord>> FindDelta(
    const runtime::UpdateManager& manager, const FileKey& file) {
  return FindVersion(manager, file.first, [&](const updates::VersionRecord& version) {
    return version.delta == file.second;
  });
}

}  // namespace

// What the calls share: who pushes which file, the workers, and the watch over slow ones.
class PushCalls::Shared {
 public:
  Shared(runtime::UpdateManager& manager, Telemetry& telemetry, const AccessToken& token,
         PushLimits limits)
      : manager(manager),
        telemetry(telemetry),
        token(token),
        limits(limits),
        workers(limits.at_once, "push"),
        watch_([this] { Watch(); }) {}
  ~Shared() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    watch_.join();
    workers.Stop();
  }

  absl::Status Add(const std::shared_ptr<Call>& call);
  void Remove(const std::shared_ptr<Call>& call);
  // `call` pushes this file from now on; who pushed it so far, or null.
  std::shared_ptr<Call> TakeOver(const FileKey& file, const std::shared_ptr<Call>& call) {
    const std::lock_guard lock(mutex_);
    return std::exchange(files_[file], call);
  }
  std::set<std::shared_ptr<Call>> Close(const absl::Status& why) {
    const std::lock_guard lock(mutex_);
    closed_ = why;
    return open_;
  }

  runtime::UpdateManager& manager;
  Telemetry& telemetry;
  const AccessToken& token;
  const PushLimits limits;
  runtime::WorkerPool workers;

 private:
  void Watch();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<Call>> open_ ABSL_GUARDED_BY(mutex_);
  std::map<FileKey, std::shared_ptr<Call>> files_ ABSL_GUARDED_BY(mutex_);
  std::thread watch_;
};

class PushCalls::Call final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                              public std::enable_shared_from_this<Call> {
 public:
  Call(Shared& shared, grpc::CallbackServerContext& context)
      : shared_(shared), context_(context), scope_(shared.telemetry, context, Rpc::kPushDelta) {}

  void Begin(const absl::Status& admitted) {
    self_ = shared_from_this();
    std::unique_lock lock(mutex_);
    if (!admitted.ok()) {
      ending_ = true;
      end_ = admitted;
    }
    read_wanted_ = true;
    Pump(std::move(lock));
  }

  // The first to end it says why.
  void End(absl::Status status) {
    std::unique_lock lock(mutex_);
    if (!ending_) end_ = std::move(status);
    ending_ = true;
    Pump(std::move(lock));
  }

  // Returns when this call does nothing to its file any more; one that stages may finish that.
  void GiveWay() {
    const std::lock_guard step(step_);
    End(absl::AbortedError("another push of the same file took over"));
  }

  void CheckPace(absl::Time now) {
    {
      const std::lock_guard lock(mutex_);
      if (waits_since_ == absl::InfiniteFuture()) return;
      if (waited_ + (now - waits_since_) <= shared_.limits.window) return;
      // A client that takes no answer cannot be told either.
      if (writing_) context_.TryCancel();
    }
    End(absl::DeadlineExceededError(absl::StrCat("too slow: fewer than ",
                                                 shared_.limits.window_bytes, " bytes in ",
                                                 absl::FormatDuration(shared_.limits.window),
                                                 "; push it again, it goes on where it got to")));
  }

 private:
  void OnReadDone(bool ok) override {
    {
      const std::lock_guard lock(mutex_);
      CountWait(ok ? read_.Length() : 0);
    }
    shared_.workers.Schedule([self = shared_from_this(), ok] { self->Step(ok); });
  }

  void OnWriteDone(bool) override {
    std::unique_lock lock(mutex_);
    CountWait(0);
    writing_ = false;
    read_wanted_ = true;
    Pump(std::move(lock));
  }

  void OnCancel() override { End(absl::CancelledError("the client went away")); }

  void OnDone() override {
    shared_.Remove(self_);
    self_.reset();  // a worker may still hold it
  }

  // One message, or the end of them, on a worker.
  void Step(bool ok) {
    const std::lock_guard step(step_);
    {
      const std::lock_guard lock(mutex_);
      if (ending_) return;
    }
    absl::Status status;
    if (!ok) {
      status = Complete();
    } else {
      v1::PushDeltaRequest request;
      const bool parsed =
          grpc::SerializationTraits<v1::PushDeltaRequest>::Deserialize(&read_, &request).ok();
      status = parsed ? Take(request) : absl::InvalidArgumentError("malformed PushDeltaRequest");
    }
    if (!status.ok()) End(std::move(status));
  }

  absl::Status Take(const v1::PushDeltaRequest& request) {
    if (request.part_case() == v1::PushDeltaRequest::kHeader && !has_header_)
      return TakeHeader(request.header());
    if (request.part_case() == v1::PushDeltaRequest::kChunk && has_header_)
      return TakeChunk(request.chunk());
    return absl::InvalidArgumentError(has_header_ ? "expected a chunk after the header"
                                                  : "expected the header first");
  }

  absl::Status TakeHeader(const v1::PushHeader& header) {
    const auto file = ReadHeader(header);
    if (!file.ok()) return file.status();
    file_ = *file;
    total_ = header.bytes();
    if (const auto before = shared_.TakeOver(file_, shared_from_this()); before != nullptr)
      before->GiveWay();
    const auto known = FindDelta(shared_.manager, file_);
    if (!known.ok()) return known.status();
    if (known->has_value()) {
      Answer(**known);
      return absl::OkStatus();
    }
    const auto offset = shared_.manager.BeginReceive(file_.first, file_.second, total_);
    if (!offset.ok()) return offset.status();
    has_header_ = true;
    received_ = *offset;
    v1::PushDeltaResponse response;
    response.set_offset(received_);
    Write(response, /*last=*/false);
    return absl::OkStatus();
  }

  absl::Status TakeChunk(const std::string& chunk) {
    if (chunk.empty() || chunk.size() > kMaxChunkBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("a chunk of ", chunk.size(), " bytes, expected 1 to ", kMaxChunkBytes));
    }
    if (chunk.size() > total_ - received_) {
      return absl::InvalidArgumentError(
          absl::StrCat("the header says ", total_, " bytes, but more of them came: ", chunk.size(),
                       " at offset ", received_));
    }
    auto status = shared_.manager.Append(file_.first, file_.second, received_, chunk);
    if (!status.ok()) return status;
    received_ += chunk.size();
    std::unique_lock lock(mutex_);
    read_wanted_ = true;
    Pump(std::move(lock));
    return absl::OkStatus();
  }

  absl::Status Complete() {
    if (!has_header_) return absl::InvalidArgumentError("expected the header first, got nothing");
    if (received_ != total_) {
      return absl::InvalidArgumentError(absl::StrCat("the client closed its side after ", received_,
                                                     " of ", total_,
                                                     " bytes; push it again, it goes on there"));
    }
    const auto version = shared_.manager.Stage(file_.first, file_.second);
    if (!version.ok()) return version.status();
    // By its number: another file, which leads to the same weights, may have brought it.
    const auto staged = FindVersion(
        shared_.manager, file_.first,
        [&](const updates::VersionRecord& record) { return record.number == *version; });
    if (!staged.ok()) return staged.status();
    if (!staged->has_value()) {
      return absl::AbortedError(
          absl::StrCat("version ", *version, " was staged, and given up meanwhile"));
    }
    Answer(**staged);
    return absl::OkStatus();
  }

  void Answer(const updates::VersionRecord& record) {
    v1::PushDeltaResponse response;
    response.mutable_staged()->set_version(record.number);
    response.mutable_staged()->set_state(ToMessage(record.state));
    Write(response, /*last=*/true);
  }

  void Write(const v1::PushDeltaResponse& response, bool last) {
    bool owned = false;
    grpc::ByteBuffer message;
    (void)grpc::SerializationTraits<v1::PushDeltaResponse>::Serialize(response, &message, &owned);
    std::unique_lock lock(mutex_);
    if (ending_) return;
    written_ = message;
    write_wanted_ = true;
    ending_ = last;
    Pump(std::move(lock));
  }

  // Starts what is wanted. gRPC may call back from inside, so the mutex is not held while it is called.
  void Pump(std::unique_lock<std::mutex> lock) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    while (write_wanted_ || (read_wanted_ && !ending_)) {
      const bool write = std::exchange(write_wanted_, false);
      if (!write) read_wanted_ = false;
      writing_ = writing_ || write;
      ++starting_;
      waits_since_ = absl::Now();
      lock.unlock();
      if (write) {
        StartWrite(&written_);
      } else {
        StartRead(&read_);
      }
      lock.lock();
      --starting_;
    }
    if (!ending_ || finished_ || starting_ > 0 || writing_) return;
    finished_ = true;
    const absl::Status end = end_;
    lock.unlock();
    Finish(scope_.End(end));
  }

  // Time is the client's while it is waited for; enough bytes buy a new window.
  void CountWait(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    waited_ += absl::Now() - std::exchange(waits_since_, absl::InfiniteFuture());
    window_bytes_ += bytes;
    if (window_bytes_ < shared_.limits.window_bytes) return;
    window_bytes_ = 0;
    waited_ = absl::ZeroDuration();
  }

  Shared& shared_;
  grpc::CallbackServerContext& context_;
  RpcScope scope_;
  std::shared_ptr<Call> self_;  // until OnDone

  std::mutex step_;  // held through a step; the fields of steps follow
  FileKey file_;
  bool has_header_ = false;
  uint64_t total_ = 0, received_ = 0;

  grpc::ByteBuffer read_, written_;  // belong to the read and the write that run
  std::mutex mutex_;
  bool read_wanted_ ABSL_GUARDED_BY(mutex_) = false, write_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false, finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  absl::Time waits_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  absl::Duration waited_ ABSL_GUARDED_BY(mutex_);
  size_t window_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::Status PushCalls::Shared::Add(const std::shared_ptr<Call>& call) {
  const std::lock_guard lock(mutex_);
  if (!closed_.ok()) return closed_;
  if (static_cast<int>(open_.size()) >= limits.at_once) {
    return absl::ResourceExhaustedError(
        absl::StrCat(open_.size(), " deltas are being pushed at once, at most ", limits.at_once,
                     " may be: try again in a while"));
  }
  open_.insert(call);
  return absl::OkStatus();
}

void PushCalls::Shared::Remove(const std::shared_ptr<Call>& call) {
  const std::lock_guard lock(mutex_);
  open_.erase(call);
  for (auto it = files_.begin(); it != files_.end();)
    it = it->second == call ? files_.erase(it) : std::next(it);
}

void PushCalls::Shared::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, absl::ToChronoNanoseconds(limits.window / 16));
    const auto open = open_;
    lock.unlock();
    for (const auto& call : open) call->CheckPace(absl::Now());
    lock.lock();
  }
}

PushCalls::PushCalls(runtime::UpdateManager& manager, Telemetry& telemetry,
                     const AccessToken& token, PushLimits limits)
    : shared_(std::make_unique<Shared>(manager, telemetry, token, limits)) {}

PushCalls::~PushCalls() = default;

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* PushCalls::Open(
    grpc::CallbackServerContext& context) {
  const auto call = std::make_shared<Call>(*shared_, context);
  absl::Status admitted = shared_->token.Check(AuthorizationOf(context));
  if (admitted.ok()) admitted = shared_->Add(call);
  call->Begin(admitted);
  return call.get();
}

void PushCalls::EndAll(const absl::Status& status) {
  for (const auto& call : shared_->Close(status)) call->End(status);
}

}  // namespace espalier::service
