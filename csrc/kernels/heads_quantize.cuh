// Heads of a packed tensor as FP8, a tensor with a scale of its own for each part: normalised, turned, or as they are.
#pragma once
#include <kernels/blocks.cuh>
#include <kernels/norm_heads.cuh>

namespace te {

// What becomes of a part's heads.
struct HeadsOut {
  const float* scale;  // the scale, or the amax that it is made from
  u32* amax;           // bits of max |x|, zero before
  float* scale_inv;
  u8* codes;  // [rows, heads of the part, features]
  i64 end;    // the part's last block plus one
};

// L as for `HeadPlace`.
template <class T, class G, class L> struct HeadsQuantizeArguments {
  const T* x;
  const G* gamma[L::parts];  // of the normalised parts
  const float* table;
  i64 count;     // see `Heads`
  float* scale;  // statistics of the norm [rows, L::count], or null
  i64 rows;
  HeadsOut out[L::parts];
};

// Sixteen features of a head in one thread: two chunks that turn with each other, or lie side by side.
template <class L, bool INTERLEAVED> struct TwoChunks {
  int at[2];   // first features
  bool turns;
  TE_DEVICE TwoChunks(int lane, bool turned) {
    turns = turned && 8 * lane < L::half;
    const bool apart = turns && !INTERLEAVED;
    at[0] = apart ? 8 * lane : 16 * lane;
    at[1] = apart ? 8 * lane + L::half : 16 * lane + 8;
  }
  // The eight angles of the sixteen features: those of pairs 8 * lane and on.
  template <int BY>
  TE_DEVICE void angles(const float* table, i64 count, i64 row, int lane, float (&cos)[8], float (&sin)[8]) const {
    const float* t = table + place_of<BY>(row, count) * (2 * L::half) + 8 * lane;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      u32 c[4], s[4];
      read_again(t + 4 * k, c);
      read_again(t + L::half + 4 * k, s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        cos[4 * k + i] = float_of(c[i]);
        sin[4 * k + i] = float_of(s[i]);
      }
    }
  }
  static TE_DEVICE void turn(const float (&cos)[8], const float (&sin)[8], float (&v)[2][8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& a = INTERLEAVED ? v[i / 4][2 * i % 8] : v[0][i];
      float& b = INTERLEAVED ? v[i / 4][2 * i % 8 + 1] : v[1][i];
      const float first = a, second = b;
      a = sub(mul(first, cos[i]), mul(second, sin[i]));
      b = add(mul(second, cos[i]), mul(first, sin[i]));
    }
  }
};

// A thread has sixteen features of GROUP heads of a row and a part: they share angles and gamma. Block `index` has one
// part. F, R as for `Target`; NORMS, TURNS: what is done before; CODES, AMAX: what is written.
template <class T, class G, class L, class F, class R, bool NORMS, bool L2, bool ZERO_CENTERED, bool TURNS,
          bool INTERLEAVED, int BY, bool CODES, bool AMAX, int GROUP, int THREADS>
TE_DEVICE void heads_quantize(const HeadsQuantizeArguments<T, G, L>& a, float epsilon, i64 index) {
  constexpr int size = L::size(0), lanes = size / 16;
  int part = 0;
#pragma unroll
  for (int p = 0; p + 1 < L::parts; ++p) part += index >= a.out[p].end;
  HeadsOut out = a.out[0];
  i64 first = 0;
#pragma unroll
  for (int p = 1; p < L::parts; ++p) {
    if (part != p) continue;
    first = a.out[p - 1].end;
    out = a.out[p];
  }
  const HeadPlace<L> whose(0, part, 0, true);  // the same for all of a block
  const bool normed = NORMS && whose.normed(), turned = TURNS && whose.turned();
  const u32 heads = whose.pick([](int p) { return L::own(p); }), groups = (heads + GROUP - 1) / GROUP;
  constexpr int units = THREADS / lanes;  // of a block; threads may be left over
  const u32 unit = (u32)(index - first) * units + thread() / lanes, row = unit / groups;
  const u32 group = unit - row * groups;
  const int lane = thread() % lanes;
  const bool works = thread() < units * lanes && row < a.rows;
  const TwoChunks<L, INTERLEAVED> mine(lane, turned);
  const T* from = a.x + (i64)row * L::width + whose.begin() * size;

  Chunk<T> x[GROUP][2];
#pragma unroll
  for (int j = 0; j < GROUP; ++j) {
    const u32 head = group + j * groups;
    const int valid = works && head < heads ? 8 : 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) load<T, WHOLE>(from + head * size + mine.at[k], valid, x[j][k]);
  }
  const bool turns = mine.turns && works;
  float cos[8], sin[8], gain[2][8], scale = 1.0f;
  if (turns) mine.template angles<BY>(a.table, a.count, row, lane, cos, sin);
  if (normed) {
#pragma unroll
    for (int k = 0; k < 2; ++k) gains<G, L, L2, ZERO_CENTERED>(a.gamma, whose, mine.at[k], gain[k]);
  }
  if constexpr (CODES) {
    scale = R::scale(*out.scale);
    if (unit == 0 && thread() == 0) *out.scale_inv = div(1.0f, scale);
  }
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < GROUP; ++j) {
    const u32 head = group + j * groups;
    const bool exists = works && head < heads;
    float v[2][8];
#pragma unroll
    for (int k = 0; k < 2; ++k) unpack<T>(x[j][k], v[k]);
    if (normed) {
      const float r = inverse_norm<L, L2>(v, epsilon);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[k][i] = mul(mul(v[k][i], r), gain[k][i]);
        if (turned) round_to<T>(v[k]);
      }
      const i64 place = (i64)row * L::count + whose.pick([](int p) { return L::first(p); }) + head;
      if (CODES && exists && lane == 0 && a.scale) a.scale[place] = r;
    }
    if (turns) TwoChunks<L, INTERLEAVED>::turn(cos, sin, v);
    if (!exists) continue;  // behind the exchanges of a head
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Chunk<T> rounded;
      pack<T>(v[k], rounded);
      if constexpr (AMAX) most = Magnitude<T>::most(most, chunk_most<T>(rounded));
      if constexpr (CODES) {
        unpack<T>(rounded, v[k]);
        Chunk<u8> c;
        encode<F>(v[k], scale, c.w);
        store<u8, WHOLE>(out.codes + ((i64)row * heads + head) * size + mine.at[k], 8, c);
      }
    }
  }
  if constexpr (AMAX) {
    float largest = Magnitude<T>::value(most, 0);
    if constexpr (Magnitude<T>::per_word == 2) largest = max_abs(largest, Magnitude<T>::value(most, 1));
    const u32 bits = block_max<THREADS>(largest);
    if (thread() == 0 && bits != 0) global_max(out.amax, bits);
  }
}

}  // namespace te
