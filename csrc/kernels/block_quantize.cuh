// FP8 with an FP32 scale for 1x128 or 128x128 elements, transposed column copy: one read of a Source, all copies.
// The scales of 1x128 blocks lie as cuBLASLt reads them: consecutive rows of the matrix (columns, for the column copy)
// next to each other. Those of 128x128 tiles lie by rows, which are filled up with zeros to a multiple of four.
#pragma once
#include <kernels/blocks.cuh>
#include <kernels/quantize.cuh>

namespace te {

// What becomes of OUTS adjacent outputs of a source; R::scale makes the scale from a block's amax.
template <class F, class D, class R, int OUTS, bool SQUARE, bool ROW, bool COL, bool DENSE, bool SUM> struct BlockTarget {
  typedef F Format;
  typedef R Rule;
  static constexpr int outs = OUTS;
  static constexpr bool square = SQUARE, has_row = ROW, has_col = COL, has_dense = DENSE, has_sum = SUM;
  D* dense;
  u8* row;
  float* row_scale;
  u8* col;
  float* col_scale;
  float* sums;  // [tiles down, OUTS * width], sums over the rows of a tile; or null
};

// Shared memory of a block: maxima of the warps' columns, scales of columns.
template <class D> struct BlockShared {
  alignas(16) u32 partial[8][TILE_COLS / Magnitude<D>::per_word];
  alignas(16) float scale[TILE_COLS];
};

// One tile of 16 * GROUPS rows: values are kept as D between the passes over them, an output at a time. What is computed,
// or read element by element, waits in dynamic shared memory, all outputs of it, until its turn comes; what is read as it
// is stays in registers, as do FP32 values. FP32 halves of a pair are tiles of their own, next to each other, so that the
// second finds its operands in L2. AHEAD: row groups that a thread brings into L2 for a tile that runs `wave` blocks
// later. PIECE: how the halves of a source's operands lie.
template <class S, class D, int ALIGNED, int GROUPS, int BATCH, int AHEAD, auto PIECE> struct BlockTile {
  static constexpr bool split = S::outs == 2 && sizeof(D) == 4;
  static constexpr bool waits = sizeof(D) == 2 && (S::computes || ALIGNED != WHOLE);
  static constexpr int per = Magnitude<D>::per_word;
  static_assert(waits || split || S::outs == 1, "registers hold one output");
  static_assert(GROUPS % BATCH == 0, "whole batches");
  typedef BlockShared<D> Shared;

  const S& source;
  const i64 rows, width;
  Shared& shared;
  const int half;
  const Tile<GROUPS> tile;
  const int valid, lines;  // columns of this thread that exist, and rows from its first on where they do
  Chunk<D> kept[GROUPS];

  TE_DEVICE BlockTile(const S& source, i64 rows, i64 width, Shared& shared)
      : source(source), rows(rows), width(width), shared(shared), half(split ? block() % 2 : 0),
        tile(split ? block() / 2 : block(), width), valid(tile.valid(width)),
        lines(valid == 0 ? 0 : (int)(rows - tile.row(0) < 2 * GROUPS ? rows - tile.row(0) : 2 * GROUPS)) {}

  TE_DEVICE int here(int g) const { return 2 * g < lines ? (ALIGNED == WHOLE ? 8 : valid) : 0; }
  // Where this thread's first eight columns are in output `out` of a target.
  template <class T> TE_DEVICE i64 first(int out) const {
    return tile.row(0) * (T::outs * width) + out * width + tile.col();
  }

  static TE_DEVICE u8* waiting(int out, int g) {
    return dynamic_shared() + 16 * ((out * GROUPS + g) * TILE_THREADS + thread());
  }
  // Codes of output `out`, to be transposed: where it waited, if it did.
  static TE_DEVICE Codes<GROUPS>& turned(int out) {
    return *(Codes<GROUPS>*)(dynamic_shared() + (waits ? 16 * out * GROUPS * TILE_THREADS : 0));
  }
  TE_DEVICE void fetch(int out) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      u32 w[4];
      read_shared(waiting(out, g), w);
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[g].w[i] = w[i];
    }
  }

  TE_DEVICE void bring_ahead(i64 wave) const {
    const Tile<GROUPS> later((split ? block() / 2 : block()) + wave, width);
    const int there = tile.chunk % 8 == 0 ? later.valid(width) : 0;
    typename S::Regs none;
    u32 row = (u32)later.row(0);
#pragma unroll
    for (int g = 0; g < AHEAD; ++g, row += 2) {
      renew(row);
      if (there > 0 && row < rows) source.template load<PREFETCH, PIECE>(none, row, later.col(), there);
    }
  }

  // Write outputs from FIRST on of row group g where they are written as they are.
  template <int FIRST, class T, class... More>
  TE_DEVICE void store_dense(int g, const Chunk<D> (&c)[S::outs], const T& t, const More&... more) const {
    if constexpr (T::has_dense) {
      if constexpr (split) {
        store<D, ALIGNED>(t.dense + first<T>(half) + 2 * g * T::outs * width, here(g), kept[g]);
      } else {
#pragma unroll
        for (int o = 0; o < T::outs; ++o)
          store<D, ALIGNED>(t.dense + first<T>(o) + 2 * g * T::outs * width, here(g), c[FIRST + o]);
      }
    }
    if constexpr (sizeof...(More) > 0) store_dense<FIRST + T::outs>(g, c, more...);
  }

  // The outputs of row group g, zeros where nothing exists.
  TE_DEVICE void compute(int g, const typename S::Cols& cols, const typename S::Regs& regs, Chunk<D> (&c)[S::outs]) const {
    Keep<S, D>::outs(source, cols, regs, ALIGNED == WHOLE ? 8 : here(g), c);
    if constexpr (ALIGNED == WHOLE && S::computes) {
#pragma unroll
      for (int o = 0; o < S::outs; ++o)
#pragma unroll
        for (int w = 0; w < Chunk<D>::words; ++w) c[o].w[w] = here(g) ? c[o].w[w] : 0;
    }
  }

  template <class... T> TE_DEVICE void load(i64 wave, const T&... t) {
    typename S::Cols cols;
    source.template load_cols<ALIGNED>(cols, tile.col(), valid);
    u32 row = (u32)tile.row(0);
#pragma unroll(waits ? 1 : GROUPS)
    for (int start = 0; start < GROUPS; start += BATCH) {
      typename S::Regs regs[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b, row += 2) {
        renew(row);  // addresses of all rows at once would spill
        source.template load<ALIGNED, PIECE>(regs[b], row, tile.col(), here(start + b));
      }
      if constexpr (AHEAD > 0)
        if (start + BATCH >= GROUPS) bring_ahead(wave);
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int g = start + b;
        Chunk<D> c[S::outs];
        compute(g, cols, regs[b], c);
        if constexpr (waits) {
#pragma unroll
          for (int o = 0; o < S::outs; ++o) {
            const u32 w[4] = {c[o].w[0], c[o].w[1], c[o].w[2], c[o].w[3]};
            write_shared(waiting(o, g), w);
          }
        } else {
          kept[g] = c[0];
          if constexpr (split)
            if (half == 1) kept[g] = c[S::outs - 1];
          if constexpr (S::computes && BATCH < GROUPS) renew_all(kept[g]);  // before the next are loaded
        }
        store_dense<0>(g, c, t...);
      }
    }
  }

  // Sums of the tile's rows, in the order of quantize.cuh.
  template <class T> TE_DEVICE void tile_sums(const T& t, int out) const {
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float v[8];
      unpack<D>(kept[g], v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] = add(sums[i], v[i]);
    }
    store_sums(sums, t.sums + (tile.top / tile.rows * T::outs + out) * width, tile.left, width);
  }

  // Scales of the rows, and the row copy.
  template <class T> TE_DEVICE void row_codes(const T& t, int out) {
    typedef RowMaxima<D, GROUPS, 16> Maxima;
    u32 most[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) most[g] = chunk_most<D>(kept[g]);
    float scale[Maxima::held];
    Maxima::reduce(most, tile.chunk, scale);
#pragma unroll
    for (int i = 0; i < Maxima::held; ++i) {
      scale[i] = T::Rule::scale(scale[i]);
      const int row = tile.local_row(Maxima::item(tile.chunk, i));
      if (tile.chunk < Maxima::owners && tile.top + row < rows)
        t.row_scale[(out * width + tile.left) / 128 * rows + tile.top + row] = div(1.0f, scale[i]);
    }
    i64 at = first<T>(out);
    renew(at);
    u8* to = t.row + at;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float v[8];
      unpack<D>(kept[g], v);
      Chunk<u8> c;
      encode<typename T::Format>(v, from_lane(scale[Maxima::place(g)], 16 * tile.half + Maxima::owner(g)), c.w);
      store<u8, ALIGNED>(to, here(g), c);
      to += 2 * T::outs * width;
    }
  }

  // Maxima of the columns over the rows of a warp.
  TE_DEVICE void column_maxima() {
    u32 most[Chunk<D>::words];
#pragma unroll
    for (int w = 0; w < Chunk<D>::words; ++w) {
      most[w] = 0;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) most[w] = Magnitude<D>::most(most[w], kept[g].w[w]);
      most[w] = Magnitude<D>::most(most[w], exchange(most[w], 16));
    }
    u32* p = &shared.partial[tile.warp][Chunk<D>::words * tile.chunk];
    if (tile.half == 0)
#pragma unroll
      for (int w = 0; w < Chunk<D>::words; ++w) p[w] = most[w];
  }
  // A thread a column.
  template <class T> TE_DEVICE void column_scales(const T& t, int out) {
    if (thread() < TILE_COLS) {
      const int c = thread();
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) most = Magnitude<D>::most(most, shared.partial[w][c / per]);
      const float scale = T::Rule::scale(Magnitude<D>::value(most, c % per));
      shared.scale[c] = scale;
      if (tile.left + c < width && tile.top < rows)
        t.col_scale[(tile.top / 128 * T::outs + out) * width + tile.left + c] = div(1.0f, scale);
    }
  }
  template <class T> TE_DEVICE void column_codes(int number) {
    float scale[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scale[i] = shared.scale[8 * tile.chunk + i];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float v[8];
      u32 codes[2];
      unpack<D>(kept[g], v);
      encode_each<typename T::Format>(v, scale, codes);
      turned(number).put(tile.local_row(g), tile.chunk, codes);
    }
  }

  // One scale for the tile: both copies have the same codes.
  template <class T> TE_DEVICE void square_codes(const T& t, int out, int number) {
    u32 most = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) most = Magnitude<D>::most(most, chunk_most<D>(kept[g]));
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) most = Magnitude<D>::most(most, exchange(most, mask));
    if (thread() % 32 == 0) shared.partial[tile.warp][0] = most;
    barrier();
    most = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) most = Magnitude<D>::most(most, shared.partial[w][0]);
    most = per == 2 ? Magnitude<D>::most(most, byte_perm(most, most, 0x1032)) : most;
    const float scale = T::Rule::scale(Magnitude<D>::value(most, 0));
    const i64 down = tile.top / 128, across = (out * width + tile.left) / 128;
    if constexpr (T::has_row) tile_scale(t.row_scale, down, across, (T::outs * width + 127) / 128, div(1.0f, scale));
    if constexpr (T::has_col) tile_scale(t.col_scale, across, down, (rows + 127) / 128, div(1.0f, scale));
    u8* to = t.row + first<T>(out);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float v[8];
      Chunk<u8> c;
      unpack<D>(kept[g], v);
      encode<typename T::Format>(v, scale, c.w);
      if constexpr (T::has_row) store<u8, ALIGNED>(to, here(g), c);
      to += 2 * T::outs * width;
      if constexpr (T::has_col) turned(number).put(tile.local_row(g), tile.chunk, c.w);
    }
  }
  TE_DEVICE static void tile_scale(float* scales, i64 row, i64 col, i64 count, float scale_inv) {
    const i64 filled = (count + 3) / 4 * 4;
    if (thread() == 0) scales[row * filled + col] = scale_inv;
    if (col == count - 1 && thread() > 0 && thread() < filled - col) scales[row * filled + col + thread()] = 0.0f;
  }

  // Everything that is wanted of the output that is kept, which is number `number` of the source and `out` of the target.
  template <class T> TE_DEVICE void quantize(const T& t, int out, int number) {
    if constexpr (T::has_sum) tile_sums(t, out);
    if constexpr (T::square) {
      square_codes(t, out, number);
    } else {
      if constexpr (T::has_col) {
        column_maxima();
        barrier();
        column_scales(t, out);
      }
      if constexpr (T::has_row) row_codes(t, out);
      if constexpr (T::has_col) {
        barrier();
        if constexpr (T::has_row) renew_all(kept);
        column_codes<T>(number);
      }
    }
    // Also: what the next output writes to shared memory has been read.
    if constexpr (T::has_col || T::square) barrier();
    if constexpr (T::has_col) {
      typedef Codes<GROUPS> Mine[1];
      store_columns<GROUPS, 1>(*(const Mine*)&turned(number), t.col + out * width * rows, tile.top, tile.left, rows, width);
    }
  }

  // The outputs of all targets in turn, from number FIRST on.
  template <int FIRST, class T, class... More> TE_DEVICE void quantize_all(const T& t, const More&... more) {
    if constexpr (split) {
      quantize(t, half, 0);
    } else if constexpr (T::has_row || T::has_col || T::has_sum) {
#pragma unroll
      for (int o = 0; o < T::outs; ++o) {
        if constexpr (waits) fetch(FIRST + o);
        quantize(t, o, FIRST + o);
      }
    }
    if constexpr (sizeof...(More) > 0) quantize_all<FIRST + T::outs>(more...);
  }
};

template <class D, int ALIGNED, int GROUPS, int BATCH, int AHEAD, auto PIECE, class S, class... T>
TE_DEVICE void block_quantize(const S& source, i64 rows, i64 width, i64 wave, const T&... targets) {
  typedef BlockTile<S, D, ALIGNED, GROUPS, BATCH, AHEAD, PIECE> Work;
  static_assert(!Work::split || sizeof...(T) == 1, "halves of one target");
  TE_SHARED typename Work::Shared shared;
  Work work(source, rows, width, shared);
  work.load(wave, targets...);
  work.template quantize_all<0>(targets...);
}

}  // namespace te
