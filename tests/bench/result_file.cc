#include "tests/bench/result_file.h"

#include <cstdio>

#include "tests/bench/timing.h"

namespace espalier::bench {
namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace

bool WriteResultFile(const std::string& path, const std::string& device, const std::string& command,
                     const std::vector<std::string>& rows) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  std::fprintf(file,
               "{\"device\": %s, \"commit\": %s, \"date\": %s, \"command\": %s, \"rows\": [\n",
               Quoted(device).c_str(), Quoted(Commit()).c_str(), Quoted(Today()).c_str(),
               Quoted(command).c_str());
  for (size_t i = 0; i < rows.size(); ++i) {
    std::fprintf(file, "  %s%s\n", rows[i].c_str(), i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(file, "]}\n");
  return std::fclose(file) == 0;
}

}  // namespace espalier::bench
