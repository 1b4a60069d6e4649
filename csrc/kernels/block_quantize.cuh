// FP8 with an FP32 scale for 1x128 or 128x128 elements, transposed column copy: one read of a Source, both copies.
// The scales of 1x128 blocks lie as cuBLASLt reads them: consecutive rows of the matrix (columns, for the column copy)
// next to each other. Those of 128x128 tiles lie by rows, which are filled up with zeros to a multiple of four.
#pragma once
#include <kernels/blocks.cuh>
#include <kernels/quantize.cuh>

namespace te {

template <class S, class D> struct BlockArguments {
  S source;
  D* dense;
  u8* row;
  float* row_scale;
  u8* col;
  float* col_scale;
  float* sums;  // [tiles down, outputs * width], sums over the rows of a tile; or null
  i64 rows, width;
  i64 wave;  // blocks that run at a time
};

// One tile of 16 * GROUPS rows: values are kept as D between the passes over them. Both halves of a pair are one tile;
// PARK: the second waits in shared memory until the first is done, which takes fewer registers. FP32 halves are tiles
// of their own, next to each other, so that the second finds its operands in L2. AHEAD: row groups that a thread brings
// into L2 for a tile that runs a wave later. PIECE: how the halves of a source's operands lie.
template <class S, class F, class D, class R, int ALIGNED, int GROUPS, int BATCH, int AHEAD, auto PIECE, bool PARK,
          bool SQUARE, bool ROW, bool COL, bool DENSE, bool SUM>
struct BlockTile {
  static constexpr bool split = S::outs == 2 && sizeof(D) == 4;
  static constexpr bool parks = PARK && S::outs == 2 && !split;
  static constexpr int outs = split || parks ? 1 : S::outs;
  static constexpr int per = Magnitude<D>::per_word, groups = GROUPS;
  static constexpr bool square_blocks = SQUARE, has_row = ROW, has_col = COL, has_sum = SUM;

  struct Shared {
    Codes<COL ? GROUPS : 1> codes[COL ? outs : 1];
    alignas(16) u32 partial[outs][8][TILE_COLS / per];
    alignas(16) float scale[outs][TILE_COLS];
  };

  typedef BlockArguments<S, D> Arguments;

  const Arguments& a;
  Shared& shared;
  i64 half;
  const Tile<GROUPS> tile;
  const int valid, rows_here;  // columns of this thread and rows of the tile that exist
  const i64 total;
  i64 first;                   // where this thread's first eight columns are, in a matrix as wide as all outputs
  Chunk<D> kept[outs][GROUPS];

  TE_DEVICE BlockTile(const Arguments& a, Shared& shared)
      : a(a), shared(shared), half(split ? block() % 2 : 0), tile(split ? block() / 2 : block(), a.width),
        valid(tile.valid(a.width)), rows_here((int)(a.rows - tile.top < 16 * GROUPS ? a.rows - tile.top : 16 * GROUPS)),
        total(S::outs * a.width), first(tile.row(0) * total + half * a.width + tile.col()) {}

  TE_DEVICE int here(int g) const { return tile.local_row(g) < rows_here ? valid : 0; }
  TE_DEVICE i64 block_col(int out) const { return ((half + out) * a.width + tile.left) / 128; }

  static TE_DEVICE u8* parked(int g) { return dynamic_shared() + 16 * (g * TILE_THREADS + thread()); }
  // The second half takes the place of the first.
  TE_DEVICE void unpark() {
    half = 1;
    first += a.width;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      u32 w[4];
      read_shared(parked(g), w);
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[0][g].w[i] = w[i];
    }
  }

  TE_DEVICE void bring_ahead() const {
    const Tile<GROUPS> later((split ? block() / 2 : block()) + a.wave, a.width);
    const int there = tile.chunk % 8 == 0 ? later.valid(a.width) : 0;
    typename S::Regs none;
    u32 row = (u32)later.row(0);
#pragma unroll
    for (int g = 0; g < AHEAD; ++g, row += 2) {
      renew(row);
      if (there > 0 && row < a.rows) a.source.template load<PREFETCH, PIECE>(none, row, later.col(), there);
    }
  }

  // Row group g as it is kept, and written where it is written too.
  TE_DEVICE void keep(int g, const typename S::Cols& cols, const typename S::Regs& regs, D*& to) {
    Chunk<D> c[S::outs];
    Keep<S, D>::outs(a.source, cols, regs, here(g), c);
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      kept[o][g] = c[o];
      if constexpr (split)
        if (half == 1) kept[o][g] = c[S::outs - 1];
      if constexpr (S::computes && BATCH < GROUPS) renew_all(kept[o][g]);  // before the next are loaded
      if constexpr (DENSE) store<D, ALIGNED>(to + o * a.width, here(g), kept[o][g]);
    }
    if constexpr (parks) {
      const Chunk<D>& second = c[S::outs - 1];
      const u32 w[4] = {second.w[0], second.w[1], second.w[2], second.w[3]};
      write_shared(parked(g), w);
      if constexpr (DENSE) store<D, ALIGNED>(to + a.width, here(g), second);
    }
    if constexpr (DENSE) to += 2 * total;
  }

  TE_DEVICE void load() {
    typename S::Cols cols;
    a.source.template load_cols<ALIGNED>(cols, tile.col(), valid);
    D* to = a.dense + first;
    u32 row = (u32)tile.row(0);
#pragma unroll
    for (int start = 0; start < GROUPS; start += BATCH) {
      typename S::Regs regs[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b, row += 2) {
        renew(row);  // addresses of all rows at once would spill
        a.source.template load<ALIGNED, PIECE>(regs[b], row, tile.col(), here(start + b));
      }
      if constexpr (AHEAD > 0)
        if (start + BATCH >= GROUPS) bring_ahead();
#pragma unroll
      for (int b = 0; b < BATCH; ++b) keep(start + b, cols, regs[b], to);
    }
  }

  // Sums of the tile's rows, in the order of quantize.cuh.
  TE_DEVICE void tile_sums() const {
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        float v[8];
        unpack<D>(kept[o][g], v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = add(sums[i], v[i]);
      }
      store_sums(sums, a.sums + tile.top / tile.rows * total + (half + o) * a.width, tile.left, a.width);
    }
  }
  // Scales of the rows, and the row copy.
  TE_DEVICE void rows() {
    typedef RowMaxima<D, GROUPS, 16> Maxima;
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      u32 most[GROUPS];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) most[g] = chunk_most<D>(kept[o][g]);
      float scale[Maxima::held];
      Maxima::reduce(most, tile.chunk, scale);
#pragma unroll
      for (int i = 0; i < Maxima::held; ++i) {
        scale[i] = R::scale(scale[i]);
        const int row = tile.local_row(Maxima::item(tile.chunk, i));
        if (tile.chunk < Maxima::owners && row < rows_here)
          a.row_scale[block_col(o) * a.rows + tile.top + row] = div(1.0f, scale[i]);
      }
      u8* to = a.row + first + o * a.width;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        float v[8];
        unpack<D>(kept[o][g], v);
        Chunk<u8> c;
        encode<F>(v, from_lane(scale[Maxima::place(g)], 16 * tile.half + Maxima::owner(g)), c.w);
        store<u8, ALIGNED>(to, here(g), c);
        to += 2 * total;
      }
    }
  }

  // Maxima of the columns over the rows of a warp.
  TE_DEVICE void column_maxima() {
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      u32 most[Chunk<D>::words];
#pragma unroll
      for (int w = 0; w < Chunk<D>::words; ++w) {
        most[w] = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) most[w] = Magnitude<D>::most(most[w], kept[o][g].w[w]);
        most[w] = Magnitude<D>::most(most[w], exchange(most[w], 16));
      }
      u32* p = &shared.partial[o][tile.warp][Chunk<D>::words * tile.chunk];
      if (tile.half == 0)
#pragma unroll
        for (int w = 0; w < Chunk<D>::words; ++w) p[w] = most[w];
    }
  }
  // A thread a column.
  TE_DEVICE void column_scales() {
    static_assert(outs * TILE_COLS <= TILE_THREADS, "a thread a column");
    if (thread() < outs * TILE_COLS) {
      const int o = thread() / TILE_COLS, c = thread() % TILE_COLS;
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) most = Magnitude<D>::most(most, shared.partial[o][w][c / per]);
      const float scale = R::scale(Magnitude<D>::value(most, c % per));
      shared.scale[o][c] = scale;
      if (tile.left + c < a.width && rows_here > 0)
        a.col_scale[tile.top / 128 * total + (half + o) * a.width + tile.left + c] = div(1.0f, scale);
    }
  }
  TE_DEVICE void column_codes() {
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      float scale[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) scale[i] = shared.scale[o][8 * tile.chunk + i];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        float v[8];
        u32 codes[2];
        unpack<D>(kept[o][g], v);
        encode_each<F>(v, scale, codes);
        shared.codes[o].put(tile.local_row(g), tile.chunk, codes);
      }
    }
  }

  // One scale for the tile: both copies have the same codes.
  TE_DEVICE void square() {
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      u32 most = 0;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) most = Magnitude<D>::most(most, chunk_most<D>(kept[o][g]));
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2) most = Magnitude<D>::most(most, exchange(most, mask));
      if (thread() % 32 == 0) shared.partial[o][tile.warp][0] = most;
    }
    barrier();
#pragma unroll
    for (int o = 0; o < outs; ++o) {
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) most = Magnitude<D>::most(most, shared.partial[o][w][0]);
      most = per == 2 ? Magnitude<D>::most(most, byte_perm(most, most, 0x1032)) : most;
      const float scale = R::scale(Magnitude<D>::value(most, 0));
      tile_scales(o, div(1.0f, scale));
      u8* to = a.row + first + o * a.width;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        float v[8];
        Chunk<u8> c;
        unpack<D>(kept[o][g], v);
        encode<F>(v, scale, c.w);
        if constexpr (ROW) store<u8, ALIGNED>(to, here(g), c);
        to += 2 * total;
        if constexpr (COL) shared.codes[o].put(tile.local_row(g), tile.chunk, c.w);
      }
    }
  }
  TE_DEVICE void tile_scales(int out, float scale_inv) {
    const i64 r = tile.top / 128, c = block_col(out);
    if constexpr (ROW) tile_scale(a.row_scale, r, c, (total + 127) / 128, scale_inv);
    if constexpr (COL) tile_scale(a.col_scale, c, r, (a.rows + 127) / 128, scale_inv);
  }
  TE_DEVICE static void tile_scale(float* scales, i64 row, i64 col, i64 count, float scale_inv) {
    const i64 filled = (count + 3) / 4 * 4;
    if (thread() == 0) scales[row * filled + col] = scale_inv;
    if (col == count - 1 && thread() > 0 && thread() < filled - col) scales[row * filled + col + thread()] = 0.0f;
  }
};

template <class Work> TE_DEVICE void quantize_half(Work& work) {
  if constexpr (Work::has_sum) work.tile_sums();
  if constexpr (Work::square_blocks) {
    work.square();
  } else {
    if constexpr (Work::has_col) {
      work.column_maxima();
      barrier();
      work.column_scales();
    }
    if constexpr (Work::has_row) work.rows();
    if constexpr (Work::has_col) {
      barrier();
      if constexpr (Work::has_row)
#pragma unroll
        for (int o = 0; o < Work::outs; ++o) renew_all(work.kept[o]);
      work.column_codes();
    }
  }
  if constexpr (Work::has_col) {
    barrier();
    store_columns<Work::groups, Work::outs>(work.shared.codes, work.a.col + work.half * work.a.width * work.a.rows,
                                            work.tile.top, work.tile.left, work.a.rows, work.a.width);
  }
}

template <class F, class R, int ALIGNED, int GROUPS, int BATCH, int AHEAD, auto PIECE, bool PARK, bool SQUARE, bool ROW,
          bool COL, bool DENSE, bool SUM, class S, class D>
TE_DEVICE void block_quantize(const BlockArguments<S, D>& a) {
  typedef BlockTile<S, F, D, R, ALIGNED, GROUPS, BATCH, AHEAD, PIECE, PARK, SQUARE, ROW, COL, DENSE, SUM> Work;
  TE_SHARED typename Work::Shared shared;
  Work work(a, shared);
  work.load();
  quantize_half(work);
  if constexpr (Work::parks) {
    work.unpark();
    if constexpr (SQUARE) barrier();  // the first half's maxima have been read
    quantize_half(work);
  }
}

}  // namespace te
