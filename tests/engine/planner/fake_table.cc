#include "tests/engine/planner/fake_table.h"

namespace espalier::planner {

kernels::LinearVariant FakeVariant(const char* name, kernels::Layout layout, const char* packing,
                                   bool batch_invariant) {
  kernels::LinearVariant variant = {};
  variant.name = name;
  variant.layout = layout;
  variant.packing = packing;
  variant.batch_invariant = batch_invariant;
  return variant;
}

CostTable FakeTable(const std::vector<FakeOption>& options) {
  CostTable table;
  for (size_t b = 0; b < options[0].micros.size(); ++b) table.tokens.push_back(int64_t{1} << b);
  table.costs.resize(table.tokens.size());
  for (const FakeOption& fake : options) {
    LayerOption option;
    option.layout.spec.layout = fake.variant->layout;
    option.layout.bytes = fake.bytes;
    option.layout.stored = static_cast<int64_t>(fake.bytes / sizeof(float));
    option.variant = fake.variant;
    option.resident_bytes = fake.bytes;
    table.options.push_back(option);
    for (size_t b = 0; b < table.tokens.size(); ++b) {
      Cost cost;
      cost.predicted = cost.micros = fake.micros[b];
      cost.measured = fake.micros[b] == kCannotRun ? 0 : fake.micros[b];
      table.costs[b].push_back(cost);
    }
  }
  return table;
}

}  // namespace espalier::planner
