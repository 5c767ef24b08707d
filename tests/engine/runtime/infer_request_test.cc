// What a request may do with its results, and what it is told about its execution.
#include "engine/runtime/infer_request.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"
#include "tests/engine/runtime/test_request.h"

namespace espalier::runtime {
namespace {

using espalier::testing::FakeModel;
using espalier::testing::FakeModelOptions;
using espalier::testing::TestRequest;

VersionHandle Serve() {
  inference::ModelConfig config;
  config.set_max_batch_size(8);
  auto version = ServedVersion::Create({.name = "m",
                                        .version = 1,
                                        .config = std::move(config),
                                        .model = std::make_unique<FakeModel>(FakeModelOptions()),
                                        .latency = std::make_shared<ModelLatency>()});
  EXPECT_TRUE(version.ok()) << version.status();
  return VersionHandle(std::move(*version));
}

// Takes its results itself, or says why it cannot.
class OwnResults final : public TestRequest {
 public:
  using TestRequest::TestRequest;
  absl::Status TakeOutputs(absl::Span<const std::byte* const> from) override {
    taken.resize(outputs[0].bytes / sizeof(float));
    std::memcpy(taken.data(), from[0], outputs[0].bytes);
    return outcome;
  }
  absl::Status outcome;
  std::vector<float> taken;
};

TEST(InferRequestTest, ARequestMayTakeItsResultsItself) {
  const VersionHandle version = Serve();
  OwnResults request(2, 1);
  request.Submit(version);
  ASSERT_TRUE(request.status().ok());
  EXPECT_THAT(request.taken, ::testing::ElementsAre(2, 4, 6, 8, 10, 12, 14, 16));
}

TEST(InferRequestTest, ResultsThatCannotBeTakenFailTheRequestAndAreCountedSo) {
  const VersionHandle version = Serve();
  OwnResults request(1);
  request.outcome = absl::InvalidArgumentError("the region has shrunk");
  request.Submit(version);
  EXPECT_EQ(request.status(), request.outcome);
  EXPECT_EQ(version->statistics().failure.count, 1u);
  EXPECT_EQ(version->statistics().success.count, 0u);
}

TEST(InferRequestTest, OnlyAnExecutedRequestHasPhases) {
  const VersionHandle version = Serve();
  TestRequest good(1);
  good.Submit(version);
  ASSERT_TRUE(good.status().ok());
  EXPECT_TRUE(good.executed);
  for (const int64_t nanos : good.phases) EXPECT_GT(nanos, 0);
  TestRequest bad(9);
  bad.Submit(version);
  ASSERT_FALSE(bad.status().ok());
  EXPECT_FALSE(bad.executed);
}

}  // namespace
}  // namespace espalier::runtime
