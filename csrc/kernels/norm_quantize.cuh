// A norm and a per-tensor FP8 quantize in one read: a cluster of blocks has ROWS whole rows, COLS columns a block. Sums
// of a row meet through the cluster's shared memory; the next rows arrive while these are converted.
#pragma once
#include <kernels/norm.cuh>
#include <kernels/tile.cuh>

namespace te {

template <class S, class T, class Y, class G> struct NormQuantizeArguments {
  S source;
  const G* gamma;
  const G* beta;
  const float* scale;  // the scale, or the amax that it is made from
  u32* amax;  // bits of max |y|, zero before; or null
  float* scale_inv;
  T* stream;  // what is normalised; or null
  Y* y;       // or null
  float* rstd;
  float* mean;
  u8* row;  // [rows, width]
  u8* col;  // [width, rows]
  i64 rows, width;
};

// Sums of N numbers (a power of two) over a warp; lane l has that of number l / (32 / N). Numbers change lanes by halves,
// so this takes N - 1 + log2(32 / N) exchanges.
template <int N> TE_DEVICE float scatter_sum(float (&x)[N], int lane) {
#pragma unroll
  for (int n = N / 2, mask = 16; n > 0; n /= 2, mask /= 2) {
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float kept = upper ? x[i + n] : x[i], given = upper ? x[i] : x[i + n];
      x[i] = add(kept, exchange(given, mask));
    }
  }
  return lane_sum<32 / N>(x[0]);
}

// Eight values as they are stored; `most` follows their magnitudes. Narrow ones two at a time, on the bits.
template <class Y> struct Rounded {
  float most = 0.0f;
  TE_DEVICE void round(float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max_abs(most, v[i]);
  }
  TE_DEVICE float largest() const { return most; }
};
template <class Y> struct RoundedPairs {
  u32 most = 0;  // but for signs
  static TE_DEVICE u32 larger(u32 m, u32 x);
  TE_DEVICE void round(float (&v)[8]) {
    Chunk<Y> c;
    pack<Y>(v, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = larger(most, c.w[i]);
    unpack<Y>(c, v);
  }
  TE_DEVICE float largest() const {
    const Y low = {(u16)most}, high = {(u16)(most >> 16)};
    return max_abs(max_abs(0.0f, widen(low)), widen(high));
  }
};
template <> TE_DEVICE u32 RoundedPairs<bf16>::larger(u32 m, u32 x) { return larger_bf16x2(m, x); }
template <> TE_DEVICE u32 RoundedPairs<f16>::larger(u32 m, u32 x) { return larger_f16x2(m, x); }
template <> struct Rounded<bf16> : RoundedPairs<bf16> {};
template <> struct Rounded<f16> : RoundedPairs<f16> {};

// How a tile is dealt out: COLS columns of ROWS rows a block, a row a warp at a time, ACROSS chunks a lane. Shared
// memory: copies on their way, codes, sums of rows. WIDTH: the row's length, 0 if not all of its blocks are whole.
template <class S, class T, int ROWS, int COLS, int CLUSTER, int THREADS, int STAGES, int WIDTH, bool COL>
struct NormTile {
  static constexpr int down = ROWS * 32 / THREADS, across = COLS / 256;  // rows a warp, chunks a lane of a row
  typedef Feed<S, down * across, THREADS, STAGES> Copies;
  // Codes go where the second operand was, if what is made of both takes the place of the first; or where the row itself
  // was, half of it, which its warp alone reads.
  static constexpr bool behind = COL && STAGES == 1 && Copies::pieces == 2 * pieces_of<T>();
  static constexpr bool inside = COL && STAGES == 1 && sizeof(T) == 2 && Copies::pieces == 1;
  static constexpr int codes_at = inside ? 0 : behind ? Copies::bytes / 2 : Copies::bytes;
  static constexpr int codes = COL && !behind && !inside ? ROWS * COLS : 0;
  static constexpr int sums = 2 * CLUSTER * ROWS * 2 * 4;
  static constexpr int mail_at = Copies::bytes + codes + sums;
  static constexpr int bytes = mail_at + 16;
  static constexpr int blocks_down = ROWS / 16;         // of codes
  static constexpr int lanes = 32 / down;               // that have the sums of one of the warp's rows
  static constexpr int steps = blocks_down * COLS / 4;  // of the pass over columns: 16 rows of four
  // Where the codes of 128 columns of a row are.
  static TE_DEVICE u8* code_row(u8* codes, u32 row, u32 block) {
    if constexpr (inside)
      return codes + ((row % down * across + block / 4) * THREADS + row / down * 32) * 16 + block % 4 * 128;
    else
      return codes + (block * ROWS + row) * 128;
  }
  static_assert(steps % THREADS == 0 && THREADS / blocks_down % 32 == 0 && 16 % down == 0, "a warp's rows in one block");
  static_assert(WIDTH == 0 || WIDTH == COLS * CLUSTER, "whole blocks");
};

// What a thread works with. Members that a whole row makes constants are.
template <class S, class T, class Y, class G, bool CENTERED, bool ZERO_CENTERED, int COLS, int CLUSTER, int ACROSS,
          int WIDTH>
struct NormPart {
  const NormQuantizeArguments<S, T, Y, G>& a;
  const int warp = thread() / 32, lane = thread() % 32, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const i64 left = (i64)rank * COLS;
  float gain[ACROSS][8];
  Chunk<G> beta[CENTERED ? ACROSS : 1];

  TE_DEVICE NormPart(const NormQuantizeArguments<S, T, Y, G>& given) : a(given) {}
  TE_DEVICE i64 width() const { return WIDTH ? WIDTH : a.width; }
  TE_DEVICE i64 col(int j) const { return left + 8 * (lane + 32 * j); }
  TE_DEVICE int valid(int j) const { return WIDTH ? 8 : columns_left(a.width, col(j)); }
  TE_DEVICE float columns_of(int k) const {  // of block k
    const i64 n = width() - k * COLS;
    return WIDTH ? (float)COLS : (float)(n < COLS ? n : COLS);
  }
  TE_DEVICE void load_weights() {
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) {
      Chunk<G> gamma;
      load_again<G, WHOLE>(a.gamma + col(j), valid(j), gamma);
      gain_of<G, ZERO_CENTERED>(gamma, gain[j]);
      clear_beyond(gain[j], valid(j));
      if constexpr (CENTERED) load_again<G, WHOLE>(a.beta + col(j), valid(j), beta[j]);
    }
  }
  TE_DEVICE void normalise(float (&v)[8], int j, float mean, float rstd) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul(mul(CENTERED ? sub(v[i], mean) : v[i], rstd), gain[j][i]);
    if constexpr (CENTERED) {
      float shift[8];
      unpack<G>(beta[j], shift);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = add(v[i], shift[i]);
    }
  }
};

// The columns of a tile's codes to global memory: [width, rows], from `y` on, `left_over` rows and `columns` of them.
template <class Plan, int COLS, int THREADS>
TE_DEVICE void store_turned(u8* codes, u8* y, i64 rows, i64 left_over, i64 columns) {
  constexpr int BLOCKS = Plan::blocks_down, PER = THREADS / BLOCKS;  // words of four columns that a step takes
  const int down = thread() % BLOCKS, first = thread() / BLOCKS;
  if (16 * down >= left_over) return;
  u8* line = y + (i64)(4 * first) * rows + 16 * down;
  auto step = [&](int s, auto store) {
    if (4 * (first + s * PER) >= columns) return;
    u32 lines[4][4];
    take_turned([&](int row) { return (const u32*)Plan::code_row(codes, row, first / 32 + s * (PER / 32)); }, 16 * down,
                first % 32 ^ down * Codes<BLOCKS>::spread, lines);
    u8* p = line;
#pragma unroll
    for (int k = 0; k < 4; ++k, p += rows) store(p, lines[k]);  // whole chunks of eight columns
    line += 4 * PER * rows;
  };
  if (rows % 16 == 0) {
#pragma unroll
    for (int s = 0; s < Plan::steps / THREADS; ++s) step(s, [](u8* p, const u32(&w)[4]) { write(p, w); });
  } else {
#pragma unroll 1
    for (int s = 0; s < Plan::steps / THREADS; ++s)
      step(s, [&](u8* p, const u32(&w)[4]) { store_line(p, w, rows, left_over - 16 * down); });
  }
}

// R::scale tells how the scale is found. Y is what y is rounded to before it is quantized (float: nothing). STREAM,
// DENSE, ROW, COL, AMAX: what is written. The statistics of parts of a row are combined by Chan's formula (count, mean,
// sum of squared distances), so one exchange is enough for a LayerNorm too.
template <class S, class F, class R, class T, class Y, class G, bool CENTERED, bool ZERO_CENTERED, int ROWS, int COLS,
          int CLUSTER, int THREADS, int STAGES, int WIDTH, bool STREAM, bool DENSE, bool ROW, bool COL, bool AMAX>
TE_DEVICE void norm_quantize(const NormQuantizeArguments<S, T, Y, G>& a, float epsilon) {
  typedef NormTile<S, T, ROWS, COLS, CLUSTER, THREADS, STAGES, WIDTH, COL> Plan;
  typedef typename Plan::Copies Copies;
  constexpr int DOWN = Plan::down, ACROSS = Plan::across, LANES = Plan::lanes;
  NormPart<S, T, Y, G, CENTERED, ZERO_CENTERED, COLS, CLUSTER, ACROSS, WIDTH> part(a);
  const int warp = part.warp, lane = part.lane, rank = part.rank, mine = warp * DOWN + lane / LANES;
  const i64 width = part.width(), rows = a.rows, stride = blocks() / CLUSTER * ROWS;
  u8* codes = dynamic_shared() + Plan::codes_at;
  float* sums = (float*)(dynamic_shared() + Copies::bytes + Plan::codes);  // [2, CLUSTER, ROWS, 2]
  u64* mail = (u64*)(dynamic_shared() + Plan::mail_at);                    // [2]
  constexpr int MAIL = CLUSTER * ROWS * (1 + CENTERED) * 4;
  // Where a warp's first codes go: a row is 128 bytes of each of its codes' blocks.
  const int swizzled = (2 * (lane % 16)) ^ (warp * DOWN / 16 * Codes<Plan::blocks_down>::spread);
  u8* put = Plan::code_row(codes, warp * DOWN, lane / 16) + 4 * swizzled;
  auto issue = [&](i64 top, int to) {
    const i64 first = top + warp * DOWN;
    auto line = [&](int i, bool exists) {
#pragma unroll
      for (int j = 0; j < ACROSS; ++j)
        Copies::issue(a.source, to, i * ACROSS + j, (first + i) * width + part.col(j), exists && part.valid(j) > 0);
    };
    if (first + DOWN <= rows) {
#pragma unroll
      for (int i = 0; i < DOWN; ++i) line(i, true);
    } else {
#pragma unroll 1
      for (int i = 0; i < DOWN; ++i) line(i, first + i < rows);
    }
    commit_copies();
  };
#pragma unroll
  for (int k = 0; k < STAGES; ++k) issue(block() / CLUSTER * ROWS + k * stride, k);
  if constexpr (CLUSTER > 1) {
    if (thread() < 2) {
      open_mailbox(mail + thread());
      expect(mail + thread(), MAIL);
    }
    mailboxes_opened();
  }
  part.load_weights();
  const float scale = R::scale(*a.scale);
  if (block() == 0 && thread() == 0) *a.scale_inv = div(1.0f, scale);
  const float share = div(1.0f, (float)width);
  const float own_columns = part.columns_of(rank);
  const float inverse = div(1.0f, own_columns > 0.0f ? own_columns : 1.0f);
  Rounded<Y> rounded;
  int turn = 0, stage = 0;  // turn: bit 0 the buffer of sums, bit 1 its round modulo 2
  if constexpr (CLUSTER > 1) wait_for_mailboxes();

  for (i64 top = block() / CLUSTER * ROWS; top < rows; top += stride) {
    const i64 first = top + warp * DOWN, base = first * width + part.col(0);
    auto value = [&](int i, int j, Chunk<T>& x, float(&v)[8]) {
      Copies::get(stage, i * ACROSS + j, x);
      unpack<T>(x, v);
    };
    auto first_value = [&](int i, int j, Chunk<T>& x, float(&v)[8]) {  // columns and rows beyond the end are zeros
      if constexpr (Held<S, T>::as_read) {
        value(i, j, x, v);
      } else {
        typename S::Regs regs;
        typename S::Cols cols;
        Copies::take(stage, i * ACROSS + j, regs);
        Held<S, T>::keep(a.source, cols, regs, part.valid(j), x);
        Copies::put(stage, i * ACROSS + j, x);
        if constexpr (STREAM)
          store<T, WHOLE>(a.stream + base + i * width + 256 * j, first + i < rows ? part.valid(j) : 0, x);
        unpack<T>(x, v);
      }
    };
    Chunk<T> x;
    float sum[DOWN], v[8], own_mean = 0.0f;
    wait_copies<STAGES - 1>();

    float* buffer = sums + turn % 2 * CLUSTER * ROWS * 2;
    u64* mailbox = mail + turn % 2;
    if constexpr (CENTERED) {
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
        sum[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
          first_value(i, j, x, v);
          sum[i] = add(sum[i], sum_of(v));
        }
      }
      own_mean = mul(scatter_sum<DOWN>(sum, lane), inverse);
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
      const float level = CENTERED ? from_lane(own_mean, i * LANES) : 0.0f;
      sum[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        if constexpr (CENTERED)
          value(i, j, x, v);
        else
          first_value(i, j, x, v);
        sum[i] = add(sum[i], squares_of<CENTERED>(v, level, part.valid(j)));
      }
    }
    const float own_squares = scatter_sum<DOWN>(sum, lane);
#pragma unroll
    for (int first = 0; first < CLUSTER; first += LANES) {
      const int to = first + lane % LANES;
      if (to >= CLUSTER) continue;
      float* at = buffer + (rank * ROWS + mine) * 2;
      if constexpr (CLUSTER > 1) {
        send_to(to, at, mailbox, own_squares);
        if constexpr (CENTERED) send_to(to, at + 1, mailbox, own_mean);
      } else {
        at[0] = own_squares;
        at[1] = own_mean;
      }
    }
    if constexpr (CLUSTER > 1) {
      wait_for_mail(mailbox, turn / 2);  // so all warps of this block are done with the operands
      if (thread() == 0) expect(mailbox, MAIL);  // again, in the round after next
    } else {
      barrier();
    }
    turn = (turn + 1) % 4;

    float mean = 0.0f, squares = 0.0f;
    if constexpr (CENTERED) {
#pragma unroll
      for (int first = 0; first < CLUSTER; first += LANES) {
        const int k = first + lane % LANES;
        if (k < CLUSTER) mean = fma(part.columns_of(k), buffer[(k * ROWS + mine) * 2 + 1], mean);
      }
      mean = mul(lane_sum<LANES>(mean), share);
    }
#pragma unroll
    for (int first = 0; first < CLUSTER; first += LANES) {
      const int k = first + lane % LANES;
      if (k >= CLUSTER) continue;
      squares = add(squares, buffer[(k * ROWS + mine) * 2]);
      if constexpr (CENTERED) {
        const float away = sub(buffer[(k * ROWS + mine) * 2 + 1], mean);
        squares = fma(mul(part.columns_of(k), away), away, squares);
      }
    }
    const float rstd = inverse_sqrt(add(mul(lane_sum<LANES>(squares), share), epsilon));
    if (rank == 0 && lane % LANES == 0 && top + mine < rows) {
      a.rstd[top + mine] = rstd;
      if constexpr (CENTERED) a.mean[top + mine] = mean;
    }

    auto line = [&](int i) {
      const float row_rstd = from_lane(rstd, i * LANES), row_mean = CENTERED ? from_lane(mean, i * LANES) : 0.0f;
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        const i64 at = base + i * width + 256 * j;
        const int here = part.valid(j);
        value(i, j, x, v);
        part.normalise(v, j, row_mean, row_rstd);
        rounded.round(v);
        if constexpr (DENSE) store<Y, WHOLE>(a.y + at, here, v);
        Chunk<u8> c;
        encode<F>(v, scale, c.w);
        if constexpr (ROW) store<u8, WHOLE>(a.row + at, here, c);
        if constexpr (Plan::inside)
          if (j % 2 == 0) warp_barrier();  // all lanes have read what the codes replace
        if constexpr (COL) write_shared(put + (Plan::code_row(codes, i, 2 * j) - codes), c.w);
      }
    };
    if (first + DOWN <= rows) {
#pragma unroll 2
      for (int i = 0; i < DOWN; ++i) line(i);
    } else {
#pragma unroll 1
      for (int i = 0; first + i < rows; ++i) line(i);
    }
    if constexpr (!Plan::behind && !Plan::inside) issue(top + STAGES * stride, stage);
    if constexpr (COL) {
      barrier();
      store_turned<Plan, COLS, THREADS>(codes, a.col + part.left * rows + top, rows, rows - top, width - part.left);
    }
    if ((Plan::behind || Plan::inside) && top + stride < rows) {
      barrier();
      issue(top + stride, stage);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  if constexpr (AMAX) {
    const u32 bits = warp_max(bits_of(rounded.largest()) & 0x7fffffffu);
    if (lane == 0 && bits != 0) global_max(a.amax, bits);
  }
}

}  // namespace te
