// golden_file.h — files of the first version of each format, which every later build must read.
// With ESPALIER_WRITE_GOLDEN set, a test writes the ones that are missing.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace espalier::updates::testing {

inline std::string GoldenFile(const std::string& name, const std::string& bytes_when_missing) {
  const std::string path = "tests/data/store/" + name;
  if (!std::filesystem::exists(path) && std::getenv("ESPALIER_WRITE_GOLDEN") != nullptr) {
    std::filesystem::create_directories("tests/data/store");
    std::ofstream(path, std::ios::binary) << bytes_when_missing;
  }
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

}  // namespace espalier::updates::testing
