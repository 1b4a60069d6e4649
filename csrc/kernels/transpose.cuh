// A matrix of bytes, transposed: the other copy of FP8 codes under one scale.
#pragma once
#include <kernels/tile.cuh>

namespace te {

// x [rows, width] to y [width, rows]; block `index` takes a tile of 16 * GROUPS rows.
template <int ALIGNED, int GROUPS> TE_DEVICE void transpose_bytes(const u8* x, u8* y, i64 rows, i64 width, i64 index) {
  TE_SHARED Codes<GROUPS> codes[1];
  const Tile<GROUPS> tile(index, width);
  const int valid = tile.valid(width);
  Chunk<u8> c[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const i64 row = tile.row(g);
    load<u8, ALIGNED>(x + row * width + tile.col(), row < rows ? valid : 0, c[g]);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) codes[0].put(tile.local_row(g), tile.chunk, c[g].w);
  barrier();
  store_columns<GROUPS, 1>(codes, y, tile.top, tile.left, rows, width);
}

}  // namespace te
