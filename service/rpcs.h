// rpcs.h — the RPCs of inference.GRPCInferenceService and espalier.v1.UpdateService, each once.
#pragma once

#include <cstdint>
#include <iterator>

namespace espalier::service {

// Unary RPCs that are answered at once. ModelInfer and ModelStreamInfer have types of their own and
// stand apart.
#define ESPALIER_OFFERED_RPCS(X)  \
  X(ServerLive)                   \
  X(ServerReady)                  \
  X(ModelReady)                   \
  X(ServerMetadata)               \
  X(ModelMetadata)                \
  X(ModelConfig)                  \
  X(ModelStatistics)              \
  X(RepositoryIndex)              \
  X(SystemSharedMemoryStatus)     \
  X(SystemSharedMemoryRegister)   \
  X(SystemSharedMemoryUnregister) \
  X(CudaSharedMemoryStatus)       \
  X(CudaSharedMemoryRegister)     \
  X(CudaSharedMemoryUnregister)   \
  X(TraceSetting)                 \
  X(LogSettings)

// Unary RPCs that are answered later, by repository_control.h.
#define ESPALIER_REPOSITORY_RPCS(X) \
  X(RepositoryModelLoad)            \
  X(RepositoryModelUnload)

// Of espalier.v1.UpdateService, see update_service.h.
#define ESPALIER_UPDATE_RPCS(X) \
  X(PushDelta)                  \
  X(ActivateVersion)            \
  X(Rollback)                   \
  X(ConfirmVersion)             \
  X(ListVersions)               \
  X(WatchVersions)              \
  X(FetchDeltas)                \
  X(ReadAudit)                  \
  X(PrepareTransaction)         \
  X(DecideTransaction)          \
  X(GetTransaction)

#define ESPALIER_RPCS(X)   \
  X(ModelInfer)            \
  X(ModelStreamInfer)      \
  ESPALIER_OFFERED_RPCS(X) \
  ESPALIER_REPOSITORY_RPCS(X) ESPALIER_UPDATE_RPCS(X)

enum class Rpc : uint8_t {
#define ESPALIER_RPC_ENUM(name) k##name,
  ESPALIER_RPCS(ESPALIER_RPC_ENUM)
#undef ESPALIER_RPC_ENUM
};

inline constexpr const char* kRpcNames[] = {
#define ESPALIER_RPC_NAME(name) #name,
    ESPALIER_RPCS(ESPALIER_RPC_NAME)
#undef ESPALIER_RPC_NAME
};
inline constexpr int kRpcs = std::size(kRpcNames);

constexpr const char* NameOf(Rpc rpc) { return kRpcNames[static_cast<int>(rpc)]; }

}  // namespace espalier::service
