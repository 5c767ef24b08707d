#include "engine/updates/probation.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"

namespace espalier::updates {
namespace {

constexpr uint64_t kMaxNumber = uint64_t{1} << 62;  // as a duration in microseconds: for ever
constexpr double kMaxLatencyRatio = 1e6;

void SerializeDuration(ByteWriter& out, absl::Duration duration) {
  const auto micros = static_cast<uint64_t>(absl::ToInt64Microseconds(duration));
  out.Varint(std::min(micros, kMaxNumber));
}

void SerializeDouble(ByteWriter& out, double value) {
  out.LittleEndian(std::bit_cast<uint64_t>(value), 8);
}

absl::Duration ReadDuration(FieldReader& fields, absl::string_view what) {
  const uint64_t micros = fields.Varint(what, kMaxNumber);
  return micros == kMaxNumber ? absl::InfiniteDuration()
                              : absl::Microseconds(static_cast<int64_t>(micros));
}

double ReadDouble(FieldReader& fields, absl::string_view what) {
  return std::bit_cast<double>(fields.LittleEndian(what, 8));
}

}  // namespace

Conduct Conduct::Since(const Conduct& before) const {
  return {answered - before.answered, failed - before.failed, compute_nanos - before.compute_nanos,
          nonfinite_batches - before.nonfinite_batches};
}

double Conduct::error_rate() const {
  return failed == 0 ? 0 : static_cast<double>(failed) / static_cast<double>(failed + answered);
}

std::optional<Probation> BeginProbation(const ProbationOptions& terms, const Conduct& old,
                                        absl::Time now) {
  if (terms.duration <= absl::ZeroDuration()) return std::nullopt;
  Probation probation{.terms = terms, .old = old};
  probation.old.nonfinite_batches = 0;  // not compared
  if (const absl::Time until = now + terms.duration; until != absl::InfiniteFuture())
    probation.until_micros = absl::ToUnixMicros(until);
  return probation;
}

absl::Status CheckTerms(const ProbationOptions& terms) {
  const auto in_range = [](absl::string_view what, double value, double most) {
    if (value >= 0 && value <= most) return absl::OkStatus();  // false for NaN
    return absl::InvalidArgumentError(
        absl::StrCat("a probation's ", what, " is ", value, ", expected 0 to ", most));
  };
  if (terms.duration < absl::ZeroDuration() || terms.canary_duration < absl::ZeroDuration())
    return absl::InvalidArgumentError("a probation of less than no time");
  absl::Status status = in_range("canary share", terms.canary_share, 1);
  status.Update(in_range("error rate", terms.max_error_rate, 1));
  status.Update(in_range("latency ratio", terms.max_latency_ratio, kMaxLatencyRatio));
  return status;
}

void SerializeTerms(ByteWriter& out, const ProbationOptions& terms) {
  SerializeDuration(out, terms.duration);
  SerializeDouble(out, terms.canary_share);
  SerializeDuration(out, terms.canary_duration);
  SerializeDouble(out, terms.max_error_rate);
  SerializeDouble(out, terms.max_latency_ratio);
  out.Byte(terms.golden_requests ? 1 : 0);
}

absl::StatusOr<ProbationOptions> ParseTerms(ByteReader& reader) {
  FieldReader fields(reader);
  ProbationOptions terms;
  terms.duration = ReadDuration(fields, "duration");
  terms.canary_share = ReadDouble(fields, "canary share");
  terms.canary_duration = ReadDuration(fields, "duration of the canary");
  terms.max_error_rate = ReadDouble(fields, "error rate");
  terms.max_latency_ratio = ReadDouble(fields, "latency ratio");
  terms.golden_requests = fields.Flag("golden requests");
  if (!fields.status().ok()) return fields.status();
  if (auto status = CheckTerms(terms); !status.ok()) return status;
  return terms;
}

void SerializeProbation(ByteWriter& out, const Probation& probation) {
  SerializeTerms(out, probation.terms);
  out.Varint(static_cast<uint64_t>(probation.until_micros));
  for (const uint64_t number :
       {probation.old.answered, probation.old.failed, probation.old.compute_nanos})
    out.Varint(std::min(number, kMaxNumber));
}

absl::StatusOr<Probation> ParseProbation(ByteReader& reader) {
  auto terms = ParseTerms(reader);
  if (!terms.ok()) return terms.status();
  FieldReader fields(reader);
  Probation probation{.terms = *terms};
  probation.until_micros = fields.Count("end", kMaxNumber);
  probation.old.answered = fields.Varint("answered", kMaxNumber);
  probation.old.failed = fields.Varint("failed", kMaxNumber);
  probation.old.compute_nanos = fields.Varint("compute time", kMaxNumber);
  if (!fields.status().ok()) return fields.status();
  return probation;
}

}  // namespace espalier::updates
