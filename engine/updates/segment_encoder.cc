#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/updates/bytes.h"
#include "engine/updates/counted_model.h"
#include "engine/updates/event_list.h"
#include "engine/updates/event_models.h"
#include "engine/updates/mixed_model.h"
#include "engine/updates/nonzero_bits.h"
#include "engine/updates/segment_codec.h"
#include "engine/updates/step_model.h"
#include "engine/updates/word_coder.h"
#include "engine/updates/zstd.h"

namespace espalier::updates {
namespace {

using EventSpan = std::pair<const Event*, const Event*>;

uint64_t ZigZag(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}

bool Allows(EventKind kind, Mode mode, const EncodeOptions& options) {
  const bool at_zeros = kind == EventKind::kGrow || kind == EventKind::kFlip;
  if (at_zeros && mode == Mode::kClassRange) return false;
  if (kind != EventKind::kChange && IsMixed(mode)) return false;
  if (kind != EventKind::kDrop && mode == Mode::kThreshold) return false;
  return options.modes >> static_cast<int>(mode) & 1;
}

template <typename Element>
class ListEncoder {
 public:
  using Bits = typename Element::Bits;
  ListEncoder(EventKind kind, const Bits* base, int64_t count, const SegmentEvents& events,
              const EncodeOptions& options)
      : kind_(kind), base_(base), count_(count), events_(events), options_(options) {}

  struct Coding {
    Mode mode = Mode::kRaw;
    CountedOptions counted{};  // of kCounted
    std::string payload{};
  };
  // In the way that is the smallest for the first kTrialEvents.
  absl::StatusOr<Coding> Smallest(const std::vector<Event>& list) const {
    const size_t trial = std::min<size_t>(list.size(), kTrialEvents);
    std::optional<Coding> best;
    const int64_t looked_at = LookedAt(list);
    for (uint8_t m = 0; m < kModes; ++m) {
      const auto mode = static_cast<Mode>(m);
      if (!Allows(kind_, mode, options_)) continue;
      if (IsMixed(mode) && !IsQuick(mode, looked_at, list.size())) continue;
      CountedOptions counted;
      if (mode == Mode::kCounted) {
        const auto chosen = ChooseCounted(list, std::min(trial, kCountedTrialEvents));
        if (!chosen.ok()) return chosen.status();
        counted = *chosen;
      }
      auto payload = Encode(mode, counted, list, trial);
      if (!payload.ok()) return payload.status();
      if (best && payload->size() + LeastSaved(mode, looked_at, list.size(), *best) >=
                      best->payload.size()) {
        continue;
      }
      best = Coding{mode, counted, *std::move(payload)};
    }
    if (!best) return absl::InvalidArgumentError("no mode is allowed for this list");
    if (trial < list.size()) {
      auto payload = Encode(best->mode, best->counted, list, list.size());
      if (!payload.ok()) return payload.status();
      best->payload = *std::move(payload);
    }
    return *std::move(best);
  }

 private:
  // Looks that a mixed mode may take for each event. One costs about a tenth of an event: with three
  // kMixed took 1.1 to 1.5 times as long to decode as the other modes. kCounted foresees that most
  // non-zeros do not change: 5 to 11 % smaller than kClassRange at 7 to 30 looks an event, in 1 to
  // 1.5 times its time (updates_bench, MNIST and MiniLM in bf16, one step).
  static constexpr int64_t kMixedShare = 3, kCountedShare = 40;

  // kCounted has to be worth its time: 3 % smaller where it is the one mode that looks, 0.4 % beside
  // kMixed, which decodes f32 by a twentieth faster.
  static size_t LeastSaved(Mode mode, int64_t looked_at, size_t events, const Coding& best) {
    if (mode != Mode::kCounted) return 0;
    const bool alone = looked_at > kMixedShare * static_cast<int64_t>(events);
    return best.payload.size() / (alone ? 32 : 256);
  }

  // Each option by itself, when it makes the first `trial` events smaller.
  absl::StatusOr<CountedOptions> ChooseCounted(const std::vector<Event>& list, size_t trial) const {
    CountedOptions chosen{.rows = true};
    size_t least = SIZE_MAX;
    for (const uint64_t option : {0, 4, 2, 1}) {
      const auto tried = CountedOptions::FromBits(chosen.bits() ^ option);
      const auto payload = Encode(Mode::kCounted, tried, list, trial);
      if (!payload.ok()) return payload.status();
      if (payload->size() >= least) continue;
      least = payload->size();
      chosen = tried;
    }
    return chosen;
  }
  static constexpr size_t kCountedTrialEvents = kTrialEvents / 8;

  // Whether a mixed mode, which looks at each non-zero of the rows that change, is worth the time of
  // decoding it. Without the others it is always taken.
  bool IsQuick(Mode mode, int64_t looked_at, size_t events) const {
    const int64_t share = mode == Mode::kCounted ? kCountedShare : kMixedShare;
    return looked_at <= share * static_cast<int64_t>(events) ||
           (!Allows(kind_, Mode::kRange, options_) && !Allows(kind_, Mode::kClassRange, options_));
  }
  // Non-zeros in rows that change.
  int64_t LookedAt(const std::vector<Event>& list) const {
    int64_t looked_at = 0;
    for (size_t i = 0; i < list.size();) {
      const int64_t begin = list[i].position / width() * width(), end = EndOfRow(begin);
      VisitBits(events_.nonzero, begin, end, [&](uint32_t) { return ++looked_at > 0; });
      while (i < list.size() && list[i].position < end) ++i;
    }
    return looked_at;
  }

  absl::StatusOr<std::string> Encode(Mode mode, CountedOptions counted,
                                     const std::vector<Event>& list, size_t count) const {
    const EventSpan span{list.data(), list.data() + count};
    const int64_t until = count == list.size() ? count_ : list[count - 1].position + 1;
    switch (mode) {
      case Mode::kRaw:
        return Raw(span);
      case Mode::kZstd:
        return Compressed(span);
      case Mode::kRange:
        return Ranged(span);
      case Mode::kClassRange:
        return ClassRanged(span);
      case Mode::kMixed:
      case Mode::kMixedRepeats:
      case Mode::kCounted:
        return Mixed(span, mode, counted, until);
      case Mode::kThreshold:
        return Thresholded(span, until);
    }
    return absl::InternalError("no such mode");
  }

  bool carries_value() const { return kind_ == EventKind::kChange || kind_ == EventKind::kGrow; }

  std::string Raw(EventSpan events) const {
    ByteWriter out;
    for (const Event* event = events.first; event != events.second; ++event) {
      out.LittleEndian(event->rank, 4);
      if (carries_value()) out.LittleEndian(event->new_bits, sizeof(Bits));
      if (kind_ == EventKind::kDrop) out.Byte(NegativeZero(*event));
    }
    return out.Take();
  }

  absl::StatusOr<std::string> Compressed(EventSpan events) const {
    ByteWriter gaps, symbols;
    uint32_t next_rank = 0;
    for (const Event* event = events.first; event != events.second; ++event) {
      gaps.Varint(event->rank - next_rank);
      next_rank = event->rank + 1;
      if (kind_ == EventKind::kChange) symbols.Varint(ZigZag(Step(*event)));
      if (kind_ == EventKind::kDrop) symbols.Byte(NegativeZero(*event));
      if (kind_ == EventKind::kGrow) symbols.LittleEndian(event->new_bits, sizeof(Bits));
    }
    ByteWriter out;
    for (const ByteWriter* stream : {&gaps, &symbols}) {
      const auto frame = ZstdCompress(stream->bytes(), options_.zstd_level);
      if (!frame.ok()) return frame.status();
      out.Varint(stream->size());
      if (stream->size() == 0) continue;
      out.Text(*frame);
    }
    return out.Take();
  }

  std::string Ranged(EventSpan events) const {
    RangeEncoder coder;
    GapModel gaps;
    Symbols symbols;
    uint32_t next_rank = 0;
    for (const Event* event = events.first; event != events.second; ++event) {
      gaps.Encode(coder, event->rank - next_rank);
      next_rank = event->rank + 1;
      symbols.Encode(coder, kind_, *event);
    }
    return coder.Finish();
  }

  // Classes are opened in the order of their first element in the base; each gap is coded when the
  // event before it in its class is, the last one reaches to the end of the class.
  std::string ClassRanged(EventSpan events) const {
    const auto count = static_cast<size_t>(events.second - events.first);
    std::vector<uint32_t> next_gap(count);
    std::array<uint32_t, kMaxClasses> following = events_.class_sizes;  // of the event after
    for (size_t i = count; i-- > 0;) {
      const Event& event = events.first[i];
      uint32_t& next = following[Element::ClassOf(static_cast<Bits>(event.old_bits))];
      next_gap[i] = next - event.class_rank - 1;
      next = event.class_rank;
    }
    RangeEncoder coder;
    std::array<std::unique_ptr<GapModel>, kMaxClasses> models;
    Symbols symbols;
    size_t done = 0;
    const auto encode_until = [&](uint32_t position) {
      for (; done < count && events.first[done].position < position; ++done) {
        const Event& event = events.first[done];
        GapModel& of = *models[Element::ClassOf(static_cast<Bits>(event.old_bits))];
        symbols.Encode(coder, kind_, event);
        of.Encode(coder, next_gap[done]);
      }
    };
    for (const SegmentEvents::Opening& opening : events_.openings) {
      encode_until(opening.position);
      models[opening.element_class] = std::make_unique<GapModel>();
      models[opening.element_class]->Encode(coder, following[opening.element_class]);
    }
    encode_until(UINT32_MAX);
    return coder.Finish();
  }

  int64_t width() const { return RowWidth(options_.row_elements, count_); }
  int64_t EndOfRow(int64_t begin) const { return std::min(begin + width(), count_); }

  // The elements below `until`.
  std::string Mixed(EventSpan events, Mode mode, const CountedOptions& counted,
                    int64_t until) const {
    const auto columns = static_cast<uint32_t>(width());
    WordEncoder coder;
    const auto steps = std::make_unique<StepModel<Element>>(
        columns, mode == Mode::kCounted ? counted.repeats : mode == Mode::kMixedRepeats);
    if (mode == Mode::kCounted) {
      const auto changes = std::make_unique<CountedChanges<Element>>(columns, counted);
      EncodeRows(events, until, *changes, *steps, coder);
    } else {
      const auto changes = std::make_unique<MixedChanges<Element>>(columns);
      EncodeRows(events, until, *changes, *steps, coder);
    }
    const std::string raw = coder.TakeRaw();
    ByteWriter out;
    out.Varint(raw.size());
    out.Raw(coder.TakeCoded());
    out.Raw(raw);
    return out.Take();
  }

  template <typename Changes>
  void EncodeRows(EventSpan events, int64_t until, Changes& changes, StepModel<Element>& steps,
                  WordEncoder& coder) const {
    const Event* next = events.first;
    for (int64_t begin = 0; begin < until; begin += width()) {
      const int64_t end = std::min(EndOfRow(begin), until);
      if (!changes.RowChanges(coder, next != events.second && next->position < end)) continue;
      VisitBits(events_.nonzero, begin, end, [&](uint32_t position) {
        const auto column = static_cast<uint32_t>(position - begin);
        const bool is_next = next != events.second && next->position == position;
        if (!changes.Changes(coder, column, base_[position], is_next)) return true;
        const int64_t from = Element::OrderOf(base_[position]),
                      to = Element::OrderOf(static_cast<Bits>(next->new_bits));
        steps.Step(coder, column, position, base_[position], to - from);
        ++next;
        return true;
      });
    }
  }

  // Below the least magnitude that stays all drop, above the largest that drops none: between them a bit
  // tells. Of the elements below `until`.
  std::string Thresholded(EventSpan events, int64_t until) const {
    uint64_t least_kept = UINT64_MAX, high = 0;
    VisitDrops(events, until, [&](uint64_t magnitude, const Event* drop) {
      if (drop == nullptr) {
        least_kept = std::min(least_kept, magnitude);
      } else {
        high = std::max(high, magnitude + 1);
      }
    });
    const uint64_t low = std::min(least_kept, high);
    RangeEncoder coder;
    ThresholdModel model(low, high);
    DropModel sign;
    VisitDrops(events, until, [&](uint64_t magnitude, const Event* drop) {
      if (magnitude >= high) return;
      if (magnitude >= low) coder.Bit(model.Between(magnitude), drop != nullptr);
      if (drop == nullptr) return;
      sign.Encode(coder, Element::IsNegative(static_cast<Bits>(drop->old_bits)),
                  NegativeZero(*drop));
    });
    ByteWriter out;
    out.Varint(low);
    out.Varint(high - low);
    out.Raw(coder.Finish());
    return out.Take();
  }
  // Calls `visit` with the magnitude of each non-zero below `until` and its drop, or null.
  template <typename Visit>
  void VisitDrops(EventSpan events, int64_t until, Visit visit) const {
    const Event* next = events.first;
    VisitBits(events_.nonzero, 0, until, [&](uint32_t position) {
      const bool drops = next != events.second && next->position == position;
      visit(MagnitudeOf<Element>(base_[position]), drops ? next : nullptr);
      next += drops;
      return true;
    });
  }

  struct Symbols {
    ChangeModel<Element> change;
    DropModel drop;
    std::unique_ptr<GrowModel<Element>> grow;

    void Encode(RangeEncoder& coder, EventKind kind, const Event& event) {
      if (kind == EventKind::kChange)
        change.Encode(coder, event.position, event.old_bits, event.new_bits);
      if (kind == EventKind::kDrop) {
        drop.Encode(coder, Element::IsNegative(static_cast<Bits>(event.old_bits)),
                    NegativeZero(event));
      }
      if (kind == EventKind::kGrow) {
        if (!grow) grow = std::make_unique<GrowModel<Element>>();
        grow->Encode(coder, event.new_bits);
      }
    }
  };
  static bool NegativeZero(const Event& event) {
    return Element::IsNegative(static_cast<Bits>(event.new_bits));
  }
  // Positive: away from zero.
  static int64_t Step(const Event& event) {
    const int64_t from = Element::OrderOf(static_cast<Bits>(event.old_bits));
    const int64_t step = Element::OrderOf(static_cast<Bits>(event.new_bits)) - from;
    return from < 0 ? -step : step;
  }

  EventKind kind_;
  const Bits* base_;
  int64_t count_;
  const SegmentEvents& events_;
  const EncodeOptions& options_;
};

template <typename Element>
absl::StatusOr<std::string> EncodeEvents(const typename Element::Bits* base, int64_t elements,
                                         const SegmentEvents& events,
                                         const EncodeOptions& options) {
  uint8_t head = 0;
  ByteWriter lists;
  for (int k = 0; k < kEventKinds; ++k) {
    if (!events.lists[static_cast<size_t>(k)].empty()) head = static_cast<uint8_t>(head | 1 << k);
  }
  bool first = true;
  for (int k = 0; k < kEventKinds; ++k) {
    const std::vector<Event>& list = events.lists[static_cast<size_t>(k)];
    if (list.empty()) continue;
    const ListEncoder<Element> encoder(static_cast<EventKind>(k), base, elements, events, options);
    const auto coding = encoder.Smallest(list);
    if (!coding.ok()) return coding.status();
    const uint8_t code = CodeOf(coding->mode, coding->counted);
    if (std::exchange(first, false)) {
      head = static_cast<uint8_t>(head | code << kEventKinds);
    } else {
      lists.Byte(code);
    }
    if (!options.counts_are_known) lists.Varint(list.size());
    const bool last = head % (1 << kEventKinds) >> (k + 1) == 0;
    if (!last) lists.Varint(coding->payload.size());
    lists.Raw(coding->payload);
  }
  return absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&head), 1), lists.bytes());
}

}  // namespace

absl::StatusOr<std::string> EncodeSegment(ElementKind kind, const void* old_elements,
                                          const void* new_elements, int64_t count,
                                          EventCounts& counts, const EncodeOptions& options) {
  return VisitElement(kind, [&](auto element) -> absl::StatusOr<std::string> {
    using Element = decltype(element);
    using Bits = typename Element::Bits;
    const SegmentEvents events = FindEvents<Element>(static_cast<const Bits*>(old_elements),
                                                     static_cast<const Bits*>(new_elements), count);
    const EventCounts found = events.counts();
    if (found.total() == 0) return std::string();
    counts += found;
    return EncodeEvents<Element>(static_cast<const Bits*>(old_elements), count, events, options);
  });
}

}  // namespace espalier::updates
