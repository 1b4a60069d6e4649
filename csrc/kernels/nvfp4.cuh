// NVFP4: E2M1 codes with an E4M3 scale for 16 elements along the contraction and the tensor's amax. A pass for the
// amax, and one that makes both copies: the row copy from registers, the transposed one from shared memory.
#pragma once
#include <te_ops/fp4.cuh>
#include <te_ops/philox.cuh>
#include <te_ops/reduce.cuh>

namespace te {

constexpr int FP4_ROWS = 128, FP4_COLS = 128, FP4_THREADS = 256;

// Two adjacent columns of a row as FP32, zeros for what does not exist. PAIRED: the width is even.
template <class T, bool PAIRED> TE_DEVICE void load_pair(const T* p, int valid, float& a, float& b) {
  a = valid > 0 ? widen(p[0]) : 0.0f;
  b = valid > 1 ? widen(p[1]) : 0.0f;
}
template <> TE_DEVICE void load_pair<bf16, true>(const bf16* p, int valid, float& a, float& b) {
  const u32 w = valid > 0 ? *(const u32*)p : 0u;
  a = float_of(w << 16);
  b = float_of(w & 0xffff0000u);
}
template <> TE_DEVICE void load_pair<f16, true>(const f16* p, int valid, float& a, float& b) {
  const u32 w = valid > 0 ? *(const u32*)p : 0u;
  a = widen_f16((u16)w);
  b = widen_f16((u16)(w >> 16));
}

// Bit i: whether the random Hadamard transform turns the sign of element i.
constexpr u32 HADAMARD_SIGNS = 0xd7e8u;

TE_DEVICE void turn_signs(float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (HADAMARD_SIGNS >> i & 1u) v[i] = -v[i];
}
// Four stages of sums and differences and a quarter of it (te_ops.quantizers.nvfp4).
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
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = mul(v[i], 0.25f);
}
// The transform of 16 values, rounded to BF16.
TE_DEVICE void hadamard(float (&v)[16]) {
  turn_signs(v);
  butterfly(v);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const u32 w = narrow_bf16x2(v[i], v[i + 1]);
    v[i] = float_of(w << 16);
    v[i + 1] = float_of(w & 0xffff0000u);
  }
}
TE_DEVICE void inverse_hadamard(float (&v)[16]) {
  butterfly(v);
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

// max |x| of `count` values.
template <class T> TE_DEVICE void fp4_amax(const T* p, u32* out, i64 count) {
  constexpr int UNROLL = 4;
  float most = 0.0f;
  const i64 stride = blocks() * (FP4_THREADS * UNROLL * 8);
  for (i64 base = block() * (FP4_THREADS * UNROLL * 8) + thread() * 8; base < count; base += stride) {
    Chunk<T> c[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 left = count - (base + u * FP4_THREADS * 8);
      load<T, TAILED>(p + base + u * FP4_THREADS * 8, left < 8 ? (int)(left < 0 ? 0 : left) : 8, c[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float v[8];
      unpack<T>(c[u], v);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = max_number(most, magnitude(v[i]));
    }
  }
  raise(out, most);
}

// The same of the transformed columns (and of the values). A thread has 16 rows of two columns at a time.
template <class T, bool PAIRED, bool ROW> TE_DEVICE void fp4_amax_transformed(const Fp4AmaxArguments<T>& a) {
  float row = 0.0f, col = 0.0f;
  const u32 across = (u32)((a.width + 63) / 64), down = (u32)((a.rows + 15) / 16);
  const u32 units = across * down;  // a warp each
  for (u32 unit = (u32)block() * (FP4_THREADS / 32) + thread() / 32; unit < units;
       unit += (u32)blocks() * (FP4_THREADS / 32)) {
    const i64 top = (i64)(unit / across) * 16, left = (i64)(unit % across) * 64 + thread() % 32 * 2;
    const i64 remain = a.width - left;
    const int valid = remain < 0 ? 0 : remain < 2 ? (int)remain : 2;
    float v[2][16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      load_pair<T, PAIRED>(a.x + (top + i) * a.width + left, top + i < a.rows ? valid : 0, v[0][i], v[1][i]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (ROW)
#pragma unroll
        for (int i = 0; i < 16; ++i) row = max_number(row, magnitude(v[k][i]));
      hadamard(v[k]);
#pragma unroll
      for (int i = 0; i < 16; ++i) col = max_number(col, magnitude(v[k][i]));
    }
  }
  if constexpr (ROW) raise(a.row, row);
  raise(a.col, col);
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
    encode = div(1.0f, mul(e4m3_value(code), inverse));
    encode = encode > largest ? largest : encode;
    return code;
  }
};

// The random words of 16 elements of a line, `stride` apart; as a run they share blocks of four where they can.
struct NoWords {
  static constexpr bool random = false;
  TE_DEVICE void four(int, u32 (&)[4]) const {}
};
struct RunWords {
  static constexpr bool random = true;
  const Philox& philox;
  u64 first;
  bool whole;  // first is a multiple of four
  TE_DEVICE void four(int i, u32 (&w)[4]) const {
    if (whole) {
      philox.words((first + i) / 4, w);
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

template <class Words> TE_DEVICE void fp4_codes(const float (&v)[16], float encode, const Words& words, u32 (&out)[2]) {
  const bool nan = !(encode == encode);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 code[8];
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      u32 w[4] = {0, 0, 0, 0};
      words.four(8 * half + four, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y = mul(magnitude(v[8 * half + four + i]), encode);
        code[four + i] = Words::random ? e2m1_stochastic(y, w[i]) : e2m1_nearest(y);
      }
    }
    out[half] = e2m1_pack(code, &v[8 * half], nan);
  }
}

// Up to 16 codes of a line of `count` to p, the line's place for them.
TE_DEVICE void store_codes(u8* p, const u32 (&w)[2], i64 line_bytes, int count) {
  if (count <= 0) return;
  if (line_bytes % 8 == 0 && count >= 15) {
    write(p, w);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (2 * i < count) p[i] = (u8)(w[i / 4] >> (8 * (i % 4)));
  }
}

TE_DEVICE float most_of(const float (&v)[16]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) most = max_abs(most, v[i]);
  return most;
}

// A tile of 128 x 128. A warp has sixteen rows, a thread 16 columns of four of them; of the transposed copy a thread
// has 16 rows of two columns, twice.
template <class T, bool ALIGNED, bool SQUARE, bool ROW, bool COL, bool RHT, bool RANDOM> struct Fp4Tile {
  static constexpr int words = FP4_COLS * sizeof(T) / 4;  // of a row in shared memory
  const Fp4Arguments<T>& a;
  u32* const tile;
  float* const encodes;  // SQUARE: of the 8 x 8 blocks; their codes follow
  i64 top, left;
  const int lane, warp;

  TE_DEVICE Fp4Tile(const Fp4Arguments<T>& a)
      : a(a), tile((u32*)dynamic_shared()), encodes((float*)(tile + FP4_ROWS * words)), lane(thread() % 32),
        warp(thread() / 32) {
    const u32 across = (u32)((a.width + FP4_COLS - 1) / FP4_COLS);
    top = (i64)((u32)block() / across) * FP4_ROWS;
    left = (i64)((u32)block() % across) * FP4_COLS;
  }
  TE_DEVICE u64 seed() const { return (RANDOM ? *a.seed : 0) + a.seed_offset; }
  // Words of a row are moved about by its block of sixteen, so that the columns of four blocks are in other banks.
  TE_DEVICE u32* word(int row, int w) const { return tile + row * words + (w ^ (row / 16 % 4 * 8)); }

  TE_DEVICE void rows() {
    Chunk<T> kept[4][2];
    const int place = lane % 8 * 16;
    const i64 col = left + place;
    const int valid = clamp16(a.width - col);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + 4 * i + lane / 8;
      const T* p = a.x + (top + row) * a.width + col;
      const int here = top + row < a.rows ? valid : 0;
      load<T, ALIGNED ? WHOLE : ANYWHERE>(p, here < 8 ? here : 8, kept[i][0]);
      load<T, ALIGNED ? WHOLE : ANYWHERE>(p + 8, here < 8 ? 0 : here - 8, kept[i][1]);
    }
    if constexpr (COL) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          constexpr int n = Chunk<T>::words;
#pragma unroll
          for (int w = 0; w < n; w += 4) {
            const u32 four[4] = {kept[i][h].w[w], kept[i][h].w[w + 1], kept[i][h].w[w + 2], kept[i][h].w[w + 3]};
            write_shared(word(16 * warp + 4 * i + lane / 8, (lane % 8 * 2 + h) * n + w), four);
          }
        }
    }
    if constexpr (ROW || SQUARE) {
      const Fp4Scale scale(*a.row_amax);
      const Philox philox(seed(), 0);
      float most = 0.0f;
      if constexpr (SQUARE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float v[16];
          unpack_both(kept[i], v);
          most = max_abs(most, most_of(v));
        }
        most = max_abs(most, exchange(most, 8));
        most = max_abs(most, exchange(most, 16));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 row = top + 16 * warp + 4 * i + lane / 8;
        const int here = row < a.rows ? valid : 0;
        float v[16], encode;
        unpack_both(kept[i], v);
        const u32 code = scale.block(SQUARE ? most : most_of(v), encode);
        if constexpr (SQUARE && COL)
          if (i == 0 && lane < 8) {
            encodes[8 * warp + lane] = encode;
            ((u32*)encodes)[64 + 8 * warp + lane] = code;
          }
        if constexpr (ROW) {
          u32 out[2];
          const u64 first = (u64)(row * a.width + col);
          if constexpr (RANDOM)
            fp4_codes(v, encode, RunWords{philox, first, a.width % 4 == 0}, out);
          else
            fp4_codes(v, encode, NoWords(), out);
          const i64 bytes = (a.width + 1) / 2;
          store_codes(a.row + row * bytes + col / 2, out, bytes, here);
          if (here > 0) a.row_scale[row * ((a.width + 15) / 16) + col / 16] = (u8)code;
        }
      }
    }
  }

  TE_DEVICE void columns() {
    const Fp4Scale scale(*a.col_amax);
    const Philox philox(seed(), SQUARE ? 0u : 1u);
    const i64 length = RHT ? (a.rows + 15) / 16 * 16 : a.rows;  // of a line of the transposed copy
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      const int down = 4 * turn + lane % 4, across = 16 * warp + lane / 4 * 2;  // block of rows, first column
      const i64 row = top + 16 * down, col = left + across;
      const int valid = clamp16(length - row);
      if (valid == 0) continue;
      float v[2][16];
#pragma unroll
      for (int i = 0; i < 16; ++i) pair(16 * down + i, across, v[0][i], v[1][i]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (col + k >= a.width) continue;
        if constexpr (RHT) hadamard(v[k]);
        u32 out[2], code;
        float encode;
        if constexpr (SQUARE) {
          encode = encodes[8 * down + across / 16];
          code = ((u32*)encodes)[64 + 8 * down + across / 16];
        } else {
          code = scale.block(most_of(v[k]), encode);
        }
        const u64 line = (u64)((col + k) * length + row);
        if constexpr (!RANDOM)
          fp4_codes(v[k], encode, NoWords(), out);
        else if constexpr (SQUARE)
          fp4_codes(v[k], encode, StridedWords{philox, (u64)(row * a.width + col + k), (u64)a.width}, out);
        else
          fp4_codes(v[k], encode, RunWords{philox, line, length % 4 == 0}, out);
        const i64 bytes = (length + 1) / 2;
        store_codes(a.col + (col + k) * bytes + row / 2, out, bytes, valid);
        a.col_scale[(col + k) * ((length + 15) / 16) + row / 16] = (u8)code;
      }
    }
  }

  static TE_DEVICE int clamp16(i64 left) { return left < 0 ? 0 : left < 16 ? (int)left : 16; }
  static TE_DEVICE void unpack_both(const Chunk<T> (&c)[2], float (&v)[16]) {
    float low[8], high[8];
    unpack<T>(c[0], low);
    unpack<T>(c[1], high);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = low[i];
      v[i + 8] = high[i];
    }
  }
  TE_DEVICE void pair(int row, int col, float& x, float& y) const {
    if constexpr (sizeof(T) == 4) {
      x = float_of(*word(row, col));
      y = float_of(*word(row, col + 1));
    } else {
      load_pair<T, true>((const T*)word(row, col / 2), 2, x, y);
    }
  }
};

template <class T, bool ALIGNED, bool SQUARE, bool ROW, bool COL, bool RHT, bool RANDOM>
TE_DEVICE void nvfp4(const Fp4Arguments<T>& a) {
  Fp4Tile<T, ALIGNED, SQUARE, ROW, COL, RHT, RANDOM> tile(a);
  tile.rows();
  if constexpr (COL) {
    barrier();
    tile.columns();
  }
}

}  // namespace te
