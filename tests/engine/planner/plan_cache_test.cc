#include "engine/planner/plan_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/planner/digest.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/planner/fake_table.h"

namespace espalier::planner {
namespace {

using kernels::Layout;

const auto kDense = FakeVariant("dense", Layout::kDense);
const auto kCsr = FakeVariant("csr", Layout::kCsr);

CostTable Measured() { return FakeTable({{&kDense, 1000, {10, 20}}, {&kCsr, 200, {1.5, 2.25}}}); }

CostTable Unmeasured() {
  CostTable table = Measured();
  for (auto& bucket : table.costs) {
    for (Cost& cost : bucket) cost.measured = 0;
  }
  table.options[1].resident_bytes = 7;
  return table;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class PlanCacheTest : public ::testing::Test {
 protected:
  PlanCacheTest() : device_(MakeCpuDevice(1)) {
    std::string pattern = ::testing::TempDir() + "plan_cache_XXXXXX";
    directory_ = std::string(mkdtemp(pattern.data())) + "/plans";
    key_ = Cache().KeyOf("pattern");
    path_ = directory_ + "/" + key_ + ".costs";
    std::filesystem::create_directory(directory_);
  }
  ~PlanCacheTest() override {
    std::filesystem::remove_all(std::filesystem::path(directory_).parent_path());
  }

  PlanCache Cache() const { return PlanCache(directory_, *device_); }
  bool Loads() const {
    CostTable table = Unmeasured();
    return Cache().Load(key_, table).value_or(false);
  }

  std::unique_ptr<Device> device_;
  std::string directory_, key_, path_;
};

TEST_F(PlanCacheTest, InMemoryItKnowsWhatThisProcessMeasured) {
  const PlanCache memory{std::string(kPlansInMemory), *device_};
  const std::string key = memory.KeyOf("a pattern of this test's own");
  CostTable table = Unmeasured();
  EXPECT_FALSE(*memory.Load(key, table));
  ASSERT_TRUE(memory.Store(key, Measured()).ok());
  EXPECT_TRUE(*PlanCache(std::string(kPlansInMemory), *device_).Load(key, table));
  EXPECT_EQ(table.costs[0][1].measured, 1.5);
  EXPECT_FALSE(std::filesystem::exists(std::string(kPlansInMemory)));
  for (int i = 0; i < 2000; ++i)
    ASSERT_TRUE(memory.Store(memory.KeyOf(std::to_string(i)), Measured()).ok());
  EXPECT_FALSE(*memory.Load(key, table)) << "the oldest go first";
  EXPECT_TRUE(*memory.Load(memory.KeyOf("1999"), table));
}

TEST_F(PlanCacheTest, WhatIsStoredIsLoaded) {
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  CostTable table = Unmeasured();
  ASSERT_TRUE(Cache().Load(key_, table).value_or(false));
  EXPECT_EQ(table.costs[1][1].measured, 2.25);
  EXPECT_EQ(table.costs[1][1].micros, 2.25);
  EXPECT_EQ(table.costs[0][0].measured, 10);
  EXPECT_EQ(table.options[1].resident_bytes, 200u);
}

TEST_F(PlanCacheTest, NothingIsFoundWhereNothingWasStored) {
  EXPECT_FALSE(Loads());
  ASSERT_TRUE(Cache().Store(Cache().KeyOf("another pattern"), Measured()).ok());
  EXPECT_FALSE(Loads());
}

TEST_F(PlanCacheTest, OtherTokenCountsAreKeptWhenStoringAgain) {
  CostTable other = Measured();
  other.tokens = {3, 5};
  ASSERT_TRUE(Cache().Store(key_, other).ok());
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  EXPECT_TRUE(Loads());
  CostTable table = Unmeasured();
  table.tokens = {3, 5};
  ASSERT_TRUE(Cache().Load(key_, table).value_or(false));
  EXPECT_EQ(table.costs[1][0].measured, 20);
}

TEST_F(PlanCacheTest, TheKeyNamesPatternDeviceAndBuild) {
  const auto two_threads = MakeCpuDevice(2);
  EXPECT_NE(Cache().KeyOf("a"), Cache().KeyOf("b"));
  EXPECT_NE(Cache().KeyOf("a"), PlanCache(directory_, *two_threads).KeyOf("a"));
  EXPECT_FALSE(BuildId().empty());
}

TEST_F(PlanCacheTest, EveryTruncationIsIgnored) {
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  const std::string text = ReadFile(path_);
  ASSERT_GT(text.size(), 100u);
  for (size_t size = 0; size < text.size(); ++size) {
    WriteFile(path_, text.substr(0, size));
    ASSERT_FALSE(Loads()) << "cut at " << size;
  }
}

TEST_F(PlanCacheTest, EveryFlippedByteIsIgnored) {
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  const std::string text = ReadFile(path_);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] ^= 0x04;
    WriteFile(path_, damaged);
    ASSERT_FALSE(Loads()) << "byte " << i;
  }
}

TEST_F(PlanCacheTest, ANewerFormatIsIgnoredAndReplaced) {
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  std::string body = ReadFile(path_);
  body = body.substr(0, body.rfind("end "));
  body.replace(body.find(" 1\n"), 3, " 2\n");
  WriteFile(path_, body + "end " + Sha256Hex(body) + "\n");
  EXPECT_FALSE(Loads());
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  EXPECT_TRUE(Loads());
}

TEST_F(PlanCacheTest, AnotherLayersFileUnderThisNameIsIgnored) {
  const std::string other = Cache().KeyOf("other");
  ASSERT_TRUE(Cache().Store(other, Measured()).ok());
  std::filesystem::rename(directory_ + "/" + other + ".costs", path_);
  EXPECT_FALSE(Loads());
}

TEST_F(PlanCacheTest, LinesThatMakeNoSenseAreIgnoredEvenWithAGoodChecksum) {
  for (const char* line :
       {"cost csr csr 200 1 -1", "cost csr csr 200 1 inf", "cost csr csr 200 1 nan",
        "cost csr csr -200 1 1", "cost csr csr 200 0 1", "cost nonsense csr 200 1 1",
        "cost csr csr 200 1", "cost csr csr 200 1 1 1", "price csr csr 200 1 1", "",
        "cost csr csr 200 99999999999999999999 1"}) {
    const std::string body = "espalier-layer-costs 1\nkey " + key_ + "\n" + line + "\n";
    WriteFile(path_, body + "end " + Sha256Hex(body) + "\n");
    EXPECT_FALSE(Loads()) << line;
  }
}

TEST_F(PlanCacheTest, CostsOfKernelsThatAreGoneAreNotUsed) {
  const std::string body =
      "espalier-layer-costs 1\nkey " + key_ + "\ncost csr kernel_of_last_year 200 1 0.5\n";
  WriteFile(path_, body + "end " + Sha256Hex(body) + "\n");
  EXPECT_FALSE(Loads());
}

TEST_F(PlanCacheTest, AHugeFileIsNotRead) {
  WriteFile(path_, "espalier-layer-costs 1\n");
  std::filesystem::resize_file(path_, uintmax_t{1} << 40);
  EXPECT_FALSE(Loads());
}

TEST_F(PlanCacheTest, APipeUnderTheNameDoesNotBlock) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_FALSE(Loads());
}

TEST_F(PlanCacheTest, AFileThatIsIgnoredIsNamedWithTheReason) {
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  WriteFile(path_, "garbage");
  CostTable table = Unmeasured();
  const absl::Status status = Cache().Load(key_, table).status();
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::HasSubstr(path_),
                               ::testing::HasSubstr("not a file of layer costs")));
}

TEST_F(PlanCacheTest, ADirectoryThatCannotBeWrittenIsAnErrorThatNamesIt) {
  const PlanCache cache("/proc/nowhere/plans", *device_);
  EXPECT_THAT(std::string(cache.Store(key_, Measured()).message()),
              ::testing::HasSubstr("cannot create /proc/nowhere/plans"));
  CostTable table = Unmeasured();
  EXPECT_FALSE(cache.Load(key_, table).value_or(true));
}

TEST_F(PlanCacheTest, TheDirectoryIsMadeWhenThereIsSomethingToStore) {
  std::filesystem::remove(directory_);
  EXPECT_FALSE(Loads());
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  EXPECT_TRUE(Loads());
}

TEST_F(PlanCacheTest, NoTemporaryFilesStayBehind) {
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  ASSERT_TRUE(Cache().Store(key_, Measured()).ok());
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory_))
    files += entry.is_regular_file();
  EXPECT_EQ(files, 1);
}

TEST(DigestTest, ThePatternCountsAndNotTheValues) {
  const auto tensor = [](std::vector<float> values, Shape shape = {2, 3}) {
    Tensor t = *Tensor::Allocate(DType::kFloat32, shape);
    std::copy(values.begin(), values.end(), t.As<float>());
    return t;
  };
  const std::string digest = PatternDigest(tensor({0, 1, 2, 0, 0, 3}).view());
  EXPECT_EQ(digest, PatternDigest(tensor({-0.0f, -5, 1e-40f, 0, 0, INFINITY}).view()));
  EXPECT_NE(digest, PatternDigest(tensor({1, 0, 2, 0, 0, 3}).view()));
  EXPECT_NE(digest, PatternDigest(tensor({0, 1, 2, 0, 0, 3}, {3, 2}).view()));
  EXPECT_NE(digest,
            PatternDigest(Convert(tensor({0, 1, 2, 0, 0, 3}).view(), DType::kBFloat16)->view()));
}

TEST(DigestTest, Sha256IsThatOfTheStandard) {
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace espalier::planner
