// Reductions in a fixed order inside a block.
#pragma once
#include <te_ops/machine.cuh>

namespace te {

// Sums of `lanes` adjacent threads (a power of two up to 32), in each of them.
template <int LANES> TE_DEVICE float lane_sum(float x) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) x = add(x, exchange(x, mask));
  return x;
}

// Sums over groups of GROUP adjacent threads of a block of THREADS; every thread calls it.
template <int GROUP, int THREADS> TE_DEVICE float group_sum(float x) {
  if constexpr (GROUP <= 32) {
    return lane_sum<GROUP>(x);
  } else {
    TE_SHARED float partial[THREADS / 32];
    x = lane_sum<32>(x);
    barrier();  // the last call's readers are done
    if (thread() % 32 == 0) partial[thread() / 32] = x;
    barrier();
    const int first = thread() / GROUP * (GROUP / 32);
    float total = partial[first];
#pragma unroll
    for (int i = 1; i < GROUP / 32; ++i) total = add(total, partial[first + i]);
    return total;
  }
}

// max |x| of a block, as bits, in every thread.
template <int THREADS> TE_DEVICE u32 block_max(float x) {
  TE_SHARED u32 partial[THREADS / 32];
  u32 most = warp_max(bits_of(x) & 0x7fffffffu);
  barrier();
  if (thread() % 32 == 0) partial[thread() / 32] = most;
  barrier();
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) most = most > partial[i] ? most : partial[i];
  return most;
}

}  // namespace te
