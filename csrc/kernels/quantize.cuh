// One pass over tiles of a Source: FP8 with one scale for the tensor (row copy, transposed copy, amax), the values
// themselves and their sums over rows. A Source may have several outputs, each with a Target of its own.
#pragma once
#include <kernels/sources.cuh>
#include <kernels/tile.cuh>
#include <te_ops/reduce.cuh>

namespace te {

// What becomes of OUTS adjacent outputs of a source. D is the dtype that values are rounded to first (float: none),
// R::scale tells how the scale is found.
template <class F, class D, class R, int OUTS, bool ROW, bool COL, bool AMAX, bool DENSE, bool SUM> struct Target {
  typedef F Format;
  typedef D Dense;
  static constexpr int outs = OUTS, transposed = COL ? OUTS : 0;
  static constexpr bool has_row = ROW, has_col = COL, has_amax = AMAX, has_dense = DENSE, has_sum = SUM;
  const float* scale;  // the scale, or the amax that it is made from
  u32* amax;           // bits of max |x|, zero before; or null
  float* scale_inv;
  D* dense;     // the values in their own dtype; or null
  u8* row;      // [rows, OUTS * width], or null
  u8* col;      // [OUTS * width, rows], or null
  float* sums;  // [tiles down, OUTS * width], sums over the rows of a tile; or null

  TE_DEVICE float find_scale(bool first) const {
    if constexpr (ROW || COL) {
      const float found = R::scale(*scale);
      if (first) *scale_inv = div(1.0f, found);
      return found;
    } else {
      return 1.0f;
    }
  }
};

// What a thread carries over its rows, for TARGETS targets with OUTS outputs in all.
template <int OUTS, int TARGETS> struct Running {
  float scale[TARGETS], most[TARGETS], sums[OUTS][8];
};

// Eight columns of a row: where they are in the tensor and in the tile.
struct Place {
  i64 offset, col, width;  // offset: row * width
  int local_row, chunk, valid;
};

// Hand a row's outputs from FIRST on to their targets; SLOT counts the transposed outputs before.
template <int ALIGNED, int GROUPS, int FIRST, int SLOT, int K, int OUTS, int TARGETS, class T, class... More>
TE_DEVICE void deliver(const Place& at, float (&v)[OUTS][8], Running<OUTS, TARGETS>& r, Codes<GROUPS>* codes,
                       const T& t, const More&... more) {
  typedef typename T::Dense D;
#pragma unroll
  for (int o = 0; o < T::outs; ++o) {
    float(&x)[8] = v[FIRST + o];
    const i64 to = at.offset * T::outs + o * at.width + at.col;
    clear_beyond(x, at.valid);
    round_to<D>(x);
    if constexpr (T::has_dense) store<D, ALIGNED>(t.dense + to, at.valid, x);
    if constexpr (T::has_amax) {
#pragma unroll
      for (int i = 0; i < 8; ++i) r.most[K] = max_abs(r.most[K], x[i]);
    }
    if constexpr (T::has_sum) {
#pragma unroll
      for (int i = 0; i < 8; ++i) r.sums[FIRST + o][i] = add(r.sums[FIRST + o][i], x[i]);
    }
    if constexpr (T::has_row || T::has_col) {
      Chunk<u8> c;
      encode<typename T::Format>(x, r.scale[K], c.w);
      if constexpr (T::has_row) store<u8, ALIGNED>(t.row + to, at.valid, c);
      if constexpr (T::has_col) codes[SLOT + o].put(at.local_row, at.chunk, c.w);
    }
  }
  if constexpr (sizeof...(More) > 0)
    deliver<ALIGNED, GROUPS, FIRST + T::outs, SLOT + T::transposed, K + 1>(at, v, r, codes, more...);
}

// Sums of a tile's rows: those of a thread, of the two halves of a warp, of the warps.
TE_DEVICE void store_sums(const float (&sums)[8], float* y, i64 left, i64 width) {
  TE_SHARED float shared[TILE_THREADS / 32][TILE_COLS];
  barrier();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float both = add(sums[i], exchange(sums[i], 16));
    if (thread() % 32 < 16) shared[thread() / 32][thread() % 16 * 8 + i] = both;
  }
  barrier();
  if (thread() >= TILE_COLS) return;
  float total = shared[0][thread()];
#pragma unroll
  for (int w = 1; w < TILE_THREADS / 32; ++w) total = add(total, shared[w][thread()]);
  if (left + thread() < width) y[left + thread()] = total;
}

// What is written once a tile: amaxes, sums, transposed copies.
template <int GROUPS, int FIRST, int SLOT, int K, int OUTS, int TARGETS, class T, class... More>
TE_DEVICE void conclude(const Tile<GROUPS>& tile, const Running<OUTS, TARGETS>& r, const Codes<GROUPS>* codes,
                        i64 rows, i64 width, const T& t, const More&... more) {
  if constexpr (T::has_amax) {
    const u32 bits = block_max<TILE_THREADS>(r.most[K]);
    if (thread() == 0 && bits != 0) global_max(t.amax, bits);
  }
  if constexpr (T::has_sum) {
#pragma unroll
    for (int o = 0; o < T::outs; ++o)
      store_sums(r.sums[FIRST + o], t.sums + (tile.top / tile.rows * T::outs + o) * width, tile.left, width);
  }
  if constexpr (T::has_col) {
    typedef Codes<GROUPS> Mine[T::outs];
    store_columns<GROUPS, T::outs>(*(const Mine*)(codes + SLOT), t.col, tile.top, tile.left, rows, width);
  }
  if constexpr (sizeof...(More) > 0)
    conclude<GROUPS, FIRST + T::outs, SLOT + T::transposed, K + 1>(tile, r, codes, rows, width, more...);
}

// How many of a thread's rows are loaded at once: as many as `bytes` of registers hold.
template <class S, int ALIGNED> constexpr int rows_loaded(int groups, int bytes) {
  int count = ALIGNED == ANYWHERE ? 2 : groups;
  while (count > 1 && count * (int)sizeof(typename S::Regs) > bytes) count /= 2;
  return count;
}

// Tile `index` of a source of `width` columns an output, in bands of BAND. BYTES of operands are loaded at once; AHEAD:
// the next rows' before these are computed.
template <int ALIGNED, int GROUPS, int BYTES, bool AHEAD, int BAND, class S, class... T>
TE_DEVICE void tiles(const S& source, i64 rows, i64 width, i64 index, const T&... targets) {
  constexpr int TRANSPOSED = (T::transposed + ...), COUNT = sizeof...(T);
  TE_SHARED Codes<GROUPS> codes[TRANSPOSED > 0 ? TRANSPOSED : 1];
  const Tile<GROUPS> tile = Tile<GROUPS>::template in_bands<BAND>(index, rows, width);
  const int valid = tile.valid(width);
  Running<S::outs, COUNT> running;
  {
    const float found[] = {targets.find_scale(index == 0 && thread() == 0)...};
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      running.scale[k] = found[k];
      running.most[k] = 0.0f;
    }
  }
#pragma unroll
  for (int o = 0; o < S::outs; ++o)
#pragma unroll
    for (int i = 0; i < 8; ++i) running.sums[o][i] = 0.0f;
  const i64 start = tile.row(0) * width;
  typename S::Cols cols;
  source.template load_cols<ALIGNED>(cols, tile.col(), valid);
  constexpr int BATCH = rows_loaded<S, ALIGNED>(GROUPS, BYTES);
  typename S::Regs regs[BATCH], next[BATCH];
  const auto fetch = [&](typename S::Regs(&to)[BATCH], int first) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const i64 row = tile.row(first + b);
      source.template load<ALIGNED, false>(to[b], row, tile.col(), row < rows ? valid : 0);
    }
  };
  if constexpr (AHEAD) fetch(next, 0);
#pragma unroll 1  // all at once, the addresses alone spill
  for (int first = 0; first < GROUPS; first += BATCH) {
    if constexpr (AHEAD) {
#pragma unroll
      for (int b = 0; b < BATCH; ++b) regs[b] = next[b];
      if (first + BATCH < GROUPS) fetch(next, first + BATCH);
    } else {
      fetch(regs, first);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int here = tile.row(first + b) < rows ? valid : 0;
      const Place at = {start + (first + b) * 2 * width, tile.col(), width, tile.local_row(first + b), tile.chunk, here};
      float v[S::outs][8];
      source.eval(cols, regs[b], v);
      deliver<ALIGNED, GROUPS, 0, 0, 0>(at, v, running, codes, targets...);
    }
  }
  if constexpr (TRANSPOSED > 0) barrier();
  conclude<GROUPS, 0, 0, 0>(tile, running, codes, rows, width, targets...);
}

// One of the tensors of a launch over several: a tensor [rows, width], and the number of its last tile plus one.
template <class X, class T> struct Tensor {
  const X* x;
  i64 rows, width, end;
  T target;
};

template <class X, class T, int COUNT> struct Tensors { Tensor<X, T> item[COUNT]; };

// The tensor that block `index` works on; `index` becomes its number there.
template <class X, class T, int COUNT> TE_DEVICE int find_tensor(const Tensors<X, T, COUNT>& all, i64& index) {
  int k = 0;
  while (k < COUNT - 1 && index >= all.item[k].end) ++k;
  if (k > 0) index -= all.item[k - 1].end;
  return k;
}

template <int ALIGNED, int GROUPS, int BYTES, bool AHEAD, int BAND, class X, class T, int COUNT>
TE_DEVICE void tiles_of(const Tensors<X, T, COUNT>& all, i64 index) {
  const auto& mine = all.item[find_tensor(all, index)];
  const Plain<X> source = {mine.x, mine.width};
  tiles<ALIGNED, GROUPS, BYTES, AHEAD, BAND>(source, mine.rows, mine.width, index, mine.target);
}

// max |x| of `count` values from p on, as bits: the share of part `index` of `parts`.
template <class T, int THREADS, int UNROLL> TE_DEVICE void amax(const T* p, u32* out, i64 count, i64 index, i64 parts) {
  float most = 0.0f;
  const i64 stride = parts * (THREADS * UNROLL * 8);
  for (i64 base = index * (THREADS * UNROLL * 8) + thread() * 8; base < count; base += stride) {
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

// The same of several tensors, each with the blocks up to its `end`.
template <class X> struct Amax {
  const X* x;
  u32* out;
  i64 count, end;
};
template <class X, int COUNT, int THREADS, int UNROLL> TE_DEVICE void amax_of(const Amax<X> (&all)[COUNT], i64 index) {
  int k = 0;
  while (k < COUNT - 1 && index >= all[k].end) ++k;
  const i64 begin = k > 0 ? all[k - 1].end : 0;
  amax<X, THREADS, UNROLL>(all[k].x, all[k].out, all[k].count, index - begin, all[k].end - begin);
}

}  // namespace te
