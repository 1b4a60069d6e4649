// Records back to numbers: codes times the scale of their block, in FP32, and one rounding. Codes that lie as the
// tensor does are read in chunks of eight; a transposed copy goes through shared memory.
#pragma once
#include <kernels/nvfp4.cuh>
#include <te_ops/decode.cuh>

namespace te {

// A matrix of scales: one for TALL x WIDE elements, 0 for all of them. Strides in elements.
template <int TALL, int WIDE> struct GridScales {
  const float* scale;
  i64 down, across;
  TE_DEVICE float at(i64 row, i64 col) const {
    return scale[(TALL > 0 ? row / (TALL > 0 ? TALL : 1) * down : 0) + (WIDE > 0 ? col / (WIDE > 0 ? WIDE : 1) * across : 0)];
  }
};
template <int TALL, int WIDE> struct E8m0Scales {
  const u8* scale;
  i64 down, across;
  TE_DEVICE float at(i64 row, i64 col) const { return e8m0_value(scale[row / TALL * down + col / WIDE * across]); }
  // Those of eight columns that have one each.
  template <bool ALIGNED> TE_DEVICE void eight(i64 row, i64 col, int valid, float (&v)[8]) const {
    if (ALIGNED && across == 1 && down % 8 == 0) {
      u32 w[2];
      read(scale + row / TALL * down + col, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = e8m0_value(w[i / 4] >> (8 * (i % 4)) & 0xffu);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = at(row, i < valid ? col + i : col);
    }
  }
};
// NVFP4 (te_ops.quantizers.nvfp4): LIMIT is what an amax is mapped to; `step` is 1 where every row has an amax.
template <int LIMIT> struct Fp4Scales {
  const u8* scale;
  const float* amax;
  i64 down, across, step;
  TE_DEVICE float at(i64 row, i64 col) const {
    const float most = amax[row * step], s8 = e4m3_value(scale[row * down + col / 16 * across]);
    constexpr float inverse = (float)(1.0 / LIMIT);
    const float infinity = float_of(0x7f800000u), largest = float_of(0x7f7fffffu);
    const float ratio = div((float)LIMIT, most);
    if (most < infinity && ratio < infinity) {
      const float value = mul(mul(s8, most), inverse);
      return value == infinity ? mul(s8, mul(most, inverse)) : value;
    }
    const float global = most > 0.0f && most < infinity ? min_number(ratio, largest) : 1.0f;
    return mul(s8, div(1.0f, global));
  }
};

template <class Scales, class T> struct DequantizeArguments {
  const u8* codes;
  T* y;
  Scales scales;
  i64 rows, width;
};

// Bits of a line of `count` codes from `first` on, COUNT at most; ALIGNED: they are whole and aligned.
template <class F, int COUNT, bool ALIGNED> TE_DEVICE void load_codes(const u8* line, i64 first, int count, u32* w) {
  constexpr int per_byte = Codec<F>::per_word / 4, bytes = COUNT / per_byte, n = bytes / 4;
  const u8* p = line + first / per_byte;
#pragma unroll
  for (int i = 0; i < n; ++i) w[i] = 0;
  if (count <= 0) return;
  if constexpr (ALIGNED) {
    if constexpr (bytes == 4) {
      w[0] = *(const u32*)p;
    } else if constexpr (bytes == 8) {
      u32 two[2];
      read(p, two);
      w[0] = two[0];
      w[1] = two[1];
    } else {
      u32 four[4];
      read(p, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = four[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < bytes; ++i)
      if (i * per_byte < count) w[i / 4] |= (u32)p[i] << (8 * (i % 4));
  }
}

// Chunks of eight columns, numbered through all rows. EACH: every column has a scale of its own.
template <class F, class Scales, class T, bool ALIGNED, bool EACH, int UNROLL>
TE_DEVICE void dequantize(const DequantizeArguments<Scales, T>& a) {
  const u32 chunks = (u32)((a.width + 7) / 8), total = (u32)a.rows * chunks;
  const u32 first = (u32)block() * (256 * UNROLL) + thread();
  const i64 line = Codec<F>::per_word == 8 ? (a.width + 1) / 2 : a.width;
  u32 codes[UNROLL][2];
  i64 row[UNROLL], col[UNROLL];
  int valid[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const u32 index = first + u * 256;
    row[u] = index / chunks;
    col[u] = 8 * (i64)(index % chunks);
    const i64 left = a.width - col[u];
    valid[u] = index < total ? (left < 8 ? (int)left : 8) : 0;
    load_codes<F, 8, ALIGNED>(a.codes + row[u] * line, col[u], valid[u], codes[u]);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (valid[u] <= 0) continue;
    float v[8];
    Codec<F>::template decode<8>(codes[u], v);
    float scale[EACH ? 8 : 1];
    if constexpr (EACH)
      a.scales.template eight<ALIGNED>(row[u], col[u], valid[u], scale);
    else
      scale[0] = a.scales.at(row[u], col[u]);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul(v[i], scale[EACH ? i : 0]);
    store<T, ALIGNED ? WHOLE : ANYWHERE>(a.y + row[u] * a.width + col[u], valid[u], v);
  }
}

// y [rows, width] from codes [width, length]: tiles of 64 columns and 128 rows. LENGTH16: lines are filled up to 16.
template <class F, class Scales, class T, bool ALIGNED, bool WHOLE_LINES, bool LENGTH16>
TE_DEVICE void dequantize_transposed(const DequantizeArguments<Scales, T>& a) {
  constexpr int LINES = 64, LONG = 128, PITCH = LONG + 1;
  TE_SHARED float tile[LINES][PITCH];
  const u32 across = (u32)((a.width + LINES - 1) / LINES);
  const i64 left = (i64)((u32)block() % across) * LINES, top = (i64)((u32)block() / across) * LONG;
  const i64 length = LENGTH16 ? (a.rows + 15) / 16 * 16 : a.rows;
  const i64 bytes = Codec<F>::per_word == 8 ? (length + 1) / 2 : length;
#pragma unroll
  for (int turn = 0; turn < LINES * LONG / (16 * 256); ++turn) {
    const int unit = turn * 256 + thread(), run = unit % 2 + unit / 128 * 2, line = unit / 2 % 64;
    const i64 col = left + line, row = top + 16 * run, remain = length - row;
    const int valid = col < a.width ? (remain < 0 ? 0 : remain < 16 ? (int)remain : 16) : 0;
    u32 codes[4];
    float v[16];
    load_codes<F, 16, WHOLE_LINES>(a.codes + col * bytes, row, valid, codes);
    Codec<F>::template decode<16>(codes, v);
    const float scale = valid > 0 ? a.scales.at(col, row) : 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = mul(v[i], scale);
    if constexpr (LENGTH16) inverse_hadamard(v);
#pragma unroll
    for (int i = 0; i < 16; ++i) tile[line][16 * run + i] = v[i];
  }
  barrier();
#pragma unroll
  for (int turn = 0; turn < LINES * LONG / (8 * 256); ++turn) {
    const int unit = turn * 256 + thread(), chunk = unit % (LINES / 8), local = unit / (LINES / 8);
    const i64 row = top + local, col = left + 8 * chunk, remain = a.width - col;
    const int valid = row < a.rows ? (remain < 0 ? 0 : remain < 8 ? (int)remain : 8) : 0;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = tile[8 * chunk + i][local];
    if (valid > 0) store<T, ALIGNED ? WHOLE : ANYWHERE>(a.y + row * a.width + col, valid, v);
  }
}

}  // namespace te
