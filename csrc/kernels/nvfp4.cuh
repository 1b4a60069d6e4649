// NVFP4: E2M1 codes with an E4M3 scale for 16 elements along the contraction and the tensor's amax. A pass for the
// amax, and one that makes both copies: the row copy from registers, the transposed one from shared memory.
#pragma once
#include <te_ops/fp4.cuh>
#include <te_ops/philox.cuh>
#include <te_ops/reduce.cuh>

namespace te {

constexpr int FP4_ROWS = 128, FP4_COLS = 128, FP4_THREADS = 256;

// 16-bit numbers two a word: as FP32, and maxima of magnitudes, in which a NaN wins (`most`) or loses (`most_number`).
template <class T> struct Halves;
template <> struct Halves<bf16> {
  static TE_DEVICE float value(u32 w, int half) { return float_of(half ? w & 0xffff0000u : w << 16); }
  static TE_DEVICE u32 most(u32 m, u32 w) { return larger_bf16x2(m, w); }
  static TE_DEVICE u32 most_number(u32 m, u32 w) { return larger_number_bf16x2(m, w); }
};
template <> struct Halves<f16> {
  static TE_DEVICE float value(u32 w, int half) { return widen_f16((u16)(half ? w >> 16 : w)); }
  static TE_DEVICE u32 most(u32 m, u32 w) { return larger_f16x2(m, w); }
  static TE_DEVICE u32 most_number(u32 m, u32 w) { return larger_number_f16x2(m, w); }
};

// Sixteen adjacent numbers, as they lie in memory.
template <class T> struct Run {
  static constexpr int words = 4 * sizeof(T);
  u32 w[words];
  TE_DEVICE float value(int i) const { return Halves<T>::value(w[i / 2], i % 2); }
  TE_DEVICE float most() const {
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) m = Halves<T>::most(m, w[i]);
    return magnitude(Halves<T>::value(Halves<T>::most(m, byte_perm(m, m, 0x1032)), 0));
  }
  // Of eight of them, where their codes have them.
  TE_DEVICE u32 signs(int half) const {
    const u32* p = w + half * words / 2;
    u32 even, odd;
    sign_bytes(p[0], p[1], p[2], p[3], even, odd);
    return e2m1_signs(even, odd);
  }
};
template <> TE_DEVICE float Run<float>::value(int i) const { return float_of(w[i]); }
template <> TE_DEVICE float Run<float>::most() const {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) most = max_abs(most, float_of(w[i]));
  return most;
}
template <> TE_DEVICE u32 Run<float>::signs(int half) const {
  u32 upper[4], even, odd;
#pragma unroll
  for (int i = 0; i < 4; ++i) upper[i] = byte_perm(w[8 * half + 2 * i], w[8 * half + 2 * i + 1], 0x7632);
  sign_bytes(upper[0], upper[1], upper[2], upper[3], even, odd);
  return e2m1_signs(even, odd);
}

// Sixteen rows of two adjacent columns, as words that hold both (FP32: a word each).
template <class T> struct Pairs {
  u32 w[16];
  TE_DEVICE float value(int k, int i) const { return Halves<T>::value(w[i], k); }
  TE_DEVICE u32 both() const {  // a maximum for each column
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) m = Halves<T>::most(m, w[i]);
    return m;
  }
  TE_DEVICE float most(int k) const { return magnitude(Halves<T>::value(both(), k)); }
  TE_DEVICE u32 signs(int k, int half) const {
    const u32* p = w + 8 * half;
    u32 even[2], odd[2];
    sign_bytes(p[0], p[2], p[4], p[6], even[0], even[1]);
    sign_bytes(p[1], p[3], p[5], p[7], odd[0], odd[1]);
    return e2m1_signs(even[k], odd[k]);
  }
};
template <> struct Pairs<float> {
  Run<float> column[2];
  TE_DEVICE float value(int k, int i) const { return column[k].value(i); }
  TE_DEVICE float most(int k) const { return column[k].most(); }
  TE_DEVICE u32 signs(int k, int half) const { return column[k].signs(half); }
};
// One of the two columns.
template <class T> struct Column {
  const Pairs<T>& pairs;
  int k;
  TE_DEVICE float value(int i) const { return pairs.value(k, i); }
  TE_DEVICE float most() const { return pairs.most(k); }
  TE_DEVICE u32 signs(int half) const { return pairs.signs(k, half); }
};

// Bit i: whether the random Hadamard transform turns the sign of element i.
constexpr u32 HADAMARD_SIGNS = 0xd7e8u;

TE_DEVICE void turn_signs(float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (HADAMARD_SIGNS >> i & 1u) v[i] = -v[i];
}
// Four stages of sums and differences: four times what te_ops.quantizers.nvfp4 has.
TE_DEVICE void butterfly(float (&v)[16]) {
#pragma unroll
  for (int half = 1; half < 16; half *= 2)
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if ((i & half) == 0) {
        const float a = v[i], b = v[i + half];
        v[i] = add(a, b);
        v[i + half] = sub(a, b);
      }
}
// Two columns with the signs turned and the butterfly, not yet divided by four.
template <class T> TE_DEVICE void mixed(const Pairs<T>& pairs, float (&v)[2][16]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[k][i] = pairs.value(k, i);
    turn_signs(v[k]);
    butterfly(v[k]);
  }
}
// The random Hadamard transform of two columns, rounded to BF16.
template <class T> TE_DEVICE Pairs<bf16> hadamard(const Pairs<T>& pairs) {
  float v[2][16];
  mixed(pairs, v);
  Pairs<bf16> made;
#pragma unroll
  for (int i = 0; i < 16; ++i) made.w[i] = narrow_bf16x2(mul(v[0][i], 0.25f), mul(v[1][i], 0.25f));
  return made;
}
TE_DEVICE void inverse_hadamard(float (&v)[16]) {
  butterfly(v);
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = mul(v[i], 0.25f);
  turn_signs(v);
}

// -- amax, over what is not NaN

template <class T> struct Fp4AmaxArguments {
  const T* x;
  u32* row;  // bits of max |x|, zero before; or null
  u32* col;  // of the transformed columns; or null
  i64 rows, width;
};

TE_DEVICE void raise(u32* out, float most) {
  const u32 bits = block_max<FP4_THREADS>(most);
  if (thread() == 0 && bits != 0) global_max(out, bits);
}

// Carries max |x| over words, NaNs apart.
template <class T> struct Most {
  u32 m = 0;
  TE_DEVICE void look(u32 w) { m = Halves<T>::most_number(m, w); }
  TE_DEVICE float value() const {
    return max_number(magnitude(Halves<T>::value(m, 0)), magnitude(Halves<T>::value(m, 1)));
  }
};
template <> struct Most<float> {
  float m = 0.0f;
  TE_DEVICE void look(u32 w) { m = max_number(m, magnitude(float_of(w))); }
  TE_DEVICE float value() const { return m; }
};

// max |x| of `count` values.
template <class T> TE_DEVICE void fp4_amax(const T* p, u32* out, i64 count) {
  constexpr int UNROLL = 4;
  Most<T> most;
  const i64 stride = blocks() * (FP4_THREADS * UNROLL * 8);
  for (i64 base = block() * (FP4_THREADS * UNROLL * 8) + thread() * 8; base < count; base += stride) {
    Chunk<T> c[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 left = count - (base + u * FP4_THREADS * 8);
      load<T, TAILED>(p + base + u * FP4_THREADS * 8, left < 8 ? (int)(left < 0 ? 0 : left) : 8, c[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int i = 0; i < Chunk<T>::words; ++i) most.look(c[u].w[i]);
  }
  raise(out, most.value());
}

// Two adjacent columns of row i of `pairs`, zeros for what does not exist. PAIRED: the width is even.
template <bool PAIRED, class T> TE_DEVICE void load_pair(const T* p, int valid, int i, Pairs<T>& pairs) {
  if constexpr (sizeof(T) == 4) {
    pairs.column[0].w[i] = valid > 0 ? raw(p[0]) : 0u;
    pairs.column[1].w[i] = valid > 1 ? raw(p[1]) : 0u;
  } else if constexpr (PAIRED) {
    pairs.w[i] = valid > 0 ? *(const u32*)p : 0u;
  } else {
    pairs.w[i] = (valid > 0 ? raw(p[0]) : 0u) | (valid > 1 ? raw(p[1]) << 16 : 0u);
  }
}

// The same of the transformed columns (and of the values). A thread has 16 rows of two columns at a time.
template <class T, bool PAIRED, bool ROW> TE_DEVICE void fp4_amax_transformed(const Fp4AmaxArguments<T>& a) {
  Most<T> row;
  float col = 0.0f;
  const u32 across = (u32)((a.width + 63) / 64), down = (u32)((a.rows + 15) / 16);
  const u32 units = across * down;  // a warp each
  for (u32 unit = (u32)block() * (FP4_THREADS / 32) + thread() / 32; unit < units;
       unit += (u32)blocks() * (FP4_THREADS / 32)) {
    const i64 top = (i64)(unit / across) * 16, left = (i64)(unit % across) * 64 + thread() % 32 * 2;
    const i64 remain = a.width - left;
    const int valid = remain < 0 ? 0 : remain < 2 ? (int)remain : 2;
    Pairs<T> pairs;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      load_pair<PAIRED>(a.x + (top + i) * a.width + left, top + i < a.rows ? valid : 0, i, pairs);
    if constexpr (ROW) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if constexpr (sizeof(T) == 4) {
          row.look(pairs.column[0].w[i]);
          row.look(pairs.column[1].w[i]);
        } else {
          row.look(pairs.w[i]);
        }
      }
    }
    float v[2][16];
    mixed(pairs, v);
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 0; i < 16; ++i) col = max_number(col, magnitude(v[k][i]));
  }
  if constexpr (ROW) raise(a.row, row.value());
  // Division and rounding keep order, so the largest is enough.
  raise(a.col, Halves<bf16>::value(narrow_bf16x2(mul(col, 0.25f), 0.0f), 0));
}

// -- quantize

template <class T> struct Fp4Arguments {
  const T* x;
  const float* row_amax;
  const float* col_amax;
  u8* row;        // [rows, ceil(width / 2)]
  u8* row_scale;  // [rows, ceil(width / 16)]
  u8* col;        // [width, ceil(rows / 2)]; with the transform rows are filled up to 16
  u8* col_scale;  // [width, ceil(rows / 16)]
  const u64* seed;
  u64 seed_offset;
  i64 rows, width;
};

// The two levels of scales.
struct Fp4Scale {
  float fold, inverse;
  TE_DEVICE explicit Fp4Scale(float amax) {
    const float largest = float_of(0x7f7fffffu);
    float scale = min_number(div(2688.0f, amax), largest);
    if (!(amax > 0.0f && amax <= largest)) scale = 1.0f;
    fold = mul(scale, (float)(1.0 / 6.0));
    inverse = div(1.0f, scale);
  }
  // The block's code, and what its elements are multiplied with.
  TE_DEVICE u32 block(float most, float& encode) const {
    const u32 code = e4m3::pair(mul(most, fold), 0.0f) & 0xffu;
    const float largest = float_of(0x7f7fffffu);
    encode = reciprocal(mul(e4m3_value(code), inverse));
    encode = encode > largest ? largest : encode;
    return code;
  }
};

// The random words of 16 elements of a line, `stride` apart; as a run they share blocks of four where they can.
struct NoWords {
  static constexpr bool random = false;
  TE_DEVICE void four(int, u32 (&)[4]) const {}
};
template <bool WHOLE> struct RunWords {
  static constexpr bool random = true;
  const Philox& philox;
  u64 first;
  bool whole;  // first is a multiple of four, as it always is where WHOLE
  TE_DEVICE void four(int i, u32 (&w)[4]) const {
    if (WHOLE || whole) {
      philox.words(first / 4 + i / 4, w);
    } else {
#pragma unroll 1
      for (int k = 0; k < 4; ++k) w[k] = philox.word(first + i + k);
    }
  }
};
struct StridedWords {
  static constexpr bool random = true;
  const Philox& philox;
  u64 first, stride;
  TE_DEVICE void four(int i, u32 (&w)[4]) const {
#pragma unroll 1
    for (int k = 0; k < 4; ++k) w[k] = philox.word(first + (i + k) * stride);
  }
};

// Codes of a Run or a Column times `encode`; a NaN there makes them 7 without a sign.
template <class Line, class Words>
TE_DEVICE void fp4_codes(const Line& line, float encode, const Words& words, u32 (&out)[2]) {
  const bool nan = !(encode == encode);
  const u32 kept = nan ? 0u : 0xffffffffu, sevens = nan ? 0x77777777u : 0u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 code[8];
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      u32 w[4] = {0, 0, 0, 0};
      words.four(8 * half + four, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y = mul(magnitude(line.value(8 * half + four + i)), encode);
        code[four + i] = Words::random ? e2m1_stochastic(y, w[i]) : e2m1_nearest(y);
      }
    }
    out[half] = e2m1_pack(code) | (line.signs(half) & kept) | sevens;
  }
}

// The first `count` of 16 codes to p; `aligned`: p is, to 8 bytes.
TE_DEVICE void store_codes(u8* p, const u32 (&w)[2], bool aligned, int count) {
  if (aligned && count >= 15) {
    write(p, w);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (2 * i < count) p[i] = (u8)(w[i / 4] >> (8 * (i % 4)));
  }
}

// The first `valid` of sixteen numbers from p on, zeros for the rest; MULTIPLE as below. A thread reads the two halves of
// a sector by two instructions, so it stays in L1.
template <class T, int MULTIPLE> TE_DEVICE void load_run(const T* p, int valid, Run<T>& run) {
  constexpr int half = Chunk<T>::words;
  if constexpr (MULTIPLE % 8 == 0) {
#pragma unroll
    for (int i = 0; i < 2 * half; i += 4) {
      u32 w[4] = {0, 0, 0, 0};
      if (valid > i / half * 8) read_again((const u32*)p + i, w);
#pragma unroll
      for (int k = 0; k < 4; ++k) run.w[i + k] = w[k];
    }
  } else {
    Chunk<T> c[2];
    load<T, ANYWHERE>(p, valid < 8 ? valid : 8, c[0]);
    load<T, ANYWHERE>(p + 8, valid < 8 ? 0 : valid - 8, c[1]);
#pragma unroll
    for (int i = 0; i < 2 * half; ++i) run.w[i] = c[i / half].w[i % half];
  }
}

template <bool FIRST, class A, class B> struct Either { typedef A type; };
template <class A, class B> struct Either<false, A, B> { typedef B type; };

// A tile of 128 x 128. A warp has sixteen rows, a thread 16 columns of four of them; of the transposed copy a thread
// has 16 rows of two columns, twice. The width is a multiple of MULTIPLE: 16, 8 or 1.
template <class T, int MULTIPLE, bool SQUARE, bool ROW, bool COL, bool RHT, bool RANDOM> struct Fp4Tile {
  typedef typename Either<RHT, bf16, T>::type Kept;  // what columns are quantized from
  static constexpr int words = FP4_COLS * sizeof(T) / 4;  // of a row in shared memory
  const Fp4Arguments<T>& a;
  u32* const tile;
  float* const encodes;  // SQUARE: of the 8 x 8 blocks; their codes follow
  i64 top, left;
  const int lane, warp;

  TE_DEVICE Fp4Tile(const Fp4Arguments<T>& a, i64 index)
      : a(a), tile((u32*)dynamic_shared()), encodes((float*)(tile + FP4_ROWS * words)), lane(thread() % 32),
        warp(thread() / 32) {
    const u32 across = (u32)((a.width + FP4_COLS - 1) / FP4_COLS);
    top = (i64)((u32)index / across) * FP4_ROWS;
    left = (i64)((u32)index % across) * FP4_COLS;
  }
  TE_DEVICE u64 seed() const { return (RANDOM ? *a.seed : 0) + a.seed_offset; }
  // Word w of row i of a block of sixteen rows. Words are moved about by the block, so that the columns of four blocks
  // are in other banks.
  TE_DEVICE u32* word(int block, int i, int w) const {
    return tile + block * (16 * words) + (w ^ (block % 4 * 8)) + i * words;
  }

  TE_DEVICE void rows(const Fp4Scale& scale) {
    Run<T> kept[4];
    const int place = lane % 8 * 16, first = 16 * warp + lane / 8;
    const i64 col = left + place;
    const int valid = clamp16(a.width - col), below = clamp16(a.rows - top - first);
    auto here = [&](int i) { return 4 * i < below ? valid : 0; };
    const T* from = a.x + (top + first) * a.width + col;
#pragma unroll
    for (int i = 0; i < 4; ++i, from += 4 * a.width) {
      load_run<T, MULTIPLE>(from, here(i), kept[i]);
    }
    if constexpr (COL) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int w = 0; w < Run<T>::words; w += 4) {
          const u32 four[4] = {kept[i].w[w], kept[i].w[w + 1], kept[i].w[w + 2], kept[i].w[w + 3]};
          write_shared(word(warp, 4 * i + lane / 8, lane % 8 * Run<T>::words + w), four);
        }
    }
    if constexpr (ROW || SQUARE) {
      const Philox philox(seed(), 0);
      float most = 0.0f;
      if constexpr (SQUARE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) most = max_abs(most, kept[i].most());
        most = max_abs(most, exchange(most, 8));
        most = max_abs(most, exchange(most, 16));
      }
      const i64 bytes = (a.width + 1) / 2, scales = (a.width + 15) / 16;
      u8 *to = a.row + (top + first) * bytes + col / 2, *to_scale = a.row_scale + (top + first) * scales + col / 16;
      u64 number = (u64)((top + first) * a.width + col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float encode;
        const u32 code = scale.block(SQUARE ? most : kept[i].most(), encode);
        if constexpr (SQUARE && COL)
          if (i == 0 && lane < 8) {
            encodes[8 * warp + lane] = encode;
            ((u32*)encodes)[64 + 8 * warp + lane] = code;
          }
        if constexpr (ROW) {
          u32 out[2];
          if constexpr (RANDOM)
            fp4_codes(kept[i], encode, RunWords<MULTIPLE % 4 == 0>{philox, number, a.width % 4 == 0}, out);
          else
            fp4_codes(kept[i], encode, NoWords(), out);
          store_codes(to, out, MULTIPLE == 16 || bytes % 8 == 0, MULTIPLE == 16 ? here(i) & 16 : here(i));
          if (here(i) > 0) *to_scale = (u8)code;
          to += 4 * bytes;
          to_scale += 4 * scales;
          number += 4 * (u64)a.width;
        }
      }
    }
  }

  TE_DEVICE void columns(const Fp4Scale& scale) {
    const Philox philox(seed(), SQUARE ? 0u : 1u);
    const i64 length = RHT ? (a.rows + 15) / 16 * 16 : a.rows;  // of a line of the transposed copy
    const i64 bytes = (length + 1) / 2, scales = (length + 15) / 16;
    const int across = 16 * warp + lane / 4 * 2;  // first column
    const i64 col = left + across;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      const int down = 4 * turn + lane % 4;  // block of rows
      const i64 row = top + 16 * down;
      const int valid = clamp16(length - row);
      if (valid == 0) continue;
      u8 *to = a.col + col * bytes + row / 2, *to_scale = a.col_scale + col * scales + row / 16;
      const Pairs<Kept> pairs = read_pairs(down, across);
#pragma unroll
      for (int k = 0; k < 2; ++k, to += bytes, to_scale += scales) {
        if (col + k >= a.width) continue;
        const Column<Kept> column = {pairs, k};
        u32 out[2], code;
        float encode;
        if constexpr (SQUARE) {
          encode = encodes[8 * down + across / 16];
          code = ((u32*)encodes)[64 + 8 * down + across / 16];
        } else {
          code = scale.block(column.most(), encode);
        }
        if constexpr (!RANDOM)
          fp4_codes(column, encode, NoWords(), out);
        else if constexpr (SQUARE)
          fp4_codes(column, encode, StridedWords{philox, (u64)(row * a.width + col + k), (u64)a.width}, out);
        else
          fp4_codes(column, encode, RunWords<RHT>{philox, (u64)((col + k) * length + row), length % 4 == 0}, out);
        store_codes(to, out, bytes % 8 == 0, valid);
        *to_scale = (u8)code;
      }
    }
  }

  static TE_DEVICE int clamp16(i64 left) { return left < 0 ? 0 : left < 16 ? (int)left : 16; }
  TE_DEVICE Pairs<Kept> read_pairs(int down, int across) const {
    Pairs<T> pairs;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (sizeof(T) == 4) {
        pairs.column[0].w[i] = *word(down, i, across);
        pairs.column[1].w[i] = *word(down, i, across + 1);
      } else {
        pairs.w[i] = *word(down, i, across / 2);
      }
    }
    if constexpr (RHT)
      return hadamard(pairs);
    else
      return pairs;
  }
};

// From the last tile on: what the pass for the amax has read last may still be in L2.
template <class T, int MULTIPLE, bool SQUARE, bool ROW, bool COL, bool RHT, bool RANDOM>
TE_DEVICE void nvfp4(const Fp4Arguments<T>& a) {
  Fp4Tile<T, MULTIPLE, SQUARE, ROW, COL, RHT, RANDOM> tile(a, blocks() - 1 - block());
  const Fp4Scale scale(*a.row_amax);
  tile.rows(scale);
  if constexpr (COL) {
    barrier();
    if constexpr (RHT)
      tile.columns(Fp4Scale(*a.col_amax));
    else
      tile.columns(scale);  // one amax
  }
}

}  // namespace te
