#include "clients/cli/build_info.h"

namespace espalier::cli {

const char* BuildVersion() { return ESPALIER_VERSION; }
const char* BuildCommit() { return ESPALIER_COMMIT; }

}  // namespace espalier::cli
