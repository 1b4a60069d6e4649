// d [m, n] (+)= a b^T of E4M3 codes, both contiguous along k, with FP32 scales: of 1x128 blocks of a, and of 1x128 blocks
// or 128x128 tiles of b (sm_90a). Three warp groups multiply 64 x 128 each, a warp of a fourth brings operands. A block of
// 128 along k is summed in the tensor cores; its sums are scaled and added up in FP32 registers.
//
// What a warp does beside tensor cores at work is slow (docs/design/0021), so that there is little of it: every stage has
// code of its own with its addresses in the instructions, and the warp groups multiply in turns.
#pragma once
#include <te_ops/formats.cuh>
#include <te_ops/wgmma.cuh>

namespace te {

enum Into { WRITE = 0, ADD = 1 };

// Scales of 1x128 blocks lie [k blocks, rows]; those of tiles [row tiles, k blocks], with `step` numbers from one row to
// the next.
struct GemmBlockArguments {
  TensorMap a, b;
  const float* a_scale;
  const float* b_scale;
  void* d;
  i64 m, n, k, step;
  i64 band;  // tiles down that run before the next column of tiles, so that L2 holds what they read
  const void* bias;  // [n] of D, or null
};

template <bool TILES, class D, int INTO, bool BIAS = false> struct GemmBlock {
  static constexpr int GROUPS = 3, STAGES = 5, ROWS = 64 * GROUPS, COLUMNS = 128, VALUES = COLUMNS / 2;
  static constexpr int TURN = TILES ? 2 : 1;  // of four products, after how many the next warp group follows
  static constexpr int A_BYTES = ROWS * 128, CODES = A_BYTES + COLUMNS * 128;
  static constexpr int SCALES = ROWS * 4 + (TILES ? 0 : COLUMNS * 4);
  static constexpr int BARRIERS = 16, EMPTY = 8;  // bytes of a stage; from its first barrier to the second

  const GemmBlockArguments& p;
  const u32 base;  // of shared memory, on 1024 bytes
  const int group, m, n, blocks_k;
  int row, column;  // of the tile

  TE_DEVICE GemmBlock(const GemmBlockArguments& p)
      : p(p), base(kept((shared_address(dynamic_shared()) + 1023) & ~1023u)), group((int)kept(thread() / 128)), m((int)p.m),
        n((int)p.n), blocks_k((int)((p.k + 127) / 128)), row(0), column(0) {}

  TE_DEVICE u32 a_at(int stage) const { return base + stage * CODES; }
  TE_DEVICE u32 b_at(int stage) const { return a_at(stage) + A_BYTES; }
  TE_DEVICE u32 a_scales(int stage) const { return base + STAGES * CODES + stage * SCALES; }
  TE_DEVICE u32 b_scales(int stage) const { return a_scales(stage) + ROWS * 4; }
  TE_DEVICE u32 full(int stage) const { return base + STAGES * (CODES + SCALES) + stage * BARRIERS; }

  TE_DEVICE void open() const {
    if (thread() == 0) {
      for (int s = 0; s < STAGES; ++s) {
        open_barrier(full(s), 1);
        open_barrier(full(s) + EMPTY, 4 * GROUPS);  // one arrival a warp that multiplies
      }
      barriers_opened();
    }
    barrier();
  }

  TE_DEVICE int down() const { return (m + ROWS - 1) / ROWS; }
  TE_DEVICE int across() const { return (n + COLUMNS - 1) / COLUMNS; }
  TE_DEVICE int tiles() const { return down() * across(); }
  TE_DEVICE void place(int tile) {
    const int band = (int)p.band, in_band = band * across();
    const int top = tile / in_band * band, rest = tile % in_band;
    const int height = down() - top < band ? down() - top : band;
    row = (top + rest % height) * ROWS;
    column = rest / height * COLUMNS;
  }

  // -- the warp that brings operands (one thread of it)

  static TE_DEVICE int existing(int at, int size, int end) { return end - at < size ? end - at : size; }
  TE_DEVICE void bring() {
    fetch_map(p.a);
    fetch_map(p.b);
    u32 turn = 0;
    int stage = 0;
    for (int t = (int)block(); t < tiles(); t += (int)blocks()) {
      place(t);
      const u32 rows = existing(row, ROWS, m) * 4, columns = TILES ? 0 : existing(column, COLUMNS, n) * 4;
      for (int kb = 0; kb < blocks_k; ++kb) {
        const u32 bar = full(stage);
        wait_for<EMPTY>(bar, turn ^ 1);
        expect_bytes(bar, CODES + rows + columns);
        copy_box(a_at(stage), p.a, kb * 128, row, bar);
        copy_columns(b_at(stage), p.b, kb * 128, column / 16, bar);
        copy_bytes(a_scales(stage), p.a_scale + kb * p.m + row, rows, bar);
        if constexpr (!TILES) copy_bytes(b_scales(stage), p.b_scale + kb * p.n + column, columns, bar);
        if (++stage == STAGES) stage = 0, turn ^= 1;
      }
    }
  }

  // -- the warp groups that multiply

  static TE_DEVICE int own_row() { return thread() % 128 / 32 * 16 + thread() % 32 / 4; }  // of 64, and eight below
  static TE_DEVICE int quad() { return thread() % 4; }

  struct State {
    u32 a, b, barriers, rows, columns;  // lower words of descriptors and addresses, all of stage 0
    const float* tile;                  // the next of b's scales
    float scale;
    int left;  // blocks along k
    u32 turn;
    int own, next;  // barriers of the turns
    bool ends;      // no warp group follows after this tile
  };

  template <int S> TE_DEVICE void step(float (&total)[VALUES], State& q) const {
    wait_for<S * BARRIERS>(q.barriers, q.turn);
    group_barrier(q.own, 256);
    float x[VALUES];
    start_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr u32 at = S * (CODES >> 4);
      product(x, descriptor(q.a + at + 2 * i), descriptor(q.b + at + 2 * i), i > 0);
      if (i == TURN - 1) commit_products();
    }
    commit_products();
    float rows[2] = {from_shared<S * SCALES>(q.rows), from_shared<S * SCALES + 32>(q.rows)};
    if constexpr (TILES) {
      rows[0] = mul(rows[0], q.scale);
      rows[1] = mul(rows[1], q.scale);
      q.tile += q.left > 1;
      q.scale = from_global(q.tile);
    }
    wait_products<1>();
    if (!(q.ends && q.left == 1)) arrive_at_group_barrier(q.next, 256);
    wait_products<0>();
    settle(x);
    float columns[VALUES / 2];
    if constexpr (!TILES) read_columns<S * SCALES, 0>(q.columns, columns);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const float row = rows[i / 2 % 2];
      if constexpr (TILES)
        total[i] = fma(x[i], row, total[i]);
      else
        total[i] = fma(mul(x[i], columns[i / 8 * 4 + i % 2 + i % 8 / 4 * 2]), row, total[i]);
    }
    __syncwarp();
    if (thread() % 32 == 0) arrive<S * BARRIERS + EMPTY>(q.barriers);
    --q.left;
    if constexpr (S + 1 == STAGES) q.turn ^= 1;
  }
  template <int AT, int I> static TE_DEVICE void read_columns(u32 at, float* columns) {
    if constexpr (I < VALUES / 8) {
      from_shared<AT + I * 64>(at, columns + 4 * I);
      read_columns<AT, I + 1>(at, columns);
    }
  }

  TE_DEVICE void work() {
    State q = {};
    q.a = kept((u32)rows_at(a_at(0) + group * 64 * 128));
    q.b = kept((u32)rows_at(b_at(0)));
    q.barriers = full(0);
    q.rows = a_scales(0) + (group * 64 + own_row()) * 4;
    q.columns = b_scales(0) + quad() * 16;
    q.own = (int)kept(1 + group);
    q.next = (int)kept(group == GROUPS - 1 ? 1 : 2 + group);
    if (group == GROUPS - 1) arrive_at_group_barrier(1, 256);  // the first turn
    int stage = 0;
    for (int t = (int)block(); t < tiles(); t += (int)blocks()) {
      place(t);
      float total[VALUES];
#pragma unroll
      for (int i = 0; i < VALUES; ++i) total[i] = 0.0f;
      q.left = blocks_k;
      q.ends = group == GROUPS - 1 && t + (int)blocks() >= tiles();
      if constexpr (TILES) {
        q.tile = p.b_scale + (i64)(column / 128) * p.step;
        q.scale = from_global(q.tile);
      }
      along_k(total, q, stage);
      store(total);
    }
  }

  // From stage to stage, beginning where the last tile ended.
  TE_DEVICE void along_k(float (&total)[VALUES], State& q, int& stage) const {
#define TE_STAGE(S)               \
  case S:                         \
    step<S>(total, q);            \
    if (q.left == 0) {            \
      stage = (S + 1) % STAGES;   \
      return;                     \
    }
    static_assert(STAGES == 5, "as many cases");
    switch (stage)
      for (;;) {
        TE_STAGE(0) TE_STAGE(1) TE_STAGE(2) TE_STAGE(3) TE_STAGE(4)
      }
#undef TE_STAGE
  }

  // -- the result: a thread has four columns of a row, and four more every 16

  TE_DEVICE void store(const float (&total)[VALUES]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + group * 64 + own_row() + 8 * half;
      if (r >= m) continue;
      const int left = n - column - 4 * quad();
      D* to = (D*)p.d + (i64)r * n + column + 4 * quad();
#pragma unroll
      for (int i = 0; i < VALUES; i += 8)
        if (i * 2 < left) {
          float v[4] = {total[i + 2 * half], total[i + 2 * half + 1], total[i + 2 * half + 4], total[i + 2 * half + 5]};
          if constexpr (BIAS) plus((const D*)p.bias + column + 4 * quad() + i * 2, v);
          put(to + i * 2, v[0], v[1], v[2], v[3]);
        }
    }
  }
  // Several at once would take registers that the products need.
  static TE_DEVICE void plus(const D* bias, float (&v)[4]) {
    u32 w[sizeof(D)];
    read(bias, w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(D) == 4)
        v[i] = add(v[i], float_of(w[i]));
      else
        v[i] = add(v[i], widen(D{(u16)(w[i / 2] >> (16 * (i % 2)))}));
    }
  }
  static TE_DEVICE void put(D* to, float a, float b, float c, float d) {
    if constexpr (sizeof(D) == 4 && INTO == ADD) {
      add_to_global(to, a, b, c, d);
    } else if constexpr (sizeof(D) == 4) {
      const u32 w[4] = {bits_of(a), bits_of(b), bits_of(c), bits_of(d)};
      write(to, w);
    } else {
      if constexpr (INTO == ADD) {
        a = add(a, widen(to[0]));
        b = add(b, widen(to[1]));
        c = add(c, widen(to[2]));
        d = add(d, widen(to[3]));
      }
      const u32 w[2] = {Narrow<D>::pair(a, b), Narrow<D>::pair(c, d)};
      write(to, w);
    }
  }
};

template <class G> TE_DEVICE void gemm_block(const GemmBlockArguments& p) {
  G gemm(p);
  gemm.open();
  if (gemm.group == G::GROUPS) {
    give_registers<32>();
    if (thread() == 128 * G::GROUPS) gemm.bring();
  } else {
    take_registers<160>();
    gemm.work();
  }
}

}  // namespace te
