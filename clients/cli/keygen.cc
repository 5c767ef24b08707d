#include <iostream>

#include "clients/cli/command.h"
#include "engine/updates/atomic_file.h"
#include "engine/updates/signing.h"

namespace espalier::cli {
namespace {

absl::StatusOr<updates::AtomicFile> Write(const std::string& path, int mode,
                                          const std::string& content) {
  auto file = updates::AtomicFile::CreateNew(path, mode);
  if (!file.ok()) return file.status();
  if (auto status = file->Append(content); !status.ok()) return status;
  return file;
}

absl::Status Run(const Args& args) {
  const std::string& name = args.positional()[0];
  const auto key = updates::PrivateKey::Generate();
  if (!key.ok()) return key.status();
  const auto own = key->ToPem();
  if (!own.ok()) return own.status();
  const auto known = key->Public();
  if (!known.ok()) return known.status();
  const auto shared = known->ToPem();
  if (!shared.ok()) return shared.status();
  auto secret = Write(name + ".key", 0600, *own);
  if (!secret.ok()) return secret.status();
  auto open = Write(name + ".pub", 0644, *shared);
  if (!open.ok()) return open.status();
  if (auto status = secret->CommitNew(); !status.ok()) return status;
  if (auto status = open->CommitNew(); !status.ok()) return status;
  std::cout << "key " << updates::Hex(known->id()) << ": " << name << ".key signs and stays here, "
            << name << ".pub goes to the servers\n";
  return absl::OkStatus();
}

}  // namespace

Command KeygenCommand() {
  return {
      {.name = "keygen",
       .summary = "a pair of Ed25519 keys to sign deltas with",
       .arguments = "NAME",
       .min_positional = 1,
       .max_positional = 1,
       .details =
           R"(Writes NAME.key (private, readable by its owner only, not encrypted) and NAME.pub, both PEM. Files
that exist are never replaced.

Examples:
  espalier keygen trainer)"},
      &Run};
}

}  // namespace espalier::cli
