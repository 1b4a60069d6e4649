"""Epilogue ops of ours, composed by quack's mixin: vectors over the result, and FP8 copies of it.

With m = lane / 4 and n = 2 (lane % 4), a lane of a warp group holds of each octet of columns D[m][n], D[m][n + 1],
D[m + 8][n] and D[m + 8][n + 1]: the fragment of a subtile lists them octet by octet. `QuantStore` rests on that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cutlass as _cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from quack.epilogue.ops import ColVecLoad, EpiOp, EpiSmemBytes, RowVecLoad, RowVecReduce

from te_ops.backends.cutlass import ptx

cutlass: Any = _cutlass  # most of its names come by a star
const_expr = cutlass.const_expr
ABS = 0x7FFFFFFF
OCTET = 16 * 128  # bytes that the threads of a warp group hold of eight columns


class _Vector(EpiOp):  # type: ignore[misc]
    """A vector over the result, as FP32 in shared memory: any alignment, 0 beyond its end."""

    def smem_bytes(
        self, arg_tensor: Any, cta_tile_shape_mnk: Any, epi_tile: Any, warp_shape_mnk: Any = None
    ) -> Any:
        """Shared memory that the op wants."""
        return EpiSmemBytes(unstaged=4 * self._tile_size(cta_tile_shape_mnk))

    def smem_struct_field(self, gemm: Any, params: Any) -> Any:
        """Its name and type."""
        size = self._tile_size(gemm.cta_tile_shape_mnk)
        return f"s_{self.name}", cute.struct.Align[cute.struct.MemRange[Float32, size], 16]

    @cute.jit
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        """What a thread keeps over a tile."""
        dim = const_expr(self.dim)
        size = const_expr(self._tile_size(gemm.cta_tile_shape_mnk))
        first = ctx.tile_coord_mnkl[dim] * size
        extents = ctx.varlen_manager
        end = extents.len_n() if const_expr(dim == 1) else extents.len_m(ctx.batch_idx)
        threads = const_expr(ctx.num_epi_threads)
        for turn in cutlass.range_constexpr((size + threads - 1) // threads):
            index = ctx.tidx + turn * threads
            if index < size:
                value = Float32(0.0)
                if first + index < end:
                    value = param[self.source(first + index, end)].to(Float32)
                smem_tensor[index] = value
        view = cute.make_tensor(
            smem_tensor.iterator,
            cute.make_layout((ctx.tile_M, ctx.tile_N), stride=self._broadcast_stride()),
        )
        parts = ctx.partition_for_epilogue_fn(view)
        if const_expr(ctx.tiled_copy_t2r is not None):
            parts = ctx.tiled_copy_r2s.retile(parts)
        first_part = cute.group_modes(parts, 3, cute.rank(parts))[None, None, None, 0]
        return [parts, cute.make_rmem_tensor(first_part.layout, gemm.acc_dtype)]

    def source(self, index: Any, end: Any) -> Any:
        """Where the vector keeps the value of a column or row of the kernel."""
        return index


class RowLoad(_Vector, RowVecLoad):  # type: ignore[misc]
    """One value a column; over a paired accumulator, one a pair or two halves (gate, linear)."""

    def __init__(self, name: str, form: str = "plain") -> None:
        super().__init__(name)
        self.form = form

    def source(self, index: Any, end: Any) -> Any:
        """The same where columns come in pairs."""
        if self.form == "plain":
            return index
        half = index // 2
        return half if self.form == "shared" else half + (index % 2) * (end // 2)


class ColumnLoad(_Vector, ColVecLoad):  # type: ignore[misc]
    """One value a row."""


class Argument(EpiOp):  # type: ignore[misc]
    """A pointer or tensor that another op reads from the parameters."""

    def param_fields(self) -> Any:
        """What reaches the device."""
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> Any:
        """The argument as it is."""
        return {self.name: getattr(args, self.name)}


class Stash(Argument):
    """The accumulators of a tile in shared memory, on their way from the threads that make them to the epilogue's.

    A thread of the one and the thread in its place of the other hold the same elements, so each reads what one thread
    wrote, 16 bytes of an octet at a time, side by side over a warp group.
    """

    def to_params(self, gemm: Any, args: Any) -> Any:
        """Nothing: it is no argument of the caller's."""
        return {}

    def smem_bytes(
        self, arg_tensor: Any, cta_tile_shape_mnk: Any, epi_tile: Any, warp_shape_mnk: Any = None
    ) -> Any:
        """Shared memory that the op wants."""
        return EpiSmemBytes(unstaged=4 * cta_tile_shape_mnk[0] * cta_tile_shape_mnk[1])

    def smem_struct_field(self, gemm: Any, params: Any) -> Any:
        """Its name and type."""
        size = gemm.cta_tile_shape_mnk[0] * gemm.cta_tile_shape_mnk[1]
        return "s_stash", cute.struct.Align[cute.struct.MemRange[Float32, size], 128]

    def get_smem_tensor(self, gemm: Any, params: Any, storage_epi: Any) -> Any:
        """The same as a tensor."""
        size = gemm.cta_tile_shape_mnk[0] * gemm.cta_tile_shape_mnk[1]
        return storage_epi.s_stash.get_tensor(cute.make_layout(size))

    @staticmethod
    def put(address: Any, values: Sequence[Any]) -> None:
        """A thread's accumulators, from the address of its first 16 bytes on."""
        for octet in range(len(values) // 4):
            ptx.store_shared(address + octet * OCTET, values[4 * octet : 4 * octet + 4])

    @staticmethod
    def get(address: Any, count: int) -> list[Any]:
        """That many of them."""
        return [v for octet in range(count // 4) for v in ptx.load_floats(address + octet * OCTET)]


class Copy(NamedTuple):
    """How a thread takes part in one copy of the codes: constant over the subtiles of a tile.

    Attributes:
        shared_in, shared_out: offsets into the copy's part of a buffer, where its lane's matrix row is stored and
            where it reads 16 bytes.
        address: in global memory of what it read, for the tile's first subtile.
        m, n: row and column of y there.
        stride: of the copy's rows, in bytes.
    """

    shared_in: Any
    shared_out: Any
    address: Any
    m: Any
    n: Any
    stride: Any


class State(NamedTuple):
    """What a thread keeps over the subtiles of a tile."""

    thread: Any
    shared: Any
    row: Any
    col: Any
    rows: Any
    columns: Any
    scale: Any
    largest: Any
    places: Any


class QuantStore(Argument):
    """FP8 copies of y made of one fragment: row [M, N], transposed [N, M], and the maximum of |y|.

    The codes pass through shared memory: `stmatrix` writes pairs of rows (m, m + 8) as 16-bit elements, straight for
    the row copy and transposed for the other; after the subtile's barrier every thread reads 16 bytes, puts them in
    order and writes them to global memory. Two buffers, so one barrier a subtile is enough.

    Args:
        name: of an argument that is there: "row", "col" or "amax".
        kind: "e4m3" or "e5m2".
        wanted: what is written, of row, col, amax, scale_inv.
        parts: 1, or 2 for a pair of values in natural halves.
        paired: y belongs to pairs of columns, so it has half of them.
        names: of the parameters, where they have others than "row", "col", "amax", "scale" and "scale_inv".
    """

    def __init__(
        self,
        name: str,
        kind: str,
        wanted: frozenset[str],
        *,
        parts: int,
        paired: bool,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name)
        self.names = names or {}
        self.kind, self.parts, self.paired = kind, parts, paired
        self.row, self.col, self.amax = "row" in wanted, "col" in wanted, "amax" in wanted
        self.inverse = "scale_inv" in wanted

    def _given(self, params: Any, name: str) -> Any:
        """A parameter, by what it is to this op."""
        return getattr(params, self.names.get(name, name))

    # Shared memory: per buffer, per part, the row codes of a subtile, then its column codes.

    def _copy_bytes(self, epi_tile: Any) -> int:
        rows, columns = (int(cute.size(mode)) for mode in epi_tile)
        return rows * columns // (2 if self.paired else 1)

    def _total_bytes(self, epi_tile: Any) -> int:
        return 2 * self.parts * (self.row + self.col) * self._copy_bytes(epi_tile)

    def smem_bytes(
        self, arg_tensor: Any, cta_tile_shape_mnk: Any, epi_tile: Any, warp_shape_mnk: Any = None
    ) -> Any:
        """Shared memory that the op wants."""
        return EpiSmemBytes(unstaged=self._total_bytes(epi_tile))

    def smem_struct_field(self, gemm: Any, params: Any) -> Any:
        """Its name and type."""
        size = self._total_bytes(gemm.epi_tile)
        if size == 0:
            return None
        memory: Any = cute.struct.MemRange[cutlass.Uint8, size]
        return f"s_{self.name}_codes", cute.struct.Align[memory, 128]

    def get_smem_tensor(self, gemm: Any, params: Any, storage_epi: Any) -> Any:
        """The same as a tensor."""
        size = self._total_bytes(gemm.epi_tile)
        if size == 0:
            return None
        return getattr(storage_epi, f"s_{self.name}_codes").get_tensor(cute.make_layout(size))

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        """What a thread keeps over a tile."""
        params = gemm.epilogue_params
        halves = 2 if self.paired else 1
        thread = Int32(ctx.tidx)
        m0 = Int32(ctx.tile_coord_mnkl[0]) * ctx.tile_M
        n0 = Int32(ctx.tile_coord_mnkl[1]) * (ctx.tile_N // halves)
        row = col = None
        if self.row:
            (m, n), shared = self._row_places(gemm, thread)
            codes = self._given(params, "row")
            stride = Int64(codes.stride[0])
            address = codes.iterator.toint() + Int64(m0 + m) * stride + Int64(n0 + n)
            row = Copy(shared[0], shared[1], address, m0 + m, n0 + n, stride)
        if self.col:
            (m, n), shared = self._col_places(gemm, thread)
            codes = self._given(params, "col")
            stride = Int64(codes.stride[0])
            address = codes.iterator.toint() + Int64(n0 + n) * stride + Int64(m0 + m)
            col = Copy(shared[0], shared[1], address, m0 + m, n0 + n, stride)
        return State(
            thread=thread,
            shared=Int32(smem_tensor.iterator.toint()) if smem_tensor is not None else None,
            row=row,
            col=col,
            rows=Int32(ctx.varlen_manager.len_m(ctx.batch_idx)),
            columns=Int32(ctx.varlen_manager.len_n()) // halves,
            scale=_word(self._given(params, "scale")) if self.row or self.col else None,
            largest=_zero_word() if self.amax else None,
            places=(m0 + 16 * (thread // 32) + thread % 32 // 4, n0),
        )

    def _row_places(self, gemm: Any, thread: Any) -> Any:
        """((m, n) of what a thread reads, (shared offset of its lane's matrix row, of what it reads))."""
        warp, lane = thread // 32, thread % 32
        if self.paired:
            held, chunk = 8 * warp + lane % 8, lane // 8 % 2
            index = thread % cute.size(gemm.epi_tile[0])
            read, half = index // 2, index % 2
            m, n = 16 * (read // 8) + read % 8, 8 * half
        else:
            held, chunk = 16 * warp + lane % 16, lane // 16
            read, half = thread // 2, thread % 2
            m, n = read, 16 * half
        return (m, n), tuple(
            32 * line + 16 * (part ^ ((line >> 2) & 1))
            for line, part in ((held, chunk), (read, half))
        )

    def _col_places(self, gemm: Any, thread: Any) -> Any:
        """The same for the transposed copy: 16 rows of one column."""
        rows = cute.size(gemm.epi_tile[0])
        warp, lane = thread // 32, thread % 32
        held = lane
        if self.paired:
            held = 4 * (2 * (lane // 8 % 2) + (lane & 1)) + ((lane % 8) >> 1)
        index = thread % rows if self.paired else thread
        read, chunk = index // (rows // 16), index % (rows // 16)

        def offset(line: Any, part: Any) -> Any:
            return rows * line + 16 * (part ^ ((line >> 1) & 3 if rows == 64 else line & 7))

        return (16 * chunk, read), (offset(held, warp), offset(read, chunk))

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        """What `put` gets for a subtile."""
        return state, epi_coord

    def _place(self, gemm: Any, state: Any, epi_coord: Any, part: int) -> Any:
        """Shared address of the codes of a subtile's part: buffers alternate in the order of the loop."""
        em, en = (int(c) for c in epi_coord)
        shape = gemm.epi_tile_shape
        index = em + en * int(shape[0]) if gemm.epi_m_major else em * int(shape[1]) + en
        buffer = self._total_bytes(gemm.epi_tile) // 2
        return state.shared + (index % 2 * buffer + part * (buffer // self.parts))

    def put(self, gemm: Any, loop: Any, values: Any) -> None:
        """Takes a subtile of y: FP32 values in the fragment's order, a list per part."""
        state, epi_coord = loop
        if self.amax:
            self._watch(gemm, state, epi_coord, values)
        if not (self.row or self.col):
            return
        size = self._copy_bytes(gemm.epi_tile)
        for index, part in enumerate(values):
            base = self._place(gemm, state, epi_coord, index)
            if self.amax:
                # Else the compiler puts the maximum off into the next subtile, and has no registers for two of them.
                base = ptx.after(base, state.largest[0])
            scaled = [value * state.scale for value in part]
            order = (0, 1, 2, 3) if self.paired else (0, 2, 1, 3)
            words = [
                ptx.four_codes([scaled[4 * octet + i] for i in order], self.kind)
                for octet in range(len(part) // 4)
            ]
            if self.row:
                ptx.store_matrices(
                    base + state.row.shared_in, self._row_words(words), transposed=False
                )
                base = base + size
            if self.col:
                ptx.store_matrices(base + state.col.shared_in, words, transposed=True)

    def _row_words(self, words: Any) -> Any:
        if self.paired:
            return words
        pairs = zip(words[::2], words[1::2], strict=True)
        return [ptx.permute(a, b, half) for a, b in pairs for half in (0x6420, 0x7531)]

    def _watch(self, gemm: Any, state: Any, epi_coord: Any, values: Any) -> None:
        """Raises the thread's maximum by elements that exist: the mask of their group cuts the others to 0."""
        em, en = (int(c) for c in epi_coord)
        rows, columns = (cute.size(mode) for mode in gemm.epi_tile)
        width = columns // 2 if self.paired else columns
        m, n = state.places[0] + em * rows, state.places[1] + en * width
        row_masks = [ptx.choose(m + 8 * half < state.rows, ABS) for half in range(2)]
        groups = 2  # of columns, with a mask each
        column_masks = [
            ptx.choose(n + width // groups * g < state.columns, ABS) for g in range(groups)
        ]
        for part in values:
            step = 1 if self.paired else 2  # elements of a row side by side
            for group in range(groups):
                share = part[len(part) // groups * group : len(part) // groups * (group + 1)]
                for half in range(2):
                    mine = [v for i, v in enumerate(share) if i // step % 2 == half]
                    top = mine[0]
                    for value in mine[1:]:
                        top = ptx.larger(top, value)
                    word = ptx.bits(top) & (row_masks[half] & column_masks[group])
                    state.largest[0] = cutlass.max(state.largest[0], word)

    def fetch(self, gemm: Any, loop: Any) -> list[list[Any]]:
        """After the barrier that follows `put`: what this thread passes on, 16 bytes of every copy that it writes."""
        if not (self.row or self.col):
            return []
        state, epi_coord = loop
        found = []
        for part in range(self.parts):
            base = self._place(gemm, state, epi_coord, part)
            places = [] if state.row is None else [base + state.row.shared_out]
            if state.col is not None:
                beside = self.row * self._copy_bytes(gemm.epi_tile)
                places.append(base + beside + state.col.shared_out)
            if self.paired and len(places) == 2:
                places = [ptx.select(self._turned(gemm, state), places[1], places[0])]
            found.append([ptx.load_shared(place) for place in places])
        return found

    def _turned(self, gemm: Any, state: Any) -> Any:
        """Whether a thread writes columns, where half of the threads write rows."""
        return state.thread < cute.size(gemm.epi_tile[0])

    @cute.jit
    def flush(self, gemm: Any, loop: Any, fetched: Any) -> None:
        """Writes what `fetch` gave."""
        state, epi_coord = loop[0], loop[1]
        for part in cutlass.range_constexpr(len(fetched)):
            if const_expr(not self.paired):
                if const_expr(self.row):
                    self._write_rows(gemm, state, epi_coord, part, fetched[part][0])
                if const_expr(self.col):
                    self._write_columns(gemm, state, epi_coord, part, fetched[part][-1])
            else:
                if self._turned(gemm, state):
                    if const_expr(self.col):
                        self._write_columns(gemm, state, epi_coord, part, fetched[part][0])
                else:
                    if const_expr(self.row):
                        self._write_rows(gemm, state, epi_coord, part, fetched[part][0])

    def _write_rows(self, gemm: Any, state: Any, epi_coord: Any, part: int, w: Any) -> None:
        em, en = (int(c) for c in epi_coord)
        rows, columns = (cute.size(mode) for mode in gemm.epi_tile)
        width = columns // 2 if self.paired else columns
        address = state.row.address + Int64(em * rows) * state.row.stride + Int64(en * width)
        if part:
            address = address + Int64(state.columns)
        m, inside = state.row.m + em * rows, state.row.n + en * width < state.columns
        if not self.paired:
            low = [ptx.permute(w[i], w[i + 1], 0x5410) for i in (0, 2)]
            high = [ptx.permute(w[i], w[i + 1], 0x7632) for i in (0, 2)]
            ptx.store_global((m < state.rows) & inside, address, [*low, *high])
            return
        for half, selector in ((0, 0x6240), (1, 0x7351)):  # rows m and m + 8
            a, b = ptx.permute(w[0], w[1], selector), ptx.permute(w[2], w[3], selector)
            words = [ptx.permute(a, b, 0x5410), ptx.permute(a, b, 0x7632)]
            target = address + Int64(8 * half) * state.row.stride
            ptx.store_global((m + 8 * half < state.rows) & inside, target, words)

    def _write_columns(self, gemm: Any, state: Any, epi_coord: Any, part: int, w: Any) -> None:
        em, en = (int(c) for c in epi_coord)
        rows, columns = (cute.size(mode) for mode in gemm.epi_tile)
        width = columns // 2 if self.paired else columns
        column = en * width + (state.columns if part else 0)
        address = state.col.address + Int64(column) * state.col.stride + Int64(em * rows)
        words = [ptx.permute(w[i], w[i + 1], half) for half in (0x6420, 0x7531) for i in (0, 2)]
        inside = (state.col.m + em * rows < state.rows) & (state.col.n + en * width < state.columns)
        ptx.store_global(inside, address, words)

    @cute.jit
    def end(  # noqa: PLR0917  (quack's)
        self,
        gemm: Any,
        param: Any,
        state: Any,
        epi_tile: Any,
        tiled_copy_t2r: Any,
        tiled_copy_r2s: Any,
        tile_coord_mnkl: Any,
        varlen_manager: Any,
        tidx: Any,
    ) -> None:
        """After the last subtile."""
        params = gemm.epilogue_params
        if const_expr(self.amax):
            word = cute.arch.warp_redux_sync(state.largest[0], "max")
            ptx.raise_to(state.thread % 32 == 0, self._given(params, "amax").toint(), word)
        if const_expr(self.inverse):
            first = (tile_coord_mnkl[0] == 0) & (tile_coord_mnkl[1] == 0) & (state.thread == 0)
            address = self._given(params, "scale_inv").toint()
            ptx.store_float(first, address, ptx.reciprocal(state.scale))


class ColumnSum(RowVecReduce):  # type: ignore[misc]
    """Sums of y over the rows of a tile: FP32 partials [ceil(M / tile M), N], rows beyond the end left out."""

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        """What a thread keeps over a tile."""
        state = RowVecReduce.begin(self, gemm, param, smem_tensor, ctx)
        return (*state, _Coordinates(ctx), Int32(ctx.varlen_manager.len_m(ctx.batch_idx)))

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        """What `put` gets for a subtile."""
        return RowVecReduce.begin_loop(self, gemm, state, epi_coord), state, epi_coord

    def put(self, gemm: Any, loop: Any, values: Any) -> None:
        """Takes a subtile of y: FP32 values in the fragment's order."""
        sums, (*_, coordinates, rows), epi_coord = loop
        at, held = coordinates.at(epi_coord), 2 if gemm.arch == 90 else 1
        masks = [ptx.choose(at[2 * row][0] < rows, -1) for row in range(held)]
        for i, value in enumerate(values):
            sums[i] = sums[i] + ptx.masked(value, masks[i // 2 % held])


class RowQuantStore(QuantStore):
    """The same for sm_100a, where a lane holds one row of a subtile, column by column: it writes codes from registers.

    A warp holds 32 rows, so its bytes of a column lie side by side. Compiled and looked at, not run yet.
    """

    def _total_bytes(self, epi_tile: Any) -> int:
        return 0

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        """What a thread keeps over a tile."""
        params = gemm.epilogue_params
        places = _Coordinates(ctx)
        return State(
            thread=Int32(ctx.tidx),
            shared=None,
            row=_whole(params.row) if self.row else None,
            col=_whole(params.col) if self.col else None,
            rows=Int32(ctx.varlen_manager.len_m(ctx.batch_idx)),
            columns=Int32(ctx.varlen_manager.len_n()) // (2 if self.paired else 1),
            scale=_word(params.scale) if self.row or self.col else None,
            largest=_zero_word() if self.amax else None,
            places=places,
        )

    def put(self, gemm: Any, loop: Any, values: Any) -> None:
        """Takes a subtile of y: FP32 values in the fragment's order, a list per part."""
        state, epi_coord = loop
        m, n = state.places.at(epi_coord)[0]
        n = n // 2 if self.paired else n
        exists = m < state.rows
        for part, mine in enumerate(values):
            for first in range(0, len(mine), 16):
                share = mine[first : first + 16]
                inside = exists & (n + first < state.columns)
                if self.amax:
                    self._raise(state, share, inside)
                if self.row or self.col:
                    scaled = [value * state.scale for value in share]
                    words = [
                        ptx.four_codes(scaled[i : i + 4], self.kind)
                        for i in range(0, len(share), 4)
                    ]
                    self._write(state, (part, m, n + first), words, inside)

    def _raise(self, state: Any, share: Any, inside: Any) -> None:
        top = share[0]
        for value in share[1:]:
            top = ptx.larger(top, value)
        word = ptx.bits(top) & ptx.choose(inside, ABS)
        state.largest[0] = cutlass.max(state.largest[0], word)

    def _write(self, state: Any, place: Any, words: Any, inside: Any) -> None:
        part, m, n = place
        column = n + state.columns if part else n
        if self.row:
            ptx.store_global(
                inside, state.row.address + Int64(m) * state.row.stride + Int64(column), words
            )
        if self.col:
            address = state.col.address + Int64(column) * state.col.stride + Int64(m)
            for i in range(4 * len(words)):
                ptx.store_byte(inside, address + Int64(i) * state.col.stride, words[i // 4], i % 4)


class _Coordinates:
    """Row and column in the result of every element of a thread's fragment."""

    def __init__(self, ctx: Any) -> None:
        tile = cute.make_identity_tensor((ctx.tile_M, ctx.tile_N))
        self.parts = ctx.partition_for_epilogue_fn(tile)
        self.m0 = Int32(ctx.tile_coord_mnkl[0]) * ctx.tile_M
        self.n0 = Int32(ctx.tile_coord_mnkl[1]) * ctx.tile_N

    def at(self, epi_coord: Any) -> Any:
        part = self.parts[None, None, None, epi_coord[0], epi_coord[1]]
        return [(self.m0 + part[i][0], self.n0 + part[i][1]) for i in range(cute.size(part))]


def _word(pointer: Any) -> Any:
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def _zero_word() -> Any:
    word = cute.make_rmem_tensor(1, Int32)
    word[0] = Int32(0)
    return word


def _whole(tensor: Any) -> Copy:
    """A copy seen from its first element."""
    zero = Int32(0)
    return Copy(None, None, tensor.iterator.toint(), zero, zero, Int64(tensor.stride[0]))
