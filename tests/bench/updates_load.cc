// updates_load — asks a model the same few questions over and over while its weights are updated, and remembers every
// distinct answer with the version that it names.
//
//   updates_load --url=127.0.0.1:8001 --model=digits --inputs=rows.f32 --width=784 --threads=8 --requests=1000000
//
// inputs: f32 rows, one after another; question q is rows 0 to q mod 4 of the four from 4·q on, so that batches of 1 to
// 4 items meet in the batcher. Each thread asks one after another, one at a time, until standard input ends AND that
// many requests were sent in all. Prints one JSON object: sent, answered, failed (by code), p50 and p99 in
// microseconds, and answers: [version, question, output in hex, how often]. Two answers of one version to one question
// are two entries. updates_live.py compares them with versions applied offline.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <thread>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "clients/cpp/client.h"

namespace espalier::bench {
namespace {

constexpr size_t kRowsOfQuestion = 4;

struct Options {
  std::string url, model, inputs;
  size_t width = 0;
  int threads = 8;
  uint64_t requests = 1'000'000;
};

using Answer = std::tuple<int64_t, size_t, std::string>;  // version, question, bytes

// What one thread saw.
struct Seen {
  std::map<Answer, uint64_t> answers;
  std::map<std::string, uint64_t> failures;  // by code
  std::vector<float> micros;
};

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view rest = argv[i];
    const auto number = [&](auto& to) { return absl::SimpleAtoi(rest, &to); };
    bool good = true;
    if (absl::ConsumePrefix(&rest, "--url=")) {
      options.url = std::string(rest);
    } else if (absl::ConsumePrefix(&rest, "--model=")) {
      options.model = std::string(rest);
    } else if (absl::ConsumePrefix(&rest, "--inputs=")) {
      options.inputs = std::string(rest);
    } else if (absl::ConsumePrefix(&rest, "--width=")) {
      good = number(options.width);
    } else if (absl::ConsumePrefix(&rest, "--threads=")) {
      good = number(options.threads);
    } else if (absl::ConsumePrefix(&rest, "--requests=")) {
      good = number(options.requests);
    } else {
      good = false;
    }
    if (!good) return false;
  }
  return !options.url.empty() && !options.model.empty() && options.width > 0 && options.threads > 0;
}

std::vector<client::InferRequest> Questions(const Options& options) {
  std::ifstream file(options.inputs, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const size_t row = options.width * sizeof(float);
  std::vector<client::InferRequest> questions;
  for (size_t q = 0; (q + 1) * kRowsOfQuestion * row <= bytes.size(); ++q) {
    const size_t rows = 1 + q % kRowsOfQuestion;
    client::InferRequest request;
    request.model = options.model;
    request.inputs = {{"input",
                       "FP32",
                       {static_cast<int64_t>(rows), static_cast<int64_t>(options.width)},
                       bytes.substr(q * kRowsOfQuestion * row, rows * row)}};
    questions.push_back(std::move(request));
  }
  return questions;
}

void Ask(client::Client& server, const std::vector<client::InferRequest>& questions,
         size_t question, uint64_t most, const std::atomic<bool>& ended,
         std::atomic<uint64_t>& sent, Seen& seen) {
  for (;; ++question) {
    if (sent.fetch_add(1) >= most && ended) {
      sent.fetch_sub(1);
      return;
    }
    const size_t q = question % questions.size();
    const auto begin = std::chrono::steady_clock::now();
    auto result = server.Infer(questions[q]);
    const std::chrono::duration<float, std::micro> took = std::chrono::steady_clock::now() - begin;
    seen.micros.push_back(took.count());
    int64_t version = 0;
    if (!result.ok()) {
      if (seen.failures[absl::StatusCodeToString(result.status().code())]++ == 0) {
        std::cerr << absl::StrCat(result.status().ToString(), "\n");
      }
    } else if (!absl::SimpleAtoi(result->version, &version) || result->outputs.size() != 1) {
      ++seen.failures["MALFORMED"];
    } else {
      ++seen.answers[{version, q, result->outputs[0].bytes}];
    }
  }
}

std::string Json(const std::vector<Seen>& all, uint64_t sent) {
  Seen sum;
  for (const Seen& seen : all) {
    for (const auto& [answer, count] : seen.answers) sum.answers[answer] += count;
    for (const auto& [message, count] : seen.failures) sum.failures[message] += count;
    sum.micros.insert(sum.micros.end(), seen.micros.begin(), seen.micros.end());
  }
  std::sort(sum.micros.begin(), sum.micros.end());
  const auto percentile = [&](size_t percent) {
    return sum.micros.empty() ? 0.0f : sum.micros[(sum.micros.size() - 1) * percent / 100];
  };
  std::string text = absl::StrCat("{\"sent\": ", sent, ", \"answered\": ", sum.micros.size(),
                                  ", \"p50_us\": ", percentile(50),
                                  ", \"p99_us\": ", percentile(99), ", \"failed\": {");
  const char* comma = "";
  for (const auto& [code, count] : sum.failures) {
    absl::StrAppend(&text, comma, "\"", code, "\": ", count);
    comma = ", ";
  }
  text += "}, \"answers\": [";
  comma = "";
  for (const auto& [answer, count] : sum.answers) {
    const auto& [version, question, bytes] = answer;
    absl::StrAppend(&text, comma, "[", version, ", ", question, ", \"",
                    absl::BytesToHexString(bytes), "\", ", count, "]");
    comma = ",\n";
  }
  return text + "]}\n";
}

int Run(const Options& options) {
  const auto questions = Questions(options);
  auto server = client::Client::Create(options.url);
  if (questions.empty() || !server.ok()) {
    std::cerr << "no question in " << options.inputs << ", or " << server.status() << "\n";
    return 1;
  }
  std::atomic<bool> ended = false;
  std::atomic<uint64_t> sent = 0;
  std::vector<Seen> seen(static_cast<size_t>(options.threads));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < seen.size(); ++i) {
    threads.emplace_back(
        [&, i] { Ask(**server, questions, i * 7, options.requests, ended, sent, seen[i]); });
  }
  for (char byte; read(STDIN_FILENO, &byte, 1) > 0;) {
  }
  ended = true;
  for (std::thread& thread : threads) thread.join();
  std::cout << Json(seen, sent);
  return 0;
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) {
  espalier::bench::Options options;
  if (!espalier::bench::Parse(argc, argv, options)) {
    std::cerr << "usage: updates_load --url=HOST:PORT --model=NAME --inputs=FILE --width=N "
                 "[--threads=8] [--requests=1000000]\n";
    return 2;
  }
  return espalier::bench::Run(options);
}
