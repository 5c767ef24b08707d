// ptx.cuh — one function per PTX instruction that C++ has no word for: barriers, bulk copies, matrix fragments.
//
// Addresses named `*_address` are 32-bit shared-memory addresses. Instructions of sm_90 are only called from kernels that
// are compiled for sm_90a.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace espalier::kernels::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier: a phase completes when `count` arrivals and all expected bytes have come ---

__device__ __forceinline__ void InitBarrier(uint32_t barrier_address, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_address), "r"(count)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void ArriveExpecting(uint32_t barrier_address, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_address),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier_address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_address) : "memory");
}

// Returns once the phase of parity `parity` is complete; a fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void Wait(uint32_t barrier_address, uint32_t parity) {
  uint32_t done = 0;
#ifdef ESPALIER_CUDA_WATCHDOG
  for (int tries = 0; done == 0; ++tries) {
    if (tries == ESPALIER_CUDA_WATCHDOG) __trap();
#else
  while (done == 0) {
#endif
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier_address), "r"(parity)
        : "memory");
  }
}

// --- bulk copies, global → shared, completing on a barrier ---

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void CopyBulk(uint32_t to_address, const void* from, uint32_t bytes,
                                         uint32_t barrier_address) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to_address),
      "l"(from), "r"(bytes), "r"(barrier_address)
      : "memory");
}

// One box of a 2-D tensor map at (column, row); what lies outside the tensor arrives as zeros and counts as bytes.
__device__ __forceinline__ void CopyBox(uint32_t to_address, const CUtensorMap* map, int column,
                                        int row, uint32_t barrier_address) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(to_address),
      "l"(map), "r"(barrier_address), "r"(column), "r"(row)
      : "memory");
}

// One box from shared memory to a 2-D tensor map at (column, row); what lies outside the tensor is not written. The bytes
// must have been written before a FenceAsyncProxy of every writer and a barrier.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from_address, int column,
                                         int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from_address), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but kPending of this thread's stores have read their shared memory: when a thread block may end, too, for what it
// stored is in memory before its grid has ended.
template <int kPending>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Orders this thread's ordinary shared-memory writes before later reads by the copy engine.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// From memory to L2; address and `bytes` are multiples of 16.
__device__ __forceinline__ void PrefetchBulk(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A barrier of some of the thread block's warps; 0 is __syncthreads.
__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- registers: every warp of a warpgroup gives back or takes; all warpgroups together keep within the launch's share ---

template <int kRegisters>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- clusters of thread blocks ---

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Every thread of every thread block of the cluster.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// The same where nothing but the threads' presence and initialised barriers (FenceBarrierInit) is passed on: a releasing
// arrival would wait for every load that is under way.
__device__ __forceinline__ void MeetCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// Arrives at the barrier that lies at the same address in the thread block `rank` of the cluster.
__device__ __forceinline__ void ArriveAt(uint32_t barrier_address, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier_address),
      "r"(rank)
      : "memory");
}
// The address of `address` in the thread block `rank` of the cluster, for StoreToCluster and ArriveInCluster.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void ArriveInCluster(uint32_t cluster_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
__device__ __forceinline__ void StoreToCluster(uint32_t cluster_address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address), "f"(value) : "memory");
}
// CopyBox into every thread block of `mask`, at the same address, completing on the same barrier of each.
__device__ __forceinline__ void CopyBoxToCluster(uint32_t to_address, const CUtensorMap* map,
                                                 int column, int row, uint32_t barrier_address,
                                                 uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(to_address),
      "l"(map), "r"(barrier_address), "r"(column), "r"(row), "h"(mask)
      : "memory");
}

// --- programmatic dependent launch ---

// Until the kernels that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void WaitForPredecessors() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the dependent kernel start while this one still runs.
__device__ __forceinline__ void ReleaseSuccessors() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// --- sm_80: asynchronous 16-byte copies ---

// Copies the first `bytes` (0..16) and fills the rest of the 16 with zeros.
__device__ __forceinline__ void Copy16(uint32_t to_address, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_address), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ int LoadShared8(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return static_cast<int>(value);
}
__device__ __forceinline__ uint32_t LoadShared16(uint32_t address) {
  uint32_t value;
  asm volatile("{\n.reg .u16 half;\nld.shared.u16 half, [%1];\ncvt.u32.u16 %0, half;\n}"
               : "=r"(value)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t LoadShared32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint4 LoadShared128(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// The low half of `value`.
__device__ __forceinline__ void StoreShared16(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value))
               : "memory");
}
__device__ __forceinline__ void StoreShared32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void OrShared(uint32_t address, uint32_t bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
__device__ __forceinline__ void StoreShared128(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Constant data that is read once: past L1.
__device__ __forceinline__ uint4 LoadStreamed(const uint4* from) {
  uint4 value;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(from));
  return value;
}

// --- 8×8 matrix fragments ---

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[2], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row_address)
               : "memory");
}

// Each transposed: a lane receives elements 2q and 2q + 1 of column g of every matrix.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// Four 8×8 matrices, each transposed: lane 8m + i gives the address of row i of matrix m, which receives column i.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t row_address,
                                                        const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
__device__ __forceinline__ void StoreMatrices(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace espalier::kernels::cuda
