// FP4 E2M1 with the reference's codes, by FP32 arithmetic: no device before sm_100 has the instruction.
#pragma once
#include <te_ops/formats.cuh>

namespace te {

// |x|
TE_DEVICE float magnitude(float x) { return fabsf(x); }

// Adding this rounds a small positive number to an integer, which is then in the low bits.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

// |y| as a code in the low bits of a word, nearest even: min(2 a, a + 2, a / 2 + 4), rounded, at most 7. A NaN is 7.
TE_DEVICE u32 e2m1_nearest(float a) {
  const float small = fma(a, 2.0f, ROUNDER), middle = add(a, ROUNDER + 2.0f), large = fma(a, 0.5f, ROUNDER + 4.0f);
  return bits_of(min_number(min_number(small, middle), min_number(large, ROUNDER + 7.0f)));
}
// The same to either neighbour, by 24 random bits.
TE_DEVICE u32 e2m1_stochastic(float a, u32 word) {
  a = min_number(a, 6.0f);
  const float position = min_number(min_number(add(a, a), add(a, 2.0f)), fma(a, 0.5f, 4.0f));
  const float below = add_down(position, ROUNDER);
  const float part = sub(position, sub(below, ROUNDER));
  return bits_of(below) + ((float)(word >> 8) < mul(part, 16777216.0f) ? 1u : 0u);
}

// Eight codes as a word, the first in the low bits: `code` as above, signs of `v` (none where `plain`, for NaN).
TE_DEVICE u32 e2m1_pack(const u32 (&code)[8], const float* v, bool plain) {
  const u32 sign = plain ? 0u : 0x80000000u;
  u32 w = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) w = (w << 4) + code[i] + ((bits_of(v[i]) & sign) >> 28);
  // What ROUNDER's bits have added to the three lowest codes; above, they have been shifted out.
  constexpr u32 rounder = 0x4b400000u;
  return w - (rounder + (rounder << 4) + (rounder << 8));
}

// E4M3, one code without a sign, as FP32.
TE_DEVICE float e4m3_value(u32 code) {
  return code == 0x7fu ? float_of(0x7fc00000u) : mul(float_of(code << 20), float_of(247u << 23));
}

}  // namespace te
