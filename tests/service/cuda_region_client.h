// cuda_region_client.h — what a client says to register GPU memory of its own, and to take it back.
#pragma once

#include <cstdint>
#include <string>

#include "grpcpp/client_context.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace espalier::service {

inline grpc::Status RegisterCudaRegion(inference::GRPCInferenceService::Stub& stub,
                                       const std::string& name, const std::string& handle,
                                       uint64_t byte_size, int64_t device = 0) {
  inference::CudaSharedMemoryRegisterRequest request;
  request.set_name(name);
  request.set_raw_handle(handle);
  request.set_device_id(device);
  request.set_byte_size(byte_size);
  inference::CudaSharedMemoryRegisterResponse response;
  grpc::ClientContext context;
  return stub.CudaSharedMemoryRegister(&context, request, &response);
}

inline grpc::Status UnregisterCudaRegion(inference::GRPCInferenceService::Stub& stub,
                                         const std::string& name) {
  inference::CudaSharedMemoryUnregisterRequest request;
  request.set_name(name);
  inference::CudaSharedMemoryUnregisterResponse response;
  grpc::ClientContext context;
  return stub.CudaSharedMemoryUnregister(&context, request, &response);
}

}  // namespace espalier::service
