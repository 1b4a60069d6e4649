// New tokens of a KV cache to their slots, without the host knowing how many there are.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

// Written by te_ops.backends.cuda.kv_append. Strides are in 16 bytes; null: no starts, no pages.
struct KvAppend {
  const u8* fresh;
  u8* cache;
  const i64 *lengths, *total, *starts, *table;
  i64 fresh_entry, fresh_row, cache_entry, cache_row;  // an entry is a page, where there are pages
  i64 batch, steps, width;  // 16 bytes of a token
  i64 slots, pages;  // of an entry (position p is in p % slots), or of a page, and pages of an entry
};

// 16 bytes a thread.
template <int THREADS> TE_DEVICE void kv_append(const KvAppend& p) {
  const i64 index = block() * THREADS + thread();
  if (index >= p.batch * p.steps * p.width) return;
  const i64 at = index % p.width, row = index / p.width % p.steps, entry = index / p.width / p.steps;
  const i64 i = row - (p.starts ? p.starts[entry] : 0), first = p.lengths[entry];
  if (i < 0 || i >= p.total[entry] - first) return;
  const i64 position = first + i;
  const i64 outer = p.table ? p.table[entry * p.pages + position / p.slots] : entry;
  u32 w[4];
  read(p.fresh + 16 * (entry * p.fresh_entry + row * p.fresh_row + at), w);
  write(p.cache + 16 * (outer * p.cache_entry + position % p.slots * p.cache_row + at), w);
}

}  // namespace te
