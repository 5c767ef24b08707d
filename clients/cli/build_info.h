// build_info.h — which build of the tool this is.
#pragma once

namespace espalier::cli {

const char* BuildVersion();  // "0.1.0"
const char* BuildCommit();   // short hash of the commit it was configured at; "unknown" without git

}  // namespace espalier::cli
