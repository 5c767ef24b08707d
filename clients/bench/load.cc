#include "clients/bench/load.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/bench/worker.h"

namespace espalier::bench {
namespace {

constexpr double kConnectSeconds = 5;
constexpr int64_t kNanos = 1'000'000'000;
// How often a broken stream is looked for.
constexpr int64_t kLookNanos = kNanos / 20;

void SleepUntil(int64_t nanos) {
  const timespec until{nanos / kNanos, nanos % kNanos};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

absl::StatusOr<std::vector<std::shared_ptr<grpc::Channel>>> Connect(const LoadOptions& options) {
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < std::max(options.channels, options.threads); ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetMaxReceiveMessageSize(-1);
    // Channels with equal arguments would share one connection.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    // What the library sends again by itself would not be in the ledger.
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    channels.push_back(
        grpc::CreateCustomChannel(options.url, grpc::InsecureChannelCredentials(), arguments));
    channels.back()->GetState(/*try_to_connect=*/true);
  }
  const auto deadline = std::chrono::system_clock::now() +
                        std::chrono::milliseconds(static_cast<int64_t>(kConnectSeconds * 1000));
  for (const auto& channel : channels) {
    if (!channel->WaitForConnected(deadline)) {
      return absl::UnavailableError(
          absl::StrCat("no connection to ", options.url, " within ", kConnectSeconds, " s"));
    }
  }
  return channels;
}

// Sends what is due until the window ends; returns how many requests of it had to be withheld.
uint64_t SendAtRate(const LoadOptions& options, int64_t start_nanos, Window window,
                    std::vector<std::unique_ptr<Worker>>& workers, const std::atomic<bool>& stop) {
  prctl(PR_SET_TIMERSLACK, 1);  // by default the kernel may wake this thread 50 µs late
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> gap_seconds(options.rate);
  const int64_t share =
      std::max<int64_t>(1, options.max_outstanding / static_cast<int64_t>(workers.size()));
  uint64_t withheld = 0;
  double due = static_cast<double>(start_nanos);
  for (size_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
    due += gap_seconds(random) * kNanos;
    const int64_t due_nanos = static_cast<int64_t>(due);
    if (due_nanos >= window.end_nanos) break;
    if (due_nanos > NowNanos()) SleepUntil(due_nanos);
    Worker& worker = *workers[i % workers.size()];
    if (worker.outstanding() < share) {
      worker.Send(due_nanos);
    } else if (due_nanos >= window.begin_nanos) {
      ++withheld;
    }
  }
  return withheld;
}

// Waits for `nanos`, or less when a stream breaks.
absl::Status Watch(int64_t nanos, const std::vector<std::unique_ptr<Worker>>& workers) {
  for (int64_t now = NowNanos(); now < nanos; now = NowNanos()) {
    for (const auto& worker : workers) {
      if (absl::Status status = worker->broken(); !status.ok()) return status;
    }
    SleepUntil(std::min(nanos, now + kLookNanos));
  }
  return absl::OkStatus();
}

absl::Status Measure(const LoadOptions& options, Window window,
                     const std::vector<std::unique_ptr<Worker>>& workers, LoadResult& result) {
  if (absl::Status status = Watch(window.begin_nanos, workers); !status.ok()) return status;
  if (options.measure_begins) options.measure_begins();
  const double cpu_before = CpuSeconds();
  if (absl::Status status = Watch(window.end_nanos, workers); !status.ok()) return status;
  result.client_cpus = (CpuSeconds() - cpu_before) / options.duration_seconds;
  if (options.measure_ends) options.measure_ends();
  return absl::OkStatus();
}

}  // namespace

int64_t NowNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options, const RequestSource& source) {
  auto channels = Connect(options);
  if (!channels.ok()) return channels.status();
  const int64_t start = NowNanos();
  Window window;
  window.begin_nanos = start + static_cast<int64_t>(options.warmup_seconds * kNanos);
  window.end_nanos = window.begin_nanos + static_cast<int64_t>(options.duration_seconds * kNanos);
  std::atomic<uint64_t> sequence{0};
  std::vector<std::unique_ptr<Worker>> workers;
  for (int t = 0; t < options.threads; ++t) {
    std::vector<std::shared_ptr<grpc::Channel>> own;
    for (size_t i = t; i < channels->size(); i += options.threads) own.push_back((*channels)[i]);
    workers.push_back(std::make_unique<Worker>(options, source, window, sequence, std::move(own)));
  }
  LoadResult result;
  result.seconds = options.duration_seconds;
  if (options.rate == 0) {
    for (int i = 0; i < options.concurrency; ++i) workers[i % workers.size()]->Send(NowNanos());
  }
  for (const auto& worker : workers) worker->Start();
  std::atomic<bool> stop{false};
  std::thread sender;
  if (options.rate > 0) {
    sender =
        std::thread([&] { result.withheld = SendAtRate(options, start, window, workers, stop); });
  }
  const absl::Status measured = Measure(options, window, workers, result);
  stop = true;
  if (sender.joinable()) sender.join();
  // A call ends by its own deadline, at most this long after it was sent.
  const int64_t patience = static_cast<int64_t>((options.timeout_seconds + 1) * kNanos);
  const int64_t give_up = measured.ok() ? NowNanos() + patience : 0;
  for (const auto& worker : workers) worker->Finish(give_up);
  if (!measured.ok()) return measured;
  for (const auto& worker : workers) {
    if (absl::Status status = worker->broken(); !status.ok()) return status;
    worker->AddTo(result);
  }
  return result;
}

}  // namespace espalier::bench
