#include "tests/bench/cuda/cusparse_baseline.h"

#include <cusparse.h>

#include <algorithm>
#include <cstdio>
#include <span>

namespace espalier::bench {
namespace {

using namespace kernels;           // NOLINT: a bench of that namespace
using namespace kernels::testing;  // NOLINT

constexpr cusparseSpMMAlg_t kCsrAlgorithms[] = {CUSPARSE_SPMM_CSR_ALG1, CUSPARSE_SPMM_CSR_ALG2,
                                                CUSPARSE_SPMM_CSR_ALG3};
constexpr cusparseSpMMAlg_t kBsrAlgorithms[] = {CUSPARSE_SPMM_ALG_DEFAULT, CUSPARSE_SPMM_BSR_ALG1};

KernelStatus FromCusparse(cusparseStatus_t status) {
  if (status == CUSPARSE_STATUS_SUCCESS) return {};
  if (status == CUSPARSE_STATUS_NOT_SUPPORTED || status == CUSPARSE_STATUS_INVALID_VALUE)
    return {KernelCode::kUnsupported, cusparseGetErrorString(status)};
  return {KernelCode::kLaunchFailed, cusparseGetErrorString(status)};
}

}  // namespace

struct CusparseProduct::Handles {
  cusparseHandle_t handle = nullptr;
  cusparseSpMatDescr_t weight = nullptr;
  cusparseDnMatDescr_t inputs[2] = {}, outputs[2] = {};  // as they are, feature-major
  cusparseDnMatDescr_t x = nullptr, y = nullptr;
  std::span<const cusparseSpMMAlg_t> algorithms;
  cusparseSpMMAlg_t algorithm = CUSPARSE_SPMM_ALG_DEFAULT;
};

CusparseProduct::CusparseProduct(const cuda::CudaModule* module, const WeightView& weight,
                                 const LinearArgs& args)
    : module_(module),
      row_ptr_(module, weight.row_ptr, (weight.block_row_count() + 1) * 4),
      col_idx_(module, weight.col_idx, weight.count * 4),
      values_(module, weight.values,
              weight.count * weight.block_rows * weight.block_cols * SizeOf(weight.dtype)),
      handles_(new Handles) {
  const cudaDataType_t type = weight.dtype == DType::kFloat32    ? CUDA_R_32F
                              : weight.dtype == DType::kBFloat16 ? CUDA_R_16BF
                                                                 : CUDA_R_16F;
  OrDie(FromCusparse(cusparseCreate(&handles_->handle)), "cusparse");
  const bool blocks = weight.layout == Layout::kBlockCsr;
  handles_->algorithms = blocks ? std::span<const cusparseSpMMAlg_t>(kBsrAlgorithms)
                                : std::span<const cusparseSpMMAlg_t>(kCsrAlgorithms);
  OrDie(
      FromCusparse(
          blocks ? cusparseCreateBsr(&handles_->weight, weight.block_row_count(),
                                     weight.block_col_count(), weight.count, weight.block_rows,
                                     weight.block_cols, row_ptr_.as(), col_idx_.as(), values_.as(),
                                     CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I,
                                     CUSPARSE_INDEX_BASE_ZERO, type, CUSPARSE_ORDER_ROW)
                 : cusparseCreateCsr(&handles_->weight, weight.out, weight.in, weight.count,
                                     row_ptr_.as(), col_idx_.as(), values_.as(), CUSPARSE_INDEX_32I,
                                     CUSPARSE_INDEX_32I, CUSPARSE_INDEX_BASE_ZERO, type)),
      "cusparse weight");
  // Row-major [tokens, features] is column-major [features, tokens].
  const size_t element = SizeOf(weight.dtype);
  turned_x_ = DeviceBuffer(module, weight.in * args.tokens * element);
  turned_y_ = DeviceBuffer(module, weight.out * args.tokens * element);
  turned_x_.Fill(0x3c);  // small finite numbers in every 2- and 4-byte type
  OrDie(
      FromCusparse(cusparseCreateDnMat(&handles_->inputs[0], weight.in, args.tokens, args.x_stride,
                                       const_cast<void*>(args.x), type, CUSPARSE_ORDER_COL)),
      "cusparse x");
  OrDie(FromCusparse(cusparseCreateDnMat(&handles_->outputs[0], weight.out, args.tokens,
                                         args.y_stride, args.y, type, CUSPARSE_ORDER_COL)),
        "cusparse y");
  OrDie(FromCusparse(cusparseCreateDnMat(&handles_->inputs[1], weight.in, args.tokens, args.tokens,
                                         turned_x_.as(), type, CUSPARSE_ORDER_ROW)),
        "cusparse x");
  OrDie(FromCusparse(cusparseCreateDnMat(&handles_->outputs[1], weight.out, args.tokens,
                                         args.tokens, turned_y_.as(), type, CUSPARSE_ORDER_ROW)),
        "cusparse y");
}

std::unique_ptr<CusparseProduct> CusparseProduct::CreateOrNull(const cuda::CudaModule* module,
                                                               const WeightView& weight,
                                                               const LinearArgs& args) {
  if (weight.out % weight.block_rows != 0 || weight.in % weight.block_cols != 0) return nullptr;
  auto product = std::unique_ptr<CusparseProduct>(new CusparseProduct(module, weight, args));
  const KernelStatus status = product->ChooseFastest();
  if (status.ok()) return product;
  if (status.code != KernelCode::kUnsupported) OrDie(status, "cusparse");
  std::fprintf(stderr, "cusparse, %s %d: %s\n", NameOf(weight.layout), weight.block_rows,
               status.message);
  return nullptr;
}

KernelStatus CusparseProduct::ChooseFastest() {
  const int algorithms = static_cast<int>(handles_->algorithms.size());
  int best = -1;
  double best_micros = 0;
  KernelStatus refused;
  for (int i = 0; i < 2 * algorithms; ++i) {
    double micros = 0;
    KernelStatus status = Choose(i % algorithms, i >= algorithms);
    if (status.ok()) status = Time(&micros);
    if (!status.ok()) {
      if (status.code != KernelCode::kUnsupported) return status;
      refused = status;
    } else if (best < 0 || micros < best_micros) {
      best = i;
      best_micros = micros;
    }
  }
  return best < 0 ? refused : Choose(best % algorithms, best >= algorithms);
}

CusparseProduct::~CusparseProduct() {
  for (int i = 0; i < 2; ++i) {
    cusparseDestroyDnMat(handles_->inputs[i]);
    cusparseDestroyDnMat(handles_->outputs[i]);
  }
  cusparseDestroySpMat(handles_->weight);
  cusparseDestroy(handles_->handle);
  delete handles_;
}

KernelStatus CusparseProduct::Choose(int algorithm, bool feature_major) {
  handles_->algorithm = handles_->algorithms[algorithm];
  handles_->x = handles_->inputs[feature_major ? 1 : 0];
  handles_->y = handles_->outputs[feature_major ? 1 : 0];
  const float one = 1.0f, zero = 0.0f;
  size_t bytes = 0;
  const KernelStatus status = FromCusparse(cusparseSpMM_bufferSize(
      handles_->handle, CUSPARSE_OPERATION_NON_TRANSPOSE, CUSPARSE_OPERATION_NON_TRANSPOSE, &one,
      handles_->weight, handles_->x, &zero, handles_->y, CUDA_R_32F, handles_->algorithm, &bytes));
  if (!status.ok()) return status;
  workspace_ = DeviceBuffer(module_, std::max<size_t>(bytes, 16));
  // What preprocessing finds out is kept in the matrix: as for our own kernels, it is not timed.
  return FromCusparse(cusparseSpMM_preprocess(handles_->handle, CUSPARSE_OPERATION_NON_TRANSPOSE,
                                              CUSPARSE_OPERATION_NON_TRANSPOSE, &one,
                                              handles_->weight, handles_->x, &zero, handles_->y,
                                              CUDA_R_32F, handles_->algorithm, workspace_.as()));
}

KernelStatus CusparseProduct::Time(double* micros) {
  void *begin = nullptr, *end = nullptr;
  OrDie(module_->create_event(&begin), "event");
  OrDie(module_->create_event(&end), "event");
  float elapsed = 0;
  KernelStatus status;
  for (int i = 0; i < 3 && status.ok(); ++i) {  // the first warms up
    OrDie(module_->record_event(begin, nullptr), "record");
    status = Enqueue(nullptr);
    OrDie(module_->record_event(end, nullptr), "record");
    OrDie(module_->synchronize_event(end), "cusparse");
    OrDie(module_->elapsed_micros(begin, end, &elapsed), "elapsed");
  }
  OrDie(module_->destroy_event(begin), "event");
  OrDie(module_->destroy_event(end), "event");
  *micros = elapsed;
  return status;
}

KernelStatus CusparseProduct::Enqueue(void* stream) {
  const float one = 1.0f, zero = 0.0f;
  if (KernelStatus status =
          FromCusparse(cusparseSetStream(handles_->handle, static_cast<cudaStream_t>(stream)));
      !status.ok()) {
    return status;
  }
  return FromCusparse(cusparseSpMM(handles_->handle, CUSPARSE_OPERATION_NON_TRANSPOSE,
                                   CUSPARSE_OPERATION_NON_TRANSPOSE, &one, handles_->weight,
                                   handles_->x, &zero, handles_->y, CUDA_R_32F, handles_->algorithm,
                                   workspace_.as()));
}

RowArrays ToRows(const WeightView& weight) {
  RowArrays rows;
  const size_t block = weight.block_rows * weight.block_cols * SizeOf(weight.dtype);
  const auto* values = static_cast<const char*>(weight.values);
  const int64_t R = weight.block_row_count(), C = weight.block_col_count();
  rows.view = weight;
  rows.view.layout = weight.block_rows * weight.block_cols == 1 ? Layout::kCsr : Layout::kBlockCsr;
  rows.row_ptr.push_back(0);
  const auto push = [&](int64_t column, int64_t index) {
    const char* from = values + index * static_cast<int64_t>(block);
    rows.col_idx.push_back(static_cast<int32_t>(column));
    rows.values.insert(rows.values.end(), from, from + block);
  };
  for (int64_t row = 0; row < R; ++row) {
    if (weight.layout != Layout::kDiagonal) {
      for (int32_t i = weight.row_ptr[row]; i < weight.row_ptr[row + 1]; ++i)
        push(weight.col_idx[i], i);
    } else {
      std::vector<std::pair<int64_t, int64_t>> entries;  // column, index
      const int64_t D = weight.diagonal_length();
      for (int64_t k = 0; k < weight.count; ++k) {
        const int64_t offset = weight.offsets[k];
        const int64_t t = R >= C ? (row - offset + R) % R : row;
        if (t >= D) continue;
        entries.push_back({R >= C ? t : (t + offset) % C, k * D + t});
      }
      std::sort(entries.begin(), entries.end());
      for (const auto& [column, index] : entries) push(column, index);
    }
    rows.row_ptr.push_back(static_cast<int32_t>(rows.col_idx.size()));
  }
  rows.view.count = static_cast<int64_t>(rows.col_idx.size());
  rows.view.row_ptr = rows.row_ptr.data();
  rows.view.col_idx = rows.col_idx.data();
  rows.view.offsets = nullptr;
  rows.view.values = rows.values.data();
  return rows;
}

}  // namespace espalier::bench
