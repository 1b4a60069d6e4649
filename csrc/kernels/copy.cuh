// Several tensors copied in one launch: what goes into a recorded graph's memory, and what comes out of it.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

struct Copy {
  u8* into;        // both at a multiple of 16 bytes
  const u8* from;  // the same: nothing is to be done
  i64 bytes;
  i64 end;  // blocks of this tensor and of those before it
};

template <int COUNT> struct Copies {
  Copy item[COUNT];
};

// Each block copies UNROLL * THREADS * 16 bytes. Items that are not used have no blocks.
template <int COUNT, int THREADS, int UNROLL> TE_DEVICE void copy_several(const Copies<COUNT>& p) {
  const i64 place = block();
  int k = 0;
  while (k < COUNT - 1 && place >= p.item[k].end) ++k;
  const Copy& c = p.item[k];
  if (c.into == c.from) return;
  const i64 base = (place - (k ? p.item[k - 1].end : 0)) * (UNROLL * THREADS * 16) + thread() * 16;
  u32 words[UNROLL][4];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const i64 at = base + i * (THREADS * 16);
    if (at + 16 <= c.bytes) read(c.from + at, words[i]);
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const i64 at = base + i * (THREADS * 16);
    if (at + 16 <= c.bytes)
      write(c.into + at, words[i]);
    else
      for (i64 j = at; j < c.bytes; ++j) c.into[j] = c.from[j];
  }
}

}  // namespace te
