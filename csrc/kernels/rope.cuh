// Rotary position embedding: the table of cosines and sines, and a Source whose rows are heads side by side, some of
// them turned. Heads are read where they lie: each part of a row has an address and strides of its own.
#pragma once
#include <kernels/sources.cuh>

namespace te {

// Which row of the table a row of heads reads: its own, row % count (sequences one after the other), row / count
// (positions one after the other).
constexpr int BY_ROW = 0, BY_REMAINDER = 1, BY_QUOTIENT = 2;
template <int BY> TE_DEVICE i64 place_of(i64 row, i64 count) {
  return BY == BY_ROW ? (u32)row : BY == BY_REMAINDER ? (u32)row % (u32)count : (u32)row / (u32)count;
}

// L, written by te_ops.backends.cuda.rope: `parts`, and by part `end` (the column after its last), `size` (features of
// a head), `turned`; `half`, pairs of a head. CHUNKED: chunks of eight columns lie in one head, in one half of its
// rotated features (or pair by pair), or behind them, on 16 bytes. APART: how many lanes of a warp away the thread with a
// chunk's partners is, in a pass in which all threads of a warp compute together; 0: they are read.
template <class T, class L, bool INTERLEAVED, bool INVERSE, int BY, bool CHUNKED, int APART = 0> struct Heads {
  static constexpr int outs = 1;
  static constexpr bool computes = true, inverse = INVERSE;
  const T* x[L::parts];  // or null: zeros
  i64 row[L::parts], head[L::parts];  // elements from one to the next
  const float* table;  // [.., 2, half]
  i64 count;

  // A column: the address in the first row, where its partner is from there, its pair.
  struct Column {
    const T* x;
    i64 row;
    int partner, pair;
    bool first, turned;
  };
  struct Cols { Column at; };
  struct Alone {
    Chunk<T> own;
    Chunk<float> cos, sin;
  };
  struct Both : Alone { Chunk<T> partner; };
  template <bool ALONE, class = void> struct Needed { typedef Both type; };
  template <class X> struct Needed<true, X> { typedef Alone type; };
  typedef typename Needed<(APART > 0)>::type Regs;

  TE_DEVICE Column column(i64 col) const {
    Column c = {nullptr, 0, 0, 0, true, false};
    int begin = 0;
#pragma unroll
    for (int p = 0; p < L::parts; ++p) {
      if (col >= begin && col < L::end(p)) {
        const int place = (int)col - begin, h = place / L::size(p), f = place - h * L::size(p);
        c.x = x[p] ? x[p] + h * head[p] + f : nullptr;
        c.row = row[p];
        c.turned = L::turned(p) && f < 2 * L::half && x[p] != nullptr;
        c.first = INTERLEAVED ? f % 2 == 0 : f < L::half;
        c.pair = INTERLEAVED ? f / 2 : c.first ? f : f - L::half;
        c.partner = INTERLEAVED ? (c.first ? 1 : -1) : c.first ? L::half : -L::half;
      }
      begin = L::end(p);
    }
    return c;
  }
  TE_DEVICE const float* turns(i64 r) const {
    return table + place_of<BY>(r, count) * (2 * L::half);
  }

  template <int ALIGNED> TE_DEVICE void load_cols(Cols& c, i64 col, int valid) const {
    if constexpr (CHUNKED) c.at = column(valid > 0 ? col : 0);
  }
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    if constexpr (CHUNKED) {
      load_chunk<ALIGNED>(r, row, column(valid > 0 ? col : 0), valid);
    } else if constexpr (ALIGNED != PREFETCH) {
      constexpr int per = 4 / sizeof(T);
#pragma unroll
      for (int i = 0; i < Chunk<T>::words; ++i) r.own.w[i] = r.partner.w[i] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        r.cos.w[i] = bits_of(1.0f);
        r.sin.w[i] = 0;
        if (i >= valid) continue;
        const Column c = column(col + i);
        const int shift = 8 * sizeof(T) * (i % per) % 32;
        if (c.x) r.own.w[i / per] |= raw<T>(c.x[row * c.row]) << shift;
        if (!c.turned) continue;
        r.partner.w[i / per] |= raw<T>(c.x[row * c.row + c.partner]) << shift;
        const float* t = turns(row) + c.pair;
        r.cos.w[i] = bits_of(t[0]);
        r.sin.w[i] = bits_of(c.first != INVERSE ? t[L::half] : -t[L::half]);
      }
    }
  }
  template <int ALIGNED> TE_DEVICE void load_chunk(Regs& r, i64 row, const Column& c, int valid) const {
    const T* p = c.x + row * c.row;
    const int here = c.x ? valid : 0;
    te::load<T, ALIGNED>(p, here, r.own);
    if constexpr (ALIGNED != PREFETCH) {
      const int there = c.turned ? valid : 0;
      if constexpr (!INTERLEAVED && APART == 0) keep<T>(p + c.partner, there, r.partner);
      const float* t = turns(there > 0 ? row : 0) + c.pair;
      keep<float, INTERLEAVED>(t, there, r.cos);
      keep<float, INTERLEAVED>(t + L::half, there, r.sin);
      if (there > 0) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) r.cos.w[i] = bits_of(1.0f);
    }
  }
  // Eight elements (FOUR of them) that others read too: kept in L1.
  template <class X, bool FOUR = false> static TE_DEVICE void keep(const X* p, int valid, Chunk<X>& c) {
    if (valid > 0) {
      constexpr int vectors = FOUR ? 1 : sizeof(X) == 4 ? 2 : 1;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        u32 w[4];
        read_again((const u32*)p + 4 * v, w);
#pragma unroll
        for (int i = 0; i < 4; ++i) c.w[4 * v + i] = w[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < Chunk<X>::words; ++i) c.w[i] = 0;
    }
  }

  // a * cos - b * sin and b * cos + a * sin, each product and sum rounded: the sign goes with the sine.
  TE_DEVICE void eval(const Cols& c, const Regs& r, float (&y)[1][8]) const {
    float own[8], partner[8], cos[8], sin[8];
    unpack<T>(r.own, own);
    unpack<float>(r.cos, cos);
    unpack<float>(r.sin, sin);
    if constexpr (CHUNKED && INTERLEAVED) {
#pragma unroll
      for (int i = 7; i >= 0; --i) {
          partner[i] = c.at.turned ? own[i ^ 1] : 0.0f;
        cos[i] = cos[i / 2];
        sin[i] = (i % 2 == 0) != INVERSE ? sin[i / 2] : -sin[i / 2];
      }
    } else {
      if constexpr (APART > 0) {
        Chunk<T> other;
#pragma unroll
        for (int i = 0; i < Chunk<T>::words; ++i) {
          const u32 word = exchange(r.own.w[i], APART);
          other.w[i] = c.at.turned ? word : 0;
        }
        unpack<T>(other, partner);
      } else {
        unpack<T>(r.partner, partner);
      }
      if constexpr (CHUNKED) {
        const float sign = c.at.first != INVERSE ? 1.0f : -1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sin[i] = mul(sign, sin[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) y[0][i] = turn(own[i], partner[i], cos[i], sin[i]);
  }
  // Not turned: a partner of 0, a cosine of 1 and a sine of 0 leave it as it is.
  static TE_DEVICE float turn(float own, float partner, float cos, float sin) {
    return sub(mul(own, cos), mul(partner, sin));
  }
};

// The same heads as two outputs, the left half of a row and the right one, which are the same angles apart: what a thread
// reads of the table serves two chunks.
template <class T, class L, bool INVERSE, int BY, int APART> struct HeadPairs {
  typedef Heads<T, L, false, INVERSE, BY, true, APART> One;
  static constexpr int outs = 2;
  static constexpr bool computes = true;
  One heads;
  struct Cols { typename One::Column at[2]; };
  struct Regs {
    Chunk<T> own[2];
    Chunk<float> cos, sin;
  };

  TE_DEVICE typename One::Column column(i64 col, int out) const {
    return heads.column(col + out * (L::end(L::parts - 1) / 2));
  }
  template <int ALIGNED> TE_DEVICE void load_cols(Cols& c, i64 col, int valid) const {
    for (int o = 0; o < 2; ++o) c.at[o] = column(valid > 0 ? col : 0, o);
  }
  template <int ALIGNED, int SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    bool turned = false;
    int pair = 0;
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const typename One::Column c = column(valid > 0 ? col : 0, o);
      te::load<T, ALIGNED>(c.x + row * c.row, c.x ? valid : 0, r.own[o]);
      turned = turned || c.turned;
      pair = c.pair;
    }
    if constexpr (ALIGNED != PREFETCH) {
      const int there = turned ? valid : 0;
      const float* t = heads.turns(there > 0 ? row : 0) + pair;
      One::template keep<float>(t, there, r.cos);
      One::template keep<float>(t + L::half, there, r.sin);
    }
  }
  TE_DEVICE void eval(const Cols& c, const Regs& r, float (&y)[2][8]) const {
    float cos[8], sin[8];
    unpack<float>(r.cos, cos);
    unpack<float>(r.sin, sin);
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      float partner[8];
      Chunk<T> other;
#pragma unroll
      for (int i = 0; i < Chunk<T>::words; ++i) other.w[i] = exchange(r.own[o].w[i], APART);
      unpack<T>(r.own[o], y[o]);
      unpack<T>(other, partner);
      if (!c.at[o].turned) continue;
      const float sign = c.at[o].first != INVERSE ? 1.0f : -1.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) y[o][i] = One::turn(y[o][i], partner[i], cos[i], mul(sign, sin[i]));
    }
  }
};

// y = heads of H (CHUNKED, not INTERLEAVED), `features` in each of their halves a multiple of eight, those that turn turned
// as a whole: a thread has a chunk of the first half and its partners, so that both are read once, and their angles too.
template <class H, class L, class T, int THREADS>
TE_DEVICE void turn_halves(const H& s, T* y, i64 rows) {
  constexpr u32 width = L::end(L::parts - 1), pairs = width / 16;
  const u32 index = (u32)block() * THREADS + thread();
  if (index >= (u32)rows * pairs) return;
  const u32 row = index / pairs, place = index - row * pairs;
  i64 col = 0;
  int apart = 0, begin = 0;
#pragma unroll
  for (int p = 0; p < L::parts; ++p) {
    const int each = L::size(p) / 16, at = (int)place - begin / 16;
    if (at >= 0 && 16 * (int)place < L::end(p)) {
      apart = 8 * each;
      col = begin + at / each * L::size(p) + at % each * 8;
    }
    begin = L::end(p);
  }
  const typename H::Column c = s.column(col);
  const T* x = c.x + row * c.row;
  Chunk<T> first, second;
  load<T, WHOLE>(x, c.x ? 8 : 0, first);
  load<T, WHOLE>(x + apart, c.x ? 8 : 0, second);
  T* to = y + (i64)row * width + col;
  float a[8], b[8];
  unpack<T>(first, a);
  unpack<T>(second, b);
  if (c.turned) {
    Chunk<float> angles[2];
    const float* t = s.turns(row) + c.pair;
    H::template keep<float>(t, 8, angles[0]);
    H::template keep<float>(t + L::half, 8, angles[1]);
    float cos[8], sin[8];
    unpack<float>(angles[0], cos);
    unpack<float>(angles[1], sin);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float own = a[i], partner = b[i], turned = H::inverse ? -sin[i] : sin[i];
      a[i] = H::turn(own, partner, cos[i], turned);
      b[i] = H::turn(partner, own, cos[i], -turned);
    }
  }
  store<T, WHOLE>(to, 8, a);
  store<T, WHOLE>(to + apart, 8, b);
}

// cos and sin of an angle in [0, 2^30), correct but for the last rounding: reduced and summed in FP64.
TE_DEVICE void cos_sin(float angle, float& cos, float& sin) {
  const double turns = (double)angle * 0.63661977236758134308;
  const i64 quarter = (i64)(turns + 0.5);
  const double x = (double)angle - (double)quarter * 1.57079632679489661923 - (double)quarter * 6.123233995736766e-17;
  const double z = x * x;
  const double s =
      x + x * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800)))));
  const double c = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800)))));
  const bool odd = quarter % 2 != 0;
  const double a = odd ? s : c, b = odd ? c : s;
  cos = (float)((quarter + 1) % 4 >= 2 ? -a : a);
  sin = (float)(quarter % 4 >= 2 ? -b : b);
}

// table[r] = cos and sin of (start + r) * frequency, times `amplitude`: a thread a pair.
template <int THREADS>
TE_DEVICE void rope_table(float* table, const float* frequency, i64 rows, i64 half, i64 start, float amplitude) {
  const u32 index = (u32)block() * THREADS + thread();
  if (index >= (u32)(rows * half)) return;
  const u32 row = index / (u32)half, pair = index - row * (u32)half;
  float cos, sin;
  cos_sin(mul((float)(start + row), frequency[pair]), cos, sin);
  float* at = table + (i64)row * 2 * half + pair;
  at[0] = amplitude == 1.0f ? cos : mul(cos, amplitude);
  at[half] = amplitude == 1.0f ? sin : mul(sin, amplitude);
}

}  // namespace te
