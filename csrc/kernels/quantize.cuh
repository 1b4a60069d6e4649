// FP8 with one scale for the tensor: row copy, transposed copy and amax of a Source in one pass.
#pragma once
#include <kernels/tile.cuh>
#include <te_ops/reduce.cuh>

namespace te {

template <class S, class D> struct QuantizeArguments {
  S source;
  const float* scale;  // the scale, or the amax that it is made from
  u32* amax;           // bits of max |x|, zero before; or null
  float* scale_inv;
  D* dense;  // the source's values in their own dtype; or null
  u8* row;   // [rows, outs * width], or null
  u8* col;   // [outs * width, rows], or null
  i64 rows, width;
};

// R tells how the scale is found. D is the dtype that values are rounded to first (float: none).
template <class S, class F, class D, class R, int ALIGNED, int GROUPS, bool ROW, bool COL, bool AMAX,
          bool DENSE>
TE_DEVICE void quantize(const QuantizeArguments<S, D>& a) {
  TE_SHARED Codes<GROUPS> codes[S::outs];
  const i64 index = R::reversed ? blocks() - 1 - block() : block();
  const Tile<GROUPS> tile(index, a.width);
  const int valid = tile.valid(a.width);
  const float scale = R::scale(*a.scale);
  if (block() == 0 && thread() == 0) *a.scale_inv = div(1.0f, scale);
  const i64 total = S::outs * a.width, start = tile.row(0) * total + tile.col();
  float most = 0.0f;
  typename S::Cols cols;
  a.source.template load_cols<ALIGNED>(cols, tile.col(), valid);
  constexpr int BATCH = in_flight<S, ALIGNED>(GROUPS);
#pragma unroll 1  // all at once, the addresses alone spill
  for (int first = 0; first < GROUPS; first += BATCH) {
    typename S::Regs regs[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const i64 row = tile.row(first + b);
      a.source.template load<ALIGNED, false>(regs[b], row, tile.col(), row < a.rows ? valid : 0);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int here = tile.row(first + b) < a.rows ? valid : 0;
      float v[S::outs][8];
      a.source.eval(cols, regs[b], v);
#pragma unroll
      for (int o = 0; o < S::outs; ++o) {
        clear_beyond(v[o], here);
        round_to<D>(v[o]);
        const i64 at = start + (first + b) * 2 * total + o * a.width;
        if constexpr (DENSE) store<D, ALIGNED>(a.dense + at, here, v[o]);
        if constexpr (AMAX) {
#pragma unroll
          for (int i = 0; i < 8; ++i) most = max_abs(most, v[o][i]);
        }
        if constexpr (ROW || COL) {
          Chunk<u8> c;
          encode<F>(v[o], scale, c.w);
          if constexpr (ROW) store<u8, ALIGNED>(a.row + at, here, c);
          if constexpr (COL) codes[o].put(tile.local_row(first + b), tile.chunk, c.w);
        }
      }
    }
  }
  if constexpr (AMAX) {
    const u32 bits = block_max<TILE_THREADS>(most);
    if (thread() == 0 && bits != 0) global_max(a.amax, bits);
  }
  if constexpr (COL) {
    barrier();
    store_columns<GROUPS, S::outs>(codes, a.col, tile.top, tile.left, a.rows, a.width);
  }
}

// max |x| of `count` values from p on, as bits.
template <class T, int THREADS, int UNROLL> TE_DEVICE void amax(const T* p, u32* out, i64 count) {
  float most = 0.0f;
  const i64 stride = blocks() * (THREADS * UNROLL * 8);
  for (i64 base = block() * (THREADS * UNROLL * 8) + thread() * 8; base < count; base += stride) {
    Chunk<T> c[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 left = count - (base + u * THREADS * 8);
      load<T, TAILED>(p + base + u * THREADS * 8, left < 8 ? (int)(left < 0 ? 0 : left) : 8, c[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float v[8];
      unpack<T>(c[u], v);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = max_abs(most, v[i]);
    }
  }
  const u32 bits = block_max<THREADS>(most);
  if (thread() == 0 && bits != 0) global_max(out, bits);
}

}  // namespace te
