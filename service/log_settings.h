// log_settings.h — the LogSettings RPC: what the server's log holds, changed while it runs.
//
// Settings as Triton has them: log_verbose_level (0: none, 1: refused requests too, 2: every RPC),
// log_info, log_warning, log_error, log_format. The log goes to stderr; log_file is shown, empty,
// and refused.
#pragma once

#include "absl/status/status.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::service {

// Applies all of the settings, or none and says what is wrong. Unimplemented for log_file.
absl::Status UpdateLogSettings(const inference::LogSettingsRequest& request);
void FillLogSettings(inference::LogSettingsResponse* response);

}  // namespace espalier::service
