#include "engine/runtime/log.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

namespace espalier::runtime {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What a line of every level writes to stderr, through LogEvent and through spdlog itself.
std::string Written() {
  ::testing::internal::CaptureStderr();
  LogEvent(spdlog::level::trace, "a trace", {{"n", 1}});
  LogEvent(spdlog::level::debug, "a detail", {{"n", 1}});
  LogEvent(spdlog::level::info, "an event", {{"n", 1}});
  LogEvent(spdlog::level::warn, "a warning", {{"n", 1}});
  LogEvent(spdlog::level::err, "an error", {{"n", 1}});
  spdlog::debug("plain detail");
  spdlog::info("plain event");
  spdlog::warn("plain warning");
  return ::testing::internal::GetCapturedStderr();
}

TEST(LogTest, EveryKindOfLineIsTurnedOnAndOffByItself) {
  SetLogSettings({});
  std::string text = Written();
  for (const char* there : {"an event n=1", "a warning", "an error", "plain event"})
    EXPECT_THAT(text, HasSubstr(there));
  EXPECT_THAT(text, Not(HasSubstr("detail")));
  SetLogSettings({.verbose_level = 1, .info = false});
  text = Written();
  for (const char* there : {"a detail", "a warning", "an error", "plain detail", "plain warning"})
    EXPECT_THAT(text, HasSubstr(there));
  for (const char* gone : {"event", "a trace"}) EXPECT_THAT(text, Not(HasSubstr(gone)));
  EXPECT_FALSE(LogEnabled(spdlog::level::info));
  EXPECT_TRUE(LogEnabled(spdlog::level::debug));
  SetLogSettings({.verbose_level = 2, .warning = false, .error = false});
  text = Written();
  EXPECT_THAT(text, HasSubstr("a trace"));
  for (const char* gone : {"warning", "error"}) EXPECT_THAT(text, Not(HasSubstr(gone)));
  SetLogSettings({.info = false, .warning = false, .error = false});
  EXPECT_EQ(Written(), "");
  SetLogSettings({});
}

TEST(LogTest, TheFormatChangesWhileRunning) {
  SetLogSettings({.format = LogFormat::kJson});
  EXPECT_THAT(Written(), HasSubstr("\"event\":\"an event\",\"n\":1}"));
  EXPECT_EQ(GetLogSettings().format, LogFormat::kJson);
  SetLogSettings({});
  EXPECT_THAT(Written(), HasSubstr("an event n=1"));
}

TEST(LogTest, ALowestLevelIsASetOfSettings) {
  ConfigureLogging(LogFormat::kText, spdlog::level::trace);
  EXPECT_EQ(GetLogSettings().verbose_level, 2);
  ConfigureLogging(LogFormat::kText, spdlog::level::warn);
  EXPECT_FALSE(GetLogSettings().info);
  EXPECT_TRUE(GetLogSettings().warning);
  ConfigureLogging(LogFormat::kText, spdlog::level::off);
  EXPECT_FALSE(GetLogSettings().error);
  ConfigureLogging(LogFormat::kText, spdlog::level::info);
  EXPECT_TRUE(GetLogSettings().info);
  EXPECT_EQ(GetLogSettings().verbose_level, 0);
}

}  // namespace
}  // namespace espalier::runtime
