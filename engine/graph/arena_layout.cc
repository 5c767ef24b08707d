#include "engine/graph/arena_layout.h"

#include <algorithm>
#include <numeric>

#include "engine/tensor/buffer.h"

namespace espalier::graph {
namespace {

// Values that share memory (a chain of in-place steps), live over steps [first, last].
struct Block {
  int first = 0, last = 0;
  size_t bytes = 0;
  size_t offset = 0;
};

size_t AlignedBytesOf(const Value& value, int64_t batch) { return AlignUp(BytesOf(value, batch)); }

// The block of every activation, −1 for other values.
std::vector<int> MakeBlocks(const Program& program, int64_t batch, std::vector<Block>& blocks) {
  std::vector<int> last_use(program.values.size(), -1), block_of(program.values.size(), -1);
  for (size_t i = 0; i < program.steps.size(); ++i) {
    for (const std::vector<int>* values : {&program.steps[i].inputs, &program.steps[i].keeps}) {
      for (int value : *values) last_use[value] = static_cast<int>(i);
    }
  }
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    const int now = static_cast<int>(i);
    const Value& output = program.values[step.output];
    if (output.role != Value::Role::kActivation) continue;
    const int input = step.inputs.empty() ? -1 : step.inputs[0];
    if (step.op->in_place() && input >= 0 && block_of[input] >= 0 && last_use[input] == now &&
        AlignedBytesOf(program.values[input], batch) == AlignedBytesOf(output, batch)) {
      block_of[step.output] = block_of[input];
    } else {
      block_of[step.output] = static_cast<int>(blocks.size());
      blocks.push_back({now, now, AlignedBytesOf(output, batch)});
    }
    Block& block = blocks[block_of[step.output]];
    block.last = std::max({block.last, now, last_use[step.output]});
  }
  return block_of;
}

}  // namespace

ArenaLayout PlanArena(const Program& program, int64_t batch) {
  std::vector<Block> blocks;
  const std::vector<int> block_of = MakeBlocks(program, batch, blocks);
  // Largest first, each at the lowest offset where nothing alive at the same time lies.
  std::vector<int> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return blocks[a].bytes > blocks[b].bytes; });
  ArenaLayout layout;
  std::vector<const Block*> placed;  // ascending offsets
  for (int index : order) {
    Block& block = blocks[index];
    size_t offset = 0;
    for (const Block* other : placed) {
      if (other->last < block.first || block.last < other->first) continue;
      if (offset + block.bytes <= other->offset) break;
      offset = std::max(offset, other->offset + other->bytes);
    }
    block.offset = offset;
    layout.bytes = std::max(layout.bytes, offset + block.bytes);
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), &block,
                         [](const Block* a, const Block* b) { return a->offset < b->offset; }),
        &block);
  }
  layout.offsets.resize(program.values.size(), 0);
  for (size_t value = 0; value < program.values.size(); ++value) {
    if (block_of[value] >= 0) layout.offsets[value] = blocks[block_of[value]].offset;
  }
  return layout;
}

}  // namespace espalier::graph
