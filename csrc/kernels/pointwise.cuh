// Element by element: one chunk of eight columns at a time. A Source (written by te_ops.backends.cuda.source) loads
// the operands of a chunk and computes its outputs in FP32.
#pragma once
#include <te_ops/formats.cuh>

namespace te {

// Where a pair of halves (or of alternating blocks of `block` columns) with `width` columns each lies.
struct PairLayout {
  i64 width, block;
  TE_DEVICE i64 at(i64 row, i64 col, int half) const {
    return row * 2 * width + (block == width ? col : col / block * 2 * block + col % block) + half * block;
  }
};

constexpr int IN_ONE_PIECE = 2;  // each half, known when compiled: addresses without a look at `block`

// A chunk of one half; SCATTERED (1) where eight columns are not contiguous in memory.
template <class T, int ALIGNED, int SCATTERED>
TE_DEVICE void load_half(const T* p, const PairLayout& at, i64 row, i64 col, int half, int valid, Chunk<T>& c) {
  if constexpr (SCATTERED == IN_ONE_PIECE) {
    load<T, ALIGNED>(p + (2 * row + half) * at.width + col, valid, c);
  } else if constexpr (SCATTERED) {
    constexpr int per = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < Chunk<T>::words; ++i) c.w[i] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) c.w[i / per] |= raw<T>(p[at.at(row, col + i, half)]) << (8 * sizeof(T) * (i % per) % 32);
  } else {
    load<T, ALIGNED>(p + at.at(row, col, half), valid, c);
  }
}

template <class T, int ALIGNED, bool SCATTERED>
TE_DEVICE void store_half(T* p, const PairLayout& at, i64 row, i64 col, int half, int valid, const float (&v)[8]) {
  Chunk<T> c;
  pack<T>(v, c);
  if constexpr (SCATTERED) {
    constexpr int per = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) store_one(p + at.at(row, col + i, half), c.w[i / per], i % per);
  } else {
    store<T, ALIGNED>(p + at.at(row, col, half), valid, c);
  }
}

// FLAT: the tensor is one row. Chunks of all rows are numbered through; `rows * chunks` fits 32 bits. One chunk a
// thread: more of them in flight measured slower on sm_90.
template <class S, class T, int ALIGNED, bool SCATTERED, bool FLAT, int THREADS>
TE_DEVICE void pointwise(const S& s, T* y, i64 rows, const PairLayout& at) {
  const u32 chunks = (u32)((at.width + 7) / 8);
  const u32 total = (u32)rows * chunks;
  const u32 index = (u32)block() * THREADS + thread();
  if (index >= total) return;
  const i64 row = FLAT ? 0 : index / chunks, col = 8 * (FLAT ? (i64)index : (i64)(index % chunks));
  const i64 left = at.width - col;
  const int valid = left < 8 ? (int)left : 8;
  typename S::Cols cols;
  typename S::Regs regs;
  s.template load_cols<ALIGNED>(cols, col, valid);
  s.template load<ALIGNED, SCATTERED>(regs, row, col, valid);
  float v[S::outs][8];
  s.eval(cols, regs, v);
  if constexpr (S::outs == 1) {
    store<T, ALIGNED>(y + row * at.width + col, valid, v[0]);
  } else {
    store_half<T, ALIGNED, SCATTERED>(y, at, row, col, 0, valid, v[0]);
    store_half<T, ALIGNED, SCATTERED>(y, at, row, col, 1, valid, v[1]);
  }
}

}  // namespace te
