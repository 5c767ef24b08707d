#include "engine/runtime/labels.h"

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/runtime/fake_model.h"

namespace espalier::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(LabelsTest, LinesAreClassesInTheirOrder) {
  EXPECT_THAT(*ParseLabels("cat\ndog\r\n\nCOFFEE MUG: large\n"),
              ElementsAre("cat", "dog", "", "COFFEE MUG: large"));
  EXPECT_THAT(*ParseLabels("cat\ndog"), ElementsAre("cat", "dog"));
  EXPECT_THAT(*ParseLabels(""), ElementsAre());
}

TEST(LabelsTest, WhatCannotBeLabelsIsRefused) {
  EXPECT_EQ(ParseLabels("\xff").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseLabels(std::string(kMaxLabels, '\n')).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(LabelsTest, TheFilesThatTheConfigNamesAreRead) {
  const testing::TemporaryDirectory root;
  root.MakeDirectory("m");
  const std::string model = root.path() + "/m";
  std::ofstream(model + "/labels.txt") << "a\nb\n";
  std::ofstream(root.path() + "/outside.txt") << "secret\n";
  inference::ModelConfig config;
  auto* output = config.add_output();
  output->set_name("y");
  config.add_output()->set_name("z");
  EXPECT_TRUE(ReadLabels(model, config)->empty());
  output->set_label_filename("labels.txt");
  const auto labels = ReadLabels(model, config);
  ASSERT_TRUE(labels.ok()) << labels.status();
  ASSERT_EQ(labels->size(), 1u);
  EXPECT_THAT(labels->at("y"), ElementsAre("a", "b"));
  for (const char* name : {"missing.txt", "../outside.txt", "/etc/passwd", "link.txt"}) {
    std::filesystem::create_symlink(root.path() + "/outside.txt", model + "/link.txt");
    output->set_label_filename(name);
    const absl::Status status = ReadLabels(model, config).status();
    EXPECT_FALSE(status.ok()) << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    std::filesystem::remove(model + "/link.txt");
  }
}

TEST(LabelsTest, AFileAboveTheLimitIsNotRead) {
  const testing::TemporaryDirectory root;
  std::ofstream(root.path() + "/labels.txt") << "";
  std::filesystem::resize_file(root.path() + "/labels.txt", kMaxLabelFileBytes + 1);
  inference::ModelConfig config;
  config.add_output()->set_label_filename("labels.txt");
  EXPECT_EQ(ReadLabels(root.path(), config).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace espalier::runtime
