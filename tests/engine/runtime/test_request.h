// test_request.h — an InferRequest that a test waits for.
#pragma once

#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "engine/runtime/served_version.h"
#include "tests/engine/runtime/fake_model.h"

namespace espalier::testing {

class TestRequest : public runtime::InferRequest {
 public:
  TestRequest() = default;
  // One FP32 input "x" of shape [batch, 4] counting up from `first`.
  explicit TestRequest(int64_t batch, float first = 0) {
    std::vector<float> values(static_cast<size_t>(batch) * 4);
    for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
    AddInput("x", "FP32", {batch, 4},
             std::string(reinterpret_cast<char*>(values.data()), values.size() * 4));
  }

  // Splits the bytes into pieces of `piece` bytes, so that nothing can rely on one slice.
  void AddInput(std::string name, std::string datatype, Shape shape, std::string bytes,
                size_t piece = 7) {
    memory_.push_back(std::move(bytes));
    runtime::ByteSlices slices;
    for (size_t at = 0; at < memory_.back().size(); at += piece) {
      slices.push_back({reinterpret_cast<const std::byte*>(memory_.back().data()) + at,
                        std::min(piece, memory_.back().size() - at)});
    }
    inputs.push_back({std::move(name), std::move(datatype), std::move(shape), std::move(slices)});
  }

  void Submit(const runtime::VersionHandle& handle) {
    version = handle;
    handle->Submit(this);
  }

  // Waits for the answer.
  const absl::Status& status() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return answers_ > 0; });
    return status_;
  }
  bool answered() const { return answers() > 0; }
  int answers() const {
    const std::lock_guard lock(mutex_);
    return answers_;
  }
  int64_t answered_nanos() {
    status();
    return answered_nanos_;
  }
  std::vector<float> Floats(size_t output = 0) const {
    std::vector<float> values(results_[output].size() / 4);
    std::memcpy(values.data(), results_[output].data(), results_[output].size());
    return values;
  }

  absl::Status TakeOutputs(absl::Span<const std::byte* const> from) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      results_.emplace_back(reinterpret_cast<const char*>(from[i]), outputs[i].bytes);
    }
    return absl::OkStatus();
  }
  void Answer(absl::Status status) override {
    const std::lock_guard lock(mutex_);
    status_ = std::move(status);
    answered_nanos_ = runtime::NowNanos();
    ++answers_;
    changed_.notify_all();  // under the lock: whoever waits may destroy the request then
  }

 private:
  std::list<std::string> memory_;
  std::vector<std::string> results_;
  absl::Status status_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int answers_ = 0;
  int64_t answered_nanos_ = 0;
};

// Keeps a version's only instance, behind the closed gate of its model, until the gate is opened; returns the request
// that stands there. On a busy machine one may expire in the queue: another one follows it.
inline TestRequest& Occupy(const runtime::VersionHandle& version, Gate& gate,
                           std::list<TestRequest>& requests) {
  gate.Close();
  while (true) {
    TestRequest& request = requests.emplace_back(1);
    request.Submit(version);
    while (!request.answered()) {
      if (gate.waiting() > 0) return request;
      absl::SleepFor(absl::Microseconds(100));
    }
  }
}

}  // namespace espalier::testing
