// version_content.h — what a version is made of, so that a load can tell whether it changed.
//
//   fingerprint   of the names, sizes, times and inodes of its files: equal means unchanged, cheap
//   digest        SHA-256 of their bytes: decides when the fingerprints differ (a file that was
//                 touched or copied anew is no change)
//
// Both also cover the config as parsed, so that a comment in it is no change. The files are all
// regular ones in the version's folder (external data among them) and those that the config names:
// labels and warm-up data. Hidden files are left out: half of a copy, NFS's leftovers.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/formats/model_config.h"
#include "engine/formats/reader.h"

namespace espalier::runtime {

// Files of a version that came with a request, by their path below the version's folder.
using formats::FilesInMemory;

// Of a model, for updates of its weights; no part of any version.
inline constexpr absl::string_view kDeltaFolder = "deltas";

struct VersionContent {
  std::string fingerprint;
  std::string digest;  // empty: not known
};

// Of the files as they are now, without reading them. ResourceExhausted for more files than can be
// meant; what cannot be listed is an error, what is not there is not.
absl::StatusOr<std::string> FingerprintOf(const std::string& model_directory, int64_t version,
                                          const inference::ModelConfig& config);

// Reads them all.
absl::StatusOr<std::string> DigestOf(const std::string& model_directory, int64_t version,
                                     const inference::ModelConfig& config);

// Of files in memory, which have no times: both parts are the digest.
VersionContent ContentOf(const FilesInMemory& files, const inference::ModelConfig& config);

// Fingerprint of a whole model folder: config, versions and all.
absl::StatusOr<std::string> ModelFingerprint(const std::string& model_directory);

}  // namespace espalier::runtime
