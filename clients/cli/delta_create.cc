#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "clients/cli/command.h"
#include "clients/cli/delta_files.h"
#include "clients/cli/file.h"
#include "engine/updates/apply_delta.h"
#include "engine/updates/create_delta.h"

namespace espalier::cli {
namespace {

using updates::CreateOptions;
using updates::Manifest;

constexpr int64_t kMaxVersion = int64_t{1} << 62;

// The flags that create and compose share, on top of what the files say.
absl::Status ReadOptions(const Args& args, CreateOptions& options) {
  auto keys = PrivateKeys(args, "key");
  if (!keys.ok()) return keys.status();
  options.keys = *std::move(keys);
  const auto threads = Threads(args);
  if (!threads.ok()) return threads.status();
  options.weights.threads = *threads;
  options.created_seconds = NowSeconds();
  if (args.Has("expires")) {
    absl::Duration until;
    const std::string text = args.String("expires", "");
    if (!absl::ParseDuration(text, &until) || until < absl::Seconds(1)) {
      return WrongUsage(
          absl::StrCat("--expires: expected a duration like 36h or 90m, got '", text, "'"));
    }
    options.expires_seconds = options.created_seconds + absl::ToInt64Seconds(until);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Output(const Args& args) {
  if (!args.Has("output")) return WrongUsage("--output is missing: -o x.espd");
  const std::string path = args.String("output", "");
  if (auto status = CheckReplaceable(path); !status.ok()) return status;
  return path;
}

void Tell(const Manifest& manifest, const std::string& out, int64_t weight_bytes,
          uint64_t delta_bytes) {
  const int64_t changed = manifest.counts().total();
  std::cout << absl::StrFormat(
      "%s: %s for %d changed of %s weights in %d tensors (version %d to %d, sequence %d)\n", out,
      SizeText(static_cast<double>(delta_bytes)), changed,
      SizeText(static_cast<double>(weight_bytes)), manifest.tensors.size(), manifest.base_version,
      manifest.target_version, manifest.sequence);
}

absl::Status RunCreate(const Args& args) {
  const auto out = Output(args);
  if (!out.ok()) return out.status();
  CreateOptions options;
  if (auto status = ReadOptions(args, options); !status.ok()) return status;
  const auto before = OpenCheckpoint(args.positional()[0]);
  if (!before.ok()) return before.status();
  const auto after = OpenCheckpoint(args.positional()[1]);
  if (!after.ok()) return after.status();
  options.model = args.String("model", before->model);
  const auto base = args.Int("base_version", before->version, 0, kMaxVersion);
  if (!base.ok()) return base.status();
  const int64_t next = after->version > *base ? after->version : *base + 1;
  const auto target = args.Int("version", next, 0, kMaxVersion);
  if (!target.ok()) return target.status();
  const auto sequence = args.Int("sequence", *target, 0, kMaxVersion);
  if (!sequence.ok()) return sequence.status();
  if (*target == *base) {
    return WrongUsage(absl::StrCat("--version ", *target,
                                   " is the base's: a version number names one set of bytes"));
  }
  options.base_version = *base;
  options.target_version = *target;
  options.sequence = *sequence;
  Progress progress("comparing");
  options.weights.progress = [&](int64_t done, int64_t total) {
    progress.Report(static_cast<double>(done), static_cast<double>(total));
  };
  const auto manifest = CreateDelta(*before->files, *after->files, *out, options);
  if (!manifest.ok()) return manifest.status();
  const auto delta = OpenDelta(*out);
  if (!delta.ok()) return delta.status();
  Tell(*manifest, *out, after->files->weight_bytes(), delta->size());
  if (options.keys.empty()) {
    std::cerr << "espalier: the delta is not signed (--key FILE signs it)\n";
  }
  return absl::OkStatus();
}

absl::Status RunApply(const Args& args) {
  const auto out = Output(args);
  if (!out.ok()) return out.status();
  const auto threads = Threads(args);
  if (!threads.ok()) return threads.status();
  const auto base = OpenCheckpoint(args.positional()[0]);
  if (!base.ok()) return base.status();
  const auto delta = OpenDelta(args.positional()[1]);
  if (!delta.ok()) return delta.status();
  const auto keys = PublicKeys(args, "trust");
  if (!keys.ok()) return keys.status();
  if (!keys->empty()) {
    const auto threshold = args.Int("threshold", 1, 1, static_cast<int64_t>(keys->size()));
    if (!threshold.ok()) return threshold.status();
    const auto signers = delta->CheckSigned({*keys, static_cast<int>(*threshold)});
    if (!signers.ok()) return signers.status();
  }
  Progress progress("writing");
  updates::ApplyOptions options;
  options.threads = *threads;
  options.progress = [&](uint64_t done, uint64_t total) {
    progress.Report(static_cast<double>(done), static_cast<double>(total));
  };
  if (auto status = ApplyDelta(*base->files, *delta, *out, options); !status.ok()) return status;
  std::cout << *out << ": version " << delta->manifest().target_version << " of "
            << delta->manifest().model << "\n";
  return absl::OkStatus();
}

absl::Status RunCompose(const Args& args) {
  const auto out = Output(args);
  if (!out.ok()) return out.status();
  CreateOptions options;
  if (auto status = ReadOptions(args, options); !status.ok()) return status;
  const auto base = OpenCheckpoint(args.positional()[0]);
  if (!base.ok()) return base.status();
  const std::vector<std::string> deltas(args.positional().begin() + 1, args.positional().end());
  const auto manifest = ComposeDeltas(base->files->path(), deltas, *out, options);
  if (!manifest.ok()) return manifest.status();
  const auto delta = OpenDelta(*out);
  if (!delta.ok()) return delta.status();
  Tell(*manifest, *out, base->files->weight_bytes(), delta->size());
  return absl::OkStatus();
}

const FlagSpec kOutput = {"output", "FILE", "The file to make, in place of one that is there.",
                          false, 'o'};
const FlagSpec kKey = {"key", "FILE", "Sign with this private key (espalier keygen).", true};
const FlagSpec kExpires = {"expires", "DURATION",
                           "Refused by servers after so long: 36h. Default: never."};

}  // namespace

Command DeltaCreateCommand() {
  return {
      {.name = "delta create",
       .summary = "what changed between two checkpoints, as a small signed file",
       .arguments = "OLD NEW",
       .min_positional = 2,
       .max_positional = 2,
       .flags = {kOutput,
                 kKey,
                 kExpires,
                 {"model", "NAME", "The model that it is for. Default: from OLD's path."},
                 {"base_version", "N",
                  "Version number of OLD. Default: its version directory, or 0."},
                 {"version", "N",
                  "Version number of NEW. Default: its version directory, or one more."},
                 {"sequence", "N", "Rises with every delta. Default: the version."},
                 ThreadsFlag()},
       .details =
           R"(OLD and NEW are two .onnx files (or the directories of a model), two .safetensors files, or two
folders of .safetensors files. Graphs must be the same but for weights; the first difference is named.
FILE appears complete, or not at all.

Examples:
  espalier delta create digits/1 digits/2 -o step.espd --key trainer.key
  espalier delta create llama-100/ llama-200/ -o step.espd --version 200 --expires 48h)"},
      &RunCreate};
}

Command DeltaApplyCommand() {
  return {
      {.name = "delta apply",
       .summary = "the next checkpoint, byte for byte, from the base and a delta",
       .arguments = "BASE DELTA",
       .min_positional = 2,
       .max_positional = 2,
       .flags = {{"output", "NEW", "The file or folder to make; it must not exist.", false, 'o'},
                 {"trust", "FILE", "Public key that must have signed.", true},
                 {"threshold", "N", "How many of the --trust keys. Default: 1."},
                 ThreadsFlag()},
       .details =
           R"(NEW is a folder when the checkpoint has several files. It appears complete and checked, or not at all.

Examples:
  espalier delta apply digits/1 step.espd -o next.onnx --trust trainer.pub
  espalier delta apply llama-100/ step.espd -o llama-200)"},
      &RunApply};
}

Command DeltaComposeCommand() {
  return {
      {.name = "delta compose",
       .summary = "a chain of deltas as one with the same effect",
       .arguments = "BASE DELTA...",
       .min_positional = 3,
       .max_positional = 10'000,
       .flags = {kOutput, kKey, kExpires, ThreadsFlag()},
       .details =
           R"(BASE is the checkpoint that the first delta is made for: ranks mean nothing without it. The result
leads from BASE to where the last delta leads; the signatures of the parts are not carried over. Room
for two checkpoints is needed beside the output.

Examples:
  espalier delta compose digits/1 a.espd b.espd c.espd -o abc.espd --key trainer.key)"},
      &RunCompose};
}

}  // namespace espalier::cli
