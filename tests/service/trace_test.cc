#include "service/trace.h"

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"

namespace espalier::service {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string Content(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class TraceTest : public ::testing::Test {
 protected:
  void Expect(const absl::Status& status, absl::StatusCode code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  void Trace(Tracer& tracer, const std::string& model, const std::string& request_id = "") {
    const uint64_t id = tracer.Sample(model);
    if (id != 0) tracer.Record({id, model, 1, request_id, "OK", {{"A", 5}, {"B", 7}}});
  }
  int Sampled(Tracer& tracer, const std::string& model, int requests) {
    int sampled = 0;
    for (int i = 0; i < requests; ++i) sampled += tracer.Sample(model) != 0 ? 1 : 0;
    return sampled;
  }

  testing::TemporaryDirectory directory_;
  const std::string file_ = directory_.path() + "/trace.json";
};

TEST_F(TraceTest, SettingsBeginAsTritonsAndNothingIsTraced) {
  Tracer tracer(file_);
  EXPECT_THAT(
      tracer.Get(""),
      ElementsAre(Pair("log_frequency", ElementsAre("0")), Pair("trace_count", ElementsAre("-1")),
                  Pair("trace_file", ElementsAre(file_)), Pair("trace_level", ElementsAre("OFF")),
                  Pair("trace_mode", ElementsAre("triton")),
                  Pair("trace_rate", ElementsAre("1000"))));
  EXPECT_EQ(Sampled(tracer, "m", 5000), 0);
}

TEST_F(TraceTest, RateAndCountDecideWhatIsTraced) {
  Tracer tracer(file_);
  ASSERT_TRUE(tracer.Update("", {{"trace_level", {"TIMESTAMPS"}}, {"trace_rate", {"10"}}}).ok());
  EXPECT_EQ(Sampled(tracer, "m", 100), 10);
  ASSERT_TRUE(tracer.Update("", {{"trace_count", {"3"}}}).ok());
  EXPECT_EQ(Sampled(tracer, "m", 100), 3);
  EXPECT_EQ(Sampled(tracer, "m", 100), 0);
  ASSERT_TRUE(tracer.Update("", {{"trace_count", {}}, {"trace_rate", {"1"}}}).ok());
  EXPECT_EQ(Sampled(tracer, "m", 100), 100);
  ASSERT_TRUE(tracer.Update("", {{"trace_level", {"OFF"}}}).ok());
  EXPECT_EQ(Sampled(tracer, "m", 100), 0);
}

TEST_F(TraceTest, AModelMayHaveSettingsOfItsOwn) {
  Tracer tracer(file_);
  ASSERT_TRUE(tracer.Update("m", {{"trace_level", {"TIMESTAMPS"}}, {"trace_rate", {"2"}}}).ok());
  EXPECT_EQ(Sampled(tracer, "m", 10), 5);
  EXPECT_EQ(Sampled(tracer, "other", 10), 0);
  EXPECT_EQ(tracer.Get("m")["trace_rate"].front(), "2");
  EXPECT_EQ(tracer.Get("other")["trace_rate"].front(), "1000");
  // What it has not of its own is that of all, now and later.
  ASSERT_TRUE(tracer.Update("", {{"trace_rate", {"5"}}, {"trace_count", {"1"}}}).ok());
  EXPECT_EQ(tracer.Get("m")["trace_count"].front(), "1");
  EXPECT_EQ(Sampled(tracer, "m", 10), 1);
  ASSERT_TRUE(tracer.Update("m", {{"trace_rate", {}}}).ok());
  EXPECT_EQ(tracer.Get("m")["trace_rate"].front(), "5");
  ASSERT_TRUE(tracer.Update("m", {{"trace_level", {}}}).ok());
  EXPECT_EQ(Sampled(tracer, "m", 10), 0);
}

TEST_F(TraceTest, WrongSettingsAreRefusedAndNothingIsApplied) {
  Tracer tracer(file_);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  Expect(tracer.Update("", {{"trace_rate", {"7"}}, {"zebra", {"1"}}}), kInvalid,
         "unknown trace setting 'zebra'");
  EXPECT_EQ(tracer.Get("")["trace_rate"].front(), "1000");
  Expect(tracer.Update("", {{"trace_rate", {"0"}}}), kInvalid,
         "'trace_rate' is '0', expected one number from 1 to 2147483647");
  Expect(tracer.Update("", {{"trace_rate", {"1", "2"}}}), kInvalid, "'trace_rate' is '1,2'");
  Expect(tracer.Update("", {{"trace_count", {"-2"}}}), kInvalid, "from -1 to");
  Expect(tracer.Update("", {{"log_frequency", {"many"}}}), kInvalid, "'log_frequency' is 'many'");
  Expect(tracer.Update("", {{"log_frequency", {"100001"}}}), kInvalid, "from 0 to 100000");
  Expect(tracer.Update("", {{"trace_level", {"TENSORS"}}}), kInvalid,
         "'TENSORS', expected OFF or TIMESTAMPS");
  Expect(tracer.Update("", {{"trace_file", {"/etc/passwd"}}}), absl::StatusCode::kUnimplemented,
         "--trace_file");
  EXPECT_TRUE(tracer.Update("", {{"trace_file", {}}}).ok());
}

TEST_F(TraceTest, WithoutAFileTracesCannotBeTurnedOn) {
  Tracer tracer("");
  Expect(tracer.Update("", {{"trace_level", {"TIMESTAMPS"}}}), absl::StatusCode::kUnimplemented,
         "--trace_file names a file");
  EXPECT_EQ(Sampled(tracer, "m", 2000), 0);
}

TEST_F(TraceTest, TheFileIsOneArrayAfterEveryTrace) {
  Tracer tracer(file_);
  ASSERT_TRUE(tracer.Update("", {{"trace_level", {"TIMESTAMPS"}}, {"trace_rate", {"1"}}}).ok());
  const std::string first =
      "{\"id\":1,\"model_name\":\"m\",\"model_version\":1,\"request_id\":\"a\\\"b\","
      "\"status\":\"OK\"},\n"
      "{\"id\":1,\"timestamps\":[{\"name\":\"A\",\"ns\":5},{\"name\":\"B\",\"ns\":7}]}";
  Trace(tracer, "m", "a\"b");
  EXPECT_TRUE(testing::Eventually([&] { return Content(file_) == "[" + first + "\n]\n"; }))
      << Content(file_);
  Trace(tracer, "m", "second");
  tracer.Finish();
  EXPECT_THAT(Content(file_), ::testing::StartsWith("[" + first + ",\n{\"id\":2,"));
  EXPECT_THAT(Content(file_), ::testing::EndsWith("]}\n]\n"));
  Trace(tracer, "m");
  EXPECT_EQ(tracer.dropped(), 1u);
}

TEST_F(TraceTest, WithALogFrequencyThereIsAFileForSoManyTraces) {
  Tracer tracer(file_);
  ASSERT_TRUE(tracer
                  .Update("", {{"trace_level", {"TIMESTAMPS"}},
                               {"trace_rate", {"1"}},
                               {"log_frequency", {"3"}}})
                  .ok());
  for (int i = 0; i < 7; ++i) Trace(tracer, "m", absl::StrCat("request ", i));
  tracer.Finish();
  EXPECT_EQ(Content(file_), "");
  const auto traces = [&](int index) {
    const std::string text = Content(absl::StrCat(file_, ".", index));
    EXPECT_THAT(text, ::testing::EndsWith("\n]\n"));
    int count = 0;
    for (size_t at = text.find("\"timestamps\""); at != std::string::npos;
         at = text.find("\"timestamps\"", at + 1)) {
      ++count;
    }
    return count;
  };
  EXPECT_EQ(traces(0), 3);
  EXPECT_EQ(traces(1), 3);
  EXPECT_EQ(traces(2), 1);
}

TEST_F(TraceTest, NoMoreThanAThousandFilesAreWritten) {
  Tracer tracer(file_);
  ASSERT_TRUE(tracer
                  .Update("", {{"trace_level", {"TIMESTAMPS"}},
                               {"trace_rate", {"1"}},
                               {"log_frequency", {"1"}}})
                  .ok());
  for (int64_t i = 0; i < Tracer::kMaxFiles + 2; ++i) Trace(tracer, "m", absl::StrCat(i));
  tracer.Finish();
  EXPECT_THAT(Content(file_ + ".0"), ::testing::HasSubstr("\"request_id\":\"1000\""));
  EXPECT_THAT(Content(file_ + ".1"), ::testing::HasSubstr("\"request_id\":\"1001\""));
  EXPECT_THAT(Content(file_ + ".2"), ::testing::HasSubstr("\"request_id\":\"2\""));
  EXPECT_THAT(Content(file_ + ".999"), ::testing::HasSubstr("\"request_id\":\"999\""));
  EXPECT_EQ(Content(file_ + ".1000"), "");
}

}  // namespace
}  // namespace espalier::service
