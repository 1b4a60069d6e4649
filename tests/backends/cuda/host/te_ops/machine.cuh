// The host build's side of te_ops/machine.cuh: every GPU thread is a fiber; clusters (of one block, if none are
// asked for) run one after another. TE_SHARED is one for all blocks, so kernels of clusters use dynamic_shared.
//
// Every kernel is a library that includes this, so no header of C++ comes in: these take longer than the kernel. What
// runs the fibers is compiled once, from machine.cpp.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // math.h of C alone
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define TE_DEVICE inline
#define TE_SHARED static
#define TE_FP8_INSTRUCTIONS 0

inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }

namespace te {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What threads wait at.
struct Gate {
  int arrived = 0, generation = 0;
};
struct Host {
  int threads, current, cluster, shared;  // threads of a block; the running fiber of the cluster
  i64 grid, first;                        // blocks; the cluster's first
  Gate together;
  Gate *gates, *groups;  // of each block, and of sixteen groups in each
  u64** memory;          // of each block
  int *warp_arrived, *warp_generation;
  u32* slots;  // of each fiber
};
extern Host host;

void yield();
void run_blocks(i64 grid, int threads, int shared, int cluster, void (*body)(const void*), const void* argument);

inline int thread() { return host.current % host.threads; }
inline int cluster_rank() { return host.current / host.threads; }
inline i64 block() { return host.first + cluster_rank(); }
inline i64 blocks() { return host.grid; }

inline void wait_at(Gate& gate, int count) {
  const int generation = gate.generation;
  if (++gate.arrived == count) {
    gate.arrived = 0;
    ++gate.generation;
  } else {
    while (gate.generation == generation) yield();
  }
}
inline void let_next_begin() {}
inline void wait_for_previous() {}
inline void barrier() { wait_at(host.gates[cluster_rank()], host.threads); }
inline void group_barrier(int id, int threads) {
  if (id < 1 || id > 15 || threads % 32) __builtin_trap();
  wait_at(host.groups[16 * cluster_rank() + id], threads);
}
inline u8* dynamic_shared() { return (u8*)host.memory[cluster_rank()]; }
// A mailbox: bytes on their way (the low half, signed), whether they are expected, rounds.
inline void settle(u64* mailbox, int bytes, bool arrive) {
  int* words = (int*)mailbox;
  words[0] += bytes;
  const int rounds = words[1] / 2, waiting = arrive ? 1 : words[1] % 2;
  if (arrive && words[1] % 2) __builtin_trap();
  words[1] = waiting && words[0] == 0 ? 2 * (rounds + 1) : 2 * rounds + waiting;
}
inline void open_mailbox(u64* mailbox) { *mailbox = 0; }
inline void wait_for_mailboxes() { wait_at(host.together, host.threads * host.cluster); }
inline void mailboxes_opened() {}
inline void expect(u64* mailbox, int bytes) { settle(mailbox, bytes, true); }
inline void send_to(int rank, float* own, u64* mailbox, float x) {
  const i64 offset = (u8*)own - dynamic_shared(), box = (u8*)mailbox - dynamic_shared();
  if (rank >= host.cluster || offset < 0 || offset + 4 > host.shared || box < 0 || box + 8 > host.shared || box % 8)
    __builtin_trap();
  memcpy((u8*)host.memory[rank] + offset, &x, 4);
  settle((u64*)((u8*)host.memory[rank] + box), -4, false);
}
inline void wait_for_mail(u64* mailbox, int round) {
  while (((int*)mailbox)[1] / 2 % 2 == round) yield();
}
inline void warp_barrier() {
  const int w = host.current / 32, generation = host.warp_generation[w];
  if (++host.warp_arrived[w] == 32) {
    host.warp_arrived[w] = 0;
    ++host.warp_generation[w];
  } else {
    while (host.warp_generation[w] == generation) yield();
  }
}

inline u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float float_of(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline void forget(i64&) {}
inline u32 byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = ((u64)b << 32) | a;
  u32 y = 0;
  for (int i = 0; i < 4; ++i) y |= (u32)((both >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return y;
}
inline float mul(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float div(float a, float b) { return a / b; }
inline int nearest_int(float a) { return (int)nearbyintf(a); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float inverse_sqrt(float a) { return 1.0f / sqrtf(a); }
inline float reciprocal(float a) { return 1.0f / a; }
// x + y towards plus infinity: the FP64 sum and what its rounding lost decide.
inline float sum_up(double x, double y) {
  const double sum = x + y, part = sum - x, lost = (x - (sum - part)) + (y - part);
  const float z = (float)sum;
  return (double)z < sum || ((double)z == sum && lost > 0.0) ? nextafterf(z, INFINITY) : z;
}
inline float add_up(float a, float b) { return sum_up(a, b); }
inline float fma_up(float a, float b, float c) { return sum_up((double)a * (double)b, c); }
inline float saturated(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float mul_saturated(float a, float b) { return saturated(a * b); }
inline float fma_saturated(float a, float b, float c) { return saturated(fmaf(a, b, c)); }
inline float min_number(float a, float b) { return fminf(a, b); }
inline float max_number(float a, float b) { return fmaxf(a, b); }
inline float max_abs(float m, float x) {
  if (m != m || x != x) return float_of(0x7fffffffu);
  return m > fabsf(x) ? m : fabsf(x);
}

inline void renew(u32&) {}
inline void renew(i64&) {}
inline u32 without_nan(u32 x, u32 infinity) {
  if ((x & 0x7fffu) > infinity) x &= 0xffff0000u;
  return (x >> 16 & 0x7fffu) > infinity ? x & 0xffffu : x;
}
// Signs are those that the instruction leaves: of both operands together, none beside a NaN.
inline u32 larger(u32 m, u32 x, u32 infinity) {
  u32 y = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const u32 a = (m >> shift) & 0x7fffu, b = (x >> shift) & 0x7fffu, most = a > b ? a : b;
    y |= (most > infinity ? 0x7fffu : most | (((m ^ x) >> shift) & 0x8000u)) << shift;
  }
  return y;
}
inline u32 larger_bf16x2(u32 m, u32 x) { return larger(m, x, 0x7f80u); }
inline u32 larger_f16x2(u32 m, u32 x) { return larger(m, x, 0x7c00u); }
inline u32 larger_number_bf16x2(u32 m, u32 x) { return larger_bf16x2(m, without_nan(x, 0x7f80u)); }
inline u32 larger_number_f16x2(u32 m, u32 x) { return larger_f16x2(m, without_nan(x, 0x7c00u)); }

template <int N> inline void read_words(const void* p, u32 (&w)[N]) {
  if ((uintptr_t)p % sizeof(w)) __builtin_trap();
  memcpy(w, p, sizeof(w));
}
inline void read(const void* p, u32 (&w)[4]) { read_words(p, w); }
inline void read(const void* p, u32 (&w)[2]) { read_words(p, w); }
inline void read_again(const void* p, u32 (&w)[4]) { read_words(p, w); }
inline void read_shared(const void* p, u32 (&w)[4]) { read_words(p, w); }
inline void copy_async(void* to, const void* from, bool exists) {
  const i64 offset = (u8*)to - dynamic_shared();
  if (offset < 0 || offset + 16 > host.shared || offset % 16 || (exists && (uintptr_t)from % 16)) __builtin_trap();
  if (exists)
    memcpy(to, from, 16);
  else
    memset(to, 0, 16);
}
inline void commit_copies() {}
template <int N> inline void wait_copies() {}
template <int N> inline void write_words(void* p, const u32 (&w)[N]) {
  if ((uintptr_t)p % sizeof(w)) __builtin_trap();
  memcpy(p, w, sizeof(w));
}
inline void write(void* p, const u32 (&w)[4]) { write_words(p, w); }
inline void write(void* p, const u32 (&w)[2]) { write_words(p, w); }

inline void write_shared(void* p, const u32 (&w)[4]) { write_words(p, w); }
inline void write_shared(void* p, const u32 (&w)[2]) { write_words(p, w); }
inline void prefetch(const void* p) { static volatile char seen; seen = *(const volatile char*)p; }  // it must exist
inline float widen_f16(u16 x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
inline u32 bits_bf16(float x) {
  u32 u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
inline u32 bits_f16(float x) { _Float16 y = (_Float16)x; u16 b; memcpy(&b, &y, 2); return b; }
inline u32 narrow_bf16x2(float low, float high) { return bits_bf16(low) | (bits_bf16(high) << 16); }
inline u32 narrow_f16x2(float low, float high) { return bits_f16(low) | (bits_f16(high) << 16); }

inline u32 exchange(u32 x, int mask) {
  host.slots[host.current] = x;
  warp_barrier();
  const u32 y = host.slots[host.current ^ mask];
  warp_barrier();
  return y;
}
inline float exchange(float x, int mask) { return float_of(exchange(bits_of(x), mask)); }
inline float from_lane(float x, int lane) {
  host.slots[host.current] = bits_of(x);
  warp_barrier();
  const float y = float_of(host.slots[host.current / 32 * 32 + lane]);
  warp_barrier();
  return y;
}
inline u32 uniform(u32 x) { return x; }
inline u32 warp_max(u32 x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const u32 other = exchange(x, mask);
    x = x > other ? x : other;
  }
  return x;
}
inline void global_max(u32* p, u32 x) { *p = *p > x ? *p : x; }

}  // namespace te
