#include "kernels/cuda/dense_matmul.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "kernels/cuda/dense_epilogue.h"
#include "kernels/cuda/dense_image.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace espalier::kernels::cuda {
namespace {

constexpr int kMaxHeuristics = 8;

KernelStatus FromLt(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return {KernelCode::kLaunchFailed, cublasLtGetStatusString(status)};
}

// What cuBLASLt's choice depends on.
struct Problem {
  DType dtype;
  DenseMath math;
  bool bias;
  Activation epilogue;  // kNone, kRelu or kGeluTanh
  int device;
  int64_t tokens, out, in, x_stride, y_stride;
  int64_t residual_stride;  // 0: none

  auto Key() const {
    return std::tuple(dtype, math, bias, epilogue, device, tokens, out, in, x_stride, y_stride,
                      residual_stride);
  }
};

struct DescDeleter {
  void operator()(cublasLtMatmulDescOpaque_t* p) const { cublasLtMatmulDescDestroy(p); }
  void operator()(cublasLtMatrixLayoutOpaque_t* p) const { cublasLtMatrixLayoutDestroy(p); }
  void operator()(cublasLtMatmulPreferenceOpaque_t* p) const { cublasLtMatmulPreferenceDestroy(p); }
};
using MatmulDesc = std::unique_ptr<cublasLtMatmulDescOpaque_t, DescDeleter>;
using MatrixLayout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, DescDeleter>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, DescDeleter>;

struct Plan {
  MatmulDesc desc;
  MatrixLayout weight, x, residual, y;  // without a residual its layout is that of y
  std::vector<cublasLtMatmulHeuristicResult_t> choices;
  cublasLtMatmulAlgo_t algorithm;
};

cudaDataType_t TypeOf(DType dtype) {
  return dtype == DType::kFloat32    ? CUDA_R_32F
         : dtype == DType::kBFloat16 ? CUDA_R_16BF
                                     : CUDA_R_16F;
}

cublasLtEpilogue_t EpilogueOf(const Problem& problem) {
  switch (problem.epilogue) {
    case Activation::kRelu:
      return problem.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::kGeluTanh:
      return problem.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default:
      return problem.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

// One handle a process: cuBLASLt calls with the same handle may run concurrently.
cublasLtHandle_t Handle() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t created = nullptr;
    return cublasLtCreate(&created) == CUBLAS_STATUS_SUCCESS ? created : nullptr;
  }();
  return handle;
}

// cuBLASLt is column-major: yᵀ [out × tokens] = (Wᵀ)ᵀ [out × in] · xᵀ [in × tokens].
KernelStatus MakePlan(const Problem& problem, Plan* plan) {
  if (Handle() == nullptr) return {KernelCode::kLaunchFailed, "cuBLASLt: no handle"};
  const cudaDataType_t type = TypeOf(problem.dtype);
  const cublasComputeType_t compute =
      problem.dtype == DType::kFloat32 && problem.math == DenseMath::kTf32
          ? CUBLAS_COMPUTE_32F_FAST_TF32
          : CUBLAS_COMPUTE_32F;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, residual = nullptr, y = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  const cublasStatus_t created[] = {
      cublasLtMatmulDescCreate(&desc, compute, CUDA_R_32F),
      cublasLtMatrixLayoutCreate(&weight, type, problem.in, problem.out,
                                 DenseRowStride(problem.in)),
      cublasLtMatrixLayoutCreate(&x, type, problem.in, problem.tokens, problem.x_stride),
      cublasLtMatrixLayoutCreate(
          &residual, type, problem.out, problem.tokens,
          problem.residual_stride > 0 ? problem.residual_stride : problem.y_stride),
      cublasLtMatrixLayoutCreate(&y, type, problem.out, problem.tokens, problem.y_stride),
      cublasLtMatmulPreferenceCreate(&preference)};
  plan->desc.reset(desc);
  plan->weight.reset(weight);
  plan->x.reset(x);
  plan->residual.reset(residual);
  plan->y.reset(y);
  const Preference preference_owner(preference);
  for (cublasStatus_t status : created) {
    if (status != CUBLAS_STATUS_SUCCESS) return FromLt(status);
  }
  const cublasOperation_t transpose = CUBLAS_OP_T;
  const cublasLtEpilogue_t epilogue = EpilogueOf(problem);
  const size_t workspace = kDenseWorkspaceBytes;
  cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
  cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                       &workspace, sizeof(workspace));
  plan->choices.resize(kMaxHeuristics);
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(Handle(), desc, weight, x, residual, y, preference,
                                     kMaxHeuristics, plan->choices.data(), &found);
  if (status != CUBLAS_STATUS_SUCCESS) return FromLt(status);
  if (found == 0) return {KernelCode::kUnsupported, "cuBLASLt: no algorithm for this problem"};
  plan->choices.resize(found);
  plan->algorithm = plan->choices[0].algo;
  return {};
}

// The plan of a problem, made once; null with *status set when there is none.
Plan* FindPlan(const Problem& problem, KernelStatus* status) {
  static std::mutex mutex;
  static std::map<decltype(problem.Key()), std::unique_ptr<Plan>> plans;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Plan>& plan = plans[problem.Key()];
  if (plan == nullptr) {
    auto made = std::make_unique<Plan>();
    *status = MakePlan(problem, made.get());
    if (!status->ok()) return nullptr;
    plan = std::move(made);
  }
  return plan.get();
}

bool IsFused(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu ||
         activation == Activation::kGeluTanh;
}

Problem ProblemOf(const LinearArgs& args, DenseMath math) {
  int device = 0;
  cudaGetDevice(&device);
  return {args.io_dtype,
          math,
          args.bias != nullptr,
          IsFused(args.activation) ? args.activation : Activation::kNone,
          device,
          args.tokens,
          args.weight.out,
          args.weight.in,
          args.x_stride,
          args.y_stride,
          args.residual == nullptr ? 0 : args.residual_stride};
}

char* BiasInScratch(const LinearArgs& args) { return static_cast<char*>(args.scratch); }

// The bias pointer is part of the descriptor, which calls share: each call sets it on a copy.
KernelStatus Multiply(const KernelContext& ctx, const LinearArgs& args, const Plan& plan,
                      const cublasLtMatmulAlgo_t& algorithm) {
  cublasLtMatmulDescOpaque_t desc = *plan.desc;
  const void* bias = BiasInScratch(args);
  if (args.bias != nullptr) {
    const cublasStatus_t status = cublasLtMatmulDescSetAttribute(
        &desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
    if (status != CUBLAS_STATUS_SUCCESS) return FromLt(status);
  }
  const size_t bias_bytes = (args.weight.out * SizeOf(args.io_dtype) + 255) / 256 * 256;
  const float one = 1.0f, beta = args.residual == nullptr ? 0.0f : 1.0f;
  const void* residual = args.residual == nullptr ? args.y : args.residual;
  return FromLt(cublasLtMatmul(Handle(), &desc, &one, args.weight.packed, plan.weight.get(), args.x,
                               plan.x.get(), &beta, residual, plan.residual.get(), args.y,
                               plan.y.get(), &algorithm, BiasInScratch(args) + bias_bytes,
                               kDenseWorkspaceBytes, static_cast<cudaStream_t>(ctx.stream)));
}

// Median of five timings of eight calls each, in microseconds; of one call each where the first takes longer than 2 ms, which
// is long against what a clock or a cold cache can do to it.
KernelStatus TimeChoice(const KernelContext& ctx, const LinearArgs& args, const Plan& plan,
                        const cublasLtMatmulAlgo_t& algorithm, float* micros) {
  constexpr int kTimings = 5, kCalls = 8;
  constexpr float kLongMicros = 2000;
  const auto stream = static_cast<cudaStream_t>(ctx.stream);
  cudaEvent_t begin = nullptr, end = nullptr;
  if (cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess) {
    return {KernelCode::kLaunchFailed, "cuBLASLt: no events to time with"};
  }
  std::array<float, kTimings> timings{};
  int calls = 1;
  KernelStatus status;
  for (int t = -1; t < kTimings && status.ok(); ++t) {  // the first round warms up
    cudaEventRecord(begin, stream);
    for (int c = 0; c < calls && status.ok(); ++c) status = Multiply(ctx, args, plan, algorithm);
    cudaEventRecord(end, stream);
    if (const cudaError_t error = cudaEventSynchronize(end); status.ok()) status = FromCuda(error);
    float millis = 0;
    cudaEventElapsedTime(&millis, begin, end);
    if (t >= 0) timings[t] = millis * 1000 / static_cast<float>(calls);
    if (t < 0 && millis * 1000 < kLongMicros) calls = kCalls;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(timings.begin(), timings.end());
  *micros = timings[kTimings / 2];
  return status;
}

KernelStatus Check(const LinearArgs& args) {
  if (!FitsDenseImage(DescOfArgs(args)))
    return {KernelCode::kUnsupported, "dense: needs one type of f32, bf16, f16"};
  if (KernelStatus status = CheckArgs(args); !status.ok() || args.tokens == 0) return status;
  if (args.scratch == nullptr)
    return {KernelCode::kInvalidArgument, "dense: scratch must not be null"};
  return {};
}

}  // namespace

KernelStatus DenseMatmul(const KernelContext& ctx, const LinearArgs& args, DenseMath math) {
  KernelStatus status = Check(args);
  if (!status.ok() || args.tokens == 0) return status;
  Plan* plan = FindPlan(ProblemOf(args, math), &status);
  if (plan == nullptr) return status;
  if (args.bias != nullptr) {
    status = ConvertBias(ctx, args, BiasInScratch(args));
    if (!status.ok()) return status;
  }
  status = Multiply(ctx, args, *plan, plan->algorithm);
  if (!status.ok() || IsFused(args.activation)) return status;
  return ActivateInPlace(ctx, args);
}

KernelStatus SettleDenseMatmul(const KernelContext& ctx, const LinearArgs& args, DenseMath math) {
  KernelStatus status = Check(args);
  if (!status.ok() || args.tokens == 0) return status;
  Plan* plan = FindPlan(ProblemOf(args, math), &status);
  if (plan == nullptr) return status;
  float best = 0;
  int timed = 0;
  for (const cublasLtMatmulHeuristicResult_t& choice : plan->choices) {
    float micros = 0;
    if (choice.state != CUBLAS_STATUS_SUCCESS) continue;
    if (!TimeChoice(ctx, args, *plan, choice.algo, &micros).ok())
      continue;  // a refused algorithm is no candidate
    if (timed++ == 0 || micros < best) {
      best = micros;
      plan->algorithm = choice.algo;
    }
  }
  return timed > 0
             ? KernelStatus{}
             : KernelStatus{KernelCode::kUnsupported, "cuBLASLt: every algorithm was refused"};
}

KernelStatus RunDenseCublasLt(const KernelContext& ctx, const LinearArgs& args) {
  return DenseMatmul(ctx, args, DenseMath::kStrict);
}

}  // namespace espalier::kernels::cuda
