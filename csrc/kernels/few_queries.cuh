// Attention of a few queries over many keys: blocks share the keys of a head out, each reads its own once for all rows
// that see them, and another kernel merges their results.
#pragma once
#include <te_ops/formats.cuh>
#include <te_ops/reduce.cuh>

namespace te {

// The score of a key that is not seen.
#define TE_FEW_NONE te::float_of(0xff800000u)

// Written by te_ops.backends.cuda.few_queries. Strides and positions are in elements; null: there is none of it.
struct FewKeys {
  i64 entry, row, head;  // from an entry of the batch (or a page), a row (a slot), a head to the next
};
struct FewCall {
  const void *q, *k, *v;
  float* parts;  // [batch, key heads, rows, splits, DV + 2]: a sum over values, its largest score, the sum of weights
  const i64 *q_starts, *q_lens, *kv_starts, *kv_lens, *table;
  FewKeys at_q, at_k, at_v;
  i64 batch, s_q, s_kv, heads, splits, page, pages;  // key heads; slots of a page, pages of an entry
  i64 scale;  // the bits of an FP32 number
};

// Where a sequence's rows or keys lie among those of its entry.
struct FewSpan {
  i64 start, count;
};
TE_DEVICE FewSpan span_of(const i64* starts, const i64* lens, i64 entry, i64 size) {
  i64 start = starts ? starts[entry] : 0;
  start = start < 0 ? 0 : start > size ? size : start;
  i64 count = lens ? lens[entry] : size - start;
  count = count < 0 ? 0 : count > size - start ? size - start : count;
  return {start, count};
}

// A row of a key head: query i of a head among those that share it, and the keys that it sees.
struct FewRow {
  int i, head, low, high;
};
template <class F> TE_DEVICE FewRow row_of(const F& f, const FewCall& p, i64 row, i64 queries, i64 keys) {
  const i64 i = row / F::GROUP, middle = i + (F::ending ? keys - queries : 0);
  const i64 from = f.left < 0 ? 0 : middle - f.left, to = f.right < 0 ? keys : middle + f.right + 1;
  const i64 low = from < 0 ? 0 : from, high = to > keys ? keys : to;
  const bool sees = i < queries && high > low;
  return {(int)i, (int)(row % F::GROUP), sees ? (int)low : 0, sees ? (int)high : 0};
}

TE_DEVICE float power(float x, float largest) { return exp2f(x - (largest == TE_FEW_NONE ? 0.0f : largest)); }

// Sums of LANES adjacent threads of each of COUNT values, shared out: a thread gets EACH = max(COUNT / LANES, 1) of them,
// from `held` on. Half as many exchanges as values, instead of one a value and step.
template <int COUNT, int LANES> TE_DEVICE int held(int lane) {
  return COUNT >= LANES ? lane * (COUNT / LANES) : lane / (LANES / COUNT);
}
template <int COUNT, int LANES> TE_DEVICE void shared_sums(float (&x)[COUNT], int lane) {
  int n = COUNT;
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    if (n > 1) {
      const bool upper = lane & mask;
      n /= 2;
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i)
        if (i < n) {
          const float low = x[i], high = x[i + n];
          x[i] = add(upper ? high : low, exchange(upper ? low : high, mask));
        }
    } else {
      x[0] = add(x[0], exchange(x[0], mask));
    }
  }
}

// F, written by the planner: D, DV, GROUP (query heads a key head), `left` and `right` (-1: an open side), `ending`
// (the diagonal ends at the last key), `paged`, `score(s, i, j, head, batch)`. A key is read by LANES threads, eight
// features each; ROWS rows a block, STEP keys a round, of which STAGES are on their way.
template <class T, class F, int LANES, int ROWS, int STEP, int STAGES, int THREADS>
TE_DEVICE void few_queries(const FewCall& p, const F& f) {
  constexpr int PER = 32 / LANES, WARPS = THREADS / 32, UNIT = WARPS * PER * STEP;
  constexpr int COUNT = ROWS * STEP, EACH = COUNT > LANES ? COUNT / LANES : 1;
  constexpr int OWN = EACH > STEP ? EACH / STEP : 1, WITHIN = EACH / OWN;  // rows that a thread has, scores of each
  constexpr int TWINS = LANES > COUNT ? LANES / COUNT : 1, SPREAD = STEP / WITHIN * TWINS;  // threads that share a row
  const int lane = thread() % 32, warp = thread() / 32, group = lane / LANES, own = lane % LANES, first = 8 * own;
  const i64 chunks = (p.s_q * F::GROUP + ROWS - 1) / ROWS;
  i64 at = block();
  const i64 split = at % p.splits; at /= p.splits;
  const i64 chunk = at % chunks; at /= chunks;
  const i64 head = at % p.heads, entry = at / p.heads;
  const FewSpan rows = span_of(p.q_starts, p.q_lens, entry, p.s_q);
  const FewSpan keys = span_of(p.kv_starts, p.kv_lens, entry, p.s_kv);

  float q[ROWS][8], sum[ROWS][8];
  int begin = 0x7fffffff, end = 0;
  const float scale = float_of((u32)p.scale);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const FewRow row = row_of<F>(f, p, chunk * ROWS + r, rows.count, keys.count);
    Chunk<T> x;
#pragma unroll
    for (int w = 0; w < Chunk<T>::words; ++w) x.w[w] = 0;
    if (row.high > row.low) {
      begin = row.low < begin ? row.low : begin;
      end = row.high > end ? row.high : end;
      const i64 place = entry * p.at_q.entry + (rows.start + row.i) * p.at_q.row;
      if (first < F::D) read((const T*)p.q + place + (head * F::GROUP + row.head) * p.at_q.head + first, x.w);
    }
    unpack<T>(x, q[r]);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      q[r][c] = mul(q[r][c], scale);
      sum[r][c] = 0.0f;
    }
  }
  FewRow mine[OWN];
  float most[OWN], weight[OWN];
  const int held_first = held<COUNT, LANES>(own);
#pragma unroll
  for (int o = 0; o < OWN; ++o) {
    mine[o] = row_of<F>(f, p, chunk * ROWS + held_first / STEP + o, rows.count, keys.count);
    most[o] = TE_FEW_NONE;
    weight[o] = 0.0f;
  }
  if (begin > end) begin = end;
  const i64 rounds = (end - begin + UNIT - 1) / UNIT, each = (rounds + p.splits - 1) / p.splits * UNIT;
  const i64 from = begin + split * each, stop = from + each < end ? from + each : end;
  const T *k = (const T*)p.k + head * p.at_k.head + first, *v = (const T*)p.v + head * p.at_v.head + first;

  // A thread's own keys and values: nobody else reads what it asked for.
  u8* stage = dynamic_shared() + 16 * thread();
  const auto ask = [&](i64 round, int place) {
#pragma unroll
    for (int s = 0; s < STEP; ++s) {
      const i64 j = round + (s * WARPS + warp) * PER + group;
      const bool there = j < stop;
      i64 outer = entry, inner = keys.start + (there ? j : 0);
      if constexpr (F::paged) {
        const u32 slot = (u32)inner, number = slot / (u32)p.page;
        outer = there ? p.table[entry * p.pages + number] : 0;
        inner = slot - number * (u32)p.page;
      }
      u8* to = stage + 16 * THREADS * (2 * STEP * place + s);
      copy_async(to, k + outer * p.at_k.entry + inner * p.at_k.row, there && first < F::D);
      copy_async(to + 16 * THREADS * STEP, v + outer * p.at_v.entry + inner * p.at_v.row, there && first < F::DV);
    }
  };
  i64 asked = from;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i, asked += UNIT) {
    if (asked < stop) ask(asked, i);
    commit_copies();
  }
  int place = 0;
  for (i64 round = from; round < stop; round += UNIT) {
    wait_copies<STAGES - 2>();
    float score[COUNT];
#pragma unroll
    for (int s = 0; s < STEP; ++s) {
      Chunk<T> key;
      float x[8];
      read_shared(stage + 16 * THREADS * (2 * STEP * place + s), key.w);
      unpack<T>(key, x);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float product = 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) product = fma(q[r][c], x[c], product);
        score[r * STEP + s] = product;
      }
    }
    shared_sums<COUNT, LANES>(score, own);
    float old[OWN];
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
      float largest = most[o];
#pragma unroll
      for (int e = 0; e < WITHIN; ++e) {
        const int s = (held_first + e) % STEP, j = (int)(round + (s * WARPS + warp) * PER + group);
        float& x = score[o * WITHIN + e];
        x = f.score(x, (float)mine[o].i, (float)j, head * F::GROUP + mine[o].head, entry);
        x = j < stop && j >= mine[o].low && j < mine[o].high ? mul(x, 1.44269504f) : TE_FEW_NONE;
        largest = max_number(largest, x);
      }
#pragma unroll
      for (int mask = TWINS; mask < SPREAD; mask *= 2) largest = max_number(largest, exchange(largest, mask));
      old[o] = power(most[o], largest);
      most[o] = largest;
      weight[o] = mul(weight[o], old[o]);
#pragma unroll
      for (int e = 0; e < WITHIN; ++e) {
        float& x = score[o * WITHIN + e];
        x = power(x, largest);
        weight[o] = add(weight[o], x);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float factor = from_lane(old[r % OWN], group * LANES + r / OWN * SPREAD);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[r][c] = mul(sum[r][c], factor);
    }
#pragma unroll
    for (int s = 0; s < STEP; ++s) {
      Chunk<T> value;
      float x[8];
      read_shared(stage + 16 * THREADS * (2 * STEP * place + STEP + s), value.w);
      unpack<T>(value, x);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int index = r * STEP + s;
        const float factor = from_lane(score[index % EACH], group * LANES + index / EACH * TWINS);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[r][c] = fma(factor, x[c], sum[r][c]);
      }
    }
    if (asked < stop) ask(asked, place == 0 ? STAGES - 1 : place - 1);
    commit_copies();
    asked += UNIT;
    place = place == STAGES - 1 ? 0 : place + 1;
  }
  wait_copies<0>();

  // All threads get all rows: sums of weights of the threads that share a row, once each.
  float all_most[ROWS], all_weight[ROWS];
#pragma unroll
  for (int o = 0; o < OWN; ++o)
#pragma unroll
    for (int mask = TWINS; mask < SPREAD; mask *= 2) weight[o] = add(weight[o], exchange(weight[o], mask));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    all_most[r] = from_lane(most[r % OWN], group * LANES + r / OWN * SPREAD);
    all_weight[r] = from_lane(weight[r % OWN], group * LANES + r / OWN * SPREAD);
  }

  // Groups of a warp, then warps of the block.
#pragma unroll
  for (int mask = LANES; mask < 32; mask *= 2) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float other = exchange(all_most[r], mask), largest = max_number(all_most[r], other);
      const float ours = power(all_most[r], largest), theirs = power(other, largest);
      all_weight[r] = add(mul(all_weight[r], ours), mul(exchange(all_weight[r], mask), theirs));
      all_most[r] = largest;
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[r][c] = add(mul(sum[r][c], ours), mul(exchange(sum[r][c], mask), theirs));
    }
  }
  constexpr int WIDE = F::DV + 2;
  static_assert(sizeof(float) * WARPS * ROWS * WIDE <= 32 * STEP * STAGES * THREADS, "more than keys and values need");
  auto shared = (float (*)[ROWS][WIDE])dynamic_shared();  // where keys and values were, which all have read
  barrier();
  if (group == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first < F::DV)
#pragma unroll
        for (int c = 0; c < 8; ++c) shared[warp][r][first + c] = sum[r][c];
      if (first == 0) shared[warp][r][F::DV] = all_most[r], shared[warp][r][F::DV + 1] = all_weight[r];
    }
  }
  barrier();
  for (int e = thread(); e < ROWS * WIDE; e += THREADS) {
    const int r = e / WIDE, c = e % WIDE;
    const i64 row = chunk * ROWS + r;
    if (row >= p.s_q * F::GROUP) continue;
    float largest = TE_FEW_NONE, made = 0.0f;
    for (int w = 0; w < WARPS; ++w) largest = max_number(largest, shared[w][r][F::DV]);
    for (int w = 0; w < WARPS; ++w) made = fma(power(shared[w][r][F::DV], largest), shared[w][r][c], made);
    p.parts[(((entry * p.heads + head) * p.s_q * F::GROUP + row) * p.splits + split) * WIDE + c] =
        c == F::DV ? largest : made;
  }
}

struct FewMerge {
  const float* parts;
  void* o;
  float* lse;  // [batch, heads, rows]
  const void* sink;  // one a head, FP32, or null
  const i64 *q_starts, *q_lens;
  i64 o_entry, o_row;  // elements from an entry and from a row to the next; heads lie behind one another
  i64 batch, s_q, heads, splits;
};

// A block a row of a head: tensor rows that no sequence has become 0, and their lse +inf, like rows that see no key.
template <class T, class F, int THREADS> TE_DEVICE void few_queries_merged(const FewMerge& p) {
  constexpr int WIDE = F::DV + 2;
  const i64 heads = p.heads * F::GROUP;
  const i64 head = block() % heads, place = block() / heads % p.s_q, entry = block() / heads / p.s_q;
  const FewSpan rows = span_of(p.q_starts, p.q_lens, entry, p.s_q);
  const i64 i = place - rows.start;
  const bool there = i >= 0 && i < rows.count;
  const i64 row = i * F::GROUP + head % F::GROUP;
  const float* own =
      p.parts + ((entry * p.heads + head / F::GROUP) * p.s_q * F::GROUP + (there ? row : 0)) * p.splits * WIDE;
  float largest = TE_FEW_NONE, weight = 0.0f;
  if (there) {
    for (i64 s = thread() % 32; s < p.splits; s += 32) largest = max_number(largest, own[s * WIDE + F::DV]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) largest = max_number(largest, exchange(largest, mask));
    for (i64 s = thread() % 32; s < p.splits; s += 32)
      weight = fma(power(own[s * WIDE + F::DV], largest), own[s * WIDE + F::DV + 1], weight);
    weight = lane_sum<32>(weight);
  }
  const bool empty = weight == 0.0f;
  float lse = empty ? float_of(0x7f800000u) : mul(add(largest, log2f(weight)), 0.69314718f);
  float factor = empty ? 0.0f : div(1.0f, weight);
  if (p.sink && !empty) {
    const float sink = ((const float*)p.sink)[head], apart = sub(sink, lse);
    factor = div(factor, add(1.0f, exp2f(mul(apart, 1.44269504f))));
    const float more = apart > 0.0f ? apart : 0.0f, gap = apart > 0.0f ? -apart : apart;
    lse = add(add(lse, more), log1pf(exp2f(mul(gap, 1.44269504f))));
  }
  for (int c = thread(); c < F::DV; c += THREADS) {
    float made = 0.0f;
    if (!empty)
      for (i64 s = 0; s < p.splits; ++s) made = fma(power(own[s * WIDE + F::DV], largest), own[s * WIDE + c], made);
    const u32 pair = Narrow<T>::pair(mul(made, factor), 0.0f);
    ((u16*)p.o)[entry * p.o_entry + place * p.o_row + head * F::DV + c] = (u16)pair;
  }
  if (thread() == 0) p.lse[(entry * heads + head) * p.s_q + place] = lse;
}

}  // namespace te
