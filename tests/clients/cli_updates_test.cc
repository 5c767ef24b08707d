// The commands that change weights of servers: what they send, in which order, what they say, and the
// exit codes. The fleet's two phases with every part of them failing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/cli/file.h"
#include "clients/cli/update_servers.h"
#include "engine/updates/sha256.h"
#include "tests/clients/fake_update_server.h"
#include "tests/clients/run_line.h"

namespace espalier::cli {
namespace {

namespace fs = std::filesystem;
using espalier::testing::FakeUpdates;
using espalier::testing::UpdateServerOf;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

const grpc::Status kAway(grpc::StatusCode::UNAVAILABLE, "it is away");
const grpc::Status kRefused(grpc::StatusCode::FAILED_PRECONDITION, "for another base");

class UpdateCommandsTest : public ::testing::Test {
 protected:
  UpdateCommandsTest() {
    fs::create_directories(folder_);
    for (const auto& [name, value] : {std::pair("a", '\x3f'), std::pair("b", '\x40')}) {
      // w F32 [100000]: x + i / 2^23, so that the delta is of some size
      const std::string json =
          R"({"w":{"dtype":"F32","shape":[100000],"data_offsets":[0,400000]}})";
      std::string file(1, static_cast<char>(json.size()));
      file += std::string(7, '\0') + json;
      for (uint32_t i = 0; i < 100'000; ++i) {
        const uint32_t noise = (i * 2654435761u) >> (value == '\x40' ? 9 : 12);
        file += {static_cast<char>(noise), static_cast<char>(noise >> 8), '\x01', value};
      }
      EXPECT_TRUE(WriteFile(At(absl::StrCat(name, ".safetensors")), file).ok());
    }
    const Outcome created = RunLine({"delta", "create", At("a.safetensors"), At("b.safetensors"),
                                     "-o", delta_, "--model", "m", "--base_version", "6"});
    EXPECT_EQ(created.code, kExitOk) << created.err;
    content_ = ReadFile(delta_).value();
    EXPECT_GT(content_.size(), 150'000u);
  }
  ~UpdateCommandsTest() override { fs::remove_all(folder_); }
  std::string At(const std::string& name) const { return folder_ + "/" + name; }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/update_commands_", getpid());
  const std::string delta_ = At("ab.espd");
  std::string content_;
};

TEST_F(UpdateCommandsTest, APushSendsTheFileAndActivatesWithTheToken) {
  FakeUpdates service;
  const UpdateServerOf server(service);
  ASSERT_TRUE(WriteFile(At("token"), "  sesame-sesame-sesame\n").ok());
  const Outcome pushed =
      RunLine({"delta", "push", delta_, "--to", server.url(), "--token_file", At("token"),
               "--probation", "10m", "--canary", "0.25", "--canary_duration", "1m"});
  EXPECT_EQ(pushed.code, kExitOk) << pushed.err;
  EXPECT_EQ(pushed.out, absl::StrCat(server.url(), ": version 7 of m serves\n"));
  EXPECT_EQ(service.received, content_);
  EXPECT_EQ(service.last_authorization, "Bearer sesame-sesame-sesame");
  EXPECT_EQ(service.activated.version(), 7);
  EXPECT_EQ(service.activated.probation().seconds(), 600);
  EXPECT_EQ(service.activated.probation().canary_share(), 0.25);
  EXPECT_EQ(service.activated.probation().canary_seconds(), 60);
}

TEST_F(UpdateCommandsTest, APushSendsOnlyWhatTheServerLacks) {
  FakeUpdates service;
  const UpdateServerOf server(service);
  service.received = content_.substr(0, content_.size() - 1000);
  EXPECT_EQ(RunLine({"delta", "push", delta_, "--to", server.url()}).code, kExitOk);
  EXPECT_EQ(service.received, content_);
  service.state = v1::LIVE;
  service.activated.Clear();
  EXPECT_THAT(RunLine({"delta", "push", delta_, "--to", server.url()}).out,
              HasSubstr("serves already"));
  EXPECT_EQ(service.activated.version(), 0);
}

TEST_F(UpdateCommandsTest, APushGoesOnWhereItWasCut) {
  FakeUpdates service;
  service.cut_after = content_.size() / 2;
  const UpdateServerOf server(service);
  const Outcome pushed = RunLine({"delta", "push", delta_, "--to", server.url(), "--no_activate"});
  EXPECT_EQ(pushed.code, kExitOk) << pushed.err;
  EXPECT_THAT(pushed.out, HasSubstr("version 7 of m is STAGED"));
  EXPECT_EQ(service.received, content_);
  EXPECT_EQ(service.pushes, 2);
  EXPECT_EQ(service.activated.version(), 0);
}

TEST_F(UpdateCommandsTest, RefusalsKeepTheirReasonAndSayWhatToDo) {
  FakeUpdates service;
  service.fails["push"] = kRefused;
  std::string url;
  {
    const UpdateServerOf server(service);
    url = server.url();
    const Outcome refused = RunLine({"delta", "push", delta_, "--to", url});
    EXPECT_EQ(refused.code, kExitFailure);
    EXPECT_THAT(refused.err,
                HasSubstr(absl::StrCat(url, ": FAILED_PRECONDITION: for another base")));
    EXPECT_THAT(RunLine({"delta", "rollback", "m", "--url", url}).err,
                HasSubstr("--update_address"));
  }
  const Outcome nobody = RunLine({"delta", "push", delta_, "--to", url});
  EXPECT_EQ(nobody.code, kExitFailure);
  EXPECT_THAT(nobody.err, HasSubstr("is there an espalierd with --update_address?"));
  EXPECT_THAT(RunLine({"delta", "push", At("a.safetensors"), "--to", url}).err,
              HasSubstr("a.safetensors"));
}

TEST_F(UpdateCommandsTest, ARollbackThatOnlySomeTookSaysWhatServesWhereAndWhatMendsIt) {
  FakeUpdates services[3];
  for (FakeUpdates& service : services) service.serves = 4;
  services[0].fails["rollback"] = kRefused;
  const UpdateServerOf a(services[0]), b(services[1]), c(services[2]);
  const std::string all = absl::StrCat(a.url(), ",", b.url(), ",", c.url());
  const Outcome mixed = RunLine({"delta", "rollback", "m", "--url", all});
  EXPECT_EQ(mixed.code, kExitFailure);
  EXPECT_THAT(mixed.out, HasSubstr(absl::StrCat(a.url(), "  4       no")));
  EXPECT_THAT(mixed.out, HasSubstr(absl::StrCat(b.url(), "  3       yes")));
  EXPECT_THAT(mixed.err, HasSubstr("only 2 of 3 servers went back"));
  EXPECT_THAT(mixed.err,
              HasSubstr(absl::StrCat("espalier delta rollback m --to 3 --url ", a.url(), "\n")));
  services[0].fails.clear();
  const Outcome mended = RunLine({"delta", "rollback", "m", "--to", "3", "--url", a.url()});
  EXPECT_EQ(mended.code, kExitOk);
  EXPECT_EQ(mended.err, "");
  services[1].fails["rollback"] = services[0].fails["rollback"] = kRefused;
  const Outcome nobody =
      RunLine({"delta", "rollback", "m", "--url", absl::StrCat(a.url(), ",", b.url())});
  EXPECT_THAT(nobody.err, Not(HasSubstr("went back"))) << "nothing has changed";
}

TEST_F(UpdateCommandsTest, MistakesInTheCommandLineAreFoundBeforeAnythingIsSent) {
  const auto wrong = [&](std::vector<std::string> line, const std::string& text) {
    line.insert(line.begin(), "delta");
    const Outcome outcome = RunLine(line);
    EXPECT_EQ(outcome.code, kExitUsage) << absl::StrJoin(line, " ");
    EXPECT_THAT(outcome.err, HasSubstr(text));
  };
  wrong({"push"}, "expected DELTA, or --resume ID");
  wrong({"push", delta_, "--to", "nonsense"}, "--to: expected HOST:PORT");
  wrong({"push", delta_, "--to", "127.0.0.1:0"}, "--to: expected HOST:PORT");
  wrong({"push", delta_, "--to", "127.0.0.1:1,"}, "--to: expected HOST:PORT");
  wrong({"push", delta_, "--no_activate", "--probation", "1m"}, "--no_activate leaves nothing");
  wrong({"push", delta_, "--probation", "10"}, "--probation: expected a duration");
  wrong({"push", delta_, "--canary", "2"}, "--canary: expected a number from 0 to 1");
  wrong({"push", delta_, "--canary", "0.5"}, "--canary does nothing without --canary_duration");
  wrong({"activate", "m", "7", "--canary_duration", "1m"},
        "--canary_duration does nothing without --canary");
  wrong({"activate", "m", "7", "--max_error_rate", "0.1", "--golden"},
        "--max_error_rate does nothing without --probation or --canary");
  wrong({"activate", "m", "7", "--max_latency_ratio", "2", "--probation", "0s"},
        "--max_latency_ratio does nothing without");
  wrong({"push", delta_, "--expiry", "25h"}, "--expiry: expected a duration from 1s to 24h");
  wrong({"push", delta_, "--to", "127.0.0.1:1,127.0.0.2:1", "--canary", "0.1", "--canary_duration",
         "150s"},
        "--expiry: the canaries of 2 servers take 5m, nobody has it serve after 5m");
  wrong({"push", delta_, "--resume", std::string(32, '0')}, "--resume goes with");
  wrong({"activate", "m", "zero"}, "expected a version number above zero, got 'zero'");
  wrong({"confirm", "m", "-1"}, "");
  wrong({"rollback", "m", "--to", "0"}, "--to: expected a number from 1");
  wrong({"fetch", "m"}, "--from is missing");
  wrong({"fetch", "../m", "--from", "1"}, "is no model name");
  wrong({"log", "m", "--most", "1001"}, "--most: expected a number from 1 to 1000");
}

TEST_F(UpdateCommandsTest, ANameStandsForAllItsAddressesOfOneFamily) {
  EXPECT_THAT(ResolveServers("127.0.0.1:1,127.0.0.2:1,127.0.0.1:1").value(),
              ElementsAre("127.0.0.1:1", "127.0.0.2:1"));
  EXPECT_THAT(ResolveServers("[::1]:5").value(), ElementsAre("[::1]:5"));
  EXPECT_TRUE(absl::IsUnavailable(ResolveServers("no.such.host.invalid:1").status()));
}

TEST_F(UpdateCommandsTest, FetchedDeltasAreFilesOnlyWhenTheyAreWhole) {
  FakeUpdates service;
  const UpdateServerOf server(service);
  const auto add = [&](int64_t to, const std::string& bytes, uint64_t size, bool digest_fits) {
    v1::FetchDeltasResponse part;
    part.mutable_header()->set_from_version(to - 1);
    part.mutable_header()->set_to_version(to);
    part.mutable_header()->set_bytes(size);
    const auto digest = updates::Sha256Of(digest_fits ? bytes : "other");
    part.mutable_header()->set_sha256(std::string(digest.begin(), digest.end()));
    service.to_fetch.push_back(part);
    part.set_chunk(bytes);
    service.to_fetch.push_back(part);
  };
  const auto fetch = [&] {
    return RunLine({"delta", "fetch", "m", "--from", "1", "-o", folder_, "--url", server.url()});
  };
  add(2, "first", 5, true);
  add(3, "second", 6, true);
  const Outcome fetched = fetch();
  EXPECT_EQ(fetched.code, kExitOk) << fetched.err;
  EXPECT_EQ(ReadFile(At("m-2.espd")).value(), "first");
  EXPECT_EQ(ReadFile(At("m-3.espd")).value(), "second");

  // A file of an earlier fetch is replaced, anything else is left alone.
  fs::remove(At("m-3.espd"));
  fs::create_symlink("precious", At("m-3.espd"));
  ASSERT_TRUE(WriteFile(At("precious"), "precious").ok());
  const Outcome beside_a_link = fetch();
  EXPECT_EQ(beside_a_link.code, kExitFailure);
  EXPECT_THAT(beside_a_link.err, HasSubstr("m-3.espd is there already, and is no regular file"));
  EXPECT_TRUE(fs::is_symlink(At("m-3.espd")));
  EXPECT_EQ(ReadFile(At("precious")).value(), "precious");

  const auto fails = [&](const std::string& text) {
    const Outcome outcome = fetch();
    EXPECT_EQ(outcome.code, kExitFailure);
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_FALSE(fs::exists(At("m-9.espd")));
    service.to_fetch.clear();
  };
  service.to_fetch.clear();
  add(9, "short", 6, true);
  fails("did not arrive as the server said");
  add(9, "changed", 7, false);
  fails("did not arrive as the server said");
  add(9, "too long", 3, true);
  fails("more than the 3 bytes");
  v1::FetchDeltasResponse stray;
  stray.set_chunk("stray");
  service.to_fetch.push_back(stray);
  fails("bytes of no delta");
  EXPECT_THAT(fetch().out, HasSubstr("version 1 is the one that serves"));
}

class FleetTest : public UpdateCommandsTest {
 protected:
  Outcome Push() { return RunLine({"delta", "push", delta_, "--to", Urls()}); }
  Outcome Resume(const std::string& url) {
    diary_.clear();
    return RunLine({"delta", "push", "--resume", Id(), "--to", url});
  }
  std::string Urls() const {
    return absl::StrCat(servers_[0].url(), ",", servers_[1].url(), ",", servers_[2].url());
  }
  std::string Id() const { return fakes_[0].last.id(); }
  v1::TransactionState StateOf(int i) { return fakes_[i].states[fakes_[0].last.id()]; }

  FakeUpdates::Diary diary_;
  FakeUpdates fakes_[3] = {FakeUpdates("0", &diary_), FakeUpdates("1", &diary_),
                           FakeUpdates("2", &diary_)};
  const UpdateServerOf servers_[3] = {UpdateServerOf(fakes_[0]), UpdateServerOf(fakes_[1]),
                                      UpdateServerOf(fakes_[2])};
};

TEST_F(FleetTest, TheFirstServerPreparesBeforeAndCommitsBeforeTheOthers) {
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitOk) << pushed.err;
  ASSERT_EQ(diary_.size(), 6u);
  EXPECT_EQ(diary_[0], "0 prepare");
  EXPECT_EQ(diary_[3], "0 commit");
  EXPECT_THAT(diary_, UnorderedElementsAre("0 prepare", "1 prepare", "2 prepare", "0 commit",
                                           "1 commit", "2 commit"));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(fakes_[i].received, content_);
    EXPECT_EQ(StateOf(i), v1::COMMITTED);
    EXPECT_THAT(pushed.out, HasSubstr(absl::StrCat(servers_[i].url(), ": version 7 of m serves")));
  }
  const v1::Transaction& sent = fakes_[1].last;
  EXPECT_EQ(sent.id().size(), 32u);
  EXPECT_EQ(sent.weights().size(), 32u);
  EXPECT_THAT(sent.participants(),
              ElementsAre(servers_[0].url(), servers_[1].url(), servers_[2].url()));
}

TEST_F(FleetTest, AProbationTravelsToAllAndTheUserIsToldWhereToLook) {
  const Outcome pushed =
      RunLine({"delta", "push", delta_, "--to", Urls(), "--probation", "10m", "--canary", "0.25",
               "--canary_duration", "149s", "--max_error_rate", "0.1", "--golden"});
  EXPECT_EQ(pushed.code, kExitOk) << pushed.err;
  for (int i = 0; i < 3; ++i) {
    const v1::Probation& probation = fakes_[i].last.probation();
    EXPECT_EQ(probation.seconds(), 600);
    EXPECT_EQ(probation.canary_share(), 0.25);
    EXPECT_EQ(probation.canary_seconds(), 149);
    EXPECT_EQ(probation.max_error_rate(), 0.1);
    EXPECT_TRUE(probation.golden_requests());
    EXPECT_THAT(pushed.out, HasSubstr(absl::StrCat(servers_[i].url(),
                                                   ": version 7 of m serves, on probation\n")));
  }
  EXPECT_THAT(pushed.out, HasSubstr(absl::StrCat("delta versions m --url ", Urls())));
  Push();
  EXPECT_FALSE(fakes_[0].last.has_probation()) << "unless it is asked for";
}

TEST_F(FleetTest, AllAbortWhenOneServerWouldPromiseWithoutTheProbation) {
  fakes_[1].knows_probation = false;
  const Outcome pushed = RunLine({"delta", "push", delta_, "--to", Urls(), "--probation", "10m"});
  EXPECT_EQ(pushed.code, kExitFailure);
  EXPECT_THAT(pushed.err, AllOf(HasSubstr(absl::StrCat(servers_[1].url(), ": FAILED_PRECONDITION")),
                                HasSubstr("an older server"), HasSubstr("no server has changed")));
  EXPECT_THAT(diary_, Not(::testing::Contains(EndsWith("commit"))));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(StateOf(i), v1::ABORTED);
  diary_.clear();
  EXPECT_EQ(Push().code, kExitOk) << "without one it takes part";
}

TEST_F(FleetTest, WhoServesItAlreadyHasNothingToDecide) {
  fakes_[0].state = v1::LIVE;
  EXPECT_EQ(Push().code, kExitOk);
  EXPECT_THAT(diary_, ElementsAre("1 prepare", "2 prepare", "1 commit", "2 commit"));
}

TEST_F(FleetTest, NobodyPreparesWhenOneServerDoesNotTakeTheDelta) {
  fakes_[2].fails["push"] = kRefused;
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitFailure);
  EXPECT_THAT(pushed.err, HasSubstr("for another base"));
  EXPECT_THAT(diary_, IsEmpty());
}

TEST_F(FleetTest, AllAbortWhenOneDoesNotPrepare) {
  fakes_[1].fails["prepare"] = kRefused;
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitFailure);
  EXPECT_THAT(pushed.err, HasSubstr("no server has changed"));
  EXPECT_THAT(diary_, ::testing::Contains("0 abort"));
  EXPECT_THAT(diary_, Not(::testing::Contains(EndsWith("commit"))));
  EXPECT_EQ(StateOf(0), v1::ABORTED);
  EXPECT_EQ(StateOf(2), v1::ABORTED);
}

TEST_F(FleetTest, NobodyElseIsAskedWhenTheFirstDoesNotPrepare) {
  fakes_[0].fails["prepare"] = kRefused;
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitFailure);
  EXPECT_THAT(diary_, Not(::testing::Contains("1 prepare")));
  EXPECT_THAT(diary_, Not(::testing::Contains(EndsWith("commit"))));
}

TEST_F(FleetTest, AnUnknownDecisionIsNotGuessedAndResumeFinishesIt) {
  fakes_[0].fails["commit"] = kAway;
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitFailure);
  EXPECT_THAT(pushed.err, AllOf(HasSubstr("whether it has decided is not known"),
                                HasSubstr(absl::StrCat("--resume ", Id()))));
  EXPECT_THAT(diary_, ElementsAre("0 prepare", ::testing::_, ::testing::_, "0 commit fails"));
  fakes_[0].fails.clear();
  const Outcome resumed = Resume(servers_[2].url());  // any of them knows the others
  EXPECT_EQ(resumed.code, kExitOk) << resumed.err;
  EXPECT_EQ(diary_[0], "0 commit");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(StateOf(i), v1::COMMITTED);
}

TEST_F(FleetTest, ADecisionStandsThoughOneServerMissesIt) {
  fakes_[2].fails["commit"] = kAway;
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitFailure);
  EXPECT_THAT(pushed.err, AllOf(HasSubstr("1 of 3 servers missed the decision to commit"),
                                HasSubstr("which stands")));
  EXPECT_EQ(StateOf(1), v1::COMMITTED);
  fakes_[2].fails.clear();
  EXPECT_EQ(Resume(servers_[0].url()).code, kExitOk);
  EXPECT_EQ(StateOf(2), v1::COMMITTED);
}

TEST_F(FleetTest, ResumeAbortsWhatNotAllHavePrepared) {
  fakes_[0].fails["commit"] = kAway;
  Push();
  fakes_[0].fails.clear();
  fakes_[1].states.clear();  // as if the client had died before it was asked
  const Outcome resumed = Resume(servers_[0].url());
  EXPECT_EQ(resumed.code, kExitFailure);
  EXPECT_THAT(resumed.err, HasSubstr("no server has changed"));
  EXPECT_EQ(StateOf(0), v1::ABORTED);
  EXPECT_EQ(StateOf(2), v1::ABORTED);
}

TEST_F(FleetTest, AnExpiredTransactionIsAbortedEverywhere) {
  fakes_[0].fails["commit"] = kAway;
  Push();
  fakes_[0].fails.clear();
  fakes_[0].states[fakes_[0].last.id()] = v1::ABORTED;  // the first did so by itself
  const Outcome resumed = Resume(servers_[1].url());
  EXPECT_EQ(StateOf(1), v1::ABORTED);
  EXPECT_EQ(StateOf(2), v1::ABORTED);
  EXPECT_THAT(diary_, Not(::testing::Contains(EndsWith("commit"))));
}

TEST_F(FleetTest, WhenTheFirstHasLostItTheOthersDecideByWhatTheyHeard) {
  fakes_[0].fails["commit"] = kAway;
  Push();
  const std::string id = fakes_[0].last.id();
  fakes_[0].fails.clear();
  fakes_[0].states.clear();
  fakes_[2].fails["get"] = kAway;
  const Outcome unheard = Resume(servers_[1].url());
  EXPECT_THAT(unheard.err, HasSubstr("without it all others are needed"));
  EXPECT_EQ(fakes_[1].states[id], v1::PREPARED) << "nobody guesses";
  fakes_[2].fails.clear();
  fakes_[2].states[id] = v1::COMMITTED;
  EXPECT_EQ(Resume(servers_[1].url()).code, kExitOk);
  EXPECT_EQ(fakes_[1].states[id], v1::COMMITTED);
}

TEST_F(FleetTest, WhenTheFirstHasLostItAndNobodyHeardOfADecisionAllAbort) {
  fakes_[0].fails["commit"] = kAway;
  Push();
  const std::string id = fakes_[0].last.id();
  fakes_[0].fails.clear();
  fakes_[0].states.clear();
  const Outcome resumed = Resume(servers_[1].url());
  EXPECT_THAT(resumed.err, HasSubstr("no server has changed"));
  EXPECT_EQ(fakes_[1].states[id], v1::ABORTED);
  EXPECT_EQ(fakes_[2].states[id], v1::ABORTED);
}

TEST_F(FleetTest, ATransactionThatNobodyKnowsIsSaidToBeNone) {
  const Outcome resumed =
      RunLine({"delta", "push", "--resume", std::string(32, 'a'), "--to", Urls()});
  EXPECT_EQ(resumed.code, kExitFailure);
  EXPECT_THAT(resumed.err, HasSubstr("no such transaction"));
}

TEST_F(FleetTest, NothingHappensWhenAllServeItAlready) {
  for (FakeUpdates& fake : fakes_) fake.state = v1::LIVE;
  const Outcome pushed = Push();
  EXPECT_EQ(pushed.code, kExitOk);
  EXPECT_THAT(pushed.out, HasSubstr("serves on all 3 servers already"));
  EXPECT_THAT(diary_, IsEmpty());
}

}  // namespace
}  // namespace espalier::cli
