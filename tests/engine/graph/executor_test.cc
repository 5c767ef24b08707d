// The arena: reuse of memory never changes an answer, and serving allocates nothing.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <random>

#include "engine/graph/arena_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/graph/graph_harness.h"

namespace {
std::atomic<int64_t> allocations = 0;
}
// Counts every allocation of the program, so that a test can see that there is none.
void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace espalier::testing {
namespace {

// A chain with branches: every value may be read again much later. With layers, some of which take another value as their
// residual.
formats::ModelGraph RandomGraph(uint32_t seed, bool layers = false) {
  std::mt19937 random(seed);
  formats::ModelGraph graph = MakeGraph({kBatch, 4, 6});
  if (layers)
    graph.initializers.emplace("w", MakeTensor(DType::kFloat32, {6, 6}, RandomData(36, 1)));
  std::vector<std::string> names = {"x"};
  const auto pick = [&] { return names[random() % names.size()]; };
  for (int i = 0; i < 30; ++i) {
    const std::string name = "v" + std::to_string(i);
    switch (random() % (layers ? 8 : 5)) {
      case 0:
        graph.nodes.push_back(MakeNode("Tanh", {pick()}, {name}));
        break;
      case 1:
        graph.nodes.push_back(MakeNode("Softmax", {pick()}, {name}));
        break;
      case 2:
        graph.nodes.push_back(MakeNode("Mul", {pick(), pick()}, {name}));
        break;
      case 3:
        graph.nodes.push_back(MakeNode("Sub", {pick(), names.back()}, {name}));
        break;
      case 4: {
        const std::string swapped = name + "_swapped";
        graph.nodes.push_back(
            MakeNode("Transpose", {pick()}, {swapped}, {{"perm", std::vector<int64_t>{0, 2, 1}}}));
        graph.nodes.push_back(MakeNode("Relu", {swapped}, {name + "_relu"}));
        graph.nodes.push_back(MakeNode("Transpose", {name + "_relu"}, {name},
                                       {{"perm", std::vector<int64_t>{0, 2, 1}}}));
        break;
      }
      default:
        graph.nodes.push_back(MakeNode("MatMul", {pick(), "w"}, {name + "_product"}));
        graph.nodes.push_back(MakeNode("Add", {name + "_product", pick()}, {name + "_sum"}));
        graph.nodes.push_back(MakeNode("Tanh", {name + "_sum"}, {name}));
        break;
    }
    names.push_back(name);
  }
  graph.nodes.push_back(MakeNode("Add", {names.back(), names[names.size() / 2]}, {"y"}));
  return graph;
}

TEST(ArenaTest, ReusedMemoryNeverChangesAnAnswer) {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    ExpectMatchesReference([=] { return RandomGraph(seed); }, 7, 1e-5);
    ExpectMatchesReference([=] { return RandomGraph(seed, /*layers=*/true); }, 7, 1e-5);
  }
}

TEST(ArenaTest, ALongChainTakesTheMemoryOfTwoValues) {
  formats::ModelGraph graph = MakeGraph({kBatch, 64, 64});
  std::string last = "x";
  for (int i = 0; i < 20; ++i) {
    const std::string name = i == 19 ? "y" : "v" + std::to_string(i);
    graph.nodes.push_back(
        MakeNode("Transpose", {last}, {name}, {{"perm", std::vector<int64_t>{0, 2, 1}}}));
    last = name;
  }
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 8});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(graph::PlanArena(*program, 8).bytes, 2u * 8 * 64 * 64 * sizeof(float));
}

TEST(ArenaTest, InPlaceOpsTakeNoMemoryOfTheirOwn) {
  formats::ModelGraph graph = MakeGraph({kBatch, 64});
  graph.nodes.push_back(MakeNode("Tanh", {"x"}, {"a"}));
  graph.nodes.push_back(MakeNode("Relu", {"a"}, {"b"}));
  graph.nodes.push_back(MakeNode("Softmax", {"b"}, {"c"}));
  graph.nodes.push_back(MakeNode("Sigmoid", {"c"}, {"y"}));
  auto program = graph::Lower(std::move(graph), {.max_batch_size = 8});
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(graph::PlanArena(*program, 8).bytes, 8u * 64 * sizeof(float));
}

TEST(ExecutorTest, RunningAllocatesNothing) {
  auto program = graph::Lower(RandomGraph(3), {.max_batch_size = 8});
  ASSERT_TRUE(program.ok()) << program.status();
  const auto device = MakeCpuDevice(1);
  const graph::Executor executor(*program, *device, {1, 2, 4, 8},
                                 std::vector<std::vector<graph::LinearBinding>>(4));
  auto state = executor.NewState();
  ASSERT_TRUE(state.ok());
  std::fill_n(static_cast<float*>((*state)->input(0)), 8 * 24, 0.5f);
  ASSERT_TRUE(executor.Run(**state, 8).ok());
  const int64_t before = allocations;
  for (int64_t batch = 1; batch <= 8; ++batch) ASSERT_TRUE(executor.Run(**state, batch).ok());
  EXPECT_EQ(allocations, before);
}

TEST(ExecutorTest, ABatchOutsideTheLimitsIsRefused) {
  auto program = graph::Lower(RandomGraph(3), {.max_batch_size = 8});
  ASSERT_TRUE(program.ok());
  const auto device = MakeCpuDevice(1);
  const graph::Executor executor(*program, *device, {8},
                                 std::vector<std::vector<graph::LinearBinding>>(1));
  auto state = executor.NewState();
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(executor.Run(**state, 0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(executor.Run(**state, 9).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(executor.Run(**state, -1).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ExecutorTest, BuffersAreAligned) {
  auto program = graph::Lower(RandomGraph(3), {.max_batch_size = 8});
  ASSERT_TRUE(program.ok());
  const auto device = MakeCpuDevice(1);
  const graph::Executor executor(*program, *device, {8},
                                 std::vector<std::vector<graph::LinearBinding>>(1));
  auto state = executor.NewState();
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*state)->input(0)) % kAlignment, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*state)->output(0)) % kAlignment, 0u);
}

}  // namespace
}  // namespace espalier::testing
