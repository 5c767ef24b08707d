#include "service/telemetry.h"

#include "engine/runtime/overload.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::service {
namespace {

TEST(InFlightTest, ARequestThatGrowsAboveTheLimitIsAnOverloadAndKeepsWhatItHad) {
  InFlight in_flight({.max_bytes = 100});
  ASSERT_TRUE(in_flight.Enter(10).ok());
  EXPECT_TRUE(in_flight.Grow(1000).ok()) << "one request alone may be as large as it likes";
  in_flight.Leave(1010);
  ASSERT_TRUE(in_flight.Enter(10).ok());
  ASSERT_TRUE(in_flight.Enter(10).ok());
  EXPECT_TRUE(in_flight.Grow(80).ok());
  const absl::Status refused = in_flight.Grow(1);
  EXPECT_TRUE(runtime::IsOverload(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("100 bytes of requests in flight, at most 100 may be, and this "
                                   "input has 1"));
  EXPECT_EQ(in_flight.bytes(), 100);
  EXPECT_EQ(in_flight.requests(), 2);
}

TEST(InFlightTest, WithoutALimitEverythingGrows) {
  InFlight in_flight({});
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(in_flight.Enter(1).ok());
  EXPECT_TRUE(in_flight.Grow(int64_t{1} << 50).ok());
}

}  // namespace
}  // namespace espalier::service
