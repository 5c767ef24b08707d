// echo_bench — what the server adds to gRPC and to the engine, and how soon it is ready. See
// --help.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "engine/formats/model_config.h"
#include "engine/formats/reader.h"
#include "engine/planner/prepared_model.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/bench/child_process.h"
#include "tests/bench/echo_server.h"
#include "tests/bench/timing.h"

namespace espalier::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr char kHelp[] =
    R"(echo_bench: what espalierd adds to gRPC and the engine, one image at a time.

  echo_bench [--models DIR] [--server FILE] [--rounds N] [--requests N] [--out FILE]

  --models    model repository (default tests/data/models)
  --server    espalierd to measure (default: beside this program)
  --rounds    alternating windows per model (default 21); every figure is a median over them
  --requests  requests per window (default 400)
  --out       write JSON there

Three servers, each a process of its own on this machine, answer the same client over loopback in
turn: espalierd, and two that only take the same message through the same raw callback API and
answer at once, with as many bytes as espalierd's answer ("echo") and with the bytes they got
("full_echo"). engine_us is the prepared model in this process, warm, at batch 1. overhead_us is
p50 - echo p50 - engine, round by round. Readiness is the time from exec to the ready file.
)";

struct Options {
  std::string models = "tests/data/models", server, out, command;
  int rounds = 21, requests = 400;
};

std::string Quote(const std::string& text) { return "\"" + text + "\""; }

double Micros(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

double Median(std::vector<double> samples) { return Summarize(std::move(samples)).median; }

// Blocking unary calls with raw bytes; what it costs is the same for all servers.
class RawClient {
 public:
  explicit RawClient(int port)
      : channel_(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                     grpc::InsecureChannelCredentials())),
        stub_(channel_) {}

  std::string Call(const std::string& method, const std::string& request) {
    const grpc::Slice slice(request);
    grpc::ByteBuffer answer = Exchange(method, grpc::ByteBuffer(&slice, 1));
    grpc::Slice whole;
    if (!answer.Valid() || !answer.DumpToSingleSlice(&whole).ok()) return "";
    return {reinterpret_cast<const char*>(whole.begin()), whole.size()};
  }

  // Latency of each of `count` requests, one after the other.
  std::vector<double> Window(const grpc::ByteBuffer& request, int count) {
    std::vector<double> micros;
    for (int i = 0; i < count; ++i) {
      const auto began = Clock::now();
      Exchange("ModelInfer", request);
      micros.push_back(Micros(Clock::now() - began));
    }
    return micros;
  }

 private:
  grpc::ByteBuffer Exchange(const std::string& method, const grpc::ByteBuffer& request) {
    grpc::ClientContext context;
    grpc::ByteBuffer answer;
    grpc::Status status;
    auto call = stub_.PrepareUnaryCall(&context, "/inference.GRPCInferenceService/" + method,
                                       request, &queue_);
    call->StartCall();
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);
    if (!status.ok()) {
      std::fprintf(stderr, "%s: %s\n", method.c_str(), status.error_message().c_str());
      std::exit(1);
    }
    return answer;
  }

  std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
};

// One item of random inputs for the model, as the server describes it.
inference::ModelInferRequest OneItem(RawClient& client, const std::string& model) {
  inference::ModelMetadataRequest question;
  question.set_name(model);
  inference::ModelMetadataResponse metadata;
  metadata.ParseFromString(client.Call("ModelMetadata", question.SerializeAsString()));
  inference::ModelInferRequest request;
  request.set_model_name(model);
  for (const auto& input : metadata.inputs()) {
    auto* tensor = request.add_inputs();
    tensor->set_name(input.name());
    tensor->set_datatype(input.datatype());
    int64_t elements = 1;
    for (const int64_t dim : input.shape()) {
      tensor->add_shape(std::max<int64_t>(dim, 1));
      elements *= std::max<int64_t>(dim, 1);
    }
    std::vector<float> values(static_cast<size_t>(elements));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) / 17;
    request.add_raw_input_contents(reinterpret_cast<const char*>(values.data()),
                                   values.size() * sizeof(float));
  }
  return request;
}

// What the engine alone takes for one item, warm. Dies when the model cannot be prepared: the
// server could.
double EngineMicros(const std::string& directory, const std::string& plan_cache,
                    const Device& device) {
  auto graph = formats::ReadModel(directory + "/1/model.onnx");
  auto config = formats::ReadModelConfig(directory);
  auto complete = formats::CompleteModelConfig(config.ok() ? *config : inference::ModelConfig(),
                                               fs::path(directory).filename(), *graph);
  planner::PrepareOptions options;
  options.max_batch_size = complete->max_batch_size();
  options.plan_cache_dir = plan_cache;
  auto model = planner::PreparedModel::Prepare(*std::move(graph), device, options);
  auto state = (*model)->NewState();
  std::memset((*state)->input(0), 0, 3136);
  const auto run = [&] {
    if (!(*model)->Run(**state, 1).ok()) std::exit(1);
  };
  return Median(TimeInTurn({run}, TimingOptions())[0]);
}

struct ModelResult {
  std::string model, layouts;
  double p50 = 0, p99 = 0, echo = 0, full_echo = 0, engine = 0, server_infer = 0, overhead = 0;
};

inference::ModelStatistics StatisticsOf(RawClient& client, const std::string& model) {
  inference::ModelStatisticsRequest question;
  question.set_name(model);
  inference::ModelStatisticsResponse answer;
  answer.ParseFromString(client.Call("ModelStatistics", question.SerializeAsString()));
  return answer.model_stats(0);
}

class Bench {
 public:
  explicit Bench(Options options) : options_(std::move(options)) {
    folder_ = fs::temp_directory_path() / ("echo_bench." + std::to_string(getpid()));
    fs::create_directories(folder_);
    for (const auto& entry : fs::directory_iterator(options_.models)) {
      if (entry.is_directory()) models_.push_back(entry.path().filename());
    }
    std::sort(models_.begin(), models_.end());
  }
  ~Bench() { fs::remove_all(folder_); }

  int Run() {
    const double first = Median(ReadyMicros(5, /*keep_plans=*/false));
    const double cached = Median(ReadyMicros(5, /*keep_plans=*/true));
    std::printf("ready, all %zu models: first start %.0f ms, from the plan cache %.0f ms\n",
                models_.size(), first / 1e3, cached / 1e3);
    AddReadyRow("ready on first start", first, 5e6);
    AddReadyRow("ready from the plan cache", cached, 1e6);
    fs::remove(folder_ / "ready.json");
    ChildProcess server(ServerCommand(), folder_ / "server.log");
    RawClient client(server.AwaitPort(folder_ / "ready.json"));
    std::printf("%-20s %8s %8s %8s %8s %9s %9s  us\n", "model", "p50", "p99", "echo", "engine",
                "overhead", "full echo");
    for (const std::string& model : models_) AddModelRow(Measure(client, model));
    if (!options_.out.empty()) Write();
    return 0;
  }

 private:
  std::vector<std::string> ServerCommand() const {
    return {options_.server,
            "--model_repository=" + options_.models,
            "--address=127.0.0.1:0",
            "--metrics_address=",
            "--state_dir=" + (folder_ / "state").string(),
            "--ready_file=" + (folder_ / "ready.json").string()};
  }

  std::vector<double> ReadyMicros(int starts, bool keep_plans) {
    std::vector<double> micros;
    for (int i = 0; i < starts; ++i) {
      if (!keep_plans) fs::remove_all(folder_ / "state");
      fs::remove(folder_ / "ready.json");
      const auto began = Clock::now();
      ChildProcess server(ServerCommand(), folder_ / "server.log");
      server.AwaitPort(folder_ / "ready.json");
      micros.push_back(Micros(Clock::now() - began));
    }
    return micros;
  }

  std::unique_ptr<ChildProcess> StartEcho(size_t answer_bytes, const std::string& port_file) {
    fs::remove(port_file);
    return std::make_unique<ChildProcess>(
        std::vector<std::string>{"/proc/self/exe", "--serve_echo", std::to_string(answer_bytes),
                                 port_file},
        folder_ / "echo.log");
  }

  ModelResult Measure(RawClient& client, const std::string& model) {
    const std::string request = OneItem(client, model).SerializeAsString();
    const size_t answer_bytes = client.Call("ModelInfer", request).size();
    const std::string echo_file = folder_ / "echo.json", full_file = folder_ / "full.json";
    const auto echo_server = StartEcho(answer_bytes, echo_file),
               full_server = StartEcho(0, full_file);
    RawClient echo(echo_server->AwaitPort(echo_file)), full(full_server->AwaitPort(full_file));
    const grpc::Slice slice(request);
    const grpc::ByteBuffer message(&slice, 1);
    for (RawClient* each : {&client, &echo, &full})
      each->Window(message, options_.requests);  // warm

    ModelResult result{.model = model};
    result.engine = EngineMicros(options_.models + "/" + model, folder_ / "state/plans", *device_);
    const auto before = StatisticsOf(client, model).inference_stats().compute_infer();
    std::vector<double> p50s, p99s, echoes, full_echoes, overheads;
    for (int round = 0; round < options_.rounds; ++round) {
      std::vector<double> window = client.Window(message, options_.requests);
      std::sort(window.begin(), window.end());
      p50s.push_back(window[window.size() / 2]);
      p99s.push_back(window[window.size() * 99 / 100]);
      echoes.push_back(Median(echo.Window(message, options_.requests)));
      full_echoes.push_back(Median(full.Window(message, options_.requests)));
      overheads.push_back(p50s.back() - echoes.back() - result.engine);
    }
    const auto after = StatisticsOf(client, model).inference_stats().compute_infer();
    result.server_infer = static_cast<double>(after.ns() - before.ns()) / 1e3 /
                          static_cast<double>(after.count() - before.count());
    result.p50 = Median(p50s);
    result.p99 = Median(p99s);
    result.echo = Median(echoes);
    result.full_echo = Median(full_echoes);
    result.overhead = Median(overheads);
    inference::ModelConfigRequest question;
    question.set_name(model);
    inference::ModelConfigResponse answer;
    answer.ParseFromString(client.Call("ModelConfig", question.SerializeAsString()));
    result.layouts = answer.config().parameters().at("layouts").string_value();
    return result;
  }

  void AddReadyRow(const std::string& name, double micros, double bar) {
    std::ostringstream row;
    row << "{\"case\": " << Quote(name) << ", \"models\": " << models_.size()
        << ", \"us\": " << micros << ", \"bar_us\": " << bar << "}";
    rows_.push_back(row.str());
  }

  void AddModelRow(const ModelResult& r) {
    std::printf("%-20s %8.1f %8.1f %8.1f %8.1f %9.1f %9.1f\n", r.model.c_str(), r.p50, r.p99,
                r.echo, r.engine, r.overhead, r.full_echo);
    std::fflush(stdout);
    std::ostringstream row;
    row << "{\"case\": \"one image\", \"model\": " << Quote(r.model)
        << ", \"layout\": " << Quote(r.layouts) << ", \"M\": 1, \"us\": " << r.p50
        << ", \"p99_us\": " << r.p99 << ", \"echo_us\": " << r.echo
        << ", \"full_echo_us\": " << r.full_echo << ", \"engine_us\": " << r.engine
        << ", \"server_infer_us\": " << r.server_infer << ", \"overhead_us\": " << r.overhead
        << ", \"bar_us\": 30}";
    rows_.push_back(row.str());
  }

  void Write() const {
    std::ofstream file(options_.out);
    file << "{\"device\": " << Quote(DescribeCpu()) << ", \"commit\": " << Quote(Commit())
         << ", \"date\": " << Quote(Today()) << ",\n \"command\": " << Quote(options_.command)
         << ",\n \"rows\": [\n";
    for (size_t i = 0; i < rows_.size(); ++i)
      file << "  " << rows_[i] << (i + 1 < rows_.size() ? ",\n" : "\n");
    file << " ]}\n";
  }

  const Options options_;
  fs::path folder_;
  std::vector<std::string> models_;
  std::unique_ptr<Device> device_ = MakeCpuDevice(0);
  std::vector<std::string> rows_;
};

int Main(int argc, char** argv) {
#ifndef NDEBUG
  std::fprintf(stderr,
               "echo_bench measures optimized builds only; configure with the release preset\n");
  return 2;
#endif
  if (argc == 4 && std::string(argv[1]) == "--serve_echo") {
    return RunEchoServer(static_cast<size_t>(std::atoll(argv[2])), argv[3]);
  }
  Options options;
  options.server = fs::read_symlink("/proc/self/exe").parent_path() / "espalierd";
  options.command = "echo_bench";
  for (int i = 1; i < argc; ++i) options.command += std::string(" ") + argv[i];
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 < argc) return argv[++i];
      std::fprintf(stderr, "%s needs a value\n", flag.c_str());
      std::exit(2);
    };
    if (flag == "--help") {
      std::fputs(kHelp, stdout);
      return 0;
    } else if (flag == "--models") {
      options.models = value();
    } else if (flag == "--server") {
      options.server = value();
    } else if (flag == "--rounds") {
      options.rounds = std::max(1, std::atoi(value().c_str()));
    } else if (flag == "--requests") {
      options.requests = std::max(1, std::atoi(value().c_str()));
    } else if (flag == "--out") {
      options.out = value();
    } else {
      std::fprintf(stderr, "unknown argument '%s'; see --help\n", flag.c_str());
      return 2;
    }
  }
  return Bench(std::move(options)).Run();
}

}  // namespace
}  // namespace espalier::bench

int main(int argc, char** argv) { return espalier::bench::Main(argc, argv); }
