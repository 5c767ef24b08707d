#include "kernels/transpose/transpose.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace espalier::kernels {
namespace {

KernelContext Backwards() {
  KernelContext context;
  context.threads = 2;
  context.parallel_for = [](void*, int64_t n, KernelContext::Task task, void* arg) {
    for (int64_t i = n - 1; i >= 0; --i) task(arg, i);
  };
  return context;
}

template <typename T>
void CheckPermutation(const std::vector<int64_t>& x_dims, const std::vector<int>& perm) {
  TransposeArgs args;
  args.element_bytes = sizeof(T);
  args.rank = static_cast<int>(perm.size());
  std::vector<int64_t> x_strides(x_dims.size());
  int64_t count = 1;
  for (int axis = args.rank - 1; axis >= 0; --axis) {
    x_strides[axis] = count;
    count *= x_dims[axis];
  }
  for (int axis = 0; axis < args.rank; ++axis) {
    args.dims[axis] = x_dims[perm[axis]];
    args.strides[axis] = x_strides[perm[axis]];
  }
  std::vector<T> x(count), y(count + 1, T{77});
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<T>(i * 2654435761u);
  args.x = x.data();
  args.y = y.data();
  ASSERT_TRUE(Transpose(Backwards(), args).ok());
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, from = 0;
    for (int axis = args.rank - 1; axis >= 0; --axis) {
      from += rest % args.dims[axis] * args.strides[axis];
      rest /= args.dims[axis];
    }
    ASSERT_EQ(y[i], x[from]) << "element " << i;
  }
  ASSERT_EQ(y[count], T{77});
}

TEST(TransposeTest, EveryPermutationOfFourAxesAndEveryElementSizeMatches) {
  for (const auto& dims :
       {std::vector<int64_t>{2, 3, 4, 5}, {1, 7, 1, 33}, {33, 1, 40, 2}, {1, 1, 1, 1}}) {
    std::vector<int> perm = {0, 1, 2, 3};
    do {
      CheckPermutation<uint8_t>(dims, perm);
      CheckPermutation<uint16_t>(dims, perm);
      CheckPermutation<uint32_t>(dims, perm);
      CheckPermutation<uint64_t>(dims, perm);
    } while (std::next_permutation(perm.begin(), perm.end()));
  }
}

TEST(TransposeTest, MatricesAroundTheTileMatch) {
  for (const int64_t rows : {1, 31, 32, 33, 65}) {
    for (const int64_t cols : {1, 31, 32, 33, 97}) CheckPermutation<uint32_t>({rows, cols}, {1, 0});
  }
}

TEST(TransposeTest, NothingIsWrittenForNoElementsAndBrokenContractsAreRefused) {
  uint32_t v = 5;
  TransposeArgs args;
  args.rank = 2;
  args.dims[0] = 0;
  args.dims[1] = 3;
  args.x = args.y = &v;
  EXPECT_TRUE(Transpose({}, args).ok());
  EXPECT_EQ(v, 5u);
  args.dims[0] = 1;
  args.element_bytes = 3;
  EXPECT_EQ(Transpose({}, args).code, KernelCode::kInvalidArgument);
  args.rank = 0;
  EXPECT_EQ(Transpose({}, args).code, KernelCode::kInvalidArgument);
}

}  // namespace
}  // namespace espalier::kernels
