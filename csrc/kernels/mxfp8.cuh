// MXFP8: FP8 with an E8M0 scale for 1x32 (row copy), 32x1 (column copy, as the tensor lies) or 32x32 elements. A warp
// has 32 rows of 8 * ACROSS columns, so that no block leaves it: no barrier.
#pragma once
#include <kernels/blocks.cuh>
#include <kernels/ring.cuh>

namespace te {

template <class S, class D> struct MxArguments {
  S source;
  D* dense;
  u8* row;
  u8* row_scale;
  u8* col;
  u8* col_scale;
  i64 rows, width;
};

// amax * float32(1 / largest) rounded up to a power of two (te_ops.quantizers.mxfp8.e8m0_from_amax).
template <class F> TE_DEVICE u32 e8m0_of(float amax) {
  const u32 bits = bits_of(mul(amax, (float)(1.0 / F::largest)));
  const u32 exponent = (bits >> 23) & 0xffu, mantissa = bits & 0x7fffffu;
  const u32 code = exponent + (mantissa > (exponent == 0 ? 0x400000u : 0u) ? 1u : 0u);
  return code - (code >= 255u ? 1u : 0u);
}
// What elements under a code are multiplied with.
TE_DEVICE float e8m0_encode(u32 code) {
  if (code == 255u) return float_of(0x7fc00000u);
  return float_of(code == 254u ? 0x00400000u : (254u - code) << 23);
}

// Where a thread's share of a warp's tile is; nothing of it exists beyond the last tile.
template <int ACROSS> struct MxPlace {
  static constexpr int DOWN = 32 / ACROSS;  // rows that a warp has at a time
  int lane;
  i64 top, left;         // first row of the warp, first column of the thread
  int valid, rows_here;  // its columns and the warp's rows that exist

  TE_DEVICE MxPlace(u32 index, i64 rows, i64 width) : lane(thread() % 32) {
    const u32 wide = tiles_across(width);
    top = (i64)(index / wide) * 32;
    left = (i64)(index % wide) * (8 * ACROSS) + lane % ACROSS * 8;
    const i64 remain = top < rows ? width - left : 0;
    valid = remain < 0 ? 0 : remain < 8 ? (int)remain : 8;
    rows_here = (int)(rows - top < 32 ? rows - top : 32);
  }
  static TE_DEVICE u32 tiles_across(i64 width) { return (u32)((width + 8 * ACROSS - 1) / (8 * ACROSS)); }
  TE_DEVICE int local_row(int i) const { return i * DOWN + lane / ACROSS; }
  TE_DEVICE int here(int i) const { return local_row(i) < rows_here ? valid : 0; }
};

// LINES: rows that a thread computes at a time, and whose row copy it writes; values then wait in shared memory, where
// only their thread reads them, for the scales of their columns. STAGES: how many times LINES rows are on their way
// there; 0: they are loaded to registers. PIECE: how the halves of a source's operands lie. WHOLE_BLOCKS: the width is
// a multiple of 32.
template <class S, class F, class D, int ALIGNED, int ACROSS, int LINES, int STAGES, int THREADS, auto PIECE,
          bool WHOLE_BLOCKS, bool SQUARE, bool ROW, bool COL, bool DENSE>
struct MxTiles {
  typedef MxPlace<ACROSS> Place;
  typedef MxArguments<S, D> Arguments;
  typedef typename S::Regs Regs;
  typedef Ring<S, LINES, STAGES, THREADS> Loads;
  static constexpr int DOWN = Place::DOWN, ROWS = ACROSS, outs = S::outs, words = Chunk<D>::words;
  static constexpr int BATCHES = ROWS / LINES;
  static_assert(STAGES <= BATCHES, "on their way: rows of this tile and of the next");
  static_assert(STAGES == 0 || ALIGNED == WHOLE, "chunks are copied whole");

  const Arguments& a;
  const int lane;
  const i64 total;

  TE_DEVICE MxTiles(const Arguments& a) : a(a), lane(thread() % 32), total(outs * a.width) {}

  // Rows and columns beyond the end read what is there, where that changes no maximum: a row once more, or a block that
  // does not exist.
  TE_DEVICE i64 row_read(const Place& at, int i) const {
    u32 row = (u32)(at.top + at.local_row(i));
    renew(row);  // addresses of all rows at once would spill
    const u32 last = (u32)a.rows - 1;
    return row < last ? row : last;
  }
  TE_DEVICE i64 col_read(const Place& at) const { return at.left < a.width ? at.left : 0; }
  TE_DEVICE int columns_read(const Place& at) const { return ALIGNED == WHOLE ? 8 : at.valid; }

  // Where values wait.
  static TE_DEVICE u8* waiting(int out, int i, int piece) {
    return dynamic_shared() + Loads::bytes + (((out * ROWS + i) * (words / 4) + piece) * THREADS + thread()) * 16;
  }
  static TE_DEVICE void put(int out, int i, const Chunk<D>& c) {
#pragma unroll
    for (int p = 0; p < words / 4; ++p) {
      const u32 w[4] = {c.w[4 * p], c.w[4 * p + 1], c.w[4 * p + 2], c.w[4 * p + 3]};
      write_shared(waiting(out, i, p), w);
    }
  }
  static TE_DEVICE void get(int out, int i, float (&v)[8]) {
    Chunk<D> c;
#pragma unroll
    for (int p = 0; p < words / 4; ++p) {
      u32 w[4];
      read_shared(waiting(out, i, p), w);
#pragma unroll
      for (int k = 0; k < 4; ++k) c.w[4 * p + k] = w[k];
    }
    unpack<D>(c, v);
  }

  TE_DEVICE void issue(const Place& at, int batch, int stage) const {
#pragma unroll
    for (int l = 0; l < LINES; ++l)
      Loads::template issue<PIECE>(a.source, stage, l, row_read(at, batch * LINES + l), col_read(at), true);
    commit_copies();
  }

  TE_DEVICE void compute(const Place& at, const typename S::Cols& cols, const Regs& regs, Chunk<D> (&c)[outs]) const {
    Keep<S, D>::outs(a.source, cols, regs, columns_read(at), c);
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      if constexpr (ALIGNED == WHOLE && !WHOLE_BLOCKS) {
#pragma unroll
        for (int w = 0; w < words; ++w) c[o].w[w] = at.valid ? c[o].w[w] : 0;
      }
      renew_all(c[o]);  // before the next are unpacked
    }
  }

  // The rows of a batch, loaded and computed.
  TE_DEVICE void values(const Place& at, const Place& next, const typename S::Cols& cols, int batch, int& stage,
                        Chunk<D> (&c)[LINES][outs]) const {
    if constexpr (STAGES > 0) {
      wait_copies<(STAGES > 0 ? STAGES - 1 : 0)>();
#pragma unroll
      for (int l = 0; l < LINES; ++l) {
        Regs regs;
        Loads::take(stage, l, regs);
        compute(at, cols, regs, c[l]);
      }
      if (batch + STAGES < BATCHES)
        issue(at, batch + STAGES, stage);
      else
        issue(next, batch + STAGES - BATCHES, stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    } else {
      Regs regs[LINES];
#pragma unroll
      for (int l = 0; l < LINES; ++l)
        a.source.template load<ALIGNED, PIECE>(regs[l], row_read(at, batch * LINES + l), col_read(at), columns_read(at));
#pragma unroll
      for (int l = 0; l < LINES; ++l) compute(at, cols, regs[l], c[l]);
    }
  }

  // Scales of a batch's rows, and their copy from element `to` on.
  TE_DEVICE void rows(const Place& at, int batch, const Chunk<D> (&c)[LINES][outs], i64 to) const {
    typedef RowMaxima<D, LINES * outs, 4> Maxima;
    u32 most[LINES * outs];
    float scale[Maxima::held];
#pragma unroll
    for (int k = 0; k < LINES * outs; ++k) most[k] = chunk_most<D>(c[k / outs][k % outs]);
    Maxima::reduce(most, lane % 4, scale);
#pragma unroll
    for (int i = 0; i < Maxima::held; ++i) {
      const u32 code = e8m0_of<F>(scale[i]);
      scale[i] = e8m0_encode(code);
      const int item = Maxima::item(lane % 4, i), row = at.local_row(batch * LINES + item / outs);
      if (lane % 4 < Maxima::owners && row < at.rows_here && at.left - lane % 4 * 8 < a.width)
        a.row_scale[(at.top + row) * ((total + 31) / 32) + (item % outs * a.width + at.left) / 32] = (u8)code;
    }
#pragma unroll
    for (int k = 0; k < LINES * outs; ++k) {
      const int l = k / outs, o = k % outs;
      float v[8];
      Chunk<u8> codes;
      unpack<D>(c[l][o], v);
      encode<F>(v, from_lane(scale[Maxima::place(k)], lane / 4 * 4 + Maxima::owner(k)), codes.w);
      store<u8, ALIGNED>(a.row + to + l * DOWN * total + o * a.width, at.here(batch * LINES + l), codes);
    }
  }

  // Scales of an output's columns, from their maxima, and the column copy.
  TE_DEVICE void columns(const Place& at, int o, u32 (&most)[words]) const {
    typedef Dealt<D, words, DOWN, ACROSS> Maxima;
    const int down = lane / ACROSS;
    float own[Maxima::held], scale[8];
    Maxima::reduce(most, down, own);
    const i64 col = o * a.width + at.left;
    u8* to_scale = a.col_scale + at.top / 32 * total + col;
#pragma unroll
    for (int i = 0; i < Maxima::held; ++i) {
      const u32 code = e8m0_of<F>(own[i]);
      own[i] = e8m0_encode(code);
      const int column = Maxima::item(down, i);
      if (down < Maxima::owners && column < at.valid) to_scale[column] = (u8)code;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[i] = from_lane(own[Maxima::place(i)], Maxima::owner(i) * ACROSS + lane % ACROSS);
    i64 to = (at.top + down) * total + col;
#pragma unroll 2
    for (int i = 0; i < ROWS; ++i, to += DOWN * total) {
      float v[8];
      Chunk<u8> c;
      get(o, i, v);
      encode_each<F>(v, scale, c.w);
      store<u8, ALIGNED>(a.col + to, at.here(i), c);
    }
  }

  // One scale for 32 x 32: both copies are the same bytes, with the scale repeated for the rows and for the columns.
  TE_DEVICE void square(const Place& at, int o, const u32 (&maxima)[words]) const {
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < words; ++w) most = Magnitude<D>::most(most, maxima[w]);
    most = Magnitude<D>::most(most, exchange(most, 1));
    most = Magnitude<D>::most(most, exchange(most, 2));
#pragma unroll
    for (int mask = ACROSS; mask < 32; mask *= 2) most = Magnitude<D>::most(most, exchange(most, mask));
    if constexpr (Magnitude<D>::per_word == 2) most = Magnitude<D>::most(most, byte_perm(most, most, 0x1032));
    const u32 code = e8m0_of<F>(Magnitude<D>::value(most, 0));
    const float scale = e8m0_encode(code);
    const Chunk<u8> codes = {code * 0x01010101u, code * 0x01010101u};
    const i64 col = o * a.width + at.left, across = (total + 31) / 32;
    if constexpr (COL)
      if (lane < ACROSS) store<u8, ALIGNED>(a.col_scale + at.top / 32 * total + col, at.valid, codes);
    i64 to = (at.top + lane / ACROSS) * total + col;
    u8* to_scale = a.row_scale + (at.top + lane / ACROSS) * across + col / 32;
#pragma unroll 2
    for (int i = 0; i < ROWS; ++i, to += DOWN * total) {
      float v[8];
      Chunk<u8> c;
      get(o, i, v);
      encode<F>(v, scale, c.w);
      store<u8, ALIGNED>((ROW ? a.row : a.col) + to, at.here(i), c);
      if constexpr (ROW) {
        if (lane % 4 == 0 && at.here(i) > 0) *to_scale = (u8)code;
        to_scale += DOWN * across;
      }
    }
  }

  TE_DEVICE void tile(const Place& at, const Place& next, int& stage) const {
    typename S::Cols cols;
    a.source.template load_cols<ALIGNED>(cols, col_read(at), columns_read(at));
    u32 most[outs][words];
#pragma unroll
    for (int o = 0; o < outs; ++o)
#pragma unroll
      for (int w = 0; w < words; ++w) most[o][w] = 0;
    i64 to = (at.top + lane / ACROSS) * total + at.left;
#pragma unroll 1
    for (int batch = 0; batch < BATCHES; ++batch, to += LINES * DOWN * total) {
      Chunk<D> c[LINES][outs];
      values(at, next, cols, batch, stage, c);
#pragma unroll
      for (int k = 0; k < LINES * outs; ++k) {
        const int l = k / outs, o = k % outs, i = batch * LINES + l;
        if constexpr (DENSE) store<D, ALIGNED>(a.dense + to + l * DOWN * total + o * a.width, at.here(i), c[l][o]);
#pragma unroll
        for (int w = 0; w < words; ++w) most[o][w] = Magnitude<D>::most(most[o][w], c[l][o].w[w]);
        if constexpr (COL || SQUARE) put(o, i, c[l][o]);
      }
      if constexpr (ROW && !SQUARE) rows(at, batch, c, to);
    }
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      if constexpr (SQUARE)
        square(at, o, most[o]);
      else if constexpr (COL)
        columns(at, o, most[o]);
    }
  }

  // All warps of a block take as many turns, so that the compiler knows a warp to be together.
  TE_DEVICE void run() const {
    const u32 count = (u32)((a.rows + 31) / 32) * Place::tiles_across(a.width);
    const u32 stride = (u32)blocks() * (THREADS / 32), warp = thread() / 32;
    u32 first = (u32)block() * (THREADS / 32);
    int stage = 0;
    if constexpr (STAGES > 0) {
      const Place at(first + warp, a.rows, a.width);
#pragma unroll
      for (int s = 0; s < STAGES; ++s) issue(at, s, s);
    }
#pragma unroll 1
    for (; first < count; first += stride) {
      const Place at(first + warp, a.rows, a.width);
      tile(at, STAGES > 0 ? Place(first + stride + warp, a.rows, a.width) : at, stage);
    }
    if constexpr (STAGES > 0) wait_copies<0>();
  }
};

template <class S, class F, class D, int ALIGNED, int ACROSS, int LINES, int STAGES, int THREADS, auto PIECE,
          bool WHOLE_BLOCKS, bool SQUARE, bool ROW, bool COL, bool DENSE>
TE_DEVICE void mxfp8(const MxArguments<S, D>& a) {
  MxTiles<S, F, D, ALIGNED, ACROSS, LINES, STAGES, THREADS, PIECE, WHOLE_BLOCKS, SQUARE, ROW, COL, DENSE>(a).run();
}

}  // namespace te
