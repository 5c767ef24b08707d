// updates_bench.cc — a delta between two checkpoints: bytes, time to make it, time to decode it.
//
//   updates_bench OLD NEW [--rounds=N]
//
// Verifies first: the delta, signed, is applied and the result compared with NEW byte for byte. Then
// times, in turn: making it on all CPUs and on one (files read, compared, digested, encoded, written,
// synced; medians), and decoding it into a checked journal against weights in memory, on one (the fastest
// round: the bar is what a core takes, not what its neighbours do to it). Prints one JSON
// object. updates_bytes.py runs it beside other tools.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "engine/updates/apply_delta.h"
#include "engine/updates/create_delta.h"
#include "engine/updates/journal.h"
#include "tests/bench/timing.h"

namespace espalier::bench {
namespace {

namespace fs = std::filesystem;
using updates::Checkpoint;
using updates::CreateDelta;
using updates::CreateOptions;
using updates::DeltaFile;
using updates::TensorInfo;

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::cerr << value.status() << "\n";
  std::exit(1);
}

void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::exit(1);
}

std::string Contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The weights of a checkpoint, in memory, as a server holds them.
class Resident final : public updates::TensorReader {
 public:
  explicit Resident(const Checkpoint& from) : tensors_(from.tensors()) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      data_.emplace_back(static_cast<size_t>(tensors_[i].bytes));
      OrDie(from.Read(i, 0, tensors_[i].elements(), data_.back().data()));
    }
  }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  absl::Status Read(size_t tensor, int64_t first, int64_t count, void* to) const override {
    const auto size = static_cast<size_t>(SizeOf(tensors_[tensor].kind()));
    std::memcpy(to, data_[tensor].data() + static_cast<size_t>(first) * size,
                static_cast<size_t>(count) * size);
    return absl::OkStatus();
  }
  const void* InMemory(size_t tensor, int64_t first) const override {
    return data_[tensor].data() + first * SizeOf(tensors_[tensor].kind());
  }

 private:
  std::vector<TensorInfo> tensors_;
  std::vector<std::vector<char>> data_;
};

struct Pair {
  std::unique_ptr<Checkpoint> before, after;
  std::string delta_path;
  CreateOptions options;
};

DeltaFile OpenDelta(const std::string& path) {
  return OrDie(DeltaFile::Open(
      std::make_shared<updates::FileSource>(OrDie(formats::RegularFile::Open(path)))));
}

void Verify(const Pair& pair, const std::string& new_path) {
  const std::string out = pair.delta_path + ".applied" + fs::path(new_path).extension().string();
  fs::remove_all(out);
  OrDie(ApplyDelta(*pair.before, OpenDelta(pair.delta_path), out));
  if (Contents(out) != Contents(new_path)) {
    std::cerr << out << " is not " << new_path << "\n";
    std::exit(1);
  }
  fs::remove_all(out);
}

int Run(const std::string& old_path, const std::string& new_path, int rounds) {
  const int cpus = [] {
    cpu_set_t usable;
    return sched_getaffinity(0, sizeof(usable), &usable) == 0 ? CPU_COUNT(&usable) : 1;
  }();
  Pair pair{
      OrDie(Checkpoint::Open(old_path)), OrDie(Checkpoint::Open(new_path)), new_path + ".espd", {}};
  pair.options.model = "bench";
  pair.options.base_version = 1;
  pair.options.target_version = pair.options.sequence = 2;
  pair.options.created_seconds = 1'800'000'000;
  pair.options.keys = {OrDie(updates::PrivateKey::Generate())};
  const auto create = [&](int threads) {
    pair.options.weights.threads = threads;
    // Opening is part of making: headers and graphs are read.
    const auto before = OrDie(Checkpoint::Open(old_path)),
               after = OrDie(Checkpoint::Open(new_path));
    return OrDie(CreateDelta(*before, *after, pair.delta_path, pair.options));
  };
  const updates::Manifest manifest = create(cpus);
  Verify(pair, new_path);
  const DeltaFile delta = OpenDelta(pair.delta_path);
  const Resident base(*pair.before);
  TimingOptions timing;
  timing.samples = rounds;
  timing.sample_micros = 0;  // each call is a sample
  const auto samples = TimeInTurn(
      {[&] { create(cpus); }, [&] { create(1); }, [&] { OrDie(DecodeJournal(delta, base)); }},
      timing);
  const auto changes = manifest.counts().total();
  const double decode_ns = 1000 * Summarize(samples[2]).min;
  // The bar: 120 ns a change and 1 ns a non-zero of the base, on one core.
  const double allowed_ns =
      120.0 * static_cast<double>(changes) + static_cast<double>(manifest.base_nonzeros);
  std::printf(
      "{\"ours\": %llu, \"head\": %llu, \"rest\": %llu, \"changes\": %lld, \"values\": %lld, "
      "\"drops\": %lld, \"grows\": %lld, \"nonzeros\": %lld, \"file_bytes\": %lld, "
      "\"encode_s\": %.6f, \"encode_1cpu_s\": %.6f, \"decode_ns\": %.0f, \"decode_allowed_ns\": "
      "%.0f, \"cpus\": %d}\n",
      static_cast<unsigned long long>(delta.size()),
      static_cast<unsigned long long>(delta.head_bytes()),
      static_cast<unsigned long long>(manifest.rest_frame_bytes), static_cast<long long>(changes),
      static_cast<long long>(manifest.counts().of[0]),
      static_cast<long long>(manifest.counts().of[1]),
      static_cast<long long>(manifest.counts().of[2]),
      static_cast<long long>(manifest.base_nonzeros),
      static_cast<long long>(fs::file_size(new_path)), Summarize(samples[0]).median / 1e6,
      Summarize(samples[1]).median / 1e6, decode_ns, allowed_ns, cpus);
  fs::remove(pair.delta_path);
  return 0;
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) {
  std::vector<std::string> paths;
  int rounds = 5;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--rounds=", 0) == 0) {
      rounds = std::stoi(argument.substr(9));
    } else {
      paths.push_back(argument);
    }
  }
  if (paths.size() != 2) {
    std::cerr << "usage: updates_bench OLD NEW [--rounds=N]\n";
    return 2;
  }
#ifndef NDEBUG
  std::cerr << "a debug build is not timed\n";
  return 2;
#endif
  return espalier::bench::Run(paths[0], paths[1], rounds);
}
