// What differs between the GPU and a host build of the device code: instructions, barriers, shuffles.
// The tests put a file of this name before it to run kernels on a CPU; nothing else holds PTX.
#pragma once

namespace te {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TE_DEVICE __device__ __forceinline__
#define TE_SHARED __shared__

#if __CUDA_ARCH__ >= 890
#define TE_FP8_INSTRUCTIONS 1
#else
#define TE_FP8_INSTRUCTIONS 0
#endif

TE_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
TE_DEVICE float float_of(u32 x) { return __uint_as_float(x); }
// Makes the compiler forget what x is made from: addresses are computed where they are used, not carried through a loop.
TE_DEVICE void forget(i64& x) { asm volatile("" : "+l"(x)); }
TE_DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Arithmetic with one rounding that the compiler never contracts: what decides about bytes.
TE_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
TE_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
TE_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
TE_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
TE_DEVICE int nearest_int(float a) { return __float2int_rn(a); }
TE_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TE_DEVICE float inverse_sqrt(float a) { return rsqrtf(a); }  // within 2 units of the last place

TE_DEVICE float reciprocal(float a) { return __frcp_rn(a); }

TE_DEVICE float add_up(float a, float b) { return __fadd_ru(a, b); }
TE_DEVICE float fma_up(float a, float b, float c) { return __fmaf_ru(a, b, c); }
// Rounded, then brought into [0, 1]; 0 for NaN.
TE_DEVICE float mul_saturated(float a, float b) {
  float y;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
TE_DEVICE float fma_saturated(float a, float b, float c) {
  float y;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
// The number where the other is a NaN.
TE_DEVICE float min_number(float a, float b) { return fminf(a, b); }
TE_DEVICE float max_number(float a, float b) { return fmaxf(a, b); }

// max(m, |x|) that keeps a NaN.
TE_DEVICE float max_abs(float m, float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(m), "f"(fabsf(x)));
  return y;
}

// A word whose halves have the larger magnitude of two; a NaN wins, signs mean nothing. One instruction where there is one.
// `larger_number`: a NaN loses.
#if __CUDA_ARCH__ >= 860
TE_DEVICE u32 larger_number_bf16x2(u32 m, u32 x) {
  asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(m) : "r"(x));
  return m;
}
TE_DEVICE u32 larger_number_f16x2(u32 m, u32 x) {
  asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(m) : "r"(x));
  return m;
}
TE_DEVICE u32 larger_bf16x2(u32 m, u32 x) {
  asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(m) : "r"(x));
  return m;
}
TE_DEVICE u32 larger_f16x2(u32 m, u32 x) {
  asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(m) : "r"(x));
  return m;
}
#else
TE_DEVICE u32 larger_number_bf16x2(u32 m, u32 x) {
  asm("{ .reg .b32 a, b; abs.bf16x2 a, %0; abs.bf16x2 b, %1; max.bf16x2 %0, a, b; }" : "+r"(m) : "r"(x));
  return m;
}
TE_DEVICE u32 larger_number_f16x2(u32 m, u32 x) {
  asm("{ .reg .b32 a, b; abs.f16x2 a, %0; abs.f16x2 b, %1; max.f16x2 %0, a, b; }" : "+r"(m) : "r"(x));
  return m;
}
TE_DEVICE u32 larger_bf16x2(u32 m, u32 x) {
  asm("{ .reg .b32 a, b; abs.bf16x2 a, %0; abs.bf16x2 b, %1; max.NaN.bf16x2 %0, a, b; }" : "+r"(m) : "r"(x));
  return m;
}
TE_DEVICE u32 larger_f16x2(u32 m, u32 x) {
  asm("{ .reg .b32 a, b; abs.f16x2 a, %0; abs.f16x2 b, %1; max.NaN.f16x2 %0, a, b; }" : "+r"(m) : "r"(x));
  return m;
}
#endif

// Hides from the compiler what x holds, so that what is derived from it is derived again instead of kept in registers.
TE_DEVICE void renew(u32& x) { asm volatile("" : "+r"(x)); }
TE_DEVICE void renew(i64& x) { asm volatile("" : "+l"(x)); }

// Read once, so not kept in L1.
TE_DEVICE void read(const void* p, u32 (&w)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(p));
}
TE_DEVICE void read(const void* p, u32 (&w)[2]) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
}
// Into L2, for a block that comes later.
TE_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Read by every row, so kept in L1.
TE_DEVICE void read_again(const void* p, u32 (&w)[4]) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
}
// A kernel whose text begins with TE_OPS_PASSING writes so much that nobody will find it in L2: it leaves first.
#ifdef TE_OPS_PASSING
#define TE_OPS_STORE "st.global.cs"
#else
#define TE_OPS_STORE "st.global"
#endif
// To global memory, in one instruction: the compiler takes a vector's store apart when it comes out of branches.
TE_DEVICE void write(void* p, const u32 (&w)[4]) {
  asm volatile(TE_OPS_STORE ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
TE_DEVICE void write(void* p, const u32 (&w)[2]) {
  asm volatile(TE_OPS_STORE ".v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}

TE_DEVICE float widen_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
TE_DEVICE u32 narrow_bf16x2(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
TE_DEVICE u32 narrow_f16x2(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

#if TE_FP8_INSTRUCTIONS
TE_DEVICE u32 instruction_e4m3x2(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
TE_DEVICE u32 instruction_f16x2(u16 e4m3x2) {
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(e4m3x2));
  return y;
}
TE_DEVICE u32 instruction_e5m2x2(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
// Four at once: pairs that meet outside of one statement are cleared and permuted.
TE_DEVICE u32 instruction_e4m3x4(float a, float b, float c, float d) {
  u32 y;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
      "mov.b32 %0, {low, high}; }"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}
TE_DEVICE u32 instruction_e5m2x4(float a, float b, float c, float d) {
  u32 y;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; "
      "mov.b32 %0, {low, high}; }"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}
#endif

// Shared memory whose size the launch gives; a block's own, also in the host build.
TE_DEVICE u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 te_ops_dynamic_shared[];
  return te_ops_dynamic_shared;
}
TE_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
TE_DEVICE void write_shared(void* p, const u32 (&w)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
TE_DEVICE void write_shared(void* p, const u32 (&w)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared_address(p)), "r"(w[0]), "r"(w[1]) : "memory");
}
TE_DEVICE void read_shared(const void* p, u32 (&w)[4]) {
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared_address(p))
               : "memory");
}

// 16 bytes to shared memory without registers, or zeros; seen by this thread after wait_copies, by others after a
// barrier behind it. `wait_copies<N>`: all but the last N commits are there.
TE_DEVICE void copy_async(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
TE_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> TE_DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Clusters: blocks on neighbouring processors that write to each other's dynamic shared memory. A `mailbox` (8 bytes there)
// counts what arrives, so nobody waits for other memory, as at a barrier of the cluster: before the first `send_to`, all
// blocks have opened theirs; for each round, one thread of the receiver tells how many bytes it `expect`s.
#if __CUDA_ARCH__ >= 900
TE_DEVICE int cluster_rank() {
  u32 y;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(y));
  return (int)y;
}
TE_DEVICE void open_mailbox(u64* mailbox) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(mailbox)) : "memory");
}
TE_DEVICE void mailboxes_opened() {  // by every thread; `wait_for_mailboxes` later
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
TE_DEVICE void wait_for_mailboxes() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
TE_DEVICE void expect(u64* mailbox, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mailbox)), "r"(bytes)
               : "memory");
}
// To the same place in the shared memory of block `rank` of the cluster, counted by its mailbox.
TE_DEVICE void send_to(int rank, float* own, u64* mailbox, float x) {
  u32 there, box;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(box) : "r"(shared_address(mailbox)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there),
               "r"(bits_of(x)), "r"(box)
               : "memory");
}
// Until everything expected is there; `round` counts the mailbox's rounds modulo 2.
TE_DEVICE void wait_for_mail(u64* mailbox, int round) {
  u32 there;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(there)
                 : "r"(shared_address(mailbox)), "r"(round)
                 : "memory");
  } while (!there);
}
#else
TE_DEVICE int cluster_rank() { return 0; }
TE_DEVICE void open_mailbox(u64*) {}
TE_DEVICE void mailboxes_opened() {}
TE_DEVICE void wait_for_mailboxes() {}
TE_DEVICE void expect(u64*, int) {}
TE_DEVICE void send_to(int, float* own, u64*, float x) { *own = x; }
TE_DEVICE void wait_for_mail(u64*, int) { __syncthreads(); }
#endif

// Two kernels on a stream: the first lets the second begin before it has ended, which is launched `early` (see
// te_ops.backends.cuda.launch) and waits for the end of the first before it touches memory.
#if __CUDA_ARCH__ >= 900
TE_DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
TE_DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
TE_DEVICE void let_next_begin() {}
TE_DEVICE void wait_for_previous() {}
#endif

TE_DEVICE void barrier() { __syncthreads(); }
// Of `threads` threads of a block, whole warps: `id` from 1 to 15 tells groups apart.
TE_DEVICE void group_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
TE_DEVICE void warp_barrier() { __syncwarp(); }
TE_DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TE_DEVICE u32 exchange(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TE_DEVICE float from_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// The same value in every lane of a warp, told to the compiler as such: what is made from it takes no vector register.
TE_DEVICE u32 uniform(u32 x) { return __reduce_or_sync(0xffffffffu, x); }
TE_DEVICE u32 warp_max(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
TE_DEVICE void global_max(u32* p, u32 x) { atomicMax(p, x); }
TE_DEVICE int thread() { return threadIdx.x; }
TE_DEVICE i64 block() { return blockIdx.x; }
TE_DEVICE i64 blocks() { return gridDim.x; }

}  // namespace te
