#include "engine/runtime/placement.h"

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_cuda.h"

namespace espalier::runtime {
namespace {

using espalier::testing::FakeCuda;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

inference::ModelConfig Config(const std::string& text) {
  inference::ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return config;
}

Devices Machine(int gpus) {
  FakeCuda::Reset().devices = gpus;
  auto devices = OpenDevices({.threads = 1}, FakeCuda::Module());
  EXPECT_TRUE(devices.ok());
  return *std::move(devices);
}

std::vector<int> Gpus(const std::string& config, const Devices& devices) {
  auto placement = PlaceInstances(Config(config), devices);
  EXPECT_TRUE(placement.ok()) << placement.status();
  return placement.ok() ? placement->gpus : std::vector<int>{-1};
}

std::string Refusal(const std::string& config, const Devices& devices) {
  return std::string(PlaceInstances(Config(config), devices).status().message());
}

TEST(PlacementTest, WithoutAGroupEveryGpuGetsTwoInstancesAndACpuMachineItsOwn) {
  EXPECT_THAT(Gpus("", Machine(1)), ElementsAre(0, 0));
  EXPECT_THAT(Gpus("", Machine(2)), ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(Gpus("", Machine(0)), IsEmpty());
}

TEST(PlacementTest, AGroupNamesGpusOrMeansAll) {
  const Devices two = Machine(2);
  EXPECT_THAT(Gpus("instance_group { kind: KIND_GPU count: 2 gpus: 1 }", two), ElementsAre(1, 1));
  EXPECT_THAT(Gpus("instance_group { kind: KIND_GPU }", two), ElementsAre(0, 1));
  EXPECT_THAT(Gpus("instance_group { count: 1 }", two), ElementsAre(0, 1));
  EXPECT_THAT(
      Gpus("instance_group { kind: KIND_GPU gpus: [0, 1] } instance_group { gpus: 0 }", two),
      ElementsAre(0, 1, 0));
  EXPECT_THAT(Gpus("instance_group { kind: KIND_CPU count: 3 }", two), IsEmpty());
}

TEST(PlacementTest, AGpuThatIsDemandedAndNotThereIsRefusedWithTheReason) {
  EXPECT_THAT(Refusal("instance_group { kind: KIND_GPU }", Machine(0)),
              AllOf(HasSubstr("demands a GPU"), HasSubstr("the driver lists none"),
                    HasSubstr("KIND_AUTO")));
  EXPECT_THAT(Refusal("instance_group { gpus: 0 }", Machine(0)), HasSubstr("demands a GPU"));
  EXPECT_THAT(Refusal("instance_group { gpus: [0, 2] }", Machine(2)),
              AllOf(HasSubstr("names GPU 2"), HasSubstr("has 2 usable")));
}

TEST(PlacementTest, OneModelRunsOnOneKindOfDevice) {
  EXPECT_THAT(
      Refusal("instance_group { kind: KIND_GPU } instance_group { kind: KIND_CPU }", Machine(1)),
      HasSubstr("on the CPU and on a GPU"));
  EXPECT_THAT(
      Gpus("instance_group { kind: KIND_AUTO } instance_group { kind: KIND_CPU }", Machine(1)),
      IsEmpty());
}

}  // namespace
}  // namespace espalier::runtime
