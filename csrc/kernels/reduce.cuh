// Sums of a Source over rows, columns or everything, in FP32 and in a fixed order.
#pragma once
#include <te_ops/formats.cuh>
#include <te_ops/reduce.cuh>

namespace te {

template <class T> TE_DEVICE void store_value(T* p, float x) {
  const float v[8] = {x, 0, 0, 0, 0, 0, 0, 0};
  Chunk<T> c;
  pack<T>(v, c);
  store_one(p, c.w[0], 0);
}

// How many rows a thread loads before it adds the first: as many as some forty registers hold.
template <class S> constexpr int rows_in_flight() {
  int count = 8;
  while (count > 2 && count * (int)sizeof(typename S::Regs) > 160) count /= 2;
  return count;
}

// Over rows, first stage: block (tile of 256 columns, slice of rows) sums its slice into partial [slices, outs * width].
template <class S, int ALIGNED, int UNROLL = rows_in_flight<S>()>
TE_DEVICE void sum_rows(const S& s, float* partial, i64 rows, i64 width, i64 slices) {
  TE_SHARED float shared[8][256];
  const i64 across = (width + 255) / 256, slice = block() / across;
  const i64 col = block() % across * 256 + thread() % 32 * 8, left = width - col;
  const int valid = left < 0 ? 0 : left < 8 ? (int)left : 8;
  const i64 share = (rows + slices - 1) / slices, begin = slice * share;
  const i64 end = begin + share < rows ? begin + share : rows;
  float total[S::outs][8];
#pragma unroll
  for (int o = 0; o < S::outs; ++o)
#pragma unroll
    for (int i = 0; i < 8; ++i) total[o][i] = 0.0f;
  typename S::Cols cols;
  s.template load_cols<ALIGNED>(cols, col, valid);
  for (i64 base = begin + thread() / 32; base < end; base += 8 * UNROLL) {
    typename S::Regs regs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      s.template load<ALIGNED, false>(regs[u], base + 8 * u, col, base + 8 * u < end ? valid : 0);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float v[S::outs][8];
      s.eval(cols, regs[u], v);
      if (base + 8 * u >= end) continue;
#pragma unroll
      for (int o = 0; o < S::outs; ++o)
#pragma unroll
        for (int i = 0; i < 8; ++i) total[o][i] = add(total[o][i], v[o][i]);
    }
  }
#pragma unroll
  for (int o = 0; o < S::outs; ++o) {
    barrier();
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[thread() / 32][thread() % 32 * 8 + i] = total[o][i];
    barrier();
    float sum = shared[0][thread()];
#pragma unroll
    for (int r = 1; r < 8; ++r) sum = add(sum, shared[r][thread()]);
    const i64 here = block() % across * 256 + thread();
    if (here < width) partial[slice * S::outs * width + o * width + here] = sum;
  }
}

// Over rows, second stage: y[c] = sum over slices. 64 columns a block, four threads each, four sums a thread: loads do
// not wait for additions, and sums of many slices are of fewer terms.
template <class T> TE_DEVICE void sum_slices(const float* partial, T* y, i64 width, i64 slices) {
  TE_SHARED float shared[4][64];
  const i64 col = block() * 64 + thread() % 64;
  float sums[4] = {};
  for (i64 k = thread() / 64; col < width && k < slices; k += 16) {
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (k + 4 * u < slices) sums[u] = add(sums[u], partial[(k + 4 * u) * width + col]);
  }
  float total = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
  shared[thread() / 64][thread() % 64] = total;
  barrier();
  if (thread() >= 64 || col >= width) return;
  for (int k = 1; k < 4; ++k) total = add(total, shared[k][thread()]);
  store_value(y + col, total);
}

// Over rows in one launch: a cluster a tile of COLS columns, each of its blocks a share of the rows; the first block adds
// the shares. Dynamic shared memory: 16 bytes, then 8 * COLS and CLUSTER * outs * COLS floats.
template <class S, class T, int ALIGNED, int COLS, int CLUSTER, int UNROLL = rows_in_flight<S>()>
TE_DEVICE void sum_rows_of_cluster(const S& s, T* y, i64 rows, i64 width) {
  constexpr int lanes = COLS / 8, at_once = 256 / lanes;  // threads of a row, rows at once
  u64* mailbox = (u64*)dynamic_shared();
  float(*warps)[COLS] = (float(*)[COLS])(dynamic_shared() + 16);
  float(*shares)[S::outs * COLS] = (float(*)[S::outs * COLS])(dynamic_shared() + 16 + 8 * COLS * sizeof(float));
  const int rank = cluster_rank();
  if (thread() == 0) {
    open_mailbox(mailbox);
    if (rank == 0) expect(mailbox, CLUSTER * S::outs * COLS * (int)sizeof(float));
  }
  mailboxes_opened();
  const i64 left = block() / CLUSTER * COLS, col = left + thread() % lanes * 8, beyond = width - col;
  const int valid = beyond < 0 ? 0 : beyond < 8 ? (int)beyond : 8;
  const i64 share = (rows + CLUSTER - 1) / CLUSTER, begin = rank * share;
  const i64 end = begin + share < rows ? begin + share : rows;
  float total[S::outs][8];
#pragma unroll
  for (int o = 0; o < S::outs; ++o)
#pragma unroll
    for (int i = 0; i < 8; ++i) total[o][i] = 0.0f;
  typename S::Cols cols;
  s.template load_cols<ALIGNED>(cols, col, valid);
  for (i64 base = begin + thread() / lanes; base < end; base += at_once * UNROLL) {
    typename S::Regs regs[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      s.template load<ALIGNED, false>(regs[u], base + at_once * u, col, base + at_once * u < end ? valid : 0);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float v[S::outs][8];
      s.eval(cols, regs[u], v);
      if (base + at_once * u >= end) continue;
#pragma unroll
      for (int o = 0; o < S::outs; ++o)
#pragma unroll
        for (int i = 0; i < 8; ++i) total[o][i] = add(total[o][i], v[o][i]);
    }
  }
  wait_for_mailboxes();
#pragma unroll
  for (int o = 0; o < S::outs; ++o) {
    barrier();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int mask = 16; mask >= lanes; mask /= 2) total[o][i] = add(total[o][i], exchange(total[o][i], mask));
      if (thread() % 32 < lanes) warps[thread() / 32][thread() % lanes * 8 + i] = total[o][i];
    }
    barrier();
    if (thread() < COLS) {
      float sum = warps[0][thread()];
#pragma unroll
      for (int w = 1; w < 8; ++w) sum = add(sum, warps[w][thread()]);
      send_to(0, &shares[rank][o * COLS + thread()], mailbox, sum);
    }
  }
  if (rank > 0) return;
  wait_for_mail(mailbox, 0);
  if (thread() >= COLS || left + thread() >= width) return;
#pragma unroll
  for (int o = 0; o < S::outs; ++o) {
    float sum = shares[0][o * COLS + thread()];
#pragma unroll
    for (int k = 1; k < CLUSTER; ++k) sum = add(sum, shares[k][o * COLS + thread()]);
    store_value(y + o * width + left + thread(), sum);
  }
}

// Over columns: a warp a row.
template <class S, class T, int ALIGNED> TE_DEVICE void sum_columns(const S& s, T* y, i64 rows, i64 width) {
  const i64 row = block() * 8 + thread() / 32;
  const bool exists = row < rows;
  float total = 0.0f;
  for (i64 base = 0; base < width; base += 4 * 256) {
    typename S::Cols cols[4];
    typename S::Regs regs[4];
    int valid[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const i64 col = base + 256 * u + thread() % 32 * 8, left = width - col;
      valid[u] = !exists || left < 0 ? 0 : left < 8 ? (int)left : 8;
      s.template load_cols<ALIGNED>(cols[u], col, valid[u]);
      s.template load<ALIGNED, false>(regs[u], row, col, valid[u]);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      float v[S::outs][8];
      s.eval(cols[u], regs[u], v);
#pragma unroll
      for (int o = 0; o < S::outs; ++o) {
        clear_beyond(v[o], valid[u]);
        total = add(total, sum_of(v[o]));
      }
    }
  }
  total = lane_sum<32>(total);
  if (exists && thread() % 32 == 0) store_value(y + row, total);
}

// Over everything: chunks of the whole tensor dealt out to blocks; y[block] is the block's sum.
template <class S, class T, int ALIGNED, bool FLAT>
TE_DEVICE void sum_all(const S& s, T* y, i64 rows, i64 width) {
  const u32 chunks = (u32)((width + 7) / 8), total = (u32)rows * chunks;
  float sum = 0.0f;
  for (u64 index = (u64)block() * 256 + thread(); index < total; index += (u64)blocks() * 256) {
    const i64 row = FLAT ? 0 : (u32)index / chunks, col = 8 * (FLAT ? (i64)index : (i64)((u32)index % chunks));
    const i64 left = width - col;
    const int valid = left < 8 ? (int)left : 8;
    typename S::Cols cols;
    typename S::Regs regs;
    s.template load_cols<ALIGNED>(cols, col, valid);
    s.template load<ALIGNED, false>(regs, row, col, valid);
    float v[S::outs][8];
    s.eval(cols, regs, v);
#pragma unroll
    for (int o = 0; o < S::outs; ++o) {
      clear_beyond(v[o], valid);
      sum = add(sum, sum_of(v[o]));
    }
  }
  sum = group_sum<256, 256>(sum);
  if (thread() == 0) store_value(y + block(), sum);
}

}  // namespace te
