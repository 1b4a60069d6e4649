// FP4 E2M1 with the reference's codes, by FP32 arithmetic: no device before sm_100 has the instruction.
#pragma once
#include <te_ops/formats.cuh>

namespace te {

// Adding this rounds a small positive number to an integer, which is then in the low bits.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

// Where a > 2 is among the codes beyond 4: 2 * middle + high, each exact, and at most one of them no whole number of
// codes. Saturation (to [0, 1]; a NaN is 0) costs no instruction, and the FP32 pipes have twice the rate of the one that
// minima and integers take.
struct E2m1Tail {
  float middle, high;
  TE_DEVICE explicit E2m1Tail(float a)
      : middle(fma_saturated(a, 0.5f, -1.0f)), high(fma_saturated(a, 0.5f, -2.0f)) {}
};

// a >= 0 as a code in the low bits of a word (which has those of ROUNDER too), nearest even.
TE_DEVICE u32 e2m1_nearest(float a) {
  const E2m1Tail tail(a);
  const float low = fma(mul_saturated(a, 0.5f), 4.0f, ROUNDER);
  return bits_of(add(fma(tail.middle, 2.0f, low), tail.high));
}
constexpr float UNITS = 42535295865117307932921825928971026432.0f;  // 2^125
// The same to either neighbour, by 24 random bits: position - bits * 2^-24, rounded up to a code. Rounding the difference
// up as well never takes it across a code. The bits are a number of FP32 as they are, in units of 2^-149.
TE_DEVICE u32 e2m1_stochastic(float a, u32 word) {
  const E2m1Tail tail(a);
  const float position = add(fma(tail.middle, 2.0f, min_number(add(a, a), 4.0f)), tail.high);
  return bits_of(add_up(fma_up(float_of(word >> 8), -UNITS, position), ROUNDER));
}

// Eight codes as a word, the first in the low bits; `code` as above.
TE_DEVICE u32 e2m1_pack(const u32 (&code)[8]) {
  u32 w = code[7];
#pragma unroll
  for (int i = 6; i >= 0; --i) w = (w << 4) + code[i];
  // What ROUNDER's bits have added to the three lowest codes; above, they have been shifted out.
  constexpr u32 rounder = 0x4b400000u;
  return w - (rounder + (rounder << 4) + (rounder << 8));
}

// Signs of the halves of four words, one in the highest bit of each byte: `first` of the low halves, `second` of the
// high.
TE_DEVICE void sign_bytes(u32 a, u32 b, u32 c, u32 d, u32& first, u32& second) {
  const u32 ab = byte_perm(a, b, 0x7351), cd = byte_perm(c, d, 0x7351);
  first = byte_perm(ab, cd, 0x5410);
  second = byte_perm(ab, cd, 0x7632);
}
// Signs of eight codes where they belong, from bytes of the even and of the odd ones.
TE_DEVICE u32 e2m1_signs(u32 even, u32 odd) { return (even >> 4 & 0x08080808u) | (odd & 0x80808080u); }

// E4M3, one code without a sign, as FP32.
TE_DEVICE float e4m3_value(u32 code) {
#if TE_FP8_INSTRUCTIONS
  return widen_f16((u16)instruction_f16x2((u16)code));
#else
  return code == 0x7fu ? float_of(0x7fc00000u) : mul(float_of(code << 20), float_of(247u << 23));
#endif
}

}  // namespace te
