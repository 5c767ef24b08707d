#include "engine/runtime/placement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace espalier::runtime {
namespace {

using Group = inference::ModelInstanceGroup;

absl::Status AddGroup(const Group& group, const Devices& devices, std::vector<int>& gpus) {
  std::vector<int> named(group.gpus().begin(), group.gpus().end());
  if (named.empty()) {
    for (const auto& gpu : devices.gpus) named.push_back(gpu->index());
  }
  for (int i = 0; i < std::max(group.count(), 1); ++i) {
    for (int index : named) {
      const bool there = std::any_of(devices.gpus.begin(), devices.gpus.end(),
                                     [&](const auto& gpu) { return gpu->index() == index; });
      if (!there) {
        return absl::FailedPreconditionError(
            absl::StrCat("instance_group.gpus names GPU ", index, ", but this server has ",
                         devices.gpus.size(), " usable, numbered from 0"));
      }
      gpus.push_back(index);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Placement> PlaceInstances(const inference::ModelConfig& config,
                                         const Devices& devices) {
  Placement placement;
  if (config.instance_group().empty()) {
    Group group;
    group.set_count(kDefaultInstancesOfGpu);
    if (auto status = AddGroup(group, devices, placement.gpus); !status.ok()) return status;
    return placement;
  }
  bool on_cpu = false;
  for (const Group& group : config.instance_group()) {
    if (group.kind() == Group::KIND_CPU) {
      on_cpu = true;
      continue;
    }
    const bool demands = group.kind() == Group::KIND_GPU || group.gpus_size() > 0;
    placement.demands_gpu = placement.demands_gpu || demands;
    if (!devices.gpus.empty()) {
      if (auto status = AddGroup(group, devices, placement.gpus); !status.ok()) return status;
    } else if (demands) {
      return absl::FailedPreconditionError(
          absl::StrCat("instance_group demands a GPU, but ", devices.why_no_gpu,
                       "; use KIND_CPU, or KIND_AUTO to take a GPU where there is one"));
    }
  }
  if (on_cpu && placement.demands_gpu) {
    return absl::InvalidArgumentError(
        "instance_group asks for instances on the CPU and on a GPU: expected one kind of device, "
        "for both would give different roundings of one answer");
  }
  if (on_cpu) placement.gpus.clear();
  return placement;
}

}  // namespace espalier::runtime
