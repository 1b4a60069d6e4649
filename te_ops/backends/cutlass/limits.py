"""Which specs `gemm.py` makes, and how they are best tiled: no library is needed to know."""

from __future__ import annotations

from te_ops.backends.cutlass.spec import Epilogue, GemmSpec, Tiling

FP8 = ("e4m3", "e5m2")
HALF = ("bf16", "fp16")
FLOAT = ("fp32", *HALF)
TILE_LOADS = 3  # 16-bit tensors that shared memory holds beside four stages of operands

PINGPONG = Tiling(128, 128, pingpong=True)
WIDE_PINGPONG = Tiling(128, 192, pingpong=True)
COOPERATIVE = Tiling(128, 128)
WIDE = Tiling(128, 192)
TALL = Tiling(256, 128)
APART = Tiling(128, 128, apart=True)

BLOCK_FORMATS = {32: FP8, 16: ("e2m1",)}
"""Of operands whose blocks have scales, by the elements of a block."""
BLOCK_TILINGS = (Tiling(256, 256), Tiling(256, 192), Tiling(256, 128), Tiling(128, 128))
"""Of such products: tiles of 256 rows are shared by the tensor cores of two processors. The order is not measured."""


def refuse(spec: GemmSpec, arch: str = "sm_90a") -> str | None:
    """None if the spec can be compiled for this arch, else the rule that it breaks."""
    other = _blackwell(spec) if arch == "sm_100a" else _hopper(spec)
    return _operands(spec) or _epilogue(spec.epilogue) or other or _tiling(spec)


def tilings(spec: GemmSpec) -> list[Tiling]:
    """The tilings that are worth a try for this spec (whatever its own), best first."""
    if spec.blocks:
        return [tiling for tiling in BLOCK_TILINGS if _block_tiling(spec, tiling) is None]
    return [tiling for tiling in _order(spec) if _registers(spec, tiling) is None]


def _hopper(spec: GemmSpec) -> str | None:
    return "only tensor cores of sm_100 multiply with scales of blocks" if spec.blocks else None


def _blackwell(spec: GemmSpec) -> str | None:
    if spec.epilogue.rebuilt is not None:
        return "for sm_100a no copy is rebuilt"
    if spec.blocks:
        return None
    if spec.a != spec.b:
        return "for sm_100a both operands have one format"
    if spec.tiling.pingpong or spec.tiling.apart or spec.tiling.m != 128:
        return "for sm_100a a tile has 128 rows and one group of threads"
    return None


def _operands(spec: GemmSpec) -> str | None:
    if spec.blocks:
        return _block_operands(spec)
    narrow = [spec.a in FP8, spec.b in FP8]
    if not all(narrow) and (any(narrow) or spec.a != spec.b or spec.a not in HALF):
        return f"operands {spec.a} and {spec.b}: both FP8, both BF16 or both FP16"
    if all(narrow) and (spec.a_major, spec.b_major) != ("k", "k"):
        return "FP8 operands have to be contiguous along K"
    if spec.scaled and not all(narrow):
        return "scales belong to FP8 operands"
    return None


def _block_operands(spec: GemmSpec) -> str | None:
    known = BLOCK_FORMATS.get(spec.blocks)
    if known is None:
        return f"blocks of {spec.blocks} elements: MXFP8 has 32, NVFP4 16"
    if spec.a not in known or spec.b not in known:
        return f"blocks of {spec.blocks} are of {' and '.join(known)}, not {spec.a} and {spec.b}"
    if spec.blocks == 16 and (spec.a_major, spec.b_major) != ("k", "k"):
        return "E2M1 operands have to be contiguous along K"
    if spec.scaled != (spec.blocks == 16):
        return (
            "E2M1 operands have a scale of the tensor beside those of blocks, MXFP8 ones have none"
        )
    return None


def _epilogue(e: Epilogue) -> str | None:
    rules = (
        (bool(e.function) == bool(e.text), "a function comes with its text"),
        (e.outs in (1, 2), "one output, or a pair"),
        (e.outs == 1 or bool(e.function), "a pair of outputs comes of a function"),
        (
            not e.acc_pair or bool(e.function),
            "a paired accumulator wants a function that takes a pair",
        ),
        (not (e.acc_pair and e.outs == 2), "a pair of outputs of a paired accumulator is not made"),
        (not (e.acc_pair and e.sums), "sums over a paired accumulator are not made"),
        (bool(e.function) or not e.loads, "loads need a function that reads them"),
        (0 <= e.acc <= len(e.loads), "the accumulator is one of the function's inputs"),
        (e.acc_store is not None or e.store is not None or _copies(e), "nothing is written"),
    )
    for holds, rule in rules:
        if not holds:
            return rule
    return _formats(e) or _loads(e) or _accumulation(e) or _rebuilt(e)


def _copies(e: Epilogue) -> bool:
    q = e.quantized
    return q is not None and (q.row or q.col or q.amax)


def _formats(e: Epilogue) -> str | None:
    for name in ("acc_store", "store", "rounds_acc", "rounds"):
        kind = getattr(e, name)
        if kind is not None and kind not in FLOAT:
            return f"{name} is one of {', '.join(FLOAT)}, not {kind}"
    if e.acc_pair and "fp32" in (e.acc_store, e.store):
        return "beside a paired accumulator, outputs that are not quantized are BF16 or FP16"
    if e.quantized is not None and e.quantized.format not in FP8:
        return f"copies are quantized to E4M3 or E5M2, not {e.quantized.format}"
    return (
        None
        if e.quantized is None or _copies(e)
        else "a quantized result without a copy and without amax"
    )


def _loads(e: Epilogue) -> str | None:
    tiles = [load for load in e.loads if load.shape == "tile"]
    if e.acc_pair and tiles:
        return "a function of a paired accumulator loads rows, columns and scalars, not tiles"
    if sum(1 + load.pair for load in tiles) > TILE_LOADS:
        return f"more than {TILE_LOADS} tiles to load"
    for load in e.loads:
        if load.format not in FLOAT:
            return f"loads are one of {', '.join(FLOAT)}, not {load.format}"
        if load.pair and load.shape not in ("tile", "row"):
            return f"a {load.shape} has no halves"
    return None


def _accumulation(e: Epilogue) -> str | None:
    if e.accumulate and (e.store is None or e.outs == 2 or e.acc_pair):
        return "what is accumulated is one output of full width, stored unquantized"
    return None


def _rebuilt(e: Epilogue) -> str | None:
    again = e.rebuilt
    if again is None:
        return None
    if again.format not in FP8:
        return f"copies are quantized to E4M3 or E5M2, not {again.format}"
    if e.acc_pair or e.quantized is None or not (e.quantized.row or e.quantized.col):
        return "a copy is rebuilt beside those of a product without gates"
    if not all(0 <= i < len(e.loads) for i in again.loads):
        return "what is rebuilt reads the epilogue's loads"
    return None


def _block_tiling(spec: GemmSpec, tiling: Tiling) -> str | None:
    if tiling not in BLOCK_TILINGS:
        return f"tile {tiling.m}x{tiling.n} is not made for operands whose blocks have scales"
    if spec.epilogue.sums and tiling.m == 256:
        return "sums over rows want a tile that one processor has: 128 rows"
    return None


def _tiling(spec: GemmSpec) -> str | None:
    tiling = spec.tiling
    if spec.blocks:
        return _block_tiling(spec, tiling)
    sizes = (tiling.m, tiling.n)
    if sizes not in ((128, 128), (128, 192), (256, 128)) or (tiling.pingpong and tiling.m != 128):
        return f"tile {tiling.m}x{tiling.n}{' pingpong' * tiling.pingpong} is not made"
    if tiling.cluster_m * tiling.cluster_n not in (1, 2, 4) or tiling.cluster_m == 3:
        return f"a cluster of {tiling.cluster_m}x{tiling.cluster_n} blocks is not made"
    if tiling.apart and (sizes != (128, 128) or tiling.pingpong):
        return "an epilogue by threads of its own is made for tiles of 128x128, which two warp groups share"
    if tiling.apart and (spec.a not in FP8 or spec.fast):
        return "an epilogue by threads of its own is made where sums are split: others have faster tilings"
    return _registers(spec, tiling)


def _registers(spec: GemmSpec, tiling: Tiling) -> str | None:
    """The combinations whose accumulators and epilogue do not fit the registers of a thread, as their code shows."""
    narrow = spec.a in FP8
    if spec.epilogue.rebuilt is not None and not (tiling.apart or tiling == PINGPONG):
        return "a copy is rebuilt by threads of its own, or tiles of 128x128 that take turns"
    if narrow and not spec.fast and (tiling.pingpong or tiling.m == 256):
        return (
            "split accumulation doubles the accumulators: two warp groups share a tile of 128 rows"
        )
    if tiling.pingpong and tiling.n == 192 and not spec.epilogue.acc_pair:
        loaded, stored, copied = _tiles(spec.epilogue)
        heavy = (
            stored > 1 or loaded + stored + copied > 2 if narrow else loaded + stored + copied > 4
        )
        if heavy or spec.epilogue.sums:
            return "beside 96 accumulators a thread has no registers for an epilogue of so many tensors"
    return None


def _tiles(e: Epilogue) -> tuple[int, int, int]:
    """Tiles loaded, stored, and quantized: codes weigh two, an amax alone one."""
    loaded = sum(1 + load.pair for load in e.loads if load.shape == "tile")
    stored = (e.acc_store is not None) + (e.outs if e.store is not None else 0)
    q = e.quantized
    return loaded, stored, 0 if q is None else 2 * e.outs if q.row or q.col else 1


def _order(spec: GemmSpec) -> list[Tiling]:
    split = spec.a in FP8 and not spec.fast
    if split and spec.epilogue.quantized:
        return [APART, COOPERATIVE, WIDE]
    if split:
        return [WIDE, COOPERATIVE]
    if spec.epilogue.acc_pair or spec.epilogue.quantized is None:
        return [WIDE_PINGPONG, PINGPONG, TALL, WIDE, COOPERATIVE]
    return [PINGPONG, WIDE_PINGPONG, TALL, COOPERATIVE, WIDE]
