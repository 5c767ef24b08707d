#include "engine/runtime/repository.h"

#include "engine/runtime/state_dir.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"

namespace espalier::runtime {
namespace {

using espalier::testing::TemporaryDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(RepositoryTest, AVersionIsAnIntegerAboveZeroWithoutLeadingZeros) {
  EXPECT_EQ(ParseVersion("1"), 1);
  EXPECT_EQ(ParseVersion("9223372036854775807"), INT64_MAX);
  for (const char* bad :
       {"", "0", "01", "-1", "+1", " 1", "1 ", "1.0", "x", "9223372036854775808", "1e3"}) {
    EXPECT_EQ(ParseVersion(bad), std::nullopt) << bad;
  }
}

TEST(RepositoryTest, AModelNameCannotBeAPath) {
  EXPECT_TRUE(IsModelName("mnist-mlp_v2.1"));
  for (const char* bad : {"", ".", "..", ".hidden", "a/b", "a\\b", "a\nb", "a\"b", "\xc3\xa4"}) {
    EXPECT_FALSE(IsModelName(bad)) << bad;
  }
  EXPECT_FALSE(IsModelName(std::string(256, 'a')));
}

TEST(RepositoryTest, AScanFindsModelsAndTheirVersionsAndNothingElse) {
  TemporaryDirectory repository;
  for (const char* path : {"b/10", "b/9", "b/007", "b/0", "b/x", "a", ".git/1", "c d/1"})
    repository.MakeDirectory(path);
  repository.Write("README.md", "not a model");
  repository.Write("b/3", "a file, not a version");
  auto models = ScanRepository(repository.path());
  ASSERT_TRUE(models.ok());
  ASSERT_EQ(models->size(), 3u);
  EXPECT_EQ((*models)[0].name, "a");
  EXPECT_THAT((*models)[0].versions, IsEmpty());
  EXPECT_EQ((*models)[1].name, "b");
  EXPECT_THAT((*models)[1].versions, ElementsAre(9, 10));
  EXPECT_EQ((*models)[2].name, "c d");
}

TEST(RepositoryTest, AMissingRepositoryIsNamed) {
  auto models = ScanRepository("/nonexistent/models");
  EXPECT_EQ(models.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(models.status().message()), HasSubstr("/nonexistent/models"));
}

TEST(RepositoryTest, VersionPoliciesSelectLatestAllOrSpecific) {
  const std::vector<int64_t> available = {1, 2, 5};
  inference::ModelVersionPolicy policy;
  EXPECT_THAT(SelectVersions(policy, available), ElementsAre(5));
  EXPECT_THAT(SelectVersions(policy, {}), IsEmpty());
  policy.mutable_latest()->set_num_versions(2);
  EXPECT_THAT(SelectVersions(policy, available), ElementsAre(2, 5));
  policy.mutable_latest()->set_num_versions(9);
  EXPECT_THAT(SelectVersions(policy, available), ElementsAre(1, 2, 5));
  policy.mutable_all();
  EXPECT_THAT(SelectVersions(policy, available), ElementsAre(1, 2, 5));
  policy.mutable_specific()->add_versions(7);
  policy.mutable_specific()->add_versions(1);
  EXPECT_THAT(SelectVersions(policy, available), ElementsAre(1, 7));
}

TEST(StateDirTest, HasOneOwnerAndNamesIt) {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/deep/state";
  auto first = StateDir::Open(path);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(std::filesystem::is_directory((*first)->plans()));
  auto second = StateDir::Open(path);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(getpid())));
  first->reset();
  EXPECT_TRUE(StateDir::Open(path).ok());
}

TEST(StateDirTest, PlansThatAreAFileAreNotKeptAndStopNobody) {
  TemporaryDirectory directory;
  directory.Write("plans", "");
  auto state = StateDir::Open(directory.path());
  ASSERT_TRUE(state.ok());
  EXPECT_EQ((*state)->plans(), "");
}

TEST(StateDirTest, APathThatIsAFileIsRefused) {
  TemporaryDirectory directory;
  directory.Write("state", "");
  EXPECT_EQ(StateDir::Open(directory.path() + "/state").status().code(),
            absl::StatusCode::kPermissionDenied);
}

}  // namespace
}  // namespace espalier::runtime
