// Hopper's tensor cores and bulk copies (sm_90a): barriers that count bytes, tiles by tensor maps, products of warp groups.
// PTX like machine.cuh, of which no host build exists.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

// A CUtensorMap, made by the driver.
struct alignas(64) TensorMap { u64 opaque[16]; };

// -- barriers in shared memory; addresses are those of `shared_address`

TE_DEVICE void open_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Before bulk copies touch a barrier that was just opened.
TE_DEVICE void barriers_opened() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TE_DEVICE void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
template <int N> TE_DEVICE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0 + %1];" ::"r"(barrier), "n"(N) : "memory");
}
// Until the phase of this parity is over, of the barrier N bytes behind.
template <int N = 0> TE_DEVICE void wait_for(u32 barrier, u32 parity) {
  u32 over;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1 + %3], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity), "n"(N)
                 : "memory");
  } while (!over);
}
TE_DEVICE void arrive_at_group_barrier(int id, int threads) {  // of `group_barrier`, without waiting
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// -- bulk copies into shared memory, whose bytes a barrier counts

TE_DEVICE void fetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// A box of a matrix.
TE_DEVICE void copy_box(u32 to, const TensorMap& map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// The same of a map with three dimensions more between the two, at the beginning of each.
TE_DEVICE void copy_columns(u32 to, const TensorMap& map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %5, %5, %5, %3}], [%4];" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "r"(0)
      : "memory");
}
// `bytes` (a multiple of 16) in a row.
TE_DEVICE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// -- shared memory by its address; N: bytes behind it, part of the instruction

template <int N> TE_DEVICE float from_shared(u32 at) {
  float y;
  asm volatile("ld.shared.f32 %0, [%1 + %2];" : "=f"(y) : "r"(at), "n"(N));
  return y;
}
template <int N> TE_DEVICE void from_shared(u32 at, float* y) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
               : "r"(at), "n"(N));
}
// The same number in all lanes, which the compiler keeps instead of making it again at every use.
TE_DEVICE u32 kept(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
// Read where it stands: the compiler would wait for it right away to keep it for the whole warp.
TE_DEVICE float from_global(const float* p) {
  float y;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(y) : "l"(p));
  return y;
}

// -- products of a warp group

template <int REGISTERS> TE_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> TE_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
TE_DEVICE void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TE_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last N commits are done. Their results are read after `settle` only.
template <int N> TE_DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// The compiler moves no use of x across this.
template <int N> TE_DEVICE void settle(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Rows of 128 bytes, swizzled over 128 bytes, eight rows after eight: what a tensor map with that swizzle writes.
TE_DEVICE u64 rows_at(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// A descriptor by its lower word.
TE_DEVICE u64 descriptor(u32 low) { return 1ull << 62 | 64ull << 32 | low; }

// x (+)= a b^T of one warp group: 64 x 32 E4M3 codes of a, 128 x 32 of b, where descriptors say.
#define TE_F4(i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define TE_F16(i) TE_F4(i), TE_F4(i + 4), TE_F4(i + 8), TE_F4(i + 12)
TE_DEVICE void product(float (&x)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1; }"
      : TE_F16(0), TE_F16(16), TE_F16(32), TE_F16(48)
      : "l"(a), "l"(b), "r"(add));
}
#undef TE_F16
#undef TE_F4

// Adds four FP32 numbers to those in global memory, which are on 16 bytes.
TE_DEVICE void add_to_global(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace te
