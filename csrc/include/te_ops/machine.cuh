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
TE_DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Arithmetic with one rounding that the compiler never contracts: what decides about bytes.
TE_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
TE_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
TE_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
TE_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
TE_DEVICE int nearest_int(float a) { return __float2int_rn(a); }
TE_DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }

// max(m, |x|) that keeps a NaN.
TE_DEVICE float max_abs(float m, float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(m), "f"(fabsf(x)));
  return y;
}

// Read once, so not kept in L1.
TE_DEVICE void read(const void* p, u32 (&w)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(p));
}
TE_DEVICE void read(const void* p, u32 (&w)[2]) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
}
TE_DEVICE void write(void* p, const u32 (&w)[4]) { *(uint4*)p = make_uint4(w[0], w[1], w[2], w[3]); }
TE_DEVICE void write(void* p, const u32 (&w)[2]) { *(uint2*)p = make_uint2(w[0], w[1]); }

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
TE_DEVICE u32 instruction_e5m2x2(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
#endif

TE_DEVICE void barrier() { __syncthreads(); }
TE_DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TE_DEVICE u32 exchange(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TE_DEVICE u32 warp_max(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
TE_DEVICE void global_max(u32* p, u32 x) { atomicMax(p, x); }
TE_DEVICE int thread() { return threadIdx.x; }
TE_DEVICE i64 block() { return blockIdx.x; }
TE_DEVICE i64 blocks() { return gridDim.x; }

}  // namespace te
