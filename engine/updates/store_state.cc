#include "engine/updates/store_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/updates/bytes.h"
#include "engine/updates/manifest.h"
#include "engine/updates/stored_file.h"

namespace espalier::updates {
namespace {

constexpr uint64_t kMaxNumber = uint64_t{1} << 62;
constexpr uint64_t kMaxSigners = 64;
constexpr uint8_t kRepository = 1;

template <typename Versions>
auto FindIn(Versions& versions, int64_t number) {
  const auto at = std::lower_bound(
      versions.begin(), versions.end(), number,
      [](const VersionRecord& record, int64_t key) { return record.number < key; });
  return at != versions.end() && at->number == number ? &*at : nullptr;
}

// Visits the fields of a record in the order of the file: once to write, once to read.
template <typename Record, typename Visitor>
void VisitRecord(Record& record, Visitor& visitor) {
  visitor.Number("version", record.number);
  visitor.Bytes("weights", record.weights);
  visitor.State(record.state);
  visitor.Flags(record.repository);
  visitor.Number("parent", record.parent);
  visitor.Number("sequence", record.sequence);
  visitor.Number("replaced", record.replaced);
  visitor.Number("activation", record.activation);
  visitor.Number("time", record.seconds);
  visitor.Bytes("delta", record.delta);
  visitor.Number("bytes of the delta", record.delta_bytes);
  visitor.Number("bytes of the journal", record.journal_bytes);
  visitor.Number("bytes of the anchor", record.anchor_bytes);
  visitor.Signers(record.signers);
  visitor.Text("reason", record.reason, kMaxReasonBytes);
}

// Only a state with a probation has what the first version cannot say: a version on probation was then one whose terms
// were not known, and so it is read, as until it is confirmed.
constexpr uint16_t kWithProbation = 2;

template <typename State, typename Visitor>
void VisitState(State& state, uint16_t version, Visitor& visitor) {
  visitor.Text("model", state.model, kMaxModelNameBytes);
  visitor.Number("active version", state.active);
  visitor.Confirmed(state.probation);
  visitor.Number("starts", state.unconfirmed_starts);
  visitor.Number("accepted sequence", state.accepted_sequence);
  visitor.Number("used up", state.used_up);
  visitor.Number("activations", state.activations);
  visitor.Number("next audit record", state.next_audit);
  visitor.List("versions", state.versions, kMaxStoredVersions,
               [&](auto& record) { VisitRecord(record, visitor); });
  visitor.List("quarantined digests", state.quarantined, kMaxQuarantinedDigests,
               [&](auto& digest) { visitor.Bytes("digest", digest); });
  visitor.List("pending audit records", state.pending, kMaxPendingAudit,
               [&](auto& record) { visitor.Audit(record); });
  if (version >= kWithProbation && state.probation) visitor.Terms(*state.probation);
}

class Writer {
 public:
  template <typename Int>
  void Number(absl::string_view, Int number) {
    out_.Varint(static_cast<uint64_t>(number));
  }
  template <typename Array>
  void Bytes(absl::string_view, const Array& bytes) {
    out_.Raw({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  void State(UpdateState state) { out_.Byte(static_cast<uint8_t>(state)); }
  void Flags(bool flag) { out_.Byte(flag ? kRepository : 0); }
  void Text(absl::string_view, const std::string& text, size_t most) {
    out_.Text(absl::string_view(text).substr(0, most));
  }
  void Signers(const std::vector<KeyId>& signers) {
    const size_t count = std::min<size_t>(signers.size(), kMaxSigners);
    out_.Varint(count);
    for (size_t i = 0; i < count; ++i) Bytes("key", signers[i]);
  }
  void Audit(const AuditRecord& record) { SerializeAudit(out_, record); }
  void Confirmed(const std::optional<Probation>& probation) { out_.Byte(probation ? 0 : 1); }
  void Terms(const Probation& probation) { SerializeProbation(out_, probation); }
  template <typename Items, typename Visit>
  void List(absl::string_view, const Items& list, size_t, const Visit& visit) {
    out_.Varint(list.size());
    for (const auto& item : list) visit(item);
  }
  const std::string& bytes() const { return out_.bytes(); }

 private:
  ByteWriter out_;
};

class Reader {
 public:
  explicit Reader(absl::string_view bytes) : reader_(bytes) {}

  template <typename Int>
  void Number(absl::string_view what, Int& number) {
    number = static_cast<Int>(fields_.Varint(what, kMaxNumber));
  }
  template <size_t kBytes>
  void Bytes(absl::string_view what, std::array<uint8_t, kBytes>& bytes) {
    bytes = fields_.Bytes<kBytes>(what);
  }
  void State(UpdateState& state) {
    const uint8_t value = fields_.Byte("state", kUpdateStates);
    if (value == 0) fields_.Fail("a state that is not known");
    state = static_cast<UpdateState>(value);
  }
  void Flags(bool& flag) { flag = fields_.Flag("flags"); }
  void Text(absl::string_view what, std::string& text, size_t most) {
    text = fields_.Text(what, most);
  }
  void Signers(std::vector<KeyId>& signers) {
    List("signers", signers, kMaxSigners, [&](KeyId& key) { Bytes("key", key); });
  }
  void Audit(AuditRecord& record) { record = fields_.Take(ParseAudit(reader_)); }
  void Confirmed(std::optional<Probation>& probation) {
    const bool confirmed = fields_.Flag("confirmed");
    if (fields_.ok() && !confirmed) probation.emplace();
  }
  void Terms(Probation& probation) { probation = fields_.Take(ParseProbation(reader_)); }
  template <typename Items, typename Visit>
  void List(absl::string_view what, Items& list, size_t most, const Visit& visit) {
    const uint64_t count = fields_.Varint(what, most);
    for (uint64_t i = 0; i < count && fields_.ok(); ++i) visit(list.emplace_back());
  }
  absl::Status Finish() {
    fields_.End("state");
    return fields_.status();
  }

 private:
  ByteReader reader_;
  FieldReader fields_{reader_};
};

// What every store keeps to, whatever it did.
absl::Status CheckConsistent(const StoreState& state) {
  int live = 0;
  for (size_t i = 0; i < state.versions.size(); ++i) {
    const VersionRecord& record = state.versions[i];
    if (record.number <= (i == 0 ? 0 : state.versions[i - 1].number))
      return absl::InvalidArgumentError("versions are not in order");
    live += record.state == UpdateState::kLive ? 1 : 0;
  }
  const VersionRecord* active = state.Find(state.active);
  if (active == nullptr || active->state != UpdateState::kLive || live != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("version ", state.active, " is active, and ", live, " are LIVE"));
  }
  return state.probation ? CheckTerms(state.probation->terms) : absl::OkStatus();
}

}  // namespace

VersionRecord* StoreState::Find(int64_t number) { return FindIn(versions, number); }
const VersionRecord* StoreState::Find(int64_t number) const { return FindIn(versions, number); }

bool StoreState::IsQuarantined(int64_t number) const {
  const VersionRecord* record = Find(number);
  return record != nullptr && record->state == UpdateState::kQuarantined;
}

VersionRecord& StoreState::Add(VersionRecord record) {
  const auto at = std::lower_bound(
      versions.begin(), versions.end(), record,
      [](const VersionRecord& a, const VersionRecord& b) { return a.number < b.number; });
  return *versions.insert(at, std::move(record));
}

absl::Status WriteStoreState(FileSystem& files, const std::string& path, const StoreState& state) {
  if (auto status = CheckConsistent(state); !status.ok())
    return absl::InternalError(absl::StrCat("would write a broken state: ", status.message()));
  const uint16_t version = state.probation ? kWithProbation : 1;
  Writer writer;
  VisitState(state, version, writer);
  auto file = SealedWriter::Create(files, path, StoredKind::kState, version);
  if (!file.ok()) return file.status();
  if (auto status = file->AppendBlock(writer.bytes()); !status.ok()) return status;
  return file->Commit().status();
}

absl::StatusOr<StoreState> ReadStoreState(FileSystem& files, const std::string& path) {
  auto file = SealedReader::Open(files, path, StoredKind::kState);
  if (!file.ok()) return file.status();
  const auto block = file->NextBlock();
  if (!block.ok()) return block.status();
  if (auto status = file->End(); !status.ok()) return status;
  StoreState state;
  Reader reader(*block);
  VisitState(state, file->version(), reader);
  auto status = reader.Finish();
  if (status.ok()) status = CheckConsistent(state);
  if (!status.ok()) return Damaged(path, status.message());
  return state;
}

}  // namespace espalier::updates
