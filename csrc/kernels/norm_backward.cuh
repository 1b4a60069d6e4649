// Gradients of RMSNorm and LayerNorm in one pass: of the input, and sums over a block's rows for gamma and beta, which
// a second kernel adds up in a fixed order.
#pragma once
#include <kernels/norm_feed.cuh>
#include <kernels/reduce.cuh>

namespace te {

template <class T, class U, class G, bool OTHER> struct NormBackwardArguments {
  Incoming<T, U, OTHER> in;
  const G* gamma;
  const float* rstd;
  const float* mean;
  T* dx;
  float* partial;  // [clusters, SUMS * width]: of gamma, then of beta
  i64 rows, width;
};

// g = dy * gain and xhat of a chunk.
template <class T, class U, bool CENTERED>
TE_DEVICE void backward_terms(const Chunk<U>& dy, const Chunk<T>& x, float mean, float rstd, float (&g)[8],
                              float (&xhat)[8]) {
  unpack<U>(dy, g);
  unpack<T>(x, xhat);
#pragma unroll
  for (int i = 0; i < 8; ++i) xhat[i] = mul(CENTERED ? sub(xhat[i], mean) : xhat[i], rstd);
}

// Sums of N numbers over the parts of a row that the blocks of a cluster have, given the block's own: every group of
// GROUP threads sends its row's to all blocks, where a mailbox counts what arrives.
template <int CLUSTER, int GROUP, int ROWS, int N> struct ClusterSums {
  static constexpr int mail = CLUSTER * ROWS * N * 4;
  static constexpr int bytes = CLUSTER > 1 ? 2 * mail + 16 : 0;
  static_assert(CLUSTER == 1 || GROUP >= CLUSTER, "a thread for each block");
  float* const sums;  // [2, CLUSTER, ROWS, N]
  u64* const boxes;   // [2]
  int turn = 0;       // bit 0 the buffer, bit 1 its round modulo 2

  TE_DEVICE explicit ClusterSums(u8* from) : sums((float*)from), boxes((u64*)(from + 2 * mail)) {
    if constexpr (CLUSTER > 1) {
      if (thread() < 2) {
        open_mailbox(boxes + thread());
        expect(boxes + thread(), mail);
      }
      mailboxes_opened();
    }
  }
  TE_DEVICE void opened() const {
    if constexpr (CLUSTER > 1) wait_for_mailboxes();
  }
  TE_DEVICE void add_up(float (&x)[N]) {
    if constexpr (CLUSTER > 1) {
      const int place = thread() % GROUP, row = thread() / GROUP;
      float* buffer = sums + turn % 2 * (CLUSTER * ROWS * N);
      u64* box = boxes + turn % 2;
      if (place < CLUSTER)
#pragma unroll
        for (int n = 0; n < N; ++n) send_to(place, buffer + (cluster_rank() * ROWS + row) * N + n, box, x[n]);
      wait_for_mail(box, turn / 2);
      if (thread() == 0) expect(box, mail);  // again, in the round after next
      turn = (turn + 1) % 4;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = buffer[row * N + n];
#pragma unroll
        for (int k = 1; k < CLUSTER; ++k) x[n] = add(x[n], buffer[(k * ROWS + row) * N + n]);
      }
    }
  }
};

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gain; without mean(g) for RMSNorm. SUMS: 0, 1 (gamma) or
// 2 (and beta). The blocks of a cluster share rows: each has GROUP * CHUNKS chunks of them, so a block sees more rows
// and fewer sums of blocks are written. HELD: bytes of dynamic shared memory before the cluster's.
template <class T, class U, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, bool OTHER, int SUMS, int GROUP,
          int CHUNKS, int THREADS, int STAGES, int CLUSTER, int HELD>
TE_DEVICE void norm_backward(const NormBackwardArguments<T, U, G, OTHER>& a) {
  typedef Incoming<T, U, OTHER> S;
  typedef Feed<S, CHUNKS, THREADS, STAGES> F;
  constexpr int ROWS = THREADS / GROUP;
  constexpr int HAVE = SUMS > 0 ? SUMS : 1;
  if constexpr (SUMS > 0) let_next_begin();  // `norm_sums`
  const i64 stride = blocks() / CLUSTER * ROWS;
  const int place = thread() % GROUP, sub_row = thread() / GROUP, width = (int)a.width;
  const int left = CLUSTER > 1 ? cluster_rank() * (8 * GROUP * CHUNKS) : 0;  // first column of this block
  i64 row = block() / CLUSTER * ROWS + sub_row;
  int turn = 0, stage = 0;
  const Weights<G, ALIGNED, CHUNKS, THREADS, 1, (STAGES > 0)> weights = {{a.gamma}, dynamic_shared() + F::bytes};
  ClusterSums<CLUSTER, GROUP, ROWS, 1 + CENTERED> across(dynamic_shared() + HELD);
  float sums[HAVE][CHUNKS][8];
  auto col = [&](int c) { return left + 8 * (c * GROUP + place); };
  auto valid = [&](int c) { return columns_left(width, col(c)); };
  auto issue = [&](i64 r, int s, int c) {
    F::issue(a.in, s, c, r * a.width + col(c), r < a.rows && col(c) < width);
  };
  auto gain = [&](int c, float(&y)[8]) {
    Chunk<G> gamma;
    weights.take(0, c, col(c), valid(c), gamma);
    gain_of<G, ZERO_CENTERED>(gamma, y);
  };
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int n = 0; n < HAVE; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[n][c][i] = 0.0f;
  }
  if constexpr (STAGES > 0) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) weights.issue(0, c, col(c), col(c) < width);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      i64 r = row + s * stride;
      forget(r);
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) issue(r, s, c);
      commit_copies();
    }
  }
  const float share = div(1.0f, (float)a.width);
  float next_rstd = row < a.rows ? a.rstd[row] : 0.0f;
  float next_mean = CENTERED && row < a.rows ? a.mean[row] : 0.0f;
  across.opened();
  // The first row of the block's, which a cluster has no register to spare for.
  i64 first = block() / CLUSTER * ROWS;
  const auto more = [&] { return (CLUSTER > 1 ? row - sub_row : first) < a.rows; };
  for (; more(); first += stride, row += stride) {
    const bool exists = row < a.rows;
    const float rstd = next_rstd, mean = next_mean;
    typename S::Regs held[STAGES > 0 ? 1 : CHUNKS];
    auto fetch = [&](int c) -> typename S::Regs& {
      if constexpr (STAGES > 0) F::take(stage, c, held[0]);
      return held[STAGES > 0 ? 0 : c];
    };
    if constexpr (STAGES > 0) {
      wait_copies<STAGES - 1>();
    } else {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
        a.in.template load<ALIGNED, false>(held[c], row, col(c), exists ? valid(c) : 0);
    }
    next_rstd = row + stride < a.rows ? a.rstd[row + stride] : 0.0f;
    if constexpr (CENTERED) next_mean = row + stride < a.rows ? a.mean[row + stride] : 0.0f;
    float g[8], xhat[8], y[8];
    float along[1 + CENTERED] = {0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const typename S::Regs& regs = fetch(c);
      backward_terms<T, U, CENTERED>(regs.dy, regs.x, mean, rstd, g, xhat);
      gain(c, y);  // dy is 0 beyond the row's end
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) g[i] = mul(g[i], y[i]);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        even = fma(g[i], xhat[i], even);
        odd = fma(g[i + 1], xhat[i + 1], odd);
      }
      along[0] = add(along[0], add(even, odd));
      if constexpr (CENTERED) along[CENTERED] = add(along[CENTERED], sum_of(g));
    }
    group_sums<GROUP, THREADS>(along, turn);
    across.add_up(along);
    const float slope = mul(along[0], share), level = CENTERED ? mul(along[CENTERED], share) : 0.0f;
    i64 later = row + STAGES * stride;
    forget(later);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const typename S::Regs& regs = fetch(c);
      backward_terms<T, U, CENTERED>(regs.dy, regs.x, mean, rstd, g, xhat);
      gain(c, y);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (SUMS > 0) sums[0][c][i] = fma(g[i], xhat[i], sums[0][c][i]);
        if constexpr (SUMS > 1) sums[SUMS - 1][c][i] = add(sums[SUMS - 1][c][i], g[i]);
        const float centred = CENTERED ? fma(g[i], y[i], -level) : mul(g[i], y[i]);
        g[i] = mul(fma(-xhat[i], slope, centred), rstd);
      }
      if constexpr (OTHER) {
        unpack<T>(regs.other, y);
#pragma unroll
        for (int i = 0; i < 8; ++i) g[i] = add(g[i], y[i]);
      }
      store<T, ALIGNED>(a.dx + row * a.width + col(c), exists ? valid(c) : 0, g);
      if constexpr (STAGES > 0) issue(later, stage, c);
    }
    if constexpr (STAGES > 0) {
      commit_copies();
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }
  if constexpr (SUMS > 0) {
    wait_copies<0>();
    float* mine = a.partial + block() / CLUSTER * SUMS * a.width;
    float* shared = (float*)dynamic_shared();  // [ROWS, GROUP * CHUNKS * 8], behind the last row's copies
#pragma unroll
    for (int n = 0; n < SUMS; ++n) {
      if constexpr (ROWS > 1) {
        barrier();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
          for (int i = 0; i < 8; ++i) shared[(sub_row * CHUNKS + c) * GROUP * 8 + 8 * place + i] = sums[n][c][i];
        barrier();
        constexpr int part = 8 * GROUP * CHUNKS;
        const i64 have = CLUSTER == 1 || a.width - left < part ? a.width - left : part;
        for (i64 k = thread(); k < have; k += THREADS) {
          float total = shared[k];
          for (int r = 1; r < ROWS; ++r) total = add(total, shared[r * CHUNKS * GROUP * 8 + k]);
          mine[n * a.width + left + k] = total;
        }
      } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) store<float, ALIGNED>(mine + n * a.width + col(c), valid(c), sums[n][c]);
      }
    }
  }
}

// y[c] = sum over slices of partial[slice, c], c over `total` columns: the first `width` of one dtype, the rest (beta's)
// of another place. 32 columns a block.
template <class G, int THREADS>
TE_DEVICE void norm_sums(const float* partial, G* dgamma, G* dbeta, i64 slices, i64 width, i64 total) {
  constexpr int GROUPS = THREADS / 32;
  TE_SHARED float shared[GROUPS][32];
  wait_for_previous();
  const i64 col = block() * 32 + thread() % 32;
  const int group = thread() / 32;
  float sum = 0.0f;
  if (col < total) {
    i64 k = group;
    for (; k + 7 * GROUPS < slices; k += 8 * GROUPS) {
      float v[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) v[u] = partial[(k + u * GROUPS) * total + col];
#pragma unroll
      for (int u = 0; u < 8; ++u) sum = add(sum, v[u]);
    }
    for (; k < slices; k += GROUPS) sum = add(sum, partial[k * total + col]);
  }
  shared[group][thread() % 32] = sum;
  barrier();
  if (group != 0 || col >= total) return;
#pragma unroll
  for (int r = 1; r < GROUPS; ++r) sum = add(sum, shared[r][thread()]);
  store_value(col < width ? dgamma + col : dbeta + (col - width), sum);
}

// The gradient of the input for rows that no block holds: each pass reads them again.
template <class T, class U, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, bool OTHER, int THREADS>
TE_DEVICE void long_norm_backward(const NormBackwardArguments<T, U, G, OTHER>& a) {
  const i64 row = block();
  const float share = div(1.0f, (float)a.width), rstd = a.rstd[row], mean = CENTERED ? a.mean[row] : 0.0f;
  int turn = 0;
  typename Incoming<T, U, OTHER>::Regs regs;
  float g[8], xhat[8], gain[8], along[1 + CENTERED] = {0.0f};
  auto fetch = [&](i64 col, int valid) {
    Chunk<G> gamma;
    a.in.template load<ALIGNED, false>(regs, row, col, valid);
    load_again<G, ALIGNED>(a.gamma + col, valid, gamma);
    gain_of<G, ZERO_CENTERED>(gamma, gain);
    backward_terms<T, U, CENTERED>(regs.dy, regs.x, mean, rstd, g, xhat);
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = mul(g[i], gain[i]);
  };
  for (i64 col = 8 * thread(); col < a.width; col += 8 * THREADS) {
    fetch(col, columns_left(a.width, col));
    if constexpr (CENTERED) along[CENTERED] = add(along[CENTERED], sum_of(g));
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = mul(g[i], xhat[i]);
    along[0] = add(along[0], sum_of(g));
  }
  group_sums<THREADS, THREADS>(along, turn);
  const float slope = mul(along[0], share), level = CENTERED ? mul(along[CENTERED], share) : 0.0f;
  for (i64 col = 8 * thread(); col < a.width; col += 8 * THREADS) {
    const int valid = columns_left(a.width, col);
    fetch(col, valid);
    if constexpr (OTHER) unpack<T>(regs.other, gain);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] = mul(fma(-xhat[i], slope, CENTERED ? sub(g[i], level) : g[i]), rstd);
      if constexpr (OTHER) g[i] = add(g[i], gain[i]);
    }
    store<T, ALIGNED>(a.dx + row * a.width + col, valid, g);
  }
}

}  // namespace te
