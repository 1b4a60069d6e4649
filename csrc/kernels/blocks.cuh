// What kernels with a scale for a block share: values kept in their own dtype between two passes over them, maxima of
// magnitudes two at a time, and scales.
#pragma once
#include <kernels/sources.cuh>
#include <te_ops/reduce.cuh>

namespace te {

// Maxima of the magnitudes of kept values, as words: two 16-bit ones, whose signs mean nothing, or one FP32. A NaN wins
// over Inf.
template <class D> struct Magnitude {
  static constexpr int per_word = 2;
  static TE_DEVICE u32 most(u32 m, u32 x);
  static TE_DEVICE float value(u32 m, int half);
  // Maxima of two rows as one word, those of `a` in the low half.
  static TE_DEVICE u32 join(u32 a, u32 b) { return most(byte_perm(a, b, 0x5410), byte_perm(a, b, 0x7632)); }
};
template <> TE_DEVICE u32 Magnitude<bf16>::most(u32 m, u32 x) { return larger_bf16x2(m, x); }
template <> TE_DEVICE u32 Magnitude<f16>::most(u32 m, u32 x) { return larger_f16x2(m, x); }
template <> TE_DEVICE float Magnitude<bf16>::value(u32 m, int half) {
  return magnitude(float_of(half ? m & 0xffff0000u : m << 16));
}
template <> TE_DEVICE float Magnitude<f16>::value(u32 m, int half) {
  return magnitude(widen_f16((u16)(half ? m >> 16 : m)));
}
template <> struct Magnitude<float> {
  static constexpr int per_word = 1;
  static TE_DEVICE u32 most(u32 m, u32 x) {
    x &= 0x7fffffffu;
    return m > x ? m : x;
  }
  static TE_DEVICE float value(u32 m, int) { return float_of(m); }
};

// Maximum over the eight values of a chunk: one word (of which a 16-bit type has two maxima).
template <class D> TE_DEVICE u32 chunk_most(const Chunk<D>& c) {
  u32 m = 0;
#pragma unroll
  for (int i = 0; i < Chunk<D>::words; ++i) m = Magnitude<D>::most(m, c.w[i]);
  return m;
}

// WORDS words of maxima, which LANES threads share (STRIDE lanes of a warp apart), dealt out so that each of them ends
// with few: fewer exchanges, and a scale is computed by one thread instead of all. Item i is half i % per of word
// i / per; it is held by the thread `owner(i)` of them, in place `place(i)`.
template <class D, int WORDS, int LANES, int STRIDE> struct Dealt {
  static constexpr int per = Magnitude<D>::per_word;
  static constexpr int spread = WORDS < LANES ? WORDS : LANES;  // threads over which words are dealt out
  static constexpr int kept = WORDS / spread;                   // words that a thread ends with
  static constexpr bool halved = per == 2 && spread < LANES;    // the halves of a word go to two threads too
  static constexpr int held = kept * (halved ? 1 : per);
  static constexpr int owners = spread * (halved ? 2 : 1);      // threads that own items

  // Word w of thread `lane` (within its group) is word `w + kept * dealt(lane)`.
  static constexpr TE_DEVICE int dealt(int lane) {
    int index = 0;
    for (int mask = 1, size = spread / 2; mask < spread; mask *= 2, size /= 2)
      if (lane & mask) index += size;
    return index;
  }
  static constexpr TE_DEVICE int owner(int item) {
    const int lane = dealt(item / per / kept);  // dealing is its own inverse
    return lane + (halved ? item % per * spread : 0);
  }
  static constexpr TE_DEVICE int place(int item) {
    return halved ? item / per % kept : item / per % kept * per + item % per;
  }
  // The item in a place of this thread.
  static TE_DEVICE int item(int lane, int place) {
    const int word = kept * dealt(lane) + (halved ? place : place / per);
    return word * per + (halved ? lane / spread % 2 : place % per);
  }

  // The words are lost.
  static TE_DEVICE void reduce(u32 (&w)[WORDS], int lane, float (&out)[held]) {
    reduce_words<WORDS, 1>(w, lane);
#pragma unroll
    for (int i = 0; i < held; ++i)
      out[i] = Magnitude<D>::value(w[halved ? i : i / per], halved ? lane / spread % 2 : i % per);
  }

  template <int N, int MASK> static TE_DEVICE void reduce_words(u32 (&w)[WORDS], int lane) {
    if constexpr (MASK < LANES) {
      if constexpr (N > kept) {
        const bool upper = lane & MASK;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          const u32 mine = upper ? w[i + N / 2] : w[i], other = upper ? w[i] : w[i + N / 2];
          w[i] = Magnitude<D>::most(mine, exchange(other, MASK * STRIDE));
        }
        reduce_words<N / 2, 2 * MASK>(w, lane);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] = Magnitude<D>::most(w[i], exchange(w[i], MASK * STRIDE));
        reduce_words<N, 2 * MASK>(w, lane);
      }
    }
  }
};

// Maxima of ROWS rows, which LANES adjacent threads share: an item a row.
template <class D, int ROWS, int LANES> struct RowMaxima : Dealt<D, ROWS / Magnitude<D>::per_word, LANES, 1> {
  typedef Dealt<D, ROWS / Magnitude<D>::per_word, LANES, 1> Base;
  // most: a word a row, from `chunk_most`.
  static TE_DEVICE void reduce(const u32 (&most)[ROWS], int lane, float (&out)[Base::held]) {
    constexpr int words = ROWS / Base::per;
    u32 w[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if constexpr (Base::per == 2)
        w[i] = Magnitude<D>::join(most[2 * i], most[2 * i + 1]);
      else
        w[i] = most[i];
    }
    Base::reduce(w, lane, out);
  }
};

// Eight values of a source as they are kept: as they lie in memory where nothing is computed.
template <class S, class D> struct Keep {
  static TE_DEVICE void outs(const S& s, const typename S::Cols& cols, const typename S::Regs& regs, int valid,
                             Chunk<D> (&c)[S::outs]) {
    float y[S::outs][8];
    s.eval(cols, regs, y);
#pragma unroll
    for (int o = 0; o < S::outs; ++o) {
      clear_beyond(y[o], valid);
      pack<D>(y[o], c[o]);
    }
  }
};
template <class T> struct Keep<Plain<T>, T> {
  static TE_DEVICE void outs(const Plain<T>&, const typename Plain<T>::Cols&, const typename Plain<T>::Regs& regs, int,
                             Chunk<T> (&c)[1]) {
    c[0] = regs.x;
  }
};

// Nothing is derived from kept values ahead of this place, and nothing derived before is used after it: unpacked
// values would take twice the registers.
template <class D> TE_DEVICE void renew_all(Chunk<D>& kept) {
#pragma unroll
  for (int w = 0; w < Chunk<D>::words; ++w) renew(kept.w[w]);
}
template <class D, int ROWS> TE_DEVICE void renew_all(Chunk<D> (&kept)[ROWS]) {
  if constexpr (sizeof(D) == 2) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) renew_all(kept[i]);
  }
}

// Codes of eight values, each times a scale of its own.
template <class F> TE_DEVICE void encode_each(const float (&v)[8], const float (&scale)[8], u32 (&codes)[2]) {
#pragma unroll
  for (int k = 0; k < 8; k += 4)
    codes[k / 4] = F::quad(mul(v[k], scale[k]), mul(v[k + 1], scale[k + 1]), mul(v[k + 2], scale[k + 2]),
                           mul(v[k + 3], scale[k + 3]));
}

}  // namespace te
