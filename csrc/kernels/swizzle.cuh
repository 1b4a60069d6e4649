// Scales of blocks in the order in which tensor cores of sm_100 read them: 512 bytes for 128 rows and four blocks along
// the contraction, of which 16 hold four blocks each of rows r, r + 32, r + 64 and r + 96. What is beyond the end is 0.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

// Scales of one operand, and where they go. Strides in bytes. PAIRED rows come as 0, rows / 2, 1, rows / 2 + 1, ...
// An amax (NVFP4), which was mapped to `limit`, becomes the number that the whole tensor is multiplied with.
struct BlockScales {
  const u8* scale;
  u8* y;
  i64 down, across, rows, blocks, paired;
  const float* amax;
  float* whole;
  i64 limit;
};
// Both operands of a product, the first in `first` blocks of threads.
struct SwizzleArguments {
  BlockScales a, b;
  i64 first;
};

// What a code times its block's scale is multiplied with (te_ops.quantizers.nvfp4).
TE_DEVICE float tensor_scale(float amax, float limit) {
  const float infinity = float_of(0x7f800000u), ratio = div(limit, amax);
  if (!(amax > 0.0f && amax < infinity)) return 1.0f;
  return ratio < infinity ? mul(amax, div(1.0f, limit)) : div(1.0f, float_of(0x7f7fffffu));
}

// A warp makes 512 bytes.
TE_DEVICE void swizzle(const SwizzleArguments& a) {
  const bool second = block() >= a.first;
  const BlockScales& s = second ? a.b : a.a;
  const u32 index = (u32)(block() - (second ? a.first : 0)), wide = (u32)((s.blocks + 3) / 4);
  if (index == 0 && thread() == 0 && s.amax) *s.whole = tensor_scale(*s.amax, (float)s.limit);
  const u32 atom = index * 8 + thread() / 32, lane = thread() % 32;
  const i64 top = (i64)(atom / wide) * 128 + lane, left = (i64)(atom % wide) * 4;
  if (top - lane >= s.rows) return;
  u32 words[4];
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const i64 row = top + 32 * group;
    words[group] = 0;
    if (row >= s.rows) continue;
    const u8* p = s.scale + (s.paired ? row / 2 + row % 2 * (s.rows / 2) : row) * s.down + left * s.across;
    if (s.across == 1 && left + 4 <= s.blocks && ((u64)p & 3) == 0) {
      words[group] = *(const u32*)p;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (left + i < s.blocks) words[group] |= (u32)p[i * s.across] << (8 * i);
  }
  write(s.y + (i64)atom * 512 + lane * 16, words);
}

}  // namespace te
