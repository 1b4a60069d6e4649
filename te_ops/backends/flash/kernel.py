"""The kernels of a spec: FlashAttention's classes for Hopper, as one function of one argument schema.

Everything that the compiler sees is traced from here; `build.py` drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass as _cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.cute.typing import Pointer
from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess
from flash_attn.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.interface import _tile_size_bwd_sm90, _tile_size_fwd_sm90
from flash_attn.cute.utils import AuxData

from te_ops.backends.flash.limits import TENSORS, TILE, padded, stays, wide
from te_ops.backends.flash.persistent import Persistent
from te_ops.backends.flash.spec import FlashSpec

cutlass: Any = _cutlass  # most of its names come by a star
const_expr = cutlass.const_expr
TYPES: dict[str, Any] = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
ARCH = 90
STAGES = 2  # of keys and values in shared memory, forward


def build(spec: FlashSpec) -> Any:
    """The compiled function, for `export_to_c`."""
    made = _backward(spec) if spec.backward else _forward(spec)
    return cute.compile(*made, make_fake_stream(), options="--enable-tvm-ffi")


# -- forward


def _forward(spec: FlashSpec) -> tuple[Any, ...]:
    """The traced function and its arguments but the stream, in the order of `build.load`."""
    tiles = _tile_size_fwd_sm90(spec.features, spec.values, spec.mask == "causal", _local(spec))
    attend = (Persistent if stays(spec) else FlashAttentionForwardSm90)(
        TYPES[spec.dtype],
        spec.features,
        spec.values,
        spec.group,
        is_causal=spec.mask == "causal",
        is_local=_local(spec),
        pack_gqa=spec.group > 1,
        tile_m=tiles.m_block_size,
        tile_n=tiles.n_block_size,
        num_stages=STAGES,
        Q_in_regs=False,
        intra_wg_overlap=tiles.intra_wg_overlap,
        mma_pv_is_rs=tiles.mma_pv_is_rs,
        score_mod=_modifier(spec) if spec.score else None,
    )

    @cute.jit
    def run(  # noqa: PLR0917  (the schema of the compiled function)
        q: Pointer,
        k: Pointer,
        v: Pointer,
        o: Pointer,
        lse: Pointer,
        sink: Pointer | None,
        captured: Pointer | None,
        q_starts: Pointer | None,
        kv_starts: Pointer | None,
        q_lens: Pointer | None,
        kv_lens: Pointer | None,
        sizes: Any,
        strides: Any,
        scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        stream: cuda.CUstream,
    ) -> None:
        given = _Given(spec, sizes, strides)
        places = given.places(q_starts, kv_starts, q_lens, kv_lens)
        attend.processors = given.n.processors
        attend(
            given.tensor(q, "q"), given.tensor(k, "k"), given.tensor(v, "v"), given.tensor(o, "o"),
            given.statistic(lse), scale, *places, None, left, right,
            given.by_head(sink), aux_data=given.captured(captured), stream=stream,
        )  # fmt: skip

    given = [_address(TYPES[spec.dtype]) for _ in range(4)]
    more = [_address(Float32, 4) if there else None for there in (spec.sink, spec.captured)]
    return (run, *given, _address(Float32, 4), *more, *_ends(spec))


# -- backward


def _backward(spec: FlashSpec) -> tuple[Any, ...]:
    """The traced function and its arguments but the stream, in the order of `build.load`."""
    before, attend, after = _stages(spec)
    shared = spec.group > 1

    @cute.jit
    def run(  # noqa: PLR0917  (the schema of the compiled function)
        q: Pointer,
        k: Pointer,
        v: Pointer,
        o: Pointer,
        do: Pointer,
        lse: Pointer,
        dq: Pointer,
        dk: Pointer,
        dv: Pointer,
        rows: Pointer,
        sums: Pointer | None,
        captured: Pointer | None,
        q_starts: Pointer | None,
        kv_starts: Pointer | None,
        q_lens: Pointer | None,
        kv_lens: Pointer | None,
        sizes: Any,
        strides: Any,
        scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        stream: cuda.CUstream,
    ) -> None:
        given = _Given(spec, sizes, strides)
        places = given.places(q_starts, kv_starts, q_lens, kv_lens)
        read = [given.tensor(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v"), (o, "o"), (do, "do"))]
        made = [given.tensor(x, n) for x, n in ((dq, "dq"), (dk, "dk"), (dv, "dv"))]
        total, logarithm, dq_sum = given.sums(rows, "q", (1, 1, wide(spec.features)))
        keys = made[1:]
        if const_expr(shared):
            keys = given.sums(sums, "k", (wide(spec.features), wide(spec.values)))
        before(
            read[3], read[4], total, given.statistic(lse), logarithm, dq_sum,
            places[0], places[2], None, None, None, scale, stream=stream,
        )  # fmt: skip
        attend(
            *read[:3], read[4], logarithm, total, dq_sum, *keys, scale, *places, left, right,
            aux_data=given.captured(captured), stream=stream,
        )  # fmt: skip
        after["q"](dq_sum, made[0], scale, places[0], places[2], None, stream=stream)
        if const_expr(shared):
            after["k"](keys[0], made[1], scale, places[1], places[3], None, stream=stream)
            after["v"](keys[1], made[2], Float32(1.0), places[1], places[3], None, stream=stream)

    tensors = [_address(TYPES[spec.dtype]) for _ in range(8)]
    memory = [_address(Float32), _address(Float32) if shared else None]
    memory.append(_address(Float32, 4) if spec.captured else None)
    return (run, *tensors[:5], _address(Float32, 4), *tensors[5:], *memory, *_ends(spec))


def _stages(spec: FlashSpec) -> tuple[Any, Any, dict[str, Any]]:
    """What runs before the gradient (row sums, a cleared dq), it, and what rounds the FP32 sums, by name."""
    tiles = _tile_size_bwd_sm90(spec.features, spec.values, spec.mask == "causal", _local(spec))
    dtype, threads = TYPES[spec.dtype], tiles.num_wg * 128
    multiple = 64 if tiles.dKV_swapAB else 32
    attend = FlashAttentionBackwardSm90(
        dtype,
        spec.features,
        spec.values,
        spec.group,
        spec.mask == "causal",
        is_local=_local(spec),
        tile_m=tiles.m_block_size,
        tile_n=tiles.n_block_size,
        Q_stage=tiles.num_stages_Q,
        dO_stage=tiles.num_stages_dO,
        PdS_stage=tiles.num_stages_PdS,
        SdP_swapAB=tiles.SdP_swapAB,
        dKV_swapAB=tiles.dKV_swapAB,
        dQ_swapAB=tiles.dQ_swapAB,
        AtomLayoutMSdP=tiles.AtomLayoutMSdP,
        AtomLayoutNdKV=tiles.AtomLayoutNdKV,
        AtomLayoutMdQ=tiles.AtomLayoutMdQ,
        num_threads=threads + 128,
        score_mod=_modifier(spec) if spec.score else None,
        score_mod_bwd=_gradient(spec) if spec.score else None,
        dQ_single_wg=tiles.dQ_single_wg,
    )
    before = FlashAttentionBackwardPreprocess(
        dtype, spec.features, spec.values, tiles.m_block_size, hdim_multiple_of=multiple
    )

    def rounds(features: int, block: int, threads: int, layout: int, swap: bool) -> Any:
        return FlashAttentionBackwardPostprocess(
            dtype, features, ARCH, block, threads, layout, swap, hdim_multiple_of=multiple
        )

    keys = (tiles.n_block_size, threads, tiles.AtomLayoutNdKV, tiles.dKV_swapAB)
    queries = (128 if tiles.dQ_single_wg else threads, tiles.AtomLayoutMdQ, tiles.dQ_swapAB)
    after = {
        "q": rounds(spec.features, tiles.m_block_size, *queries),
        "k": rounds(spec.features, *keys),
        "v": rounds(spec.values, *keys),
    }
    return before, attend, after


# -- arguments


class Sizes(NamedTuple):
    """Of a call; see `build.load`."""

    batch: Int32
    s_q: Int32
    s_kv: Int32
    h_q: Int32
    h_kv: Int32
    d_qk: Int32
    d_v: Int32
    processors: Int32


class _Given:
    """Tensors of a call, from addresses, sizes and strides."""

    def __init__(self, spec: FlashSpec, sizes: Any, strides: Any) -> None:
        self.spec, self.n = spec, Sizes(*sizes)
        self.strides = {}
        for i, name in enumerate(TENSORS[spec.backward]):
            steps = [cute.assume(s, divby=8) for s in strides[3 * i : 3 * i + 3]]
            self.strides[name] = tuple(steps[1 if spec.packed else 0 :])

    def tensor(self, address: Any, name: str) -> Any:
        """[batch, rows, heads, features], or packed."""
        n, keys = self.n, name in ("k", "v", "dk", "dv")
        features = n.d_v if name in ("v", "o", "do", "dv") else n.d_qk
        shape: tuple[Any, ...] = (n.s_kv, n.h_kv, features) if keys else (n.s_q, n.h_q, features)
        shape = shape if self.spec.packed else (n.batch, *shape)
        return cute.make_tensor(address, cute.make_layout(shape, stride=(*self.strides[name], 1)))

    def statistic(self, address: Any) -> Any:
        """[batch, heads, rows], or packed, contiguous."""
        n = self.n
        row, entry = Int64(n.s_q), Int64(n.s_q) * n.h_q
        layout = cute.make_layout((n.h_q, n.s_q), stride=(row, 1))
        if not self.spec.packed:
            layout = cute.make_layout((n.batch, n.h_q, n.s_q), stride=(entry, row, 1))
        return cute.make_tensor(address, layout)

    def by_head(self, address: Any) -> Any:
        """[heads of q], or None."""
        if const_expr(address is None):
            return None
        return cute.make_tensor(address, cute.make_layout((self.n.h_q,)))

    def captured(self, address: Any) -> AuxData:
        """What a modifier gets: the address of [captured values, heads of q], and the number of heads."""
        if const_expr(address is None):
            return AuxData()
        return AuxData(scalars=(address.toint(), self.n.h_q))

    def places(self, *addresses: Any) -> list[Any]:
        """Starts of queries and of keys, with the end, then their lengths."""
        if not self.spec.packed:
            return [None] * 4
        n = self.n.batch
        return [
            cute.make_tensor(x, cute.make_layout((size,)))
            for x, size in zip(addresses, (n + 1, n + 1, n, n), strict=True)
        ]

    def sums(self, address: Any, side: str, widths: tuple[int, ...]) -> list[Any]:
        """Memory of FP32 sums as tensors [[batch,] heads, padded rows * width], one behind the other."""
        n = self.n
        rows, heads = (n.s_q, n.h_q) if side == "q" else (n.s_kv, n.h_kv)
        rows = padded(rows, n.batch) if self.spec.packed else padded(rows)
        outer = () if self.spec.packed else (n.batch,)
        made, offset = [], Int64(0)
        for width in widths:
            row = cute.assume(Int64(rows) * width, divby=TILE)
            entry = cute.assume(row * heads, divby=TILE)
            strides = (*(entry for _ in outer), row, 1)
            layout = cute.make_layout((*outer, heads, rows * width), stride=strides)
            made.append(cute.make_tensor(address + cute.assume(offset, divby=TILE), layout))
            offset += entry * (outer[0] if outer else 1)
        return made


def _local(spec: FlashSpec) -> bool:
    return spec.mask == "window"


def _address(dtype: Any, align: int = 16) -> Any:
    return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)


def _ends(spec: FlashSpec) -> tuple[Any, ...]:
    """What both directions end with, but the stream: places, sizes, strides, scale, window."""
    places = [_address(Int32, 4) if spec.packed else None for _ in range(4)]
    sizes = tuple(Int32(1) for _ in Sizes._fields)
    strides = tuple(Int64(8) for _ in range(3 * len(TENSORS[spec.backward])))
    window = [Int32(0) if side else None for side in (spec.left, spec.right)]
    return (*places, sizes, strides, Float32(1.0), *window)


# -- score modifiers


def _modifier(spec: FlashSpec) -> Callable[..., Any]:
    """The function of a score, over the vectors that the kernel hands over."""
    function = _named(spec, spec.function)

    def modify(
        s: Any, batch: Any, head: Any, *, q_idx: Any, kv_idx: Any, aux_scalars: Any = None, **_: Any
    ) -> Any:
        places = _Places(spec, batch, head, q_idx, kv_idx, aux_scalars)
        return _each(s, lambda n: function(*places.read(s, n)))

    return modify


def _gradient(spec: FlashSpec) -> Callable[..., Any]:
    """Its derivative times the gradient of what it gives."""
    function = _named(spec, spec.gradient)

    def modify(
        grad: Any, s: Any, batch: Any, head: Any, *, q_idx: Any, kv_idx: Any,
        aux_scalars: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        places = _Places(spec, batch, head, q_idx, kv_idx, aux_scalars)
        return _each(s, lambda n: function(*places.read(s, n), grad[n]))

    return modify


class _Places:
    """Where the scores of a vector are, and what is captured."""

    def __init__(self, spec: FlashSpec, *vectors: Any) -> None:
        self.spec = spec
        *places, captured = vectors
        self.vectors = dict(zip(("batch", "head", "i", "j"), places, strict=True))
        if spec.captured:
            address, heads = captured
            memory = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
            layout = cute.make_layout((len(spec.captured), heads), stride=(heads, 1))
            self.captured = cute.make_tensor(memory, layout)

    def read(self, s: Any, n: int) -> list[Any]:
        """What the function reads of element n."""
        return [s[n] if name == "s" else Float32(self._read(name, n)) for name in self.spec.inputs]

    def _read(self, name: str, n: int) -> Any:
        if name in self.vectors:
            return self._place(name, n)
        return self.captured[self.spec.captured.index(name), self._place("head", n)]

    def _place(self, name: str, n: int) -> Any:
        place, group = self.vectors[name][n], self.spec.group
        if not self.spec.backward or group == 1 or name not in ("i", "head"):
            return place
        # flash-attn's gradient hands over i // group, and head * group + i % group, as if the heads that share keys
        # were rows of one tile, which they are forward only.
        head = self.vectors["head"][n]
        return head // group if name == "head" else place * group + head % group


def _each(s: Any, function: Callable[[int], Any]) -> Any:
    """A function, element by element: its text is of scalars."""
    made = cute.make_rmem_tensor(s.shape, Float32)
    for n in range(cute.size(s.shape)):
        made[n] = Float32(function(n))
    return made.load()


def _named(spec: FlashSpec, name: str) -> Any:
    """A function of the spec's source."""
    names: dict[str, Any] = {}
    exec(compile(spec.score, f"<{name}>", "exec"), names)
    return names[name]
