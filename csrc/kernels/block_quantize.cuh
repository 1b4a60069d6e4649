// FP8 with a scale a block: 1x128 and 128x128 (FP32 scales, transposed column copy), MXFP8 1x32 and 32x32 (E8M0
// scales, column copy as the tensor lies). One read of a Source, both copies.
#pragma once
#include <kernels/tile.cuh>
#include <te_ops/reduce.cuh>

namespace te {

template <class S, class D> struct BlockArguments {
  S source;
  D* dense;
  u8* row;
  void* row_scale;
  u8* col;
  void* col_scale;
  i64 rows, width;
};

// FP32 scales: scale_inv is 1 / scale.
template <class F, class R> struct Fp32Scale {
  typedef float Stored;
  static TE_DEVICE float encode_scale(float amax, Stored& stored) {
    const float scale = R::scale(amax);
    stored = div(1.0f, scale);
    return scale;
  }
};

// E8M0: amax * float32(1 / largest) rounded up to a power of two (te_ops.quantizers.mxfp8.e8m0_from_amax).
template <class F> struct E8m0Scale {
  typedef u8 Stored;
  static TE_DEVICE float encode_scale(float amax, Stored& stored) {
    const u32 bits = bits_of(mul(amax, (float)(1.0 / F::largest)));
    const u32 exponent = (bits >> 23) & 0xffu, mantissa = bits & 0x7fffffu;
    u32 code = exponent + (mantissa > (exponent == 0 ? 0x400000u : 0u) ? 1u : 0u);
    code -= code >= 255u ? 1u : 0u;
    stored = (u8)code;
    if (code == 255u) return float_of(0x7fc00000u);
    return float_of(code == 254u ? 0x00400000u : (254u - code) << 23);
  }
};

// BLOCK elements share a scale; it divides the 16 * GROUPS rows of a tile. SQUARE: BLOCK x BLOCK elements do. TRANSPOSED: of the column copy.
template <class S, class F, class D, class Scale, int ALIGNED, int GROUPS, int BLOCK, bool SQUARE, bool TRANSPOSED,
          bool ROW, bool COL, bool DENSE>
TE_DEVICE void block_quantize(const BlockArguments<S, D>& a) {
  typedef typename Scale::Stored Stored;
  constexpr int LANES = BLOCK / 8, WARPS = BLOCK / (2 * GROUPS);  // threads across and warps down a block
  TE_SHARED float partial[8][TILE_COLS];
  TE_SHARED Codes<GROUPS> codes[1];
  // A pair's halves are tiles of their own, next to each other, so that the second finds its operands in L2.
  const i64 half = block() % S::outs;
  const Tile<GROUPS> tile(block() / S::outs, a.width);
  const int valid = tile.valid(a.width);
  const i64 total = S::outs * a.width, col = half * a.width + tile.col();
  const i64 across = (total + BLOCK - 1) / BLOCK, down = (a.rows + BLOCK - 1) / BLOCK;
  Stored* row_scale = (Stored*)a.row_scale;
  Stored* col_scale = (Stored*)a.col_scale;

  float v[GROUPS][8];
  {
    constexpr int BATCH = in_flight<S, ALIGNED>(GROUPS);
    typename S::Cols cols;
    a.source.template load_cols<ALIGNED>(cols, tile.col(), valid);
#pragma unroll
    for (int first = 0; first < GROUPS; first += BATCH) {
      typename S::Regs regs[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const i64 row = tile.row(first + b);
        a.source.template load<ALIGNED, false>(regs[b], row, tile.col(), row < a.rows ? valid : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int g = first + b, here = tile.row(g) < a.rows ? valid : 0;
        float y[S::outs][8];
        a.source.eval(cols, regs[b], y);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[g][i] = S::outs == 2 && half == 1 ? y[S::outs - 1][i] : y[0][i];
        clear_beyond(v[g], here);
        round_to<D>(v[g]);
        if constexpr (DENSE) store<D, ALIGNED>(a.dense + tile.row(g) * total + col, here, v[g]);
      }
    }
  }

  if constexpr (SQUARE) {
    float most = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < 8; ++i) most = max_abs(most, v[g][i]);
    most = lane_max<LANES>(most);
    most = max_abs(most, exchange(most, 16));
    const int place = tile.chunk / LANES;
    if (thread() % 32 < 16 && tile.chunk % LANES == 0) partial[tile.warp][place] = most;
    barrier();
    const int first = tile.warp / WARPS * WARPS;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = max_abs(most, partial[first + w][place]);
    Stored stored;
    const float scale = Scale::encode_scale(most, stored);
    const i64 block_row = tile.top / BLOCK + tile.warp / WARPS, block_col = (col - tile.chunk % LANES * 8) / BLOCK;
    if constexpr (TRANSPOSED) {
      if (thread() == 0 && tile.top < a.rows) {
        if constexpr (ROW) row_scale[block_row * across + block_col] = stored;
        if constexpr (COL) col_scale[block_col * down + block_row] = stored;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const i64 row = tile.row(g);
      const int here = row < a.rows ? valid : 0;
      Chunk<u8> c;
      encode<F>(v[g], scale, c.w);
      if constexpr (!TRANSPOSED || ROW) store<u8, ALIGNED>((ROW ? a.row : a.col) + row * total + col, here, c);
      if constexpr (TRANSPOSED && COL) codes[0].put(tile.local_row(g), tile.chunk, c.w);
      if constexpr (!TRANSPOSED && ROW)
        if (here > 0 && tile.chunk % LANES == 0) row_scale[row * across + block_col] = stored;
    }
    if constexpr (!TRANSPOSED && COL) {
      const i64 row = tile.top + tile.warp / WARPS * BLOCK;
      if (tile.warp % WARPS == 0 && tile.half == 0 && row < a.rows)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i < valid) col_scale[block_row * total + col + i] = stored;
    }
  } else {
    if constexpr (ROW) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const i64 row = tile.row(g);
        const int here = row < a.rows ? valid : 0;
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max_abs(most, v[g][i]);
        most = lane_max<LANES>(most);
        Stored stored;
        const float scale = Scale::encode_scale(most, stored);
        Chunk<u8> c;
        encode<F>(v[g], scale, c.w);
        store<u8, ALIGNED>(a.row + row * total + col, here, c);
        if (here > 0 && tile.chunk % LANES == 0) row_scale[row * across + col / BLOCK] = stored;
      }
    }
    if constexpr (COL) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float most = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) most = max_abs(most, v[g][i]);
        most = max_abs(most, exchange(most, 16));
        if (tile.half == 0) partial[tile.warp][8 * tile.chunk + i] = most;
      }
      barrier();
      constexpr int DOWN = 16 * GROUPS / BLOCK;  // row blocks in the tile
      for (int unit = thread(); unit < DOWN * TILE_COLS; unit += TILE_THREADS) {
        const int b = unit / TILE_COLS, c = unit % TILE_COLS;
        float most = partial[b * WARPS][c];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) most = max_abs(most, partial[b * WARPS + w][c]);
        Stored stored;
        const float scale = Scale::encode_scale(most, stored);
        partial[b * WARPS][c] = scale;  // read and written by this thread only
        const i64 block_row = tile.top / BLOCK + b, c_global = half * a.width + tile.left + c;
        if (tile.left + c < a.width && block_row < down) {
          if constexpr (TRANSPOSED)
            col_scale[c_global * down + block_row] = stored;
          else
            col_scale[block_row * total + c_global] = stored;
        }
      }
      barrier();
      const float* scales = &partial[tile.warp / WARPS * WARPS][8 * tile.chunk];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[g][i] = mul(v[g][i], scales[i]);
        Chunk<u8> c;
        encode<F>(v[g], 1.0f, c.w);
        const i64 row = tile.row(g);
        if constexpr (TRANSPOSED)
          codes[0].put(tile.local_row(g), tile.chunk, c.w);
        else
          store<u8, ALIGNED>(a.col + row * total + col, row < a.rows ? valid : 0, c);
      }
    }
  }
  if constexpr (TRANSPOSED && COL) {
    barrier();
    store_columns<GROUPS, 1>(codes, a.col + half * a.width * a.rows, tile.top, tile.left, a.rows, a.width);
  }
}

}  // namespace te
