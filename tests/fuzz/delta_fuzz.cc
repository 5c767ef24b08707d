// What strangers send as a delta: refused with a message that fits into a log, or edits that keep every rule. The first
// byte says what the rest is: 0 a whole delta, whose signatures are passed over (a mutant would never get past them), 1 to 4 a segment's record against a base of that kind of elements, 5 a skeleton, 6 to 9 a record as of format 1.
#include <cstring>
#include <set>

#include "engine/formats/names.h"
#include "engine/updates/checkpoint.h"
#include "engine/updates/journal.h"
#include "tests/engine/updates/first_format.h"
#include "tests/engine/updates/memory_weights.h"
#include "tests/engine/updates/random_weights.h"
#include "tests/fuzz/fuzz_target.h"

namespace espalier::fuzz {
namespace {

using namespace espalier::
    updates;  // NOLINT(google-build-using-namespace): it is what the file is about
using updates::testing::BodyInFirstFormat;
using updates::testing::Draft;
using updates::testing::FirstFormatBytes;
using updates::testing::FirstFormatManifest;
using updates::testing::InFirstFormat;
using updates::testing::MakeDraft;
using updates::testing::MakePair;
using updates::testing::MemoryWeights;

constexpr int64_t kElements = 500, kRow = 100;

struct World {
  World() {
    Add<ByteElement>("bytes", "I8", 11);
    Add<Float16Element>("half", "F16", 12);
    Add<BFloat16Element>("brain", "BF16", 13);
    Add<Float32Element>("single", "F32", 14);
  }
  template <typename Element>
  void Add(const char* name, const char* dtype, uint64_t seed) {
    const auto pair = MakePair<Element>(kElements, seed);
    before.Add(name, dtype, {5, kRow}, pair.before);
    after.Add(name, dtype, {5, kRow}, pair.after);
  }
  MemoryWeights before, after;
};

const World& TheWorld() {
  static const auto* const world = new World;
  return *world;
}

// In the order of ElementKind.
size_t TensorOf(ElementKind kind) {
  static constexpr const char* kNames[] = {"bytes", "half", "brain", "single"};
  return static_cast<size_t>(
      FindTensor(TheWorld().before.tensors(), kNames[static_cast<size_t>(kind)]));
}

void CheckRefusal(const absl::Status& status) {
  const std::string message(status.message());
  Require(message.size() > 8 && message.size() < 4096, "an error has a short message", message);
  Require(formats::IsUtf8(message), "an error is UTF-8", message);
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:
      return;
    default:
      Require(false, "the code of an error is a listed one", status.ToString());
  }
}

void RunDelta(std::string bytes) {
  const auto delta = DeltaFile::Open(std::make_shared<MemorySource>("fuzz.espd", std::move(bytes)));
  if (!delta.ok()) return CheckRefusal(delta.status());
  const auto journal = DecodeJournal(*delta, TheWorld().before);
  if (!journal.ok()) return CheckRefusal(journal.status());
  Require(journal->entries() == delta->manifest().counts().total(),
          "a journal has what is counted");
  MemoryWeights weights = TheWorld().before;
  for (const TensorJournal& tensor : journal->tensors) {
    const ElementKind kind = weights.tensors()[tensor.tensor].kind();
    Require(IsBefore(weights.data(tensor.tensor).data(), kind, tensor.entries),
            "old values are the base's");
  }
  weights.Apply(*journal);
  const auto reader = PatchedReader::Create(*delta, TheWorld().before);
  Require(reader.ok(), "what has a journal can be read patched");
  for (size_t i = 0; i < weights.tensors().size(); ++i) {
    std::string patched(weights.data(i).size(), '\0');
    Require(reader->Read(i, 0, weights.tensors()[i].elements(), patched.data()).ok() &&
                patched == weights.data(i),
            "journal and patched reader agree");
  }
  weights.Undo(*journal);
  Require(weights == TheWorld().before, "undone is as before");
}

void RunRecord(ElementKind kind, const RecordForm& form, absl::string_view record) {
  const size_t tensor = TensorOf(kind);
  std::string base(static_cast<size_t>(kElements * SizeOf(kind)), '\0');
  Require(TheWorld().before.Read(tensor, 0, kElements, base.data()).ok(), "there is a base");
  std::vector<Edit> edits;
  EventCounts counts;
  const auto status =
      DecodeSegment(kind, PackedSegment(kind, base.data(), kElements), record, form, edits, counts);
  if (!status.ok()) return CheckRefusal(status);
  Require(static_cast<int64_t>(edits.size()) == counts.total(), "an edit an event");
  for (size_t i = 0; i < edits.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, base.data() + edits[i].position * static_cast<size_t>(SizeOf(kind)),
                static_cast<size_t>(SizeOf(kind)));
    Require(edits[i].position < kElements && (i == 0 || edits[i - 1].position < edits[i].position),
            "positions ascend");
    Require(edits[i].old_bits == bits && edits[i].new_bits != bits, "an edit changes its element");
  }
}

void RunSkeleton(absl::string_view text) {
  const auto& tensors = TheWorld().before.tensors();
  const auto files = ParseSkeleton(text, tensors);
  if (!files.ok()) return CheckRefusal(files.status());
  std::set<std::string> names;
  for (const SkeletonFile& file : *files) {
    Require(file.name.find('/') == std::string::npos && file.name != ".." && !file.name.empty(),
            "names are plain", file.name);
    Require(names.insert(file.name).second, "names are unique", file.name);
    for (const SkeletonHole& hole : file.holes)
      Require(hole.offset <= file.bytes.size() && hole.tensor < tensors.size(), "holes are inside");
  }
}

// A good delta with something in its manifest changed.
std::string WithChangedManifest(absl::string_view bytes, std::mt19937_64& random) {
  const auto delta = DeltaFile::Open(std::make_shared<MemorySource>("seed", std::string(bytes)));
  if (!delta.ok()) return std::string(bytes);
  Manifest m = delta->manifest();
  const auto any = [&] { return static_cast<int64_t>(random() % 1000); };
  switch (random() % 6) {
    case 0:
      m.target_nonzeros = any();
      break;
    case 1:
      m.rest_bytes = m.rest_frame_bytes = static_cast<uint64_t>(any());
      break;
    case 2:
      m.schema_changes = !m.schema_changes;
      break;
    case 3:
      if (!m.tensors.empty())
        m.tensors.erase(m.tensors.begin() + any() % static_cast<int64_t>(m.tensors.size()));
      break;
    default:
      if (!m.tensors.empty()) {
        TensorDelta& tensor = m.tensors[random() % m.tensors.size()];
        tensor.counts.of[random() % kEventKinds] += any() % 5 - 2;
      }
  }
  m.target_nonzeros = m.base_nonzeros + (random() % 4 ? m.counts().gained() : any());
  const auto manifest = SerializeManifest(m);
  if (!manifest.ok()) return std::string(bytes);
  const auto head = SerializeHead(*manifest, Digest(), {});
  return head.ok() ? *head + std::string(bytes.substr(delta->head_bytes())) : std::string(bytes);
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (int modes = 1; modes < 1 << kModes; ++modes) {
    if ((modes & 7) == 0) continue;
    EncodeOptions options;
    options.modes = static_cast<uint8_t>(modes);
    options.row_elements = kRow;
    const Draft draft = MakeDraft(TheWorld().before, TheWorld().after, options);
    seeds.push_back(std::string(1, '\0') + draft.Bytes());
    if (modes < 1 << static_cast<int>(Mode::kThreshold)) {
      const std::string body = BodyInFirstFormat(draft);
      seeds.push_back(std::string(1, '\0') +
                      FirstFormatBytes(FirstFormatManifest(draft.manifest, Digest(), body), body));
    }
    for (uint8_t k = 0; k < kElementKinds; ++k) {
      const auto kind = static_cast<ElementKind>(k);
      const size_t tensor = TensorOf(kind);
      std::string before(static_cast<size_t>(kElements * SizeOf(kind)), '\0'), after = before;
      EventCounts counts;
      if (TheWorld().before.Read(tensor, 0, kElements, before.data()).ok() &&
          TheWorld().after.Read(tensor, 0, kElements, after.data()).ok()) {
        const std::string record =
            EncodeSegment(kind, before.data(), after.data(), kElements, counts, options).value();
        seeds.push_back(std::string(1, static_cast<char>(1 + k)) + record);
        if (modes >= 1 << static_cast<int>(Mode::kThreshold)) continue;
        seeds.push_back(std::string(1, static_cast<char>(6 + k)) +
                        InFirstFormat(record, options.row_elements));
      }
    }
  }
  seeds.push_back(std::string("\5\0\2\1a\1\1\0\0\2xy\1b\2\0\1\1\0\1\2\0", 21));
  return seeds;
}

std::string MutateStructure(const std::string& input, std::mt19937_64& random) {
  if (input.empty()) return input;
  std::string mutant = input;
  if (input[0] == 0 && random() % 2 == 0)
    return mutant.substr(0, 1) + WithChangedManifest(absl::string_view(input).substr(1), random);
  // Numbers are varints: one byte changed is another well-formed file most of the time. The body of a
  // delta is in its second half.
  const size_t from = input[0] == 0 ? input.size() / 3 : 1;
  for (uint64_t changes = 1 + random() % 3; changes > 0 && mutant.size() > from; --changes) {
    char& byte = mutant[from + random() % (mutant.size() - from)];
    byte =
        random() % 2 ? static_cast<char>(byte ^ (1 << random() % 8)) : static_cast<char>(random());
  }
  return mutant;
}

}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;  // NOLINT(google-build-using-namespace): an extern "C" function
  if (size == 0) return 0;
  const absl::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const uint8_t what = data[0] % 10;
  if (what == 0) {
    fuzz::RunDelta(std::string(rest));
  } else if (what == 5) {
    fuzz::RunSkeleton(rest);
  } else {
    const bool first_format = what > 5;
    fuzz::RunRecord(static_cast<updates::ElementKind>(what - (first_format ? 6 : 1)),
                    {.format_version = first_format ? uint16_t{1} : updates::kFormatVersion,
                     .row_elements = fuzz::kRow},
                    rest);
  }
  return 0;
}
