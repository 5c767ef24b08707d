#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/args.h"

namespace espalier::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const CommandSpec& Spec() {
  static const auto* const spec = new CommandSpec{
      .name = "try",
      .summary = "a command for tests",
      .arguments = "MODEL",
      .min_positional = 1,
      .max_positional = 1,
      .flags = {{"batch", "1,8", "Sizes."},
                {"input", "FILE", "A file.", true},
                {"json", "", "Print JSON."},
                {"weight_memory", "MODE", "Mode."}},
      .details = "Example:\n  espalier try m",
  };
  return *spec;
}

absl::StatusOr<Args> Parse(std::vector<const char*> arguments) {
  return Args::Parse(Spec(), arguments);
}

std::string ErrorOf(std::vector<const char*> arguments) {
  absl::StatusOr<Args> args = Parse(std::move(arguments));
  EXPECT_TRUE(IsWrongUsage(args.status()));
  return std::string(args.status().message());
}

TEST(ArgsTest, FlagsAndPositionalsMixInBothSpellings) {
  auto args = Parse(
      {"--batch", "1,64", "m", "--input=a=b", "--input", "-", "--json", "--weight-memory=fastest"});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_THAT(args->positional(), ElementsAre("m"));
  EXPECT_THAT(*args->IntList("batch", 1, 100), ElementsAre(1, 64));
  EXPECT_THAT(args->All("input"), ElementsAre("a=b", "-"));
  EXPECT_TRUE(args->Has("json"));
  EXPECT_EQ(args->String("weight_memory", "balanced"), "fastest");
}

TEST(ArgsTest, AbsentFlagsHaveTheirDefaults) {
  auto args = Parse({"m"});
  ASSERT_TRUE(args.ok());
  EXPECT_FALSE(args->Has("json"));
  EXPECT_EQ(args->String("weight_memory", "balanced"), "balanced");
  EXPECT_EQ(*args->Int("batch", 5, 0, 9), 5);
  EXPECT_TRUE(args->IntList("batch", 0, 9)->empty());
  EXPECT_TRUE(args->All("input").empty());
}

TEST(ArgsTest, DoubleDashEndsTheFlags) {
  auto args = Parse({"--", "--json"});
  ASSERT_TRUE(args.ok());
  EXPECT_THAT(args->positional(), ElementsAre("--json"));
  EXPECT_FALSE(args->Has("json"));
}

TEST(ArgsTest, UnknownFlagSuggestsTheNearest) {
  EXPECT_THAT(ErrorOf({"m", "--jsn"}), HasSubstr("did you mean --json?"));
  EXPECT_THAT(ErrorOf({"m", "-json"}), HasSubstr("did you mean --json?"));
  EXPECT_THAT(ErrorOf({"m", "--somethingelse"}), Not(HasSubstr("did you mean")));
}

TEST(ArgsTest, WrongUsesOfAFlagAreRefused) {
  EXPECT_THAT(ErrorOf({"m", "--batch"}), HasSubstr("--batch needs a value: --batch 1,8"));
  EXPECT_THAT(ErrorOf({"m", "--json=yes"}), HasSubstr("--json takes no value"));
  EXPECT_THAT(ErrorOf({"m", "--json", "--json"}), HasSubstr("--json is given twice"));
  EXPECT_THAT(ErrorOf({"m", "--batch", "1", "--batch", "2"}), HasSubstr("given twice"));
}

TEST(ArgsTest, MissingAndSurplusPositionalsAreRefused) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("expected MODEL, got nothing"));
  EXPECT_THAT(ErrorOf({"m", "n"}), HasSubstr("unexpected argument 'n'"));
  EXPECT_THAT(ErrorOf({"m", "n"}), HasSubstr("espalier try --help"));
}

TEST(ArgsTest, NumbersOutOfRangeAndNonsenseAreRefused) {
  for (const char* value : {"0", "101", "x", "", "1.5", "99999999999999999999", "1,"}) {
    auto list = Parse({"m", "--batch", value})->IntList("batch", 1, 100);
    EXPECT_TRUE(IsWrongUsage(list.status())) << value;
    auto number = Parse({"m", "--batch", value})->Int("batch", 1, 1, 100);
    EXPECT_TRUE(IsWrongUsage(number.status())) << value;
  }
  for (const char* value : {"nan", "inf", "-1", "1e9"}) {
    EXPECT_FALSE(Parse({"m", "--batch", value})->Double("batch", 1, 0, 100).ok()) << value;
  }
  EXPECT_THAT(std::string(Parse({"m", "--batch", "0"})->Int("batch", 1, 1, 100).status().message()),
              HasSubstr("--batch: expected a number from 1 to 100, got '0'"));
}

TEST(ArgsTest, AnErrorOfAServerIsNoWrongUsage) {
  EXPECT_FALSE(IsWrongUsage(absl::InvalidArgumentError("wrong shape")));
}

TEST(ArgsTest, HelpShowsUsageFlagsAndExample) {
  const std::string help = HelpText(Spec());
  EXPECT_THAT(help, HasSubstr("Usage: espalier try MODEL [flags]"));
  EXPECT_THAT(help, HasSubstr("--input FILE\n      A file. May be given several times."));
  EXPECT_THAT(help, HasSubstr("Example:\n  espalier try m"));
}

TEST(NearestTest, OnlyCloseNamesAreSuggested) {
  EXPECT_EQ(Nearest("infre", {"infer", "inspect"}), "infer");
  EXPECT_EQ(Nearest("modles", {"infer", "models"}), "models");
  EXPECT_EQ(Nearest("quit", {"infer", "models"}), "");
  EXPECT_EQ(Nearest(std::string(1 << 20, 'x'), {"infer"}), "");
}

}  // namespace
}  // namespace espalier::cli
