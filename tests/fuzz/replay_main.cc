// replay_main.cc — a fuzz target without libFuzzer: replays files, then mutates the seeds, the same way every time.
//
//   onnx_fuzz_replay [--runs=N] [--seed=N] [--write_seeds=DIR] [file or folder]...
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "tests/fuzz/fuzz_target.h"

namespace {

namespace fs = std::filesystem;

std::string current;  // the input being run, written to a file when the target aborts

void Run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int Replay(const fs::path& path) {
  if (!fs::exists(path)) {
    std::cerr << path << " does not exist\n";
    std::exit(1);
  }
  if (!fs::is_directory(path)) {
    Run(ReadFile(path));
    return 1;
  }
  int count = 0;
  for (const auto& entry : fs::directory_iterator(path)) count += Replay(entry.path());
  return count;
}

std::string MutateBytes(std::string input, std::mt19937_64& random) {
  for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
    const size_t at = random() % (input.size() + 1), length = random() % 16;
    switch (random() % 4) {
      case 0:
        input.erase(at, length);
        break;
      case 1:
        input.insert(at, length, static_cast<char>(random()));
        break;
      case 2:
        input.insert(at, input.substr(random() % (input.size() + 1), length));
        break;
      default:
        if (at < input.size()) input[at] = static_cast<char>(random());
    }
  }
  return input;
}

// From a seed, up to four steps away.
void RunMutants(int runs, uint64_t seed) {
  const auto seeds = espalier::fuzz::Seeds();
  std::mt19937_64 random(seed);
  std::string input;
  for (int i = 0; i < runs; ++i) {
    if (random() % 4 == 0 || i == 0) input = seeds[random() % seeds.size()];
    input = espalier::fuzz::MutateStructure(input, random);
    Run(random() % 4 == 0 ? MutateBytes(input, random) : input);
  }
}

void KeepInput(int) {
  std::ofstream("fuzz_input.bin", std::ios::binary) << current;
  std::cerr << "the input is in fuzz_input.bin\n";
}

}  // namespace

int main(int argc, char** argv) {
  int runs = 0, replayed = 0;
  uint64_t seed = 1;
  std::signal(SIGABRT, KeepInput);
  for (const auto& input : espalier::fuzz::Seeds()) Run(input);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument.rfind("--runs=", 0) == 0) {
      runs = std::stoi(value);
    } else if (argument.rfind("--seed=", 0) == 0) {
      seed = std::stoull(value);
    } else if (argument.rfind("--write_seeds=", 0) == 0) {
      int number = 0;
      fs::create_directories(value);
      for (const auto& input : espalier::fuzz::Seeds()) {
        std::ofstream(fs::path(value) / ("seed" + std::to_string(number++)), std::ios::binary)
            << input;
      }
    } else {
      replayed += Replay(argument);
    }
  }
  RunMutants(runs, seed);
  std::cout << "replayed " << replayed << " files, ran " << runs << " mutants from seed " << seed
            << "\n";
  return 0;
}
