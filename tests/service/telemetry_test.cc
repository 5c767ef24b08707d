#include "service/telemetry.h"

#include "engine/runtime/overload.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::service {
namespace {

TEST(InFlightTest, ARequestAboveTheLimitIsAnOverloadAndTakesNothing) {
  InFlight in_flight({.max_bytes = 100});
  ASSERT_TRUE(in_flight.Enter(1000).ok()) << "one request alone may be as large as it likes";
  in_flight.Leave(1000);
  ASSERT_TRUE(in_flight.Enter(20).ok());
  ASSERT_TRUE(in_flight.Enter(80).ok());
  const absl::Status refused = in_flight.Enter(1);
  EXPECT_TRUE(runtime::IsOverload(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("100 bytes of requests in flight, at most 100 may be, and this "
                                   "request has 1"));
  EXPECT_EQ(in_flight.bytes(), 100);
  EXPECT_EQ(in_flight.requests(), 2);
}

}  // namespace
}  // namespace espalier::service
