// model_messages.h — what the runtime knows about a model, in the protocol's messages.
#pragma once

#include <vector>

#include "engine/runtime/model_manager.h"
#include "proto/inference/grpc_service.pb.h"

namespace espalier::service {

void FillMetadata(const runtime::ServedVersion& version, const std::vector<int64_t>& ready_versions,
                  inference::ModelMetadataResponse* response);

void FillStatistics(const runtime::ServedVersion& version, inference::ModelStatistics* statistics);

void FillIndex(const runtime::ModelManager::IndexEntry& entry,
               inference::RepositoryIndexResponse::ModelIndex* index);

}  // namespace espalier::service
