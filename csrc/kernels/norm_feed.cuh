// What the norm kernels share: gamma, sums over a row's threads, and operands that arrive in shared memory while other
// rows are computed.
#pragma once
#include <kernels/sources.cuh>
#include <te_ops/reduce.cuh>

namespace te {

TE_DEVICE int columns_left(i64 width, i64 col) {
  const i64 left = width - col;
  return left < 0 ? 0 : left < 8 ? (int)left : 8;
}
TE_DEVICE int columns_left(int width, int col) {
  const int left = width - col;
  return left < 0 ? 0 : left < 8 ? left : 8;
}

// Eight elements that every row reads.
template <class G, int ALIGNED> TE_DEVICE void load_again(const G* p, int valid, Chunk<G>& c) {
  if constexpr (ALIGNED == WHOLE) {
#pragma unroll
    for (int i = 0; i < Chunk<G>::words; i += 4) {
      u32 w[4] = {0, 0, 0, 0};
      if (valid >= 8) read_again((const u32*)p + i, w);
#pragma unroll
      for (int k = 0; k < 4; ++k) c.w[i + k] = w[k];
    }
  } else {
    load<G, ALIGNED>(p, valid, c);
  }
}

// The factor of a column: gamma, or 1 + gamma.
template <class G, bool ZERO_CENTERED> TE_DEVICE void gain_of(const Chunk<G>& c, float (&gain)[8]) {
  unpack<G>(c, gain);
  if constexpr (ZERO_CENTERED) {
#pragma unroll
    for (int i = 0; i < 8; ++i) gain[i] = add(gain[i], 1.0f);
  }
}

// Sums of N numbers over groups of GROUP adjacent threads, in each of them. One barrier of the group: calls use two
// buffers in turn, told apart by `turn`.
template <int GROUP, int THREADS, int N> TE_DEVICE void group_sums(float (&x)[N], int& turn) {
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] = lane_sum<(GROUP < 32 ? GROUP : 32)>(x[n]);
  if constexpr (GROUP > 32) {
    constexpr int WARPS = GROUP / 32;
    TE_SHARED float partial[2][N][THREADS / 32];
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (thread() % 32 == 0) partial[turn][n][thread() / 32] = x[n];
    if constexpr (GROUP < THREADS && THREADS / GROUP < 16)
      group_barrier(1 + thread() / GROUP, GROUP);
    else
      barrier();
    const int first = thread() / GROUP * WARPS;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n] = partial[turn][n][first];
#pragma unroll
      for (int i = 1; i < WARPS; ++i) x[n] = add(x[n], partial[turn][n][first + i]);
    }
    turn ^= 1;
  }
}

// Two tensors whose sum is normalised.
template <class T> struct Added {
  static constexpr int outs = 1;
  static constexpr bool computes = false;
  const T* x;
  const T* other;
  i64 width;
  struct Cols {};
  struct Regs { Chunk<T> x, other; };
  template <int ALIGNED> TE_DEVICE void load_cols(Cols&, i64, int) const {}
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    te::load<T, ALIGNED>(x + row * width + col, valid, r.x);
    te::load<T, ALIGNED>(other + row * width + col, valid, r.other);
  }
  TE_DEVICE void eval(const Cols&, const Regs& r, float (&y)[1][8]) const {
    float v[8];
    unpack<T>(r.x, y[0]);
    unpack<T>(r.other, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[0][i] = add(y[0][i], v[i]);
  }
};

// What the backward of a norm reads; `other`: a gradient that is added.
template <class T, class U, bool OTHER> struct Incoming {
  const U* dy;
  const T* x;
  const T* other;
  i64 width;
  struct Regs { Chunk<U> dy; Chunk<T> x; Chunk<T> other; };
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    te::load<U, ALIGNED>(dy + row * width + col, valid, r.dy);
    te::load<T, ALIGNED>(x + row * width + col, valid, r.x);
    if constexpr (OTHER) te::load<T, ALIGNED>(other + row * width + col, valid, r.other);
  }
};

// The same operands by asynchronous copies: pieces of 16 bytes, `at(piece)` their places.
template <class T> constexpr int pieces_of() { return (int)sizeof(T) / 2; }
template <class T, class At> TE_DEVICE void send(const T* p, bool exists, int first, At at) {
#pragma unroll
  for (int i = 0; i < pieces_of<T>(); ++i) copy_async(at(first + i), (const u8*)p + 16 * i, exists);
}
template <class T, class At> TE_DEVICE void receive(Chunk<T>& c, int first, At at) {
#pragma unroll
  for (int i = 0; i < pieces_of<T>(); ++i) {
    u32 w[4];
    read_shared(at(first + i), w);
#pragma unroll
    for (int k = 0; k < 4; ++k) c.w[4 * i + k] = w[k];
  }
}

// How a source is copied; `pieces` = 0: it is not.
template <class S> struct Copied {
  static constexpr int pieces = 0;
  template <class At> static TE_DEVICE void issue(const S&, i64, bool, At) {}
  template <class At> static TE_DEVICE void take(typename S::Regs&, At) {}
};
template <class T> struct Copied<Plain<T>> {
  static constexpr int pieces = pieces_of<T>();
  template <class At> static TE_DEVICE void issue(const Plain<T>& s, i64 offset, bool exists, At at) {
    send(s.x + offset, exists, 0, at);
  }
  template <class At> static TE_DEVICE void take(typename Plain<T>::Regs& r, At at) { receive(r.x, 0, at); }
};
template <class T> struct Copied<Added<T>> {
  static constexpr int pieces = 2 * pieces_of<T>();
  template <class At> static TE_DEVICE void issue(const Added<T>& s, i64 offset, bool exists, At at) {
    send(s.x + offset, exists, 0, at);
    send(s.other + offset, exists, pieces_of<T>(), at);
  }
  template <class At> static TE_DEVICE void take(typename Added<T>::Regs& r, At at) {
    receive(r.x, 0, at);
    receive(r.other, pieces_of<T>(), at);
  }
};
template <class T, class U, bool OTHER> struct Copied<Incoming<T, U, OTHER>> {
  typedef Incoming<T, U, OTHER> S;
  static constexpr int pieces = pieces_of<U>() + (1 + OTHER) * pieces_of<T>();
  template <class At> static TE_DEVICE void issue(const S& s, i64 offset, bool exists, At at) {
    send(s.dy + offset, exists, 0, at);
    send(s.x + offset, exists, pieces_of<U>(), at);
    if constexpr (OTHER) send(s.other + offset, exists, pieces_of<U>() + pieces_of<T>(), at);
  }
  template <class At> static TE_DEVICE void take(typename S::Regs& r, At at) {
    receive(r.dy, 0, at);
    receive(r.x, pieces_of<U>(), at);
    if constexpr (OTHER) receive(r.other, pieces_of<U>() + pieces_of<T>(), at);
  }
};

// A thread's chunks of the next rows, in dynamic shared memory that only it reads: no barrier. `count` chunks a row.
template <class S, int CHUNKS, int THREADS, int STAGES> struct Feed {
  static constexpr int pieces = Copied<S>::pieces;
  static constexpr int bytes = STAGES * CHUNKS * pieces * THREADS * 16;
  TE_DEVICE static u8* place(int stage, int chunk, int piece) {
    return dynamic_shared() + (((stage * pieces + piece) * CHUNKS + chunk) * THREADS + thread()) * 16;
  }
  TE_DEVICE static void issue(const S& s, int stage, int chunk, i64 offset, bool exists) {
    Copied<S>::issue(s, offset, exists, [&](int piece) { return place(stage, chunk, piece); });
  }
  TE_DEVICE static void take(int stage, int chunk, typename S::Regs& r) {
    Copied<S>::take(r, [&](int piece) { return place(stage, chunk, piece); });
  }
  // In place of the operands: what is made of them.
  template <class T> TE_DEVICE static void put(int stage, int chunk, const Chunk<T>& c) {
#pragma unroll
    for (int i = 0; i < pieces_of<T>(); ++i) {
      const u32 w[4] = {c.w[4 * i], c.w[4 * i + 1], c.w[4 * i + 2], c.w[4 * i + 3]};
      write_shared(place(stage, chunk, i), w);
    }
  }
  template <class T> TE_DEVICE static void get(int stage, int chunk, Chunk<T>& c) {
    receive(c, 0, [&](int piece) { return place(stage, chunk, piece); });
  }
};

// Gamma (and beta) of a thread's columns: copied to shared memory once, behind the rows at byte `from`, where rows are;
// else read again for each row.
template <class G, int ALIGNED, int CHUNKS, int THREADS, int COUNT, bool COPIED> struct Weights {
  static constexpr int pieces = pieces_of<G>();
  const G* given[COUNT];
  u8* from;
  TE_DEVICE u8* place(int which, int chunk, int piece) const {
    return from + (((which * CHUNKS + chunk) * pieces + piece) * THREADS + thread()) * 16;
  }
  TE_DEVICE void issue(int which, int chunk, int col, bool exists) const {
    if constexpr (COPIED) send(given[which] + col, exists, 0, [&](int i) { return place(which, chunk, i); });
  }
  TE_DEVICE void take(int which, int chunk, int col, int valid, Chunk<G>& c) const {
    if constexpr (COPIED)
      receive(c, 0, [&](int i) { return place(which, chunk, i); });
    else
      load_again<G, ALIGNED>(given[which] + col, valid, c);
  }
};

// A source's chunk as it is normalised, in T: rounded where T is narrow; zeros beyond `valid`.
template <class S, class T> struct Held {
  static constexpr bool as_read = false;
  static TE_DEVICE void keep(const S& s, const typename S::Cols& cols, const typename S::Regs& r, int valid,
                             Chunk<T>& c) {
    float y[1][8];
    s.eval(cols, r, y);
    clear_beyond(y[0], valid);
    pack<T>(y[0], c);
  }
};
template <class T> struct Held<Plain<T>, T> {
  static constexpr bool as_read = true;
  static TE_DEVICE void keep(const Plain<T>&, const typename Plain<T>::Cols&, const typename Plain<T>::Regs& r, int,
                             Chunk<T>& c) {
    c = r.x;
  }
};

}  // namespace te
