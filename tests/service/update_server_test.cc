// The update service of a whole server, where time and threads matter: slow clients, stops, limits.
#include "service/update_server.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <latch>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/updates/sha256.h"
#include "proto/espalier/v1/update.grpc.pb.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "service/server.h"
#include "service/update_service.h"
#include "tests/engine/runtime/fake_model.h"

namespace espalier::service {
namespace {

namespace fs = std::filesystem;
using espalier::testing::Eventually;
using grpc::StatusCode;
using ::testing::HasSubstr;

// Several times what a busy machine may keep a client that is quick from sending.
constexpr absl::Duration kWindow = absl::Milliseconds(1500);
constexpr uint64_t kWindowBytes = 1000;
const std::string kContent(100'000, 'x');  // no delta, which nobody notices before it is complete

class UpdateServerTest : public ::testing::Test {
 protected:
  UpdateServerTest() {
    fs::create_directories(folder_ + "/models/m/1");
    fs::copy("tests/data/models/mnist_diagonal16/1/model.onnx", folder_ + "/models/m/1");
    ServerOptions options;
    options.model_repositories = {folder_ + "/models"};
    options.address = "127.0.0.1:0";
    options.metrics_address = "";
    options.state_dir = folder_ + "/state";
    options.measure_budget_millis = 0;
    options.updates.listener.address = "127.0.0.1:0";
    options.updates.listener.push.window = kWindow;
    options.updates.listener.push.window_bytes = kWindowBytes;
    options.updates.allow_unsigned = true;
    auto server = Server::Start(std::move(options));
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    EXPECT_TRUE(Eventually([&] { return server_->ready(); }));
    stub_ = v1::UpdateService::NewStub(Channel(server_->update_port()));
  }
  ~UpdateServerTest() override {
    server_.reset();
    fs::remove_all(folder_);
  }

  static std::shared_ptr<grpc::Channel> Channel(int port) {
    return grpc::CreateChannel(absl::StrCat("127.0.0.1:", port),
                               grpc::InsecureChannelCredentials());
  }

  // A push whose header is sent, and whose offset was answered.
  struct Push {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::PushDeltaRequest, v1::PushDeltaResponse>> stream;
    uint64_t offset = 0;

    bool Send(const std::string& bytes) {
      v1::PushDeltaRequest request;
      request.set_chunk(bytes);
      return stream->Write(request);
    }
    grpc::Status End() {
      stream->WritesDone();
      v1::PushDeltaResponse response;
      while (stream->Read(&response)) {
      }
      return stream->Finish();
    }
  };
  std::unique_ptr<Push> Begin() {
    auto push = std::make_unique<Push>();
    push->stream = stub_->PushDelta(&push->context);
    v1::PushDeltaRequest request;
    request.mutable_header()->set_model("m");
    const auto digest = updates::Sha256Of(kContent);
    request.mutable_header()->set_sha256(std::string(digest.begin(), digest.end()));
    request.mutable_header()->set_bytes(kContent.size());
    push->stream->Write(request);
    v1::PushDeltaResponse response;
    EXPECT_TRUE(push->stream->Read(&response)) << push->stream->Finish().error_message();
    push->offset = response.offset();
    return push;
  }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/update_server_", getpid());
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::UpdateService::Stub> stub_;
};

TEST_F(UpdateServerTest, AClientThatDripsIsToldSoAndGoesOnLater) {
  const auto push = Begin();
  EXPECT_EQ(push->offset, 0u);
  uint64_t sent = 0;
  while (push->Send("drip") && sent < kContent.size() / 2) {
    sent += 4;
    absl::SleepFor(kWindow / 20);
  }
  const grpc::Status status = push->End();
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("too slow: fewer than 1000 bytes in 1.5s"));
  EXPECT_LT(sent, kWindowBytes);
  const auto again = Begin();
  EXPECT_GT(again->offset, 0u);
  EXPECT_LE(again->offset, sent);
}

TEST_F(UpdateServerTest, AClientThatSaysNothingIsEnded) {
  const auto push = Begin();
  v1::PushDeltaResponse response;
  EXPECT_FALSE(push->stream->Read(&response));
  EXPECT_EQ(push->stream->Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(UpdateServerTest, AClientThatIsFastEnoughMayTakeManyWindows) {
  const auto push = Begin();
  const size_t step = 2 * kWindowBytes;
  for (size_t at = 0; at < 10 * step; at += step) {
    ASSERT_TRUE(push->Send(kContent.substr(at, step)));
    absl::SleepFor(kWindow / 4);
  }
  ASSERT_TRUE(push->Send(kContent.substr(10 * step)));
  const grpc::Status status = push->End();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
}

TEST_F(UpdateServerTest, AServerThatStopsEndsWhatIsOpen) {
  const auto push = Begin();
  grpc::ClientContext context;
  const auto watch = stub_->WatchVersions(&context, v1::WatchVersionsRequest());
  watch->WaitForInitialMetadata();  // it has begun
  std::thread stop([&] { server_->Drain(absl::Seconds(60)); });
  v1::WatchVersionsResponse event;
  while (watch->Read(&event)) {
  }
  EXPECT_EQ(watch->Finish().error_code(), StatusCode::UNAVAILABLE);
  v1::PushDeltaResponse response;
  EXPECT_FALSE(push->stream->Read(
      &response));  // until then a client that closes its side is what ends a push
  const grpc::Status status = push->End();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shutting down"));
  stop.join();
}

TEST_F(UpdateServerTest, AsManyWatchesMayBeOpenAndOthersGoOn) {
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchVersionsResponse>>> watches;
  grpc::Status refused;
  for (int i = 0; i < kMaxWatches + 1; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    watches.push_back(stub_->WatchVersions(contexts.back().get(), v1::WatchVersionsRequest()));
    absl::SleepFor(absl::Milliseconds(5));
  }
  // Some one of them; in which order they arrive is not said.
  int ended = 0;
  std::vector<std::thread> readers;
  std::mutex mutex;
  for (size_t i = 0; i < watches.size(); ++i) {
    readers.emplace_back([&, i] {
      v1::WatchVersionsResponse event;
      while (watches[i]->Read(&event)) {
      }
      const grpc::Status status = watches[i]->Finish();
      const std::lock_guard lock(mutex);
      if (status.error_code() != StatusCode::RESOURCE_EXHAUSTED) return;
      ++ended;
      refused = status;
    });
  }
  EXPECT_TRUE(Eventually([&] {
    const std::lock_guard lock(mutex);
    return ended == 1;
  }));
  grpc::ClientContext context;
  v1::ListVersionsResponse list;
  EXPECT_TRUE(stub_->ListVersions(&context, v1::ListVersionsRequest(), &list).ok());
  EXPECT_EQ(list.models_size(), 1);
  for (const auto& each : contexts) each->TryCancel();
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(ended, 1);
  EXPECT_THAT(refused.error_message(), HasSubstr("32"));
}

TEST_F(UpdateServerTest, MalformedBytesAreInvalidForEveryRpc) {
  grpc::GenericStub stub(Channel(server_->update_port()));
  const grpc::Slice slice("\x0a\xff");
  const grpc::ByteBuffer request(&slice, 1);
  int asked = 0;
  for (const char* rpc :
#define ESPALIER_NAME(name) #name,
       {ESPALIER_UPDATE_RPCS(ESPALIER_NAME)}) {
#undef ESPALIER_NAME
    grpc::ClientContext context;
    grpc::ByteBuffer answer;
    grpc::Status status;
    std::latch done{1};
    stub.UnaryCall(&context, absl::StrCat("/espalier.v1.UpdateService/", rpc), {}, &request,
                   &answer, [&](grpc::Status s) {
                     status = std::move(s);
                     done.count_down();
                   });
    done.wait();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << rpc;
    EXPECT_EQ(status.error_message(), absl::StrCat("malformed ", rpc, "Request"));
    ++asked;
  }
  EXPECT_EQ(asked, 11);
}

TEST_F(UpdateServerTest, EachListenerHasItsOwnService) {
  const auto inference = inference::GRPCInferenceService::NewStub(Channel(server_->update_port()));
  grpc::ClientContext context;
  inference::ServerLiveResponse live;
  EXPECT_EQ(inference->ServerLive(&context, inference::ServerLiveRequest(), &live).error_code(),
            StatusCode::UNIMPLEMENTED);
  const auto updates = v1::UpdateService::NewStub(Channel(server_->port()));
  grpc::ClientContext other;
  v1::ListVersionsResponse list;
  EXPECT_EQ(updates->ListVersions(&other, v1::ListVersionsRequest(), &list).error_code(),
            StatusCode::UNIMPLEMENTED);
}

TEST_F(UpdateServerTest, APortThatIsTakenIsSaidToBe) {
  Telemetry telemetry({});
  auto manager = runtime::UpdateManager::Create({.state_dir = folder_ + "/other"});
  ASSERT_TRUE(manager.ok()) << manager.status();
  Peers peers("");
  const auto second =
      UpdateServer::Start({.address = absl::StrCat("127.0.0.1:", server_->update_port())},
                          AccessToken(), peers, **manager, telemetry);
  EXPECT_THAT(second.status().message(), HasSubstr("--update_address"));
}

}  // namespace
}  // namespace espalier::service
