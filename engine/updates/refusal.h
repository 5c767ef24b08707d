// refusal.h — why a delta was refused, as one word of a fixed set, for counters. The status carries it
// beside its text; without one its code says it.
//
//   expired · other_model · other_base · old_sequence · known_number · quarantined
//   damaged · not_signed · newer_format · too_large · does_not_fit · other
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace espalier::updates {

// `status`, carrying the word unless it is OK or carries one.
absl::Status Because(absl::string_view word, absl::Status status);
std::string RefusalWord(const absl::Status& status);

}  // namespace espalier::updates
