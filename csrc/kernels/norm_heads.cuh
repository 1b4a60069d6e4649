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
  // Head `number` of a part.
  TE_DEVICE HeadPlace(i64 row, int part, int number, bool exists)
      : row(exists ? row : 0), part(part), lane(thread() % (L::size(0) / 8)), exists(exists) {
    head = exists ? begin() + number : 0;
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
    return row * L::count + pick([](int p) { return L::first(p); }) + head - begin();
  }
  // The part's first head.
  TE_DEVICE int begin() const {
    return pick([](int p) { return p == 0 ? 0 : L::end(p - 1) / L::size(0); });
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

// The angles of a thread's eight features. INVERSE: to turn them back.
template <class L, bool INTERLEAVED, int BY, bool INVERSE = false>
TE_DEVICE void angles(const float* table, i64 count, const HeadPlace<L>& at, float (&cos)[8], float (&sin)[8]) {
  const int f = 8 * at.lane;
  const bool turns = at.exists && at.turned() && f < 2 * L::half;
  const bool first = INTERLEAVED || f < L::half;
  const float* t = table + place_of<BY>(at.row, count) * (2 * L::half) + (INTERLEAVED ? f / 2 : first ? f : f - L::half);
  constexpr int quads = INTERLEAVED ? 1 : 2;
  u32 c[quads][4], s[quads][4];
#pragma unroll
  for (int k = 0; k < quads; ++k)
    if (turns) {
      read_again(t + 4 * k, c[k]);
      read_again(t + L::half + 4 * k, s[k]);
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int pair = INTERLEAVED ? i / 2 : i;
    const bool plus = (INTERLEAVED ? i % 2 == 0 : first) != INVERSE;
    const float sine = turns ? float_of(s[pair / 4][pair % 4]) : 0.0f;
    cos[i] = turns ? float_of(c[pair / 4][pair % 4]) : 1.0f;
    sin[i] = plus ? sine : -sine;
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

// What eight features from `feature` on of a normalised head are multiplied by besides the statistic.
template <class G, class L, bool L2, bool ZERO_CENTERED>
TE_DEVICE void gains(const G* const (&gammas)[L::parts], const HeadPlace<L>& at, int feature, float (&gain)[8]) {
  if constexpr (L2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) gain[i] = 1.0f;
  } else {
    Chunk<G> gamma;
    load<G, WHOLE>(at.of(gammas) + feature, 8, gamma);
    unpack<G>(gamma, gain);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (ZERO_CENTERED) gain[i] = add(gain[i], 1.0f);
  }
}
// The same of a thread's features; 1 where nothing is normalised.
template <class G, class L, bool L2, bool ZERO_CENTERED>
TE_DEVICE void own_gains(const G* const (&gammas)[L::parts], const HeadPlace<L>& at, bool normed, float (&gain)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) gain[i] = 1.0f;
  if (normed) gains<G, L, L2, ZERO_CENTERED>(gammas, at, 8 * at.lane, gain);
}

// 1 / the norm of a head, in each of its threads, which have CHUNKS chunks each.
template <class L, bool L2, int CHUNKS>
TE_DEVICE float inverse_norm(const float (&v)[CHUNKS][8], float epsilon) {
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fma(v[k][i], v[k][i], squares);
  squares = lane_sum<L::size(0) / 8 / CHUNKS>(squares);
  return inverse_sqrt(add(L2 ? squares : mul(squares, 1.0f / L::size(0)), epsilon));
}

template <class T, class G, class L, bool L2, bool ZERO_CENTERED, bool ROUNDS, bool TURNS, bool INTERLEAVED, int BY,
          int THREADS>
TE_DEVICE void norm_heads(const NormHeadsArguments<T, G, L>& a, float epsilon) {
  constexpr int lanes = L::size(0) / 8;
  const HeadPlace<L> at(block() * (THREADS / lanes) + thread() / lanes, a.rows);
  Chunk<T> x;
  load<T, WHOLE>(a.x + at.offset(), at.exists ? 8 : 0, x);
  float all[1][8], cos[8], sin[8], gain[8];
  float(&v)[8] = all[0];
  unpack<T>(x, v);
  if constexpr (TURNS) angles<L, INTERLEAVED, BY>(a.table, a.count, at, cos, sin);
  const float r = inverse_norm<L, L2>(all, epsilon);
  const bool normed = at.exists && at.normed();
  own_gains<G, L, L2, ZERO_CENTERED>(a.gamma, at, normed, gain);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (normed) v[i] = mul(mul(v[i], r), gain[i]);
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
    float gain[8], along = 0.0f;
    own_gains<G, L, L2, ZERO_CENTERED>(a.gamma, at, normed, gain);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = mul(x[i], r);
      g[i] = mul(dy[i], gain[i]);
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

// A Source: the gradient of a norm of heads, whose own gradients lie in a tensor for each part and are turned back
// first. SUMS: a second output, what the gradients of gammas are sums of. A tile of 128 columns has whole heads.
template <class T, class G, class L, bool L2, bool ZERO_CENTERED, bool SUMS, bool TURNS, bool INTERLEAVED, int BY>
struct HeadsNormBack {
  static constexpr int outs = SUMS ? 2 : 1, size = L::size(0), lanes = size / 8;
  static constexpr bool computes = true;
  const T* dy[L::parts];  // or null: zeros
  i64 row[L::parts], head[L::parts];  // elements from one to the next
  const T* x;
  const float* scale;
  const G* gamma[L::parts];
  const float* table;
  i64 count;

  struct Cols {
    int part, number;  // of the head, in its part
    float gain[8];
  };
  struct Regs {
    Chunk<T> dy, x;
    float r, cos[8], sin[8];
  };

  // Which head a column is of.
  static TE_DEVICE void find(i64 col, int valid, int& part, int& number) {
    part = 0;
#pragma unroll
    for (int p = 0; p + 1 < L::parts; ++p) part += valid > 0 && col >= L::end(p);
    number = (valid > 0 ? (int)col / size : 0) - HeadPlace<L>(0, part, 0, true).begin();
  }
  template <int ALIGNED> TE_DEVICE void load_cols(Cols& c, i64 col, int valid) const {
    find(col, valid, c.part, c.number);
    const HeadPlace<L> at(0, c.part, c.number, valid > 0);
    own_gains<G, L, L2, ZERO_CENTERED>(gamma, at, valid > 0 && at.normed(), c.gain);
  }
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 place, i64 col, int valid) const {
    static_assert(ALIGNED == WHOLE);
    int part, number;
    find(col, valid, part, number);
    const HeadPlace<L> at(place, part, number, valid > 0);
    const T* from = at.of(dy);
    const bool there = at.exists && from != nullptr, normed = at.exists && at.normed();
    te::load<T, WHOLE>(from + at.row * chosen(row, part) + number * chosen(head, part) + 8 * at.lane, there ? 8 : 0, r.dy);
    te::load<T, WHOLE>(x + at.offset(), normed ? 8 : 0, r.x);
    r.r = normed ? scale[at.statistic()] : 0.0f;
    if constexpr (TURNS) angles<L, INTERLEAVED, BY, true>(table, count, at, r.cos, r.sin);
  }
  static TE_DEVICE i64 chosen(const i64 (&all)[L::parts], int part) {
    i64 found = all[0];
#pragma unroll
    for (int p = 1; p < L::parts; ++p)
      if (part == p) found = all[p];
    return found;
  }
  TE_DEVICE void eval(const Cols& c, const Regs& r, float (&y)[outs][8]) const {
    const HeadPlace<L> at(0, c.part, c.number, true);
    float dy[8], xs[8], along = 0.0f;
    unpack<T>(r.dy, dy);
    unpack<T>(r.x, xs);
    if constexpr (TURNS) turn<L, INTERLEAVED>(at, r.cos, r.sin, dy);
    round_to<T>(dy);  // as it would be written
    float g[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      xs[i] = mul(xs[i], r.r);
      g[i] = mul(dy[i], c.gain[i]);
      along = fma(g[i], xs[i], along);
    }
    along = lane_sum<lanes>(along);
    if (!L2) along = mul(along, 1.0f / size);
    const bool normed = at.normed();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[0][i] = normed ? mul(sub(g[i], mul(xs[i], along)), r.r) : dy[i];
      if constexpr (SUMS) y[outs - 1][i] = normed ? mul(dy[i], xs[i]) : 0.0f;
    }
  }
};

}  // namespace te
