// result_file.h — the one shape of result files: {"device", "commit", "date", "command", "rows": […]}.
#pragma once

#include <string>
#include <vector>

namespace espalier::bench {

// Writes `rows`, each a JSON object, with this machine, commit and day. False when it cannot.
bool WriteResultFile(const std::string& path, const std::string& device, const std::string& command,
                     const std::vector<std::string>& rows);

}  // namespace espalier::bench
