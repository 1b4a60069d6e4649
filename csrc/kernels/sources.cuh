// Sources written by hand; those of pointwise functions are generated. A source loads the operands of eight columns
// of a row (`load`; what does not depend on the row: `load_cols`) and computes `outs` outputs from them (`eval`).
#pragma once
#include <kernels/pointwise.cuh>

namespace te {

// A tensor [rows, width].
template <class T> struct Plain {
  static constexpr int outs = 1;
  static constexpr bool computes = false;
  const T* x;
  i64 width;
  struct Cols {};
  struct Regs { Chunk<T> x; };
  template <int ALIGNED> TE_DEVICE void load_cols(Cols&, i64, int) const {}
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    te::load<T, ALIGNED>(x + row * width + col, valid, r.x);
  }
  TE_DEVICE void eval(const Cols&, const Regs& r, float (&y)[1][8]) const { unpack<T>(r.x, y[0]); }
};

// The output of a norm, from its statistics.
template <class T, class G, bool CENTERED, bool ZERO_CENTERED> struct Normalised {
  static constexpr int outs = 1;
  static constexpr bool computes = true;
  const T* x;
  const G* gamma;
  const G* beta;
  const float* rstd;
  const float* mean;
  i64 width;
  struct Cols { Chunk<G> gamma, beta; };
  struct Regs { Chunk<T> x; float rstd, mean; };
  template <int ALIGNED> TE_DEVICE void load_cols(Cols& c, i64 col, int valid) const {
    te::load<G, ALIGNED>(gamma + col, valid, c.gamma);
    if constexpr (CENTERED) te::load<G, ALIGNED>(beta + col, valid, c.beta);
  }
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    te::load<T, ALIGNED>(x + row * width + col, valid, r.x);
    r.rstd = valid > 0 ? rstd[row] : 0.0f;
    if constexpr (CENTERED) r.mean = valid > 0 ? mean[row] : 0.0f;
  }
  TE_DEVICE void eval(const Cols& c, const Regs& r, float (&y)[1][8]) const {
    float gain[8], shift[8];
    unpack<T>(r.x, y[0]);
    unpack<G>(c.gamma, gain);
    if constexpr (CENTERED) unpack<G>(c.beta, shift);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = ZERO_CENTERED ? add(gain[i], 1.0f) : gain[i];
      y[0][i] = mul(mul(CENTERED ? sub(y[0][i], r.mean) : y[0][i], r.rstd), factor);
      if constexpr (CENTERED) y[0][i] = add(y[0][i], shift[i]);
    }
  }
};

// dy * xhat, whose sum over rows is the gradient of gamma.
template <class U, class T, bool CENTERED> struct GammaTerm {
  static constexpr int outs = 1;
  static constexpr bool computes = true;
  const U* dy;
  const T* x;
  const float* rstd;
  const float* mean;
  i64 width;
  struct Cols {};
  struct Regs { Chunk<U> dy; Chunk<T> x; float rstd, mean; };
  template <int ALIGNED> TE_DEVICE void load_cols(Cols&, i64, int) const {}
  template <int ALIGNED, bool SCATTERED> TE_DEVICE void load(Regs& r, i64 row, i64 col, int valid) const {
    te::load<U, ALIGNED>(dy + row * width + col, valid, r.dy);
    te::load<T, ALIGNED>(x + row * width + col, valid, r.x);
    r.rstd = valid > 0 ? rstd[row] : 0.0f;
    if constexpr (CENTERED) r.mean = valid > 0 ? mean[row] : 0.0f;
  }
  TE_DEVICE void eval(const Cols&, const Regs& r, float (&y)[1][8]) const {
    float x[8];
    unpack<U>(r.dy, y[0]);
    unpack<T>(r.x, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float xhat = mul(CENTERED ? sub(x[i], r.mean) : x[i], r.rstd);
      y[0][i] = mul(y[0][i], xhat);
    }
  }
};

}  // namespace te
