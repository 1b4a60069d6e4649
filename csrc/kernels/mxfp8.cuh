// MXFP8: FP8 with an E8M0 scale for 1x32 (row copy), 32x1 (column copy, as the tensor lies) or 32x32 elements. A warp
// has 32 rows of 8 * ACROSS columns, so that no block leaves it: no shared memory, no barrier.
#pragma once
#include <kernels/blocks.cuh>
#include <kernels/tile.cuh>

namespace te {

template <class S, class D> struct MxArguments {
  S source;
  D* dense;
  u8* row;
  u8* row_scale;
  u8* col;
  u8* col_scale;
  i64 rows, width;
  i64 wave;  // blocks that run at a time
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

// Where a thread's share of a warp's tile is.
template <int ACROSS> struct MxPlace {
  static constexpr int DOWN = 32 / ACROSS;  // rows that a warp has at a time
  int lane;
  i64 top, left;         // first row of the warp, first column of the thread
  int valid, rows_here;  // its columns and the warp's rows that exist

  TE_DEVICE MxPlace(u32 index, i64 rows, i64 width) : lane(thread() % 32) {
    const u32 wide = (u32)((width + 8 * ACROSS - 1) / (8 * ACROSS));
    top = (i64)(index / wide) * 32;
    left = (i64)(index % wide) * (8 * ACROSS) + lane % ACROSS * 8;
    const i64 remain = width - left;
    valid = remain < 0 ? 0 : remain < 8 ? (int)remain : 8;
    rows_here = (int)(rows - top < 32 ? rows - top : 32);
  }
  TE_DEVICE int local_row(int i) const { return i * DOWN + lane / ACROSS; }
  TE_DEVICE int here(int i) const { return local_row(i) < rows_here ? valid : 0; }
};

// AHEAD: rows that a thread brings into L2 for a tile that runs a wave later. PIECE: how the halves of a source's
// operands lie.
template <class S, class F, class D, int ALIGNED, int ACROSS, int BATCH, int AHEAD, auto PIECE, bool SQUARE, bool ROW,
          bool COL, bool DENSE>
struct MxTile {
  typedef MxPlace<ACROSS> Place;
  typedef MxArguments<S, D> Arguments;
  static constexpr int DOWN = Place::DOWN;
  static constexpr int ROWS = ACROSS;  // rows of a thread
  static constexpr int outs = S::outs;
  static constexpr bool square_blocks = SQUARE, has_row = ROW, has_col = COL;

  const Arguments& a;
  const u32 index;
  const Place at;
  const int lane;
  const i64 top, left;
  const int valid, rows_here;
  const i64 total;
  Chunk<D> kept[S::outs][ROWS];

  TE_DEVICE MxTile(const Arguments& a, u32 index)
      : a(a), index(index), at(index, a.rows, a.width), lane(at.lane), top(at.top), left(at.left),
        valid(at.valid), rows_here(at.rows_here), total(S::outs * a.width) {}
  TE_DEVICE int local_row(int i) const { return at.local_row(i); }
  TE_DEVICE int here(int i) const { return at.here(i); }
  TE_DEVICE i64 col(int out) const { return out * a.width + left; }
  // Where the first eight columns of this thread are, in a matrix as wide as all outputs; the next are `step` further.
  TE_DEVICE i64 first(int out) const { return (top + lane / ACROSS) * total + col(out); }
  TE_DEVICE i64 step() const { return DOWN * total; }

  TE_DEVICE void keep(int i, const typename S::Cols& cols, const typename S::Regs& regs, D*& to) {
    Chunk<D> c[S::outs];
    Keep<S, D>::outs(a.source, cols, regs, here(i), c);
#pragma unroll
    for (int o = 0; o < S::outs; ++o) {
      kept[o][i] = c[o];
      if constexpr (S::computes && BATCH < ROWS) renew_all(kept[o][i]);  // before the next are loaded
      if constexpr (DENSE) store<D, ALIGNED>(to + o * a.width, here(i), c[o]);
    }
    if constexpr (DENSE) to += step();
  }

  TE_DEVICE void load() {
    typename S::Cols cols;
    a.source.template load_cols<ALIGNED>(cols, left, valid);
    D* to = a.dense + first(0);
    i64 row = top + lane / ACROSS;
#pragma unroll
    for (int start = 0; start < ROWS; start += BATCH) {
      typename S::Regs regs[BATCH];
      renew(row);  // addresses of all rows at once would spill
#pragma unroll
      for (int b = 0; b < BATCH; ++b)
        a.source.template load<ALIGNED, PIECE>(regs[b], row + (start + b) * DOWN, left, here(start + b));
      if constexpr (AHEAD > 0)
        if (start + BATCH >= ROWS) bring_ahead();
#pragma unroll
      for (int b = 0; b < BATCH; ++b) keep(start + b, cols, regs[b], to);
    }
  }

  TE_DEVICE void bring_ahead() const {
    const Place later(index + (u32)a.wave * (TILE_THREADS / 32), a.rows, a.width);
    typename S::Regs none;
    u32 row = (u32)(later.top + later.local_row(0));
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, row += DOWN) {
      renew(row);
      if (lane % 4 == 0 && later.valid > 0 && row < a.rows)
        a.source.template load<PREFETCH, PIECE>(none, row, later.left, later.valid);
    }
  }

  TE_DEVICE void rows(int o) {
    typedef RowMaxima<D, ROWS, 4> Maxima;
    u32 most[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) most[i] = chunk_most<D>(kept[o][i]);
    float scale[Maxima::held];
    Maxima::reduce(most, lane % 4, scale);
#pragma unroll
    for (int i = 0; i < Maxima::held; ++i) {
      const u32 code = e8m0_of<F>(scale[i]);
      scale[i] = e8m0_encode(code);
      const int row = local_row(Maxima::item(lane % 4, i));
      if (lane % 4 < Maxima::owners && row < rows_here && left - lane % 4 * 8 < a.width)
        a.row_scale[(top + row) * ((total + 31) / 32) + col(o) / 32] = (u8)code;
    }
    u8* to = a.row + first(o);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float v[8];
      Chunk<u8> c;
      unpack<D>(kept[o][i], v);
      encode<F>(v, from_lane(scale[Maxima::place(i)], lane / 4 * 4 + Maxima::owner(i)), c.w);
      store<u8, ALIGNED>(to, here(i), c);
      to += step();
    }
  }

  TE_DEVICE void columns(int o) {
    typedef Dealt<D, Chunk<D>::words, DOWN, ACROSS> Maxima;
    const int down = lane / ACROSS;
    u32 most[Chunk<D>::words];
#pragma unroll
    for (int w = 0; w < Chunk<D>::words; ++w) {
      most[w] = 0;
#pragma unroll
      for (int i = 0; i < ROWS; ++i) most[w] = Magnitude<D>::most(most[w], kept[o][i].w[w]);
    }
    float own[Maxima::held], scale[8];
    Maxima::reduce(most, down, own);
    u8* to_scale = a.col_scale + top / 32 * total + col(o);
#pragma unroll
    for (int i = 0; i < Maxima::held; ++i) {
      const u32 code = e8m0_of<F>(own[i]);
      own[i] = e8m0_encode(code);
      const int column = Maxima::item(down, i);
      if (down < Maxima::owners && column < valid) to_scale[column] = (u8)code;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[i] = from_lane(own[Maxima::place(i)], Maxima::owner(i) * ACROSS + lane % ACROSS);
    u8* to = a.col + first(o);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float v[8];
      Chunk<u8> c;
      unpack<D>(kept[o][i], v);
      encode_each<F>(v, scale, c.w);
      store<u8, ALIGNED>(to, here(i), c);
      to += step();
    }
  }

  // One scale for 32 x 32: both copies are the same bytes, with the scale repeated for the rows and for the columns.
  TE_DEVICE void square(int o) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) most = Magnitude<D>::most(most, chunk_most<D>(kept[o][i]));
    most = Magnitude<D>::most(most, exchange(most, 1));
    most = Magnitude<D>::most(most, exchange(most, 2));
#pragma unroll
    for (int mask = ACROSS; mask < 32; mask *= 2) most = Magnitude<D>::most(most, exchange(most, mask));
    if constexpr (Magnitude<D>::per_word == 2) most = Magnitude<D>::most(most, byte_perm(most, most, 0x1032));
    const u32 code = e8m0_of<F>(Magnitude<D>::value(most, 0));
    const float scale = e8m0_encode(code);
    const Chunk<u8> codes = {code * 0x01010101u, code * 0x01010101u};
    if constexpr (COL)
      if (lane < ACROSS) store<u8, ALIGNED>(a.col_scale + top / 32 * total + col(o), valid, codes);
    u8* to = (ROW ? a.row : a.col) + first(o);
    const i64 across = (total + 31) / 32;
    u8* to_scale = a.row_scale + (top + lane / ACROSS) * across + col(o) / 32;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float v[8];
      Chunk<u8> c;
      unpack<D>(kept[o][i], v);
      encode<F>(v, scale, c.w);
      store<u8, ALIGNED>(to, here(i), c);
      to += step();
      if constexpr (ROW) {
        if (lane % 4 == 0 && here(i) > 0) *to_scale = (u8)code;
        to_scale += DOWN * across;
      }
    }
  }
};

template <class Work> TE_DEVICE void quantize_warp(Work& tile) {
  tile.load();
#pragma unroll
  for (int o = 0; o < Work::outs; ++o) {
    if constexpr (Work::square_blocks) {
      tile.square(o);
    } else {
      if constexpr (Work::has_row) tile.rows(o);
      if constexpr (Work::has_row && Work::has_col) renew_all(tile.kept[o]);
      if constexpr (Work::has_col) tile.columns(o);
    }
  }
}

template <class S, class F, class D, int ALIGNED, int ACROSS, int BATCH, int AHEAD, auto PIECE, bool SQUARE, bool ROW,
          bool COL, bool DENSE>
TE_DEVICE void mxfp8(const MxArguments<S, D>& a) {
  typedef MxTile<S, F, D, ALIGNED, ACROSS, BATCH, AHEAD, PIECE, SQUARE, ROW, COL, DENSE> Work;
  Work tile(a, (u32)block() * (TILE_THREADS / 32) + thread() / 32);
  if (tile.top < a.rows) quantize_warp(tile);  // a whole warp
}

}  // namespace te
