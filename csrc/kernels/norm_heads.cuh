// The norm of queries and keys over the features of a head, in a packed tensor, with the rotation that follows; and its
// backward. A head lies in adjacent threads of a warp, eight features each.
#pragma once
#include <kernels/rope.cuh>
#include <te_ops/reduce.cuh>

namespace te {

// L as for `Heads`, all heads of one size, with `width`, `heads` (in a row), `normed` and `first` (where a part's heads
// are among the normalised ones) by part, `count` (how many those are).
template <class L> struct HeadPlace {
  i64 row;
  int part, head, lane;  // head: of the row
  bool exists;
  TE_DEVICE HeadPlace(i64 unit, i64 rows) {
    constexpr int lanes = L::size(0) / 8;
    lane = thread() % lanes;
    exists = unit < rows * L::heads;
    row = exists ? (i64)((u32)unit / (u32)L::heads) : 0;
    head = exists ? (int)(unit - row * L::heads) : 0;
    part = 0;
#pragma unroll
    for (int p = 0; p + 1 < L::parts; ++p) part += head * L::size(0) >= L::end(p);
  }
  TE_DEVICE i64 offset() const { return row * L::width + head * L::size(0) + 8 * lane; }
  template <class P> TE_DEVICE auto* of(P* const (&pointers)[L::parts]) const {
    P* found = pointers[0];
#pragma unroll
    for (int p = 1; p < L::parts; ++p)
      if (part == p) found = pointers[p];
    return found;
  }
  TE_DEVICE bool normed() const { return pick([](int p) { return (int)L::normed(p); }) != 0; }
  TE_DEVICE bool turned() const { return pick([](int p) { return (int)L::turned(p); }) != 0; }
  // Where the head's number is in a row of `count`.
  TE_DEVICE i64 statistic() const {
    const int begin = pick([](int p) { return p == 0 ? 0 : L::end(p - 1) / L::size(0); });
    return row * L::count + pick([](int p) { return L::first(p); }) + head - begin;
  }
  template <class F> TE_DEVICE int pick(F value) const {
    int found = value(0);
#pragma unroll
    for (int p = 1; p < L::parts; ++p)
      if (part == p) found = value(p);
    return found;
  }
};

template <class T, class G, class L> struct NormHeadsArguments {
  const T* x;
  const G* gamma[L::parts];  // of the normalised parts
  const float* table;
  i64 count;  // see `Heads`
  T* y;
  float* scale;  // [rows, L::count]
  i64 rows;
};

// The angles of a thread's eight features.
template <class L, bool INTERLEAVED, int BY>
TE_DEVICE void angles(const float* table, i64 count, const HeadPlace<L>& at, float (&cos)[8], float (&sin)[8]) {
  const int f = 8 * at.lane;
  const bool turns = at.exists && at.turned() && f < 2 * L::half;
  const bool first = INTERLEAVED || f < L::half;
  const float* t = table + place_of<BY>(at.row, count) * (2 * L::half) + (INTERLEAVED ? f / 2 : first ? f : f - L::half);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int pair = INTERLEAVED ? i / 2 : i;
    const bool plus = INTERLEAVED ? i % 2 == 0 : first;
    cos[i] = turns ? t[pair] : 1.0f;
    sin[i] = turns ? (plus ? t[L::half + pair] : -t[L::half + pair]) : 0.0f;
  }
}

template <class L, bool INTERLEAVED>
TE_DEVICE void turn(const HeadPlace<L>& at, const float (&cos)[8], const float (&sin)[8], float (&v)[8]) {
  const bool turns = at.exists && at.turned() && 8 * at.lane < 2 * L::half;
  float partner[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = INTERLEAVED ? v[i ^ 1] : exchange(v[i], L::half >= 8 ? L::half / 8 : 1);
    partner[i] = turns ? other : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = sub(mul(v[i], cos[i]), mul(partner[i], sin[i]));
}

template <class T, class G, class L, bool L2, bool ZERO_CENTERED, bool ROUNDS, bool TURNS, bool INTERLEAVED, int BY,
          int THREADS>
TE_DEVICE void norm_heads(const NormHeadsArguments<T, G, L>& a, float epsilon) {
  constexpr int lanes = L::size(0) / 8;
  const HeadPlace<L> at(block() * (THREADS / lanes) + thread() / lanes, a.rows);
  Chunk<T> x;
  load<T, WHOLE>(a.x + at.offset(), at.exists ? 8 : 0, x);
  float v[8], cos[8], sin[8];
  unpack<T>(x, v);
  if constexpr (TURNS) angles<L, INTERLEAVED, BY>(a.table, a.count, at, cos, sin);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares = fma(v[i], v[i], squares);
  squares = lane_sum<lanes>(squares);
  const float r = inverse_sqrt(add(L2 ? squares : mul(squares, 1.0f / L::size(0)), epsilon));
  const bool normed = at.exists && at.normed();
  float gain[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) gain[i] = ZERO_CENTERED ? 0.0f : 1.0f;
  if (!L2 && normed) {
    Chunk<G> gamma;
    load<G, WHOLE>(at.of(a.gamma) + 8 * at.lane, 8, gamma);
    unpack<G>(gamma, gain);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float factor = ZERO_CENTERED ? add(gain[i], 1.0f) : gain[i];
    if (normed) v[i] = mul(mul(v[i], r), factor);
  }
  if constexpr (ROUNDS) round_to<T>(v);  // as they would be written
  if constexpr (TURNS) turn<L, INTERLEAVED>(at, cos, sin, v);
  if (!at.exists) return;
  if (normed && at.lane == 0 && a.scale) a.scale[at.statistic()] = r;
  if (a.y) store<T, WHOLE>(a.y + at.offset(), 8, v);
}

template <class T, class G, class L> struct NormHeadsBackward {
  const T* dy;
  const T* x;
  const float* scale;
  const G* gamma[L::parts];
  T* dx;
  float* partial[L::parts];  // [blocks, features] of the normalised parts, or null
  i64 rows;
};

template <class T, class G, class L, bool L2, bool ZERO_CENTERED, int THREADS>
TE_DEVICE void norm_heads_backward(const NormHeadsBackward<T, G, L>& a) {
  constexpr int size = L::size(0), lanes = size / 8, groups = THREADS / lanes;
  float sums[L::parts][8];
#pragma unroll
  for (int p = 0; p < L::parts; ++p)
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[p][i] = 0.0f;
  // All threads of a block go round equally often: they exchange.
  for (i64 first = block() * groups; first < a.rows * L::heads; first += blocks() * groups) {
    const HeadPlace<L> at(first + thread() / lanes, a.rows);
    const bool normed = at.exists && at.normed();
    Chunk<T> c, xs;
    load<T, WHOLE>(a.dy + at.offset(), at.exists ? 8 : 0, c);
    load<T, WHOLE>(a.x + at.offset(), normed ? 8 : 0, xs);
    float dy[8], x[8], g[8];
    unpack<T>(c, dy);
    unpack<T>(xs, x);
    const float r = normed ? a.scale[at.statistic()] : 0.0f;
    float gain[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) gain[i] = ZERO_CENTERED ? 0.0f : 1.0f;
    if (!L2 && normed) {
      Chunk<G> gamma;
      load<G, WHOLE>(at.of(a.gamma) + 8 * at.lane, 8, gamma);
      unpack<G>(gamma, gain);
    }
    float along = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = mul(x[i], r);
      g[i] = mul(dy[i], ZERO_CENTERED ? add(gain[i], 1.0f) : gain[i]);
      along = fma(g[i], x[i], along);
    }
    along = lane_sum<lanes>(along);
    if (!L2) along = mul(along, 1.0f / size);
#pragma unroll
    for (int p = 0; p < L::parts; ++p)
      if (L::normed(p) && at.part == p && at.exists)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[p][i] = fma(dy[i], x[i], sums[p][i]);
    if (!at.exists || !a.dx) continue;
    if (normed) {
#pragma unroll
      for (int i = 0; i < 8; ++i) dy[i] = mul(sub(g[i], mul(x[i], along)), r);
    }
    store<T, WHOLE>(a.dx + at.offset(), 8, dy);
  }
  TE_SHARED float shared[groups][size];
#pragma unroll
  for (int p = 0; p < L::parts; ++p) {
    if (!L::normed(p) || !a.partial[p]) continue;
    barrier();
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[thread() / lanes][8 * (thread() % lanes) + i] = sums[p][i];
    barrier();
    for (int f = thread(); f < size; f += THREADS) {
      float total = shared[0][f];
#pragma unroll 4
      for (int k = 1; k < groups; ++k) total = add(total, shared[k][f]);
      a.partial[p][block() * size + f] = total;
    }
  }
}

}  // namespace te
