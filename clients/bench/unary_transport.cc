#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>

#include "clients/bench/transport.h"

namespace espalier::bench {
namespace {

constexpr char kMethod[] = "/inference.GRPCInferenceService/ModelInfer";

// One call; deletes itself when it is answered.
class UnaryCall final : public Event {
 public:
  UnaryCall(AnswerSink& sink, const Request& request) : sink_(sink), request_(request) {}

  void Start(grpc::GenericStub& stub, const TransportParts& parts) {
    context_.set_deadline(
        std::chrono::system_clock::now() +
        std::chrono::microseconds(static_cast<int64_t>(parts.timeout_seconds * 1e6)));
    reader_ = stub.PrepareUnaryCall(&context_, kMethod, parts.source->Message(request_.sequence),
                                    parts.queue);
    reader_->StartCall();
    reader_->Finish(&answer_, &status_, this);
  }

  void Proceed(bool) override {
    AnswerFacts facts;
    if (status_.ok()) facts = ReadAnswer(answer_, /*streamed=*/false);
    if (facts.has_id && facts.id != request_.sequence) sink_.OnUnasked();
    sink_.OnAnswer(request_, status_, facts);
    delete this;
  }

 private:
  AnswerSink& sink_;
  const Request request_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader_;
  grpc::ByteBuffer answer_;
  grpc::Status status_;
};

class UnaryTransport final : public Transport {
 public:
  explicit UnaryTransport(TransportParts parts) : parts_(std::move(parts)), stub_(parts_.channel) {}

  void Send(const Request& request) override {
    (new UnaryCall(*parts_.sink, request))->Start(stub_, parts_);
  }

  void Close(bool) override {}  // every call has its own deadline

 private:
  const TransportParts parts_;
  grpc::GenericStub stub_;
};

}  // namespace

std::unique_ptr<Transport> MakeUnaryTransport(TransportParts parts) {
  return std::make_unique<UnaryTransport>(std::move(parts));
}

}  // namespace espalier::bench
