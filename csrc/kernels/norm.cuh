// RMSNorm and LayerNorm over the last dimension: GROUP threads a row, CHUNKS chunks of eight columns a thread, held in
// registers; CHUNKS = 0 reads long rows again for each pass.
#pragma once
#include <te_ops/formats.cuh>
#include <te_ops/reduce.cuh>

namespace te {

// The factor of a column: gamma, or 1 + gamma.
template <class G, int ALIGNED, bool ZERO_CENTERED>
TE_DEVICE void load_gain(const G* gamma, i64 col, int valid, float (&gain)[8]) {
  Chunk<G> c;
  load<G, ALIGNED>(gamma + col, valid, c);
  unpack<G>(c, gain);
  if constexpr (ZERO_CENTERED) {
#pragma unroll
    for (int i = 0; i < 8; ++i) gain[i] = add(gain[i], 1.0f);
  }
}

TE_DEVICE int columns_left(i64 width, i64 col) {
  const i64 left = width - col;
  return left < 0 ? 0 : left < 8 ? (int)left : 8;
}

template <class S, class T, class G> struct NormArguments {
  S source;
  const G* gamma;
  const G* beta;
  T* stream;  // what is normalised, if somebody else reads it; or null
  T* y;       // or null: only the statistics are wanted
  float* rstd;
  float* mean;
  i64 rows, width;
};

template <class S, class T, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, int GROUP, int CHUNKS,
          int THREADS>
TE_DEVICE void norm(const NormArguments<S, T, G>& a, float epsilon) {
  constexpr int HELD = CHUNKS > 0 ? CHUNKS : 1;
  const i64 row = block() * (THREADS / GROUP) + thread() / GROUP;
  const int place = thread() % GROUP;
  const bool exists = row < a.rows;
  const int steps = CHUNKS > 0 ? CHUNKS : (int)((a.width + 8 * GROUP - 1) / (8 * GROUP));
  float x[HELD][8];

  // One chunk of the source, rounded to what it is stored as.
  auto fetch = [&](int c, float(&v)[8]) {
    const i64 col = 8 * ((i64)c * GROUP + place);
    const int valid = exists ? columns_left(a.width, col) : 0;
    typename S::Cols cols;
    typename S::Regs regs;
    a.source.template load_cols<ALIGNED>(cols, col, valid);
    a.source.template load<ALIGNED, false>(regs, row, col, valid);
    float y[1][8];
    a.source.eval(cols, regs, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < valid ? y[0][i] : 0.0f;
    round_to<T>(v);
  };
  auto sum_over = [&](auto term) {
    float total = 0.0f;
    if constexpr (CHUNKS > 0) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) total = add(total, term(x[c], c));
    } else {
      for (int c = 0; c < steps; ++c) {
        fetch(c, x[0]);
        total = add(total, term(x[0], c));
      }
    }
    return group_sum<GROUP, THREADS>(total);
  };

  if constexpr (CHUNKS > 0) {
    typename S::Cols cols[HELD];
    typename S::Regs regs[HELD];
#pragma unroll
    for (int c = 0; c < HELD; ++c) {
      const i64 col = 8 * ((i64)c * GROUP + place);
      const int valid = exists ? columns_left(a.width, col) : 0;
      a.source.template load_cols<ALIGNED>(cols[c], col, valid);
      a.source.template load<ALIGNED, false>(regs[c], row, col, valid);
    }
#pragma unroll
    for (int c = 0; c < HELD; ++c) {
      const int valid = exists ? columns_left(a.width, 8 * ((i64)c * GROUP + place)) : 0;
      float y[1][8];
      a.source.eval(cols[c], regs[c], y);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[c][i] = i < valid ? y[0][i] : 0.0f;
      round_to<T>(x[c]);
    }
  }

  const float count = (float)a.width;
  float mean = 0.0f;
  if constexpr (CENTERED) {
    mean = div(sum_over([](const float(&v)[8], int) { return sum_of(v); }), count);
  }
  const float squares = sum_over([&](const float(&v)[8], int c) {
    const int valid = columns_left(a.width, 8 * ((i64)c * GROUP + place));
    float squared[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float d = CENTERED ? (i < valid ? sub(v[i], mean) : 0.0f) : v[i];
      squared[i] = mul(d, d);
    }
    return sum_of(squared);
  });
  const float rstd = div(1.0f, sqrt_rn(add(div(squares, count), epsilon)));
  if (exists && place == 0) {
    if (a.rstd) a.rstd[row] = rstd;
    if (CENTERED && a.mean) a.mean[row] = mean;
  }
  if (!a.y && !a.stream) return;
#pragma unroll
  for (int c = 0; c < steps; ++c) {
    const i64 col = 8 * ((i64)c * GROUP + place);
    const int valid = exists ? columns_left(a.width, col) : 0;
    if (CHUNKS == 0) fetch(c, x[0]);
    const int k = CHUNKS > 0 ? c : 0;
    if (a.stream) store<T, ALIGNED>(a.stream + row * a.width + col, valid, x[k]);
    if (!a.y) continue;
    float gain[8], shift[8] = {0, 0, 0, 0, 0, 0, 0, 0}, y[8];
    load_gain<G, ALIGNED, ZERO_CENTERED>(a.gamma, col, valid, gain);
    if constexpr (CENTERED) load_gain<G, ALIGNED, false>(a.beta, col, valid, shift);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[i] = mul(mul(CENTERED ? sub(x[k][i], mean) : x[k][i], rstd), gain[i]);
      if (CENTERED) y[i] = add(y[i], shift[i]);
    }
    store<T, ALIGNED>(a.y + row * a.width + col, valid, y);
  }
}

template <class T, class U, class G> struct NormBackwardArguments {
  const U* dy;
  const T* x;
  const G* gamma;
  const float* rstd;
  const float* mean;
  const T* other;  // a gradient to add; or null
  T* dx;
  i64 rows, width;
};

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gain; without mean(g) for RMSNorm.
template <class T, class U, class G, int ALIGNED, bool CENTERED, bool ZERO_CENTERED, int GROUP, int CHUNKS,
          int THREADS>
TE_DEVICE void norm_backward(const NormBackwardArguments<T, U, G>& a) {
  constexpr int HELD = CHUNKS > 0 ? CHUNKS : 1;
  const i64 row = block() * (THREADS / GROUP) + thread() / GROUP;
  const int place = thread() % GROUP;
  const bool exists = row < a.rows;
  const int steps = CHUNKS > 0 ? CHUNKS : (int)((a.width + 8 * GROUP - 1) / (8 * GROUP));
  const float rstd = exists ? a.rstd[row] : 0.0f;
  const float mean = CENTERED && exists ? a.mean[row] : 0.0f;
  Chunk<T> x[HELD];
  Chunk<U> dy[HELD];
  auto fetch = [&](int c, int k) {
    const i64 col = 8 * ((i64)c * GROUP + place);
    const int valid = exists ? columns_left(a.width, col) : 0;
    load<T, ALIGNED>(a.x + row * a.width + col, valid, x[k]);
    load<U, ALIGNED>(a.dy + row * a.width + col, valid, dy[k]);
  };
  // g and xhat of a held chunk; zeros beyond the row's end.
  auto terms = [&](int c, int k, float(&g)[8], float(&xhat)[8]) {
    const i64 col = 8 * ((i64)c * GROUP + place);
    const int valid = exists ? columns_left(a.width, col) : 0;
    float gain[8];
    load_gain<G, ALIGNED, ZERO_CENTERED>(a.gamma, col, valid, gain);
    unpack<U>(dy[k], g);
    unpack<T>(x[k], xhat);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] = mul(g[i], gain[i]);
      xhat[i] = mul(CENTERED ? sub(xhat[i], mean) : xhat[i], rstd);
    }
    clear_beyond(g, valid);
    clear_beyond(xhat, valid);
  };
  if constexpr (CHUNKS > 0) {
#pragma unroll
    for (int c = 0; c < HELD; ++c) fetch(c, c);
  }
  float along = 0.0f, level = 0.0f;
#pragma unroll
  for (int c = 0; c < steps; ++c) {
    const int k = CHUNKS > 0 ? c : 0;
    if (CHUNKS == 0) fetch(c, 0);
    float g[8], xhat[8];
    terms(c, k, g, xhat);
    if (CENTERED) level = add(level, sum_of(g));
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = mul(g[i], xhat[i]);
    along = add(along, sum_of(g));
  }
  const float count = (float)a.width;
  along = div(group_sum<GROUP, THREADS>(along), count);
  if (CENTERED) level = div(group_sum<GROUP, THREADS>(level), count);
#pragma unroll
  for (int c = 0; c < steps; ++c) {
    const i64 col = 8 * ((i64)c * GROUP + place);
    const int valid = exists ? columns_left(a.width, col) : 0;
    const int k = CHUNKS > 0 ? c : 0;
    if (CHUNKS == 0) fetch(c, 0);
    float g[8], xhat[8], dx[8], other[8];
    terms(c, k, g, xhat);
    if (a.other) {
      Chunk<T> o;
      load<T, ALIGNED>(a.other + row * a.width + col, valid, o);
      unpack<T>(o, other);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float centred = CENTERED ? sub(g[i], level) : g[i];
      dx[i] = mul(sub(centred, mul(xhat[i], along)), rstd);
      if (a.other) dx[i] = add(dx[i], other[i]);
    }
    store<T, ALIGNED>(a.dx + row * a.width + col, valid, dx);
  }
}

}  // namespace te
