// first_format.h — records and deltas in format 1, which nothing writes any more and everything reads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include "engine/updates/bytes.h"
#include "engine/updates/counted_model.h"
#include "tests/engine/updates/memory_weights.h"

namespace espalier::updates::testing {

// A record of the newest format whose mixed lists have rows of `width`, and that tells its counts unless
// they are given. Without lists of drops in
// kThreshold, which format 1 has not.
inline std::string InFirstFormat(absl::string_view record, int64_t width,
                                 const std::optional<EventCounts>& counts = {}) {
  ByteReader reader(record);
  const uint8_t head = *reader.Byte("head");
  const int present = head % (1 << kEventKinds);
  int code = head >> kEventKinds;
  ByteWriter out;
  for (int k = 0; k < kEventKinds; ++k) {
    if ((present >> k & 1) == 0) {
      out.Varint(0);
      continue;
    }
    if (present % (1 << k) != 0) code = *reader.Byte("mode");
    Mode mode = Mode::kRaw;
    CountedOptions options;
    EXPECT_TRUE(ReadCode(code, mode, options));
    out.Varint(counts ? static_cast<uint64_t>(counts->of[k]) : *reader.Varint("count", UINT64_MAX));
    const bool last = present >> (k + 1) == 0;
    const uint64_t size = last ? reader.left() : *reader.Varint("size", reader.left());
    const absl::string_view payload = *reader.Raw("payload", size);
    out.Byte(static_cast<uint8_t>(mode));
    if (!IsMixed(mode)) {
      out.Text(payload);
      continue;
    }
    ByteReader mixed(payload);
    const uint64_t raw_bytes = *mixed.Varint("raw bits", payload.size());
    ByteWriter first;
    first.Varint(static_cast<uint64_t>(width));
    if (mode == Mode::kCounted) first.Varint(options.bits());
    first.Text(*mixed.Raw("coded bits", mixed.left() - raw_bytes));
    first.Raw(*mixed.Raw("raw bits", raw_bytes));
    out.Text(first.bytes());
  }
  return out.Take();
}

// A manifest in format 1, for this body. The digests of files and architecture are zeros.
inline std::string FirstFormatManifest(const Manifest& manifest, const Digest& base_weights,
                                       const std::string& body) {
  ByteWriter out;
  const auto number = [&](int64_t value) { out.Varint(static_cast<uint64_t>(value)); };
  const auto digest = [&](const Digest& of) {
    out.Raw({reinterpret_cast<const char*>(of.data()), of.size()});
  };
  out.Text(manifest.model);
  out.Byte(manifest.schema_changes ? 1 : 0);
  for (const int64_t value :
       {manifest.base_version, manifest.target_version, manifest.sequence, manifest.created_seconds,
        manifest.expires_seconds, manifest.base_nonzeros, manifest.target_nonzeros})
    number(value);
  digest(base_weights);
  digest({});
  digest(manifest.target_weights);
  digest({});
  digest({});
  digest(Sha256Of(body));
  out.Varint(body.size());
  out.Varint(0);
  out.Varint(0);
  out.Varint(manifest.tensors.size());
  ByteWriter table;
  for (const TensorDelta& delta : manifest.tensors) {
    table.Text(delta.tensor.name);
    table.Text(delta.tensor.dtype);
    table.Varint(delta.tensor.dims.size());
    for (const int64_t dim : delta.tensor.dims) table.Varint(static_cast<uint64_t>(dim));
    table.Varint(static_cast<uint64_t>(delta.tensor.bytes));
    for (const int64_t count : delta.counts.of) table.Varint(static_cast<uint64_t>(count));
  }
  out.Text(table.bytes());
  return out.Take();
}

inline std::string FirstFormatBytes(const std::string& manifest, const std::string& body) {
  ByteWriter out;
  out.Raw(
      "\x93"
      "ESPD\r\n\n");
  out.LittleEndian(1, 2);
  out.LittleEndian(manifest.size(), 4);
  out.Raw(manifest);
  out.Byte(0);  // signatures
  out.Raw(body);
  return out.Take();
}

// One whose records are each of a tensor's first segment.
inline std::string BodyInFirstFormat(const Draft& draft) {
  const auto delta = OpenBytes(draft.Bytes());
  EXPECT_TRUE(delta.ok()) << delta.status();
  ByteWriter out;
  const std::vector<RecordRef> records = delta->Records().value();
  for (const RecordRef& record : records) {
    const TensorInfo& tensor = draft.manifest.tensors[record.tensor].tensor;
    out.Varint(record.tensor);
    out.Varint(0);
    out.Text(InFirstFormat(delta->Read(record).value(),
                           RowWidth(tensor.row_elements(), tensor.elements()),
                           draft.manifest.tensors[record.tensor].counts));
  }
  return out.Take();
}

}  // namespace espalier::updates::testing
