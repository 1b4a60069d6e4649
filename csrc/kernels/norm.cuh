// RMSNorm and LayerNorm over the last dimension. GROUP threads a row, CHUNKS chunks of eight columns a thread; blocks go
// through the rows. With STAGES > 0 a thread's chunks lie in shared memory, where STAGES - 1 rows are on their way while
// one is computed; else in registers. Short rows of which a thread has several at once: `short_norm`.
#pragma once
#include <kernels/norm_feed.cuh>

namespace te {

template <class S, class T, class Y, class G> struct NormArguments {
  S source;
  const G* gamma;
  const G* beta;
  T* stream;  // what is normalised, if somebody else reads it; or null
  Y* y;       // or null: only the statistics are wanted
  float* rstd;
  float* mean;
  u32* amax;  // bits of max |y|, zero before; or null
  i64 rows, width;
};

// y of a chunk: x * rstd * gain, or (x - mean) * rstd * gain + shift.
template <class G, bool CENTERED, bool ZERO_CENTERED>
TE_DEVICE void normalise(float (&v)[8], float mean, float rstd, const Chunk<G>& gamma, const Chunk<G>& beta) {
  float gain[8];
  gain_of<G, ZERO_CENTERED>(gamma, gain);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = mul(mul(CENTERED ? sub(v[i], mean) : v[i], rstd), gain[i]);
  if constexpr (CENTERED) {
    float shift[8];
    unpack<G>(beta, shift);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = add(v[i], shift[i]);
  }
}

// The sum of squares of a chunk, or of its distances to the mean where it has columns.
template <bool CENTERED> TE_DEVICE float squares_of(const float (&v)[8], float mean, int valid) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float a = CENTERED ? (i < valid ? sub(v[i], mean) : 0.0f) : v[i];
    const float b = CENTERED ? (i + 1 < valid ? sub(v[i + 1], mean) : 0.0f) : v[i + 1];
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  return add(even, odd);
}

template <class Y> TE_DEVICE float most_of(float most, float (&v)[8]) {
  round_to<Y>(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max_abs(most, v[i]);
  return most;
}

template <class S, class T, class Y, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, int GROUP, int CHUNKS,
          int THREADS, int STAGES>
TE_DEVICE void norm(const NormArguments<S, T, Y, G>& a, float epsilon) {
  typedef Feed<S, CHUNKS, THREADS, STAGES> F;
  const i64 stride = blocks() * (THREADS / GROUP);
  const int place = thread() % GROUP, width = (int)a.width;
  i64 row = block() * (THREADS / GROUP) + thread() / GROUP;
  int turn = 0, stage = 0;
  const Weights<G, ALIGNED, CHUNKS, THREADS, 2, (STAGES > 0)> weights = {{a.gamma, a.beta}, dynamic_shared() + F::bytes};
  auto col = [&](int c) { return 8 * (c * GROUP + place); };
  auto valid = [&](int c) { return columns_left(width, col(c)); };
  auto issue = [&](i64 r, int s) {
    forget(r);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) F::issue(a.source, s, c, r * a.width + col(c), r < a.rows && col(c) < width);
    commit_copies();
  };
  if constexpr (STAGES > 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      if (s == 0 && a.y) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
          for (int which = 0; which < 1 + CENTERED; ++which) weights.issue(which, c, col(c), col(c) < width);
      }
      issue(row + s * stride, s);
    }
  }
  const float share = div(1.0f, (float)a.width);
  float most = 0.0f;
  constexpr bool KEPT = STAGES == 0 && CHUNKS <= 2;  // gamma and beta, in registers
  Chunk<G> kept[1 + CENTERED][KEPT ? CHUNKS : 1];
  if constexpr (KEPT) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int which = 0; which < 1 + CENTERED; ++which)
        weights.take(which, c, col(c), a.y ? valid(c) : 0, kept[which][c]);
  }
  for (i64 first = block() * (THREADS / GROUP); first < a.rows; first += stride, row += stride) {
    const bool exists = row < a.rows;
    Chunk<T> held[STAGES > 0 ? 1 : CHUNKS];
    auto fetch = [&](int c, Chunk<T>& x) {
      typename S::Regs regs;
      typename S::Cols cols;
      F::take(stage, c, regs);
      Held<S, T>::keep(a.source, cols, regs, exists ? valid(c) : 0, x);
    };
    auto value = [&](int c, float(&v)[8]) {
      if constexpr (STAGES > 0) fetch(c, held[0]);
      unpack<T>(held[STAGES > 0 ? 0 : c], v);
    };
    if constexpr (STAGES > 0) {
      wait_copies<STAGES - 1>();
    } else {
      typename S::Regs regs[CHUNKS];
      typename S::Cols cols[CHUNKS];
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const int here = exists ? valid(c) : 0;
        a.source.template load_cols<ALIGNED>(cols[c], col(c), here);
        a.source.template load<ALIGNED, false>(regs[c], row, col(c), here);
      }
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
        Held<S, T>::keep(a.source, cols[c], regs[c], exists ? valid(c) : 0, held[c]);
    }
    float mean = 0.0f, sum[1], v[8];
    if constexpr (CENTERED) {
      sum[0] = 0.0f;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        value(c, v);
        sum[0] = add(sum[0], sum_of(v));
      }
      group_sums<GROUP, THREADS>(sum, turn);
      mean = mul(sum[0], share);
    }
    sum[0] = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      value(c, v);
      sum[0] = add(sum[0], squares_of<CENTERED>(v, mean, valid(c)));
    }
    group_sums<GROUP, THREADS>(sum, turn);
    const float rstd = inverse_sqrt(add(mul(sum[0], share), epsilon));
    if (exists && place == 0) {
      if (a.rstd) a.rstd[row] = rstd;
      if (CENTERED && a.mean) a.mean[row] = mean;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int here = exists ? valid(c) : 0;
      const i64 at = row * a.width + col(c);
      value(c, v);
      if (a.stream) store<T, ALIGNED>(a.stream + at, here, held[STAGES > 0 ? 0 : c]);
      if (!a.y) continue;
      Chunk<G> gamma, beta;
      if constexpr (KEPT) {
        gamma = kept[0][c];
        if constexpr (CENTERED) beta = kept[CENTERED][c];
      } else {
        weights.take(0, c, col(c), valid(c), gamma);
        if constexpr (CENTERED) weights.take(1, c, col(c), valid(c), beta);
      }
      normalise<G, CENTERED, ZERO_CENTERED>(v, mean, rstd, gamma, beta);
      store<Y, ALIGNED>(a.y + at, here, v);
      if (a.amax) {
        clear_beyond(v, here);
        most = most_of<Y>(most, v);
      }
    }
    if constexpr (STAGES > 0) {
      issue(row + STAGES * stride, stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }
  if (a.amax) {
    const u32 bits = warp_max(bits_of(most) & 0x7fffffffu);
    if (thread() % 32 == 0 && bits != 0) global_max(a.amax, bits);
  }
}

// As `unpack`, by other instructions where there are some: else the assembler keeps what the first pass unpacked, eight
// registers for four.
template <class T> TE_DEVICE void unpack_again(const Chunk<T>& c, float (&v)[8]) { unpack<T>(c, v); }
template <> TE_DEVICE void unpack_again<bf16>(const Chunk<bf16>& c, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = float_of(byte_perm(c.w[i], 0, 0x1044));
    v[2 * i + 1] = float_of(byte_perm(c.w[i], 0, 0x3244));
  }
}

// Rows that a part of a warp holds in registers. A warp has AT_ONCE * 32 / GROUP rows next to each other: all are on
// their way before the first is computed, and their statistics are written together.
template <class S, class T, class Y, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, int GROUP, int CHUNKS,
          int THREADS, int AT_ONCE>
TE_DEVICE void short_norm(const NormArguments<S, T, Y, G>& a, float epsilon) {
  constexpr int APART = 32 / GROUP;
  static_assert(GROUP <= 32 && AT_ONCE <= GROUP, "a thread writes one row's statistics");
  const int lane = thread() % 32, place = lane % GROUP, width = (int)a.width;
  const i64 first = (block() * (THREADS / 32) + thread() / 32) * (APART * AT_ONCE) + lane / GROUP;
  const float share = div(1.0f, (float)a.width);
  int turn = 0;
  auto col = [&](int c) { return 8 * (c * GROUP + place); };
  auto here = [&](int r, int c) { return first + r * APART < a.rows ? columns_left(width, col(c)) : 0; };
  typename S::Regs regs[AT_ONCE][CHUNKS];
  typename S::Cols cols[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    a.source.template load_cols<ALIGNED>(cols[c], col(c), columns_left(width, col(c)));
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r)
      a.source.template load<ALIGNED, false>(regs[r][c], first + r * APART, col(c), here(r, c));
  }
  Chunk<G> gamma[CHUNKS], beta[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int wanted = a.y ? columns_left(width, col(c)) : 0;
    load_again<G, ALIGNED>(a.gamma + col(c), wanted, gamma[c]);
    if constexpr (CENTERED) load_again<G, ALIGNED>(a.beta + col(c), wanted, beta[c]);
  }
  Chunk<T> held[AT_ONCE][CHUNKS];
  float mean[AT_ONCE], sum[AT_ONCE], v[8], own_mean = 0.0f, own_rstd = 0.0f, most = 0.0f;
#pragma unroll
  for (int r = 0; r < AT_ONCE; ++r) {
    mean[r] = sum[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      Held<S, T>::keep(a.source, cols[c], regs[r][c], here(r, c), held[r][c]);
      unpack<T>(held[r][c], v);
      if constexpr (CENTERED) mean[r] = add(mean[r], sum_of(v));
      else sum[r] = add(sum[r], squares_of<false>(v, 0.0f, 8));
    }
  }
  if constexpr (CENTERED) {
    group_sums<GROUP, THREADS>(mean, turn);
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      mean[r] = mul(mean[r], share);
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        unpack_again<T>(held[r][c], v);
        sum[r] = add(sum[r], squares_of<true>(v, mean[r], columns_left(width, col(c))));
      }
    }
  }
  group_sums<GROUP, THREADS>(sum, turn);
#pragma unroll
  for (int r = 0; r < AT_ONCE; ++r) {
    const float rstd = inverse_sqrt(add(mul(sum[r], share), epsilon));
    own_rstd = place == r ? rstd : own_rstd;
    own_mean = place == r ? mean[r] : own_mean;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const i64 at = (first + r * APART) * a.width + col(c);
      if (a.stream) store<T, ALIGNED>(a.stream + at, here(r, c), held[r][c]);
      if (!a.y) continue;
      unpack_again<T>(held[r][c], v);
      normalise<G, CENTERED, ZERO_CENTERED>(v, mean[r], rstd, gamma[c], beta[c]);
      store<Y, ALIGNED>(a.y + at, here(r, c), v);
      if (a.amax) {
        clear_beyond(v, here(r, c));
        most = most_of<Y>(most, v);
      }
    }
  }
  const i64 mine = first + place * APART;
  if (place < AT_ONCE && mine < a.rows) {
    if (a.rstd) a.rstd[mine] = own_rstd;
    if (CENTERED && a.mean) a.mean[mine] = own_mean;
  }
  if (a.amax) {
    const u32 bits = warp_max(bits_of(most) & 0x7fffffffu);
    if (lane == 0 && bits != 0) global_max(a.amax, bits);
  }
}

// Rows that no block holds: each pass reads them again.
template <class S, class T, class Y, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, int THREADS>
TE_DEVICE void long_norm(const NormArguments<S, T, Y, G>& a, float epsilon) {
  const i64 row = block();
  const float share = div(1.0f, (float)a.width);
  int turn = 0;
  auto fetch = [&](i64 col, int valid, Chunk<T>& x) {
    typename S::Cols cols;
    typename S::Regs regs;
    a.source.template load_cols<ALIGNED>(cols, col, valid);
    a.source.template load<ALIGNED, false>(regs, row, col, valid);
    Held<S, T>::keep(a.source, cols, regs, valid, x);
  };
  auto total = [&](auto term) {
    float sum[1] = {0.0f};
    for (i64 col = 8 * thread(); col < a.width; col += 8 * THREADS) {
      const int valid = columns_left(a.width, col);
      Chunk<T> x;
      float v[8];
      fetch(col, valid, x);
      unpack<T>(x, v);
      sum[0] = add(sum[0], term(v, valid));
    }
    group_sums<THREADS, THREADS>(sum, turn);
    return mul(sum[0], share);
  };
  float mean = 0.0f, most = 0.0f;
  if constexpr (CENTERED) mean = total([](const float(&v)[8], int) { return sum_of(v); });
  const float squares = total([&](const float(&v)[8], int valid) { return squares_of<CENTERED>(v, mean, valid); });
  const float rstd = inverse_sqrt(add(squares, epsilon));
  if (thread() == 0) {
    if (a.rstd) a.rstd[row] = rstd;
    if (CENTERED && a.mean) a.mean[row] = mean;
  }
  if (!a.y && !a.stream) return;
  for (i64 col = 8 * thread(); col < a.width; col += 8 * THREADS) {
    const int valid = columns_left(a.width, col);
    Chunk<T> x;
    float v[8];
    fetch(col, valid, x);
    if (a.stream) store<T, ALIGNED>(a.stream + row * a.width + col, valid, x);
    if (!a.y) continue;
    Chunk<G> gamma, beta;
    load_again<G, ALIGNED>(a.gamma + col, valid, gamma);
    if constexpr (CENTERED) load_again<G, ALIGNED>(a.beta + col, valid, beta);
    unpack<T>(x, v);
    normalise<G, CENTERED, ZERO_CENTERED>(v, mean, rstd, gamma, beta);
    store<Y, ALIGNED>(a.y + row * a.width + col, valid, v);
    if (a.amax) {
      clear_beyond(v, valid);
      most = most_of<Y>(most, v);
    }
  }
  if (a.amax) {
    const u32 bits = warp_max(bits_of(most) & 0x7fffffffu);
    if (thread() % 32 == 0 && bits != 0) global_max(a.amax, bits);
  }
}

}  // namespace te
