// Starting, loading beside serving, draining.
#include <thread>

#include "tests/service/service_fixture.h"

namespace espalier::service {
namespace {

using ::testing::HasSubstr;

using ServerLifecycleTest = ServiceFixture;

// What a busy machine may take for an answer that waits for nothing; those that wait here wait for ever.
constexpr absl::Duration kForAnAnswer = absl::Seconds(60);

TEST_F(ServerLifecycleTest, FourSlowLoadsDoNotSlowInferenceDown) {
  AddModel("m");
  std::vector<std::shared_ptr<FakeControl>> slow;
  for (const char* name : {"slow1", "slow2", "slow3", "slow4"}) {
    slow.push_back(AddModel(name));
    slow.back()->load_gate.Close();
  }
  options_.loader_threads = 5;  // one for `m`, whichever of the five is inspected first
  StartServer(/*wait=*/false);
  ASSERT_TRUE(Eventually([&] { return server_->models().Find("m", "").ok(); }));
  for (auto& control : slow) control->load_gate.AwaitWaiting(1);
  // All four loads are stuck, and every RPC still answers at once. Handlers that blocked would
  // stall the two callback threads of this gRPC for good.
  for (int i = 0; i < 200; ++i) {
    const grpc::Status status = Infer(RawRequest(), nullptr, kForAnAnswer);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(Infer(RawRequest(1, "slow1"), nullptr, kForAnAnswer).error_code(), grpc::UNAVAILABLE);
  }
  EXPECT_FALSE(server_->ready());
  for (auto& control : slow) control->load_gate.Open();
  EXPECT_TRUE(Eventually([&] { return server_->ready(); }));
  EXPECT_TRUE(Infer(RawRequest(1, "slow4")).ok());
}

TEST_F(ServerLifecycleTest, ASlowModelDoesNotHoldUpAnother) {
  AddModel("slow")->run_gate.Close();
  auto slow = loader_->models["slow"].control;
  AddModel("m");
  StartServer();
  std::vector<std::thread> stuck;
  for (int i = 0; i < 8; ++i)
    stuck.emplace_back([&] { EXPECT_TRUE(Infer(RawRequest(1, "slow")).ok()); });
  slow->run_gate.AwaitWaiting(1);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Infer(RawRequest(), nullptr, kForAnAnswer).ok());
  slow->run_gate.Open();
  for (std::thread& thread : stuck) thread.join();
}

TEST_F(ServerLifecycleTest, DrainFinishesWhatIsInFlightAndRefusesWhatIsNew) {
  auto control = AddModel("m");
  StartServer();
  control->run_gate.Close();
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&] { EXPECT_TRUE(Infer(RawRequest()).ok()); });
    control->run_gate.AwaitWaiting(1);  // the first runs alone
  }
  ASSERT_TRUE(Eventually([&] { return (*server_->models().Find("m", ""))->pending() == 2; }));
  std::thread drain([&] { EXPECT_TRUE(server_->Drain(kForAnAnswer)); });
  ASSERT_TRUE(Eventually([&] { return !server_->ready(); }));
  const grpc::Status refused = Infer(RawRequest(), nullptr, kForAnAnswer);
  EXPECT_EQ(refused.error_code(), grpc::UNAVAILABLE);
  EXPECT_NE(refused.error_message(), "");
  control->run_gate.Open();
  for (std::thread& client : clients) client.join();
  drain.join();
  EXPECT_THAT(control->sizes(), ::testing::ElementsAre(1, 2));
}

TEST_F(ServerLifecycleTest, DrainGivesUpAfterItsTimeout) {
  auto control = AddModel("m");
  StartServer();
  control->run_gate.Close();
  std::thread client([&] { EXPECT_FALSE(Infer(RawRequest()).ok()); });
  control->run_gate.AwaitWaiting(1);
  std::thread drain([&] { EXPECT_FALSE(server_->Drain(absl::Milliseconds(50))); });
  client.join();  // cut off, although the model never came back
  control->run_gate.Open();
  drain.join();
}

TEST_F(ServerLifecycleTest, AServerStopsWhileItLoads) {
  auto control = AddModel("m");
  control->load_delay = absl::Milliseconds(50);
  StartServer(/*wait=*/false);
  EXPECT_TRUE(server_->Drain(kForAnAnswer));
  server_.reset();
  EXPECT_EQ(control->alive, 0);
}

TEST_F(ServerLifecycleTest, TheReadyFileNamesThePorts) {
  AddModel("m");
  options_.metrics_address = "127.0.0.1:0";
  options_.ready_file = repository_.path() + "/ready.json";
  StartServer();
  ASSERT_TRUE(Eventually([&] { return std::filesystem::exists(options_.ready_file); }));
  std::ifstream file(options_.ready_file);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, absl::StrCat("{\"grpc_port\": ", server_->port(),
                               ", \"metrics_port\": ", server_->metrics_port(), "}"));
}

TEST_F(ServerLifecycleTest, TakenPortsMissingRepositoriesAndLockedStateAreNamed) {
  const testing::TemporaryDirectory state;
  options_.state_dir = state.path();
  options_.metrics_address = "127.0.0.1:0";
  StartServer();
  const auto start = [&](ServerOptions options) {
    const absl::Status status =
        Server::Start(std::move(options), std::make_unique<FakeLoader>()).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  ServerOptions other = options_;
  EXPECT_THAT(start(other), HasSubstr("is in use by process"));
  other.state_dir.clear();
  other.address = absl::StrCat("127.0.0.1:", server_->port());
  EXPECT_THAT(start(other), HasSubstr(absl::StrCat("cannot listen for gRPC on ", other.address)));
  other.address = "127.0.0.1:0";
  other.metrics_address = absl::StrCat("127.0.0.1:", server_->metrics_port());
  EXPECT_THAT(start(other), HasSubstr("cannot listen for metrics on"));
  other.metrics_address.clear();
  other.address = "127.0.0.1:99999";
  EXPECT_THAT(start(other), HasSubstr("expected host:port with a port from 0 to 65535"));
  other.address = "no-such-host.invalid:1";
  EXPECT_THAT(start(other), HasSubstr("host 'no-such-host.invalid' has no address"));
  other.address = "127.0.0.1:0";
  for (const char* inside : {"", "/deep/state"}) {
    other.state_dir = repository_.path() + inside;
    EXPECT_THAT(start(other), HasSubstr("lies in the model repository"));
  }
  other.state_dir.clear();
  other.model_repositories = {"/nonexistent/models"};
  EXPECT_THAT(start(other), HasSubstr("/nonexistent/models"));
}

}  // namespace
}  // namespace espalier::service
