#include "service/update_access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "service/listen_address.h"

namespace espalier::service {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class UpdateAccessTest : public ::testing::Test {
 protected:
  UpdateAccessTest() { fs::create_directories(folder_); }
  ~UpdateAccessTest() override { fs::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& content) const {
    const std::string path = folder_ + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  std::string WriteKey(const std::string& name) const {
    return Write(name, updates::PrivateKey::Generate()->Public()->ToPem().value());
  }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/update_access_", getpid());
};

TEST_F(UpdateAccessTest, OnlyTheTokenItselfOpensTheDoor) {
  const auto token = AccessToken::Read(Write("token", " \n0123456789abcdef\r\n"));
  ASSERT_TRUE(token.ok()) << token.status();
  EXPECT_TRUE(token->required());
  EXPECT_TRUE(token->Check("Bearer 0123456789abcdef").ok());
  EXPECT_THAT(token->Check("").message(), HasSubstr("no token"));
  for (const char* wrong :
       {"Bearer 0123456789abcdeg", "Bearer 0123456789abcde", "Bearer 0123456789abcdef0",
        "0123456789abcdef", "bearer 0123456789abcdef", "Bearer  0123456789abcdef", "Bearer ",
        "Basic 0123456789abcdef", "Bearer 1123456789abcdef"}) {
    EXPECT_TRUE(absl::IsUnauthenticated(token->Check(wrong))) << wrong;
  }
}

TEST_F(UpdateAccessTest, WithoutATokenEverybodyMayIn) {
  EXPECT_FALSE(AccessToken().required());
  EXPECT_TRUE(AccessToken().Check("").ok());
  EXPECT_TRUE(AccessToken().Check("Bearer anything").ok());
}

TEST_F(UpdateAccessTest, FilesThatHoldNoTokenSayWhatIsExpected) {
  for (const auto& [name, content] : std::initializer_list<std::pair<const char*, std::string>>{
           {"empty", ""},
           {"short", "0123456789abcde"},
           {"two", "0123456789abcdef 0123456789abcdef"},
           {"binary", std::string("0123456789abcdef\0x", 18)},
           {"umlaut", "0123456789abcdefä"},
           {"long", std::string(1025, 'x')}}) {
    const auto token = AccessToken::Read(Write(name, content));
    EXPECT_THAT(token.status().message(), HasSubstr("16 to 1024 printable")) << name;
    EXPECT_TRUE(absl::IsInvalidArgument(token.status())) << name;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(
      AccessToken::Read(Write("huge", std::string(100'000, 'x'))).status()));
  EXPECT_TRUE(absl::IsNotFound(AccessToken::Read(folder_ + "/none").status()));
  EXPECT_FALSE(AccessToken::Read(folder_).ok());
}

TEST_F(UpdateAccessTest, KeysComeFromFilesAndFromTheKeyFilesOfDirectories) {
  const std::string one = WriteKey("one.pub");
  WriteKey("more/two.pub");
  WriteKey("more/three.pem");
  Write("more/notes.txt", "not a key");
  Write("more/.hidden.pub", "not a key");
  const auto policy = ReadTrust({one, folder_ + "/more"}, 2);
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->keys.size(), 3u);
  EXPECT_EQ(policy->threshold, 2);
}

TEST_F(UpdateAccessTest, KeysThatAreNoneAreNamed) {
  const std::string one = WriteKey("one.pub");
  EXPECT_THAT(ReadTrust({one, one}, 1).status().message(), HasSubstr("twice"));
  EXPECT_THAT(ReadTrust({one}, 2).status().message(), HasSubstr("threshold"));
  EXPECT_THAT(ReadTrust({Write("bad.pub", "no key")}, 1).status().message(), HasSubstr("bad.pub"));
  const std::string secret = Write("secret.pem", updates::PrivateKey::Generate()->ToPem().value());
  EXPECT_THAT(ReadTrust({secret}, 1).status().message(), HasSubstr("secret.pem"));
  fs::create_directories(folder_ + "/none");
  EXPECT_THAT(ReadTrust({folder_ + "/none"}, 1).status().message(), HasSubstr("no *.pub"));
  EXPECT_TRUE(absl::IsNotFound(ReadTrust({folder_ + "/gone"}, 1).status()));
}

TEST(ListenAddressTest, OnlyTheLoopbackIsLoopback) {
  for (const char* address : {"127.0.0.1:1", "127.9.9.9:0", "[::1]:5"})
    EXPECT_TRUE(IsLoopback(address)) << address;
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "[fe80::1]:1",
                              "[::ffff:127.0.0.1]:1", "no.such.host.invalid:1"}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

}  // namespace
}  // namespace espalier::service
