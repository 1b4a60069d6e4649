// One step of delayed scaling for many operands: a block each. The numbers are those of te_ops.quantizers.state,
// delayed_update: the amax joins slot 0 of the window, the scale is largest / (amax of the window) / divisor, slot 0
// rolls to the end; an amax that is not finite joins as 0, is counted, and leaves the scale alone.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

struct State {
  float* scale;
  float* history;
  i64* nonfinite_steps;
  const u8* when;  // roll only if it holds; null: always
  i64 length;      // of the history
  float largest, divisor;
  int rules;        // 1: the window's amax is that of slot 0; 2: the scale is rounded down to a power of two
  int first;        // among the amaxes
  i64 count;        // of amaxes that combine by max
};

template <int STATES, int AMAXES> struct StateArguments {
  State states[STATES];
  const float* amaxes[AMAXES];
};

TE_DEVICE float larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }

template <int THREADS> TE_DEVICE float block_larger(float x) {
  TE_SHARED float shared[THREADS / 32];
  for (int mask = 16; mask > 0; mask /= 2) x = larger(x, exchange(x, mask));
  if (thread() % 32 == 0) shared[thread() / 32] = x;
  barrier();
  x = shared[0];
  for (int w = 1; w < THREADS / 32; ++w) x = larger(x, shared[w]);
  return x;
}

template <int THREADS> TE_DEVICE void update_state(const State& s, const float* const* amaxes) {
  const float infinity = float_of(0x7f800000u), most_finite = float_of(0x7f7fffffu);
  if (s.when && !*s.when) return;
  float amax = *amaxes[s.first];
  for (i64 k = 1; k < s.count; ++k) amax = larger(amax, *amaxes[s.first + k]);
  const bool finite = amax < infinity && amax > -infinity;
  const float live = larger(s.history[0], finite ? amax : 0.0f);
  float most = live;
  barrier();
  for (i64 base = 1; base < s.length; base += THREADS) {
    const i64 i = base + thread();
    const bool exists = i < s.length;
    const float x = exists ? s.history[i] : 0.0f;
    barrier();  // what is written below has been read
    if (exists) {
      most = larger(most, x);
      if (i > 1) s.history[i - 1] = x;
    }
  }
  most = block_larger<THREADS>(most);
  if (thread()) return;
  if (s.length > 1) s.history[s.length - 1] = live;
  s.history[0] = 0.0f;
  const float used = s.rules & 1 ? live : most;
  float scale = div(div(s.largest, used), s.divisor);
  scale = scale > most_finite ? most_finite : scale;
  if (s.rules & 2) scale = float_of(bits_of(scale) & 0x7f800000u);
  if (!finite)
    *s.nonfinite_steps += 1;
  else if (used > 0.0f && used < infinity && scale > 0.0f)
    *s.scale = scale;
}

}  // namespace te
