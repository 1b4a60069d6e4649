// Philox4x32-10 with the words of te_ops.quantizers.philox: word i % 4 of block i / 4 belongs to element i.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

struct Philox {
  u32 key[2];
  u32 stream;

  // By a whole warp, with one seed.
  TE_DEVICE Philox(u64 seed, u32 stream) : key{uniform((u32)seed), uniform((u32)(seed >> 32))}, stream(stream) {}

  TE_DEVICE void words(u64 block, u32 (&w)[4]) const {
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = stream, c3 = 0, k0 = key[0], k1 = key[1];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
      c0 = (u32)(b >> 32) ^ c1 ^ k0;
      c1 = (u32)b;
      c2 = (u32)(a >> 32) ^ c3 ^ k1;
      c3 = (u32)a;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    w[0] = c0;
    w[1] = c1;
    w[2] = c2;
    w[3] = c3;
  }
  TE_DEVICE u32 word(u64 element) const {
    u32 w[4];
    words(element / 4, w);
    const u32 i = (u32)element % 4;
    return i == 0 ? w[0] : i == 1 ? w[1] : i == 2 ? w[2] : w[3];
  }
};

}  // namespace te
