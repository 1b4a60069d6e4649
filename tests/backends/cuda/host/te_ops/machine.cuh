// The host build's side of te_ops/machine.cuh: every GPU thread is a fiber, blocks run one after another.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define TE_DEVICE inline
#define TE_SHARED static
#define TE_FP8_INSTRUCTIONS 0

inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
using std::signbit;

namespace te {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Host {
  int threads = 0, current = 0, arrived = 0, generation = 0;
  i64 grid = 0, block = 0;
  std::vector<ucontext_t> contexts;
  std::vector<char> done;
  std::vector<int> warp_arrived, warp_generation;
  std::vector<u32> slots;
  ucontext_t main;
};
inline Host host;

inline void yield() { swapcontext(&host.contexts[host.current], &host.main); }
inline int thread() { return host.current; }
inline i64 block() { return host.block; }
inline i64 blocks() { return host.grid; }

inline void barrier() {
  const int generation = host.generation;
  if (++host.arrived == host.threads) {
    host.arrived = 0;
    ++host.generation;
  } else {
    while (host.generation == generation) yield();
  }
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

inline u32 bits_of(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
inline float float_of(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
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
inline int nearest_int(float a) { return (int)std::nearbyint(a); }
inline float sqrt_rn(float a) { return std::sqrt(a); }
inline float max_abs(float m, float x) {
  if (m != m || x != x) return float_of(0x7fffffffu);
  return m > std::fabs(x) ? m : std::fabs(x);
}

template <int N> inline void read_words(const void* p, u32 (&w)[N]) {
  if ((uintptr_t)p % sizeof(w)) __builtin_trap();
  std::memcpy(w, p, sizeof(w));
}
inline void read(const void* p, u32 (&w)[4]) { read_words(p, w); }
inline void read(const void* p, u32 (&w)[2]) { read_words(p, w); }
template <int N> inline void write_words(void* p, const u32 (&w)[N]) {
  if ((uintptr_t)p % sizeof(w)) __builtin_trap();
  std::memcpy(p, w, sizeof(w));
}
inline void write(void* p, const u32 (&w)[4]) { write_words(p, w); }
inline void write(void* p, const u32 (&w)[2]) { write_words(p, w); }

inline float widen_f16(u16 x) { _Float16 y; std::memcpy(&y, &x, 2); return (float)y; }
inline u32 bits_bf16(float x) {
  u32 u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
inline u32 bits_f16(float x) { _Float16 y = (_Float16)x; u16 b; std::memcpy(&b, &y, 2); return b; }
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
inline u32 warp_max(u32 x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const u32 other = exchange(x, mask);
    x = x > other ? x : other;
  }
  return x;
}
inline void global_max(u32* p, u32 x) { *p = *p > x ? *p : x; }

template <class Body> struct Runner {
  static inline const Body* body;
  static void enter() {
    (*body)();
    host.done[host.current] = 1;
    yield();
  }
};

template <class Body> void run_blocks(i64 grid, int threads, const Body& body) {
  constexpr size_t STACK = 65536;
  static std::vector<char> stacks;
  stacks.resize(STACK * threads);
  Runner<Body>::body = &body;
  host.threads = threads;
  host.grid = grid;
  host.contexts.resize(threads);
  host.slots.resize(threads);
  for (i64 b = 0; b < grid; ++b) {
    host.block = b;
    host.arrived = 0;
    host.done.assign(threads, 0);
    host.warp_arrived.assign(threads / 32, 0);
    host.warp_generation.assign(threads / 32, 0);
    for (int t = 0; t < threads; ++t) {
      ucontext_t& c = host.contexts[t];
      getcontext(&c);
      c.uc_stack.ss_sp = stacks.data() + STACK * t;
      c.uc_stack.ss_size = STACK;
      c.uc_link = &host.main;
      makecontext(&c, (void (*)())Runner<Body>::enter, 0);
    }
    for (int left = threads; left > 0;) {
      left = 0;
      for (int t = 0; t < threads; ++t) {
        if (host.done[t]) continue;
        ++left;
        host.current = t;
        swapcontext(&host.main, &host.contexts[t]);
      }
    }
  }
}

}  // namespace te
