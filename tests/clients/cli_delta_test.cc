// The delta commands from the command line: what they print, and the exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "clients/cli/command.h"
#include "clients/cli/file.h"
#include "tests/clients/run_line.h"

namespace espalier::cli {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class DeltaCommandsTest : public ::testing::Test {
 protected:
  DeltaCommandsTest() {
    fs::create_directories(folder_);
    for (const auto& [name, value] : {std::pair("a", '\x3f'), std::pair("b", '\x40')}) {
      // w F32 [3] = {x, 0, x}
      const std::string json = R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})";
      std::string file(1, static_cast<char>(json.size()));
      file += std::string(7, '\0') + json;
      for (const char high : {value, '\0', value}) file += std::string(3, '\0') + high;
      EXPECT_TRUE(WriteFile(At(absl::StrCat(name, ".safetensors")), file).ok());
    }
  }
  ~DeltaCommandsTest() override { fs::remove_all(folder_); }
  std::string At(const std::string& name) const { return folder_ + "/" + name; }
  Outcome Create(std::vector<std::string> more = {}) {
    std::vector<std::string> line = {
        "delta", "create",      At("a.safetensors"), At("b.safetensors"),
        "-o",    At("ab.espd"), "--model",           "m"};
    line.insert(line.end(), more.begin(), more.end());
    return RunLine(line);
  }

  std::string folder_ = absl::StrCat(::testing::TempDir(), "/delta_commands_", getpid());
};

TEST_F(DeltaCommandsTest, ADeltaGoesFromKeygenToTheNextCheckpoint) {
  ASSERT_EQ(RunLine({"keygen", At("k")}).code, kExitOk);
  struct stat info;
  ASSERT_EQ(stat(At("k.key").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const Outcome again = RunLine({"keygen", At("k")});
  EXPECT_EQ(again.code, kExitFailure);
  EXPECT_THAT(again.err, HasSubstr("exists already"));

  const Outcome created = Create({"--key", At("k.key"), "--base_version", "6", "--version", "9"});
  EXPECT_EQ(created.code, kExitOk) << created.err;
  EXPECT_THAT(created.out,
              HasSubstr("for 2 changed of 12 bytes weights in 1 tensors (version 6 to 9"));
  const Outcome shown = RunLine({"delta", "show", At("ab.espd")});
  EXPECT_THAT(shown.out, HasSubstr("changes     2 values, 0 dropped"));
  EXPECT_THAT(shown.out, HasSubstr("w       F32"));
  EXPECT_THAT(RunLine({"delta", "show", At("ab.espd"), "--json"}).out, HasSubstr("\"changes\": 2"));
  const Outcome verified = RunLine(
      {"delta", "verify", At("ab.espd"), "--trust", At("k.pub"), "--base", At("a.safetensors")});
  EXPECT_EQ(verified.code, kExitOk) << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("target: the delta leads to the weights"));
  const Outcome wrong = RunLine({"delta", "verify", At("ab.espd"), "--base", At("b.safetensors")});
  EXPECT_EQ(wrong.code, kExitFailure);
  EXPECT_THAT(wrong.err, HasSubstr("applied already"));

  const Outcome applied = RunLine({"delta", "apply", At("a.safetensors"), At("ab.espd"), "-o",
                                   At("c.safetensors"), "--trust", At("k.pub")});
  EXPECT_EQ(applied.code, kExitOk) << applied.err;
  EXPECT_EQ(ReadFile(At("c.safetensors")).value(), ReadFile(At("b.safetensors")).value());
}

TEST_F(DeltaCommandsTest, UnsignedAndExpiringDeltasSaySo) {
  const Outcome created = Create({"--expires", "36h"});
  EXPECT_EQ(created.code, kExitOk);
  EXPECT_THAT(created.err, HasSubstr("is not signed"));
  EXPECT_THAT(RunLine({"delta", "show", At("ab.espd")}).out, Not(HasSubstr("expires     never")));
  ASSERT_EQ(RunLine({"keygen", At("k")}).code, kExitOk);
  const Outcome refused = RunLine({"delta", "apply", At("a.safetensors"), At("ab.espd"), "-o",
                                   At("c.safetensors"), "--trust", At("k.pub")});
  EXPECT_EQ(refused.code, kExitFailure);
  EXPECT_THAT(refused.err, HasSubstr("signed by 0 of the 1 trusted keys"));
  EXPECT_FALSE(fs::exists(At("c.safetensors")));
}

TEST_F(DeltaCommandsTest, AChainIsComposed) {
  ASSERT_EQ(Create().code, kExitOk);
  ASSERT_EQ(RunLine({"delta", "create", At("b.safetensors"), At("a.safetensors"), "--output",
                     At("ba.espd"), "--model", "m", "--base_version", "1"})
                .code,
            kExitOk);
  const Outcome composed = RunLine(
      {"delta", "compose", At("a.safetensors"), At("ab.espd"), At("ba.espd"), "-o", At("aa.espd")});
  EXPECT_EQ(composed.code, kExitOk) << composed.err;
  EXPECT_THAT(composed.out, HasSubstr("for 0 changed"));
  EXPECT_THAT(composed.out, HasSubstr("(version 0 to 2"));
}

TEST_F(DeltaCommandsTest, MistakesSayWhatToDo) {
  EXPECT_EQ(RunLine({"delta"}).code, kExitUsage);
  EXPECT_THAT(RunLine({"delta", "shwo"}).err, HasSubstr("did you mean 'delta show'?"));
  EXPECT_EQ(RunLine({"delta", "--help"}).code, kExitOk);
  const Outcome no_output = RunLine({"delta", "create", At("a.safetensors"), At("b.safetensors")});
  EXPECT_EQ(no_output.code, kExitUsage);
  EXPECT_THAT(no_output.err, HasSubstr("--output is missing"));
  EXPECT_EQ(Create({"--expires", "soon"}).code, kExitUsage);
  EXPECT_EQ(Create({"-x", "1"}).code, kExitUsage);
  EXPECT_EQ(Create({"--version", "3", "--base_version", "3"}).code, kExitUsage);
  EXPECT_THAT(Create({"--key", At("a.safetensors")}).err, HasSubstr("not a private key"));
  EXPECT_EQ(Create({"--key", At("missing")}).code, kExitFailure);
  EXPECT_THAT(RunLine({"delta", "show", At("a.safetensors")}).err, HasSubstr("is no delta"));
}

TEST_F(DeltaCommandsTest, NothingButAFormerDeltaIsReplaced) {
  ASSERT_TRUE(WriteFile(At("kept"), "precious").ok());
  fs::create_symlink("kept", At("link"));
  fs::create_symlink("nowhere", At("dangling"));
  ASSERT_EQ(Create().code, kExitOk);  // makes ab.espd
  ASSERT_EQ(Create().code, kExitOk) << "again, as a trainer does";
  ASSERT_EQ(RunLine({"delta", "create", At("b.safetensors"), At("a.safetensors"), "-o",
                     At("ba.espd"), "--model", "m", "--base_version", "1"})
                .code,
            kExitOk);
  const auto expect_refused = [&](const std::vector<std::string>& line, const char* why) {
    const Outcome refused = RunLine(line);
    EXPECT_EQ(refused.code, kExitFailure) << line[1] << " " << line.back();
    EXPECT_THAT(refused.err, HasSubstr(why));
  };
  for (const char* name : {"link", "dangling", "/dev/null"}) {
    const std::string out = name[0] == '/' ? name : At(name);
    const std::vector<std::vector<std::string>> lines = {
        {"delta", "create", At("a.safetensors"), At("b.safetensors"), "-o", out},
        {"delta", "apply", At("a.safetensors"), At("ab.espd"), "-o", out},
        {"delta", "compose", At("a.safetensors"), At("ab.espd"), At("ba.espd"), "-o", out}};
    for (const auto& line : lines) expect_refused(line, "is no regular file");
  }
  expect_refused({"delta", "apply", At("a.safetensors"), At("ab.espd"), "-o", At("kept")},
                 "exists already");
  EXPECT_EQ(ReadFile(At("kept")).value(), "precious");
  EXPECT_TRUE(fs::is_symlink(At("link")) && fs::is_symlink(At("dangling")));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  ASSERT_TRUE(WriteFile(At("k.pub"), "another's").ok());
  EXPECT_EQ(RunLine({"keygen", At("k")}).code, kExitFailure);
  EXPECT_FALSE(fs::exists(At("k.key"))) << "of a pair both files are made, or none";
}

TEST_F(DeltaCommandsTest, ADeltaThatNobodyCouldReadIsNotLeftBehind) {
  ASSERT_EQ(RunLine({"keygen", At("k")}).code, kExitOk);
  const Outcome twice = Create({"--key", At("k.key"), "--key", At("k.key")});
  EXPECT_EQ(twice.code, kExitFailure);
  EXPECT_THAT(twice.err, HasSubstr("is given twice"));
  EXPECT_FALSE(fs::exists(At("ab.espd")));
  EXPECT_EQ(RunLine({"delta", "create", At("a.safetensors"), At("b.safetensors"), "-o",
                     At("ab.espd"), "--model", "a\nb"})
                .code,
            kExitFailure);
  EXPECT_FALSE(fs::exists(At("ab.espd")));
}

}  // namespace
}  // namespace espalier::cli
