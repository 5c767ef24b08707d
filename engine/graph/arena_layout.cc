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

// The input in whose memory `step` may make its output as far as the two and the step itself go; −1: none.
int InPlaceInput(const Program& program, const Step& step) {
  const int input = step.op->in_place_input();
  if (input < 0) return -1;
  const int value = step.inputs[input];
  const Value &from = program.values[value], &to = program.values[step.output];
  const bool same_form = from.storage == to.storage && from.elements == to.elements &&
                         from.width == to.width && from.row_stride == to.row_stride;
  const bool read_once =
      std::ranges::count(step.inputs, value) == 1 && std::ranges::count(step.keeps, value) == 0;
  return same_form && read_once ? value : -1;
}

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
    const int input = InPlaceInput(program, step);
    if (input >= 0 && block_of[input] >= 0 && last_use[input] == now) {
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
