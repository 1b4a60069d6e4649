// Codes of FP8 and FP4 back to FP32, exactly.
#pragma once
#include <te_ops/fp4.cuh>

namespace te {

// Two codes in the low bytes of a word.
template <class F> TE_DEVICE void decode_pair(u32 codes, float& a, float& b);
template <> TE_DEVICE void decode_pair<e5m2>(u32 codes, float& a, float& b) {
  a = widen_f16((u16)(codes << 8));
  b = widen_f16((u16)(codes & 0xff00u));
}
template <> TE_DEVICE void decode_pair<e4m3>(u32 codes, float& a, float& b) {
#if TE_FP8_INSTRUCTIONS
  const u32 w = instruction_f16x2((u16)codes);
  a = widen_f16((u16)w);
  b = widen_f16((u16)(w >> 16));
#else
  a = e4m3_value(codes & 0x7fu);
  b = e4m3_value(codes >> 8 & 0x7fu);
  a = codes & 0x80u ? -a : a;
  b = codes & 0x8000u ? -b : b;
#endif
}

// COUNT codes from words, the first in the low bits.
template <class F> struct Codec {
  static constexpr int per_word = 4;
  template <int COUNT> static TE_DEVICE void decode(const u32* w, float* v) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) decode_pair<F>(w[i / 4] >> (8 * (i % 4)) & 0xffffu, v[i], v[i + 1]);
  }
};
struct e2m1 {};
template <> struct Codec<e2m1> {
  static constexpr int per_word = 8;
  // Two bits of exponent and one of mantissa at their places in FP32, times what the exponents are apart.
  template <int COUNT> static TE_DEVICE void decode(const u32* w, float* v) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const u32 code = w[i / 8] >> (4 * (i % 8));
      v[i] = mul(float_of((code & 7u) << 22 | (code & 8u) << 28), float_of(253u << 23));
    }
  }
};

// E8M0: 2^(code - 127); 255 is NaN.
TE_DEVICE float e8m0_value(u32 code) {
  if (code == 255u) return float_of(0x7fc00000u);
  return float_of(code == 0u ? 0x00400000u : code << 23);
}

}  // namespace te
