// table.h — aligned columns for people, and numbers as people and programs read them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace espalier::cli {

class Table {
 public:
  // Columns whose title starts with '>' are aligned to the right (the '>' is not printed).
  explicit Table(std::vector<std::string> titles);
  void AddRow(std::vector<std::string> cells);  // as many as there are titles
  std::string ToString() const;

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;  // the titles first
};

std::string FormatMicros(double micros);  // "87 µs", "1.93 ms", "2.41 s"
std::string FormatPercent(double share);  // 0.9025 is "90.25 %"
std::string FormatNumber(double value);   // shortest text that reads back as the same double
std::string FormatNumber(float value);    // … as the same float

}  // namespace espalier::cli
