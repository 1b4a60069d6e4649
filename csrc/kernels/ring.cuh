// Operands that arrive in shared memory while others are computed, by asynchronous copies.
#pragma once
#include <kernels/sources.cuh>

namespace te {

// STAGES times LINES chunks of all operands of a source, for each of THREADS threads, which alone reads its own: no
// barrier. They take the first `bytes` of dynamic shared memory.
template <class S, int LINES, int STAGES, int THREADS> struct Ring {
  typedef typename S::Regs Regs;
  static constexpr int slot = (int)sizeof(Regs) | 16;  // an odd number of pieces of 16 bytes: no bank conflicts
  static constexpr int bytes = STAGES * LINES * THREADS * slot;

  static TE_DEVICE u8* place(int stage, int line) {
    return dynamic_shared() + ((stage * LINES + line) * THREADS + thread()) * slot;
  }
  // Zeros where nothing exists. The caller commits.
  template <auto PIECE> static TE_DEVICE void issue(const S& s, int stage, int line, i64 row, i64 col, bool exists) {
    s.template load<COPY, PIECE>(*(Regs*)place(stage, line), row, col, exists ? 8 : 0);
  }
  static TE_DEVICE void take(int stage, int line, Regs& regs) {
    static_assert(sizeof(Regs) % 16 == 0, "whole chunks of 16- and 32-bit elements");
    u32 all[sizeof(Regs) / 4];
#pragma unroll
    for (int i = 0; i < (int)sizeof(Regs) / 16; ++i) {
      u32 w[4];
      read_shared(place(stage, line) + 16 * i, w);
#pragma unroll
      for (int k = 0; k < 4; ++k) all[4 * i + k] = w[k];
    }
    memcpy(&regs, all, sizeof(Regs));
  }
};

}  // namespace te
