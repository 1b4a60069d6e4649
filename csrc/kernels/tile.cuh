// A tile of 128 columns in a block of 256 threads: sixteen threads a row, eight columns each; a thread has GROUPS
// rows. Every FP8 kernel with a transposed copy is built on it.
#pragma once
#include <te_ops/formats.cuh>

namespace te {

constexpr int TILE_COLS = 128;
constexpr int TILE_THREADS = 256;

template <int GROUPS> struct Tile {
  static constexpr int rows = 16 * GROUPS;
  i64 top, left;  // first row and column of the tile
  int warp, half, chunk;

  TE_DEVICE Tile(i64 index, i64 width) {
    const u32 across = tiles_across(width), down = (u32)index / across;
    place(down, (u32)index - down * across);
  }
  // Tile `index` where tiles are numbered in bands of BAND rows of tiles, inside a band column by column: blocks that
  // run at the same time then share lines of the tensor and of its transposed copy alike.
  template <int BAND> static TE_DEVICE Tile in_bands(i64 index, i64 height, i64 width) {
    if constexpr (BAND == 1) return Tile(index, width);
    const u32 per_band = BAND * tiles_across(width), band = (u32)index / per_band, inside = (u32)index - band * per_band;
    const u32 down = height > 0 ? (u32)((height + rows - 1) / rows) : 1u, left_over = down - band * BAND;
    const u32 high = left_over < BAND ? left_over : BAND, over = high == BAND ? inside / BAND : inside / high;
    Tile tile;
    tile.place(band * BAND + inside - over * high, over);
    return tile;
  }
  TE_DEVICE Tile() {}
  static TE_DEVICE u32 tiles_across(i64 width) { return width > 0 ? (u32)((width + TILE_COLS - 1) / TILE_COLS) : 1u; }
  TE_DEVICE void place(u32 down, u32 over) {
    top = (i64)down * rows;
    left = (i64)over * TILE_COLS;
    warp = thread() / 32;
    half = thread() / 16 % 2;
    chunk = thread() % 16;
  }
  TE_DEVICE int local_row(int group) const { return warp * (2 * GROUPS) + 2 * group + half; }
  TE_DEVICE i64 row(int group) const { return top + local_row(group); }
  TE_DEVICE i64 col() const { return left + 8 * chunk; }
  // How many of the eight columns exist.
  TE_DEVICE int valid(i64 width) const {
    const i64 left_over = width - col();
    return left_over < 0 ? 0 : left_over < 8 ? (int)left_over : 8;
  }
};

// Sixteen rows from `first` on of four columns, transposed: out[j] are the codes of column j, first row in the low byte.
template <class Row> TE_DEVICE void take_turned(Row row, int first, int place, u32 (&out)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = row(first + 4 * i + k)[place];
    const u32 a = byte_perm(w[0], w[1], 0x5140), b = byte_perm(w[2], w[3], 0x5140);
    const u32 c = byte_perm(w[0], w[1], 0x7362), d = byte_perm(w[2], w[3], 0x7362);
    out[0][i] = byte_perm(a, b, 0x5410);
    out[1][i] = byte_perm(a, b, 0x7632);
    out[2][i] = byte_perm(c, d, 0x5410);
    out[3][i] = byte_perm(c, d, 0x7632);
  }
}

// FP8 codes of a tile in shared memory, to be read by columns. Words are XOR-swizzled by the block of sixteen rows,
// so that neither side has bank conflicts.
template <int GROUPS> struct Codes {
  static constexpr int blocks_down = GROUPS;               // of sixteen rows
  static constexpr int spread = 32 / blocks_down;
  u32 word[16 * GROUPS][32];

  TE_DEVICE void put(int row, int chunk, const u32 (&codes)[2]) {
    u32* p = &word[row][(2 * chunk) ^ (row / 16 * spread)];
    p[0] = codes[0];
    p[1] = codes[1];
  }
  // Sixteen rows of four columns, transposed: out[j] are the codes of column j, first row in the low byte.
  TE_DEVICE void take(int block, int cw, u32 (&out)[4][4]) const {
    take_turned([&](int row) { return word[row]; }, 16 * block, cw ^ (block * spread), out);
  }
};

// Up to sixteen bytes; `rows` is the length of the line they belong to, which decides about their alignment.
TE_DEVICE void store_line(u8* p, const u32 (&w)[4], i64 rows, i64 valid) {
  if (rows % 16 == 0) {
    write(p, w);
  } else if (rows % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * i < valid) *(u32*)(p + 4 * i) = w[i];
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < valid) p[i] = (u8)(w[i / 4] >> (8 * (i % 4)));
  }
}

// Write OUTS tiles of codes to y [OUTS * width, rows], the transposed copy.
template <int GROUPS, int OUTS>
TE_DEVICE void store_columns(const Codes<GROUPS> (&codes)[OUTS], u8* y, i64 top, i64 left, i64 rows, i64 width) {
  constexpr int units = GROUPS * 32;
#pragma unroll
  for (int start = 0; start < OUTS * units; start += TILE_THREADS) {
    const int unit = start + thread();
    if (OUTS * units % TILE_THREADS != 0 && unit >= OUTS * units) break;
    const int block = unit % GROUPS, cw = unit / GROUPS % 32, out = unit / units;
    const i64 row = top + 16 * block;
    if (row >= rows) continue;
    u32 lines[4][4];
    codes[out].take(block, cw, lines);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const i64 col = left + 4 * cw + j;
      if (col < width) store_line(y + (out * width + col) * rows + row, lines[j], rows, rows - row);
    }
  }
}

}  // namespace te
