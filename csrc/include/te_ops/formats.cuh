// Number formats: chunks of eight elements in registers, and conversions with the reference's bytes.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

// |x|
TE_DEVICE float magnitude(float x) { return fabsf(x); }

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

TE_DEVICE float widen(float x) { return x; }
TE_DEVICE float widen(bf16 x) { return float_of((u32)x.bits << 16); }
TE_DEVICE float widen(f16 x) { return widen_f16(x.bits); }
TE_DEVICE float widen(u8 x) { return (float)x; }

template <class T> struct Narrow;
template <> struct Narrow<bf16> {
  static TE_DEVICE u32 pair(float a, float b) { return narrow_bf16x2(a, b); }
};
template <> struct Narrow<f16> {
  static TE_DEVICE u32 pair(float a, float b) { return narrow_f16x2(a, b); }
};

// Eight consecutive elements as they are in memory. `words` 32-bit words.
template <class T> struct Chunk {
  static constexpr int words = 2 * sizeof(T);
  u32 w[words];
};

template <class T> TE_DEVICE void unpack(const Chunk<T>& c, float (&v)[8]);
template <> TE_DEVICE void unpack<float>(const Chunk<float>& c, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = float_of(c.w[i]);
}
template <> TE_DEVICE void unpack<bf16>(const Chunk<bf16>& c, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = float_of(c.w[i] << 16);
    v[2 * i + 1] = float_of(c.w[i] & 0xffff0000u);
  }
}
template <> TE_DEVICE void unpack<f16>(const Chunk<f16>& c, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = widen_f16((u16)(c.w[i] & 0xffffu));
    v[2 * i + 1] = widen_f16((u16)(c.w[i] >> 16));
  }
}
template <> TE_DEVICE void unpack<u8>(const Chunk<u8>& c, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = (float)((c.w[i / 4] >> (8 * (i % 4))) & 0xffu);
}

template <class T> TE_DEVICE void pack(const float (&v)[8], Chunk<T>& c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) c.w[i] = Narrow<T>::pair(v[2 * i], v[2 * i + 1]);
}
template <> TE_DEVICE void pack<float>(const float (&v)[8], Chunk<float>& c) {
#pragma unroll
  for (int i = 0; i < 8; ++i) c.w[i] = bits_of(v[i]);
}

template <class T> TE_DEVICE u32 raw(T x) { return x.bits; }
template <> TE_DEVICE u32 raw<float>(float x) { return bits_of(x); }
template <> TE_DEVICE u32 raw<u8>(u8 x) { return x; }

// How chunks lie: anywhere (elements are read one by one), all of them whole and aligned (`valid` is 0 or 8), or
// aligned but for a last one that may be cut. Aligned: to 16 bytes (FP32, 16-bit) or 8 (bytes).
constexpr int ANYWHERE = 0, WHOLE = 1, TAILED = 2;
constexpr int PREFETCH = 3;  // not how they lie: into L2 only
constexpr int COPY = 4;      // nor this: whole chunks, asynchronously, into shared memory, where the chunk lies

// The first `valid` elements from p on, zeros for the rest.
template <class T, int ALIGNED> TE_DEVICE void load(const T* p, int valid, Chunk<T>& c) {
  if constexpr (ALIGNED == PREFETCH) {
    if (valid > 0) prefetch(p);
    return;
  }
  if constexpr (ALIGNED == COPY) {
    static_assert(sizeof(T) != 1, "pieces of 16 bytes");
#pragma unroll
    for (int i = 0; i < Chunk<T>::words; i += 4) copy_async(c.w + i, (const u8*)p + 4 * i, valid > 0);
    return;
  }
  if (ALIGNED != ANYWHERE && valid >= 8) {
    if constexpr (sizeof(T) == 4) {
      u32 low[4], high[4];
      read(p, low);
      read(p + 4, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c.w[i] = low[i];
        c.w[i + 4] = high[i];
      }
    } else {
      read(p, c.w);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Chunk<T>::words; ++i) c.w[i] = 0;
  if constexpr (ALIGNED == WHOLE) return;
  constexpr int per = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < valid) c.w[i / per] |= raw<T>(p[i]) << (8 * sizeof(T) * (i % per) % 32);
}

template <class T> TE_DEVICE void store_one(T* p, u32 word, int place) {
  if constexpr (sizeof(T) == 4) {
    *(u32*)p = word;
  } else if constexpr (sizeof(T) == 2) {
    *(u16*)p = (u16)(word >> (16 * place));
  } else {
    *(u8*)p = (u8)(word >> (8 * place));
  }
}

// The first `valid` elements to p.
template <class T, int ALIGNED> TE_DEVICE void store(T* p, int valid, const Chunk<T>& c) {
  if (ALIGNED != ANYWHERE && valid >= 8) {
    if constexpr (sizeof(T) == 4) {
      const u32 low[4] = {c.w[0], c.w[1], c.w[2], c.w[3]}, high[4] = {c.w[4], c.w[5], c.w[6], c.w[7]};
      write(p, low);
      write(p + 4, high);
    } else {
      write(p, c.w);
    }
    return;
  }
  if constexpr (ALIGNED == WHOLE) return;
  constexpr int per = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < valid) store_one(p + i, c.w[i / per], i % per);
}

template <class T, int ALIGNED> TE_DEVICE void store(T* p, int valid, const float (&v)[8]) {
  Chunk<T> c;
  pack<T>(v, c);
  store<T, ALIGNED>(p, valid, c);
}

// The sum of eight, in pairs: three roundings deep.
TE_DEVICE float sum_of(const float (&v)[8]) {
  return add(add(add(v[0], v[1]), add(v[2], v[3])), add(add(v[4], v[5]), add(v[6], v[7])));
}

// Zeros for what does not exist.
TE_DEVICE void clear_beyond(float (&v)[8], int valid) {
  if (valid >= 8) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i >= valid) v[i] = 0.0f;
}

// v as it reads back from T.
template <class T> TE_DEVICE void round_to(float (&v)[8]) {
  Chunk<T> c;
  pack<T>(v, c);
  unpack<T>(c, v);
}
template <> TE_DEVICE void round_to<float>(float (&)[8]) {}

// FP8 by integer arithmetic, for devices without the instruction; the same bytes.
template <int MANTISSA, int BIAS> TE_DEVICE u32 software_fp8(float x, float limit) {
  u32 sign = (bits_of(x) >> 24) & 0x80u, magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  float a = float_of(magnitude);
  a = a > limit ? limit : a;
  constexpr int shift = 23 - MANTISSA;
  const float smallest = float_of((u32)(128 - BIAS) << 23);
  if (a < smallest) {
    const float steps = float_of((u32)(127 + BIAS - 1 + MANTISSA) << 23);
    return sign | (u32)nearest_int(mul(a, steps));
  }
  u32 u = bits_of(a);
  u += (1u << (shift - 1)) - 1u + ((u >> shift) & 1u);
  return sign | ((u >> shift) - ((u32)(127 - BIAS) << MANTISSA));
}

struct e4m3 {
  static constexpr float largest = 448.0f;
  static TE_DEVICE u32 pair(float low, float high) {
#if TE_FP8_INSTRUCTIONS
    return instruction_e4m3x2(low, high);
#else
    return software_fp8<3, 7>(low, 448.0f) | (software_fp8<3, 7>(high, 448.0f) << 8);
#endif
  }
  static TE_DEVICE u32 quad(float a, float b, float c, float d) {
#if TE_FP8_INSTRUCTIONS
    return instruction_e4m3x4(a, b, c, d);
#else
    return byte_perm(pair(a, b), pair(c, d), 0x5410);
#endif
  }
};

struct e5m2 {
  static constexpr float largest = 57344.0f;
  static TE_DEVICE u32 pair(float low, float high) {
#if TE_FP8_INSTRUCTIONS
    return instruction_e5m2x2(low, high);
#else
    return software_fp8<2, 15>(low, 57344.0f) | (software_fp8<2, 15>(high, 57344.0f) << 8);
#endif
  }
  static TE_DEVICE u32 quad(float a, float b, float c, float d) {
#if TE_FP8_INSTRUCTIONS
    return instruction_e5m2x4(a, b, c, d);
#else
    return byte_perm(pair(a, b), pair(c, d), 0x5410);
#endif
  }
};

// Eight values times a scale as FP8 codes: the multiplication rounds, then the conversion does.
template <class F> TE_DEVICE void encode(const float (&v)[8], float scale, u32 (&codes)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    codes[i / 4] = F::quad(mul(v[i], scale), mul(v[i + 1], scale), mul(v[i + 2], scale), mul(v[i + 3], scale));
}

// The scale of an amax (te_ops.quantizers.state.scale_from_amax).
TE_DEVICE float scale_of(float amax, float largest, float epsilon, float value_for_inf, bool pow2) {
  if (epsilon > 0.0f && amax < epsilon) amax = epsilon;
  float scale = div(largest, amax);
  if (bits_of(scale) == 0x7f800000u) scale = value_for_inf;
  const bool regular = amax > 0.0f && bits_of(amax) < 0x7f800000u;
  scale = regular ? scale : 1.0f;
  return pow2 ? float_of(bits_of(scale) & 0x7f800000u) : scale;
}

}  // namespace te
