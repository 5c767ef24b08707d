// Deltas of every format version stay readable, in every mode, whatever the encoder does since. The files are in tests/data/updates; README.md there says how they were made.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/updates/apply_delta.h"
#include "engine/updates/create_delta.h"
#include "engine/updates/journal.h"
#include "engine/updates/weight_digest.h"
#include "tests/engine/formats/onnx_builder.h"
#include "tests/engine/updates/journals.h"

namespace espalier::updates {
namespace {

namespace fs = std::filesystem;

const std::string kFolder = "tests/data/updates";

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct Golden {
  const char* name;
  uint8_t modes;  // that it was made with
  int uses;       // of these the one that is in it
};

void PrintTo(const Golden& golden, std::ostream* out) { *out << golden.name; }

class GoldenTest : public ::testing::TestWithParam<Golden> {};

TEST_P(GoldenTest, IsReadAndAppliedByteForByte) {
  const std::string path = kFolder + "/" + GetParam().name + ".espd";
  const auto base = Checkpoint::Open(kFolder + "/base.safetensors");
  ASSERT_TRUE(base.ok()) << base.status();
  // To make those of the newest format, before it is released: into a folder that is then committed.
  const char* into = std::getenv("ESPALIER_WRITE_GOLDEN");
  if (into != nullptr && absl::StartsWith(GetParam().name, absl::StrCat("v", kFormatVersion))) {
    CreateOptions options;
    options.model = "golden";
    options.base_version = 1;
    options.target_version = options.sequence = 2;
    options.created_seconds = 1'800'000'000;
    options.keys = {PrivateKey::FromPem(Contents(std::string(into) + "/golden.key")).value()};
    options.weights.encode.modes = GetParam().modes;
    const auto target = Checkpoint::Open(kFolder + "/target.safetensors");
    ASSERT_TRUE(
        CreateDelta(**base, **target, std::string(into) + "/" + GetParam().name + ".espd", options)
            .ok());
  }
  const auto delta =
      DeltaFile::Open(std::make_shared<FileSource>(formats::RegularFile::Open(path).value()));
  ASSERT_TRUE(delta.ok()) << delta.status();

  ReceivePolicy policy;
  policy.trust.emplace();
  for (const char* key :
       {"/golden.pub", "/golden_mixed.pub", "/golden_counted.pub", "/golden_v2.pub"})
    policy.trust->keys.push_back(PublicKey::FromPem(Contents(kFolder + key)).value());
  policy.model = "golden";
  policy.now_seconds = 1'800'000'000;
  const auto journal = testing::ReceiveJournal(*delta, **base, policy);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_GT(journal->entries(), 200);

  bool used = false;
  const std::vector<RecordRef> records = delta->Records().value();
  for (const RecordRef& record : records) {
    int modes[kEventKinds];
    ASSERT_TRUE(ReadModes(delta->Read(record).value(), delta->FormOf(record.tensor), modes).ok());
    for (const int mode : modes) used |= mode == GetParam().uses;
  }
  EXPECT_TRUE(used);

  const espalier::testing::TemporaryFolder folder;
  const std::string out = folder.path() + "/out.safetensors";
  const auto status = ApplyDelta(**base, *delta, out);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Contents(out), Contents(kFolder + "/target.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(
    Format1, GoldenTest,
    ::testing::Values(Golden{"v1_raw", 1, 0}, Golden{"v1_zstd", 2, 1}, Golden{"v1_range", 4, 2},
                      Golden{"v1_class_range", 12, 3}, Golden{"v1_smallest", 15, 3},
                      Golden{"v1_mixed", 16 + 1, 4}, Golden{"v1_mixed_repeats", 32 + 1, 5},
                      Golden{"v1_counted", 64 + 1, 6}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Format2, GoldenTest,
    ::testing::Values(Golden{"v2_raw", 1, 0}, Golden{"v2_zstd", 2, 1}, Golden{"v2_range", 4, 2},
                      Golden{"v2_class_range", 12, 3}, Golden{"v2_smallest", 255, 3},
                      Golden{"v2_mixed", 16 + 1, 4}, Golden{"v2_mixed_repeats", 32 + 1, 5},
                      Golden{"v2_counted", 64 + 1, 6}, Golden{"v2_threshold", 128 + 1, 7}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace espalier::updates
