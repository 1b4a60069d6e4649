"""Several results over the same operands in one pass: pointwise values, each with its FP8 copies and its sum over
rows; a tensor's FP8 copies with its sum over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.backends.chains import Chain, compose_chain, rounding
from te_ops.backends.cuda import launch
from te_ops.backends.cuda.block import block_parts, refuse_blocks, refuse_room, refuse_sums
from te_ops.backends.cuda.fused import refuse_chain
from te_ops.backends.cuda.quantize import BLOCKED, is_known, refuse_state, state_place, wanted_of
from te_ops.backends.cuda.source import CTYPES, Placed, Source, joined_source, plain, prepare
from te_ops.backends.cuda.targets import (
    MAX_OUTS,
    PER_TENSOR,
    Part,
    RunParts,
    lead_of,
    parts_kernel,
)
from te_ops.backends.cuda.wanted import Results, Wanted
from te_ops.graph import Node, Value
from te_ops.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer
from te_ops.registry import Call, Launch


@dataclass(frozen=True)
class Branch:
    """A value of the pass, and the nodes of the group that read it."""

    value: Value
    node: Node | None  # the pointwise node that makes it; None: it is read
    quantize: Node | None
    reduce: Node | None

    def refuse(self, call: Call) -> str | None:
        """Why the pass does not make what is asked of the value."""
        if self.reduce is not None:
            if self.reduce.over != "rows":
                return f"a sum over {self.reduce.over}"
            if self.reduce.dtype not in CTYPES:
                return f"writes FP32, BF16 and FP16, not {self.reduce.dtype}"
        if self.quantize is None:
            return None
        quantizer = self.quantize.quantizer
        if type(quantizer) not in PER_TENSOR:
            return self._refuse_blocks(call)
        if self.waits and self.node is not None and self.rounds(call) is None:
            return "current scaling reads its values again, and this rule does not round them"
        return refuse_state(call, self.quantize)

    def _refuse_blocks(self, call: Call) -> str | None:
        """The same of a format with a scale a block."""
        assert self.quantize is not None
        quantizer = self.quantize.quantizer
        if self.rounds(call) is None:
            return "a block's values wait for its scale as they would be written: rounded"
        outs, width = self._size(call)
        return refuse_sums(quantizer) or refuse_blocks(quantizer, width, outs)

    def _size(self, call: Call) -> tuple[int, int]:
        """Outputs, and columns of one."""
        shape, outs = call.spec(self.value).shape, self.outs
        return outs, (int(shape[-1]) if shape else 1) // outs

    @property
    def blocks(self) -> bool:
        """Whether it is quantized with a scale a block."""
        return self.quantize is not None and isinstance(self.quantize.quantizer, BLOCKED)

    @property
    def outs(self) -> int:
        """Outputs of the function that makes it."""
        return len(self.node.fn.out) if self.node is not None else 1

    @property
    def waits(self) -> bool:
        """Whether its scale is known only when all values are."""
        node = self.quantize
        if node is None or is_known(node):
            return False
        return isinstance(node.quantizer, Float8CurrentScalingQuantizer)

    def rounds(self, call: Call) -> torch.dtype | None:
        """What the value is rounded to."""
        dtype = call.spec(self.value).dtype
        if self.node is None:
            return dtype
        return rounding(call, self.value in call.writes, dtype)

    def part(self, call: Call) -> Part:
        """What the pass makes of it."""
        spec = call.spec(self.value)
        dense = spec.dtype if self.node is not None and self.value in call.writes else None
        sums = self.reduce.dtype if self.reduce is not None else None
        outs = self.outs
        quantize, rounds = self.quantize, self.rounds(call)
        if quantize is None:
            wanted = Wanted(False, False, False, dense, rounds, spec.dtype, sums)
            return Part(None, wanted, outs)
        wanted = replace(wanted_of(call, quantize, dense, rounds), sums=sums)
        return Part(quantize.quantizer, wanted, outs, is_known(quantize))

    def names(self) -> dict[Value, str]:
        """Which field of the results each value of the group is."""
        found = {} if self.node is None else {self.value: "dense"}
        if self.quantize is not None:
            fields = ("row", "col", "amax")
            found |= {Value(self.quantize.id, i): name for i, name in enumerate(fields)}
        if self.reduce is not None:
            found[self.reduce.out] = "sums"
        return found


def _refuse_tiles(call: Call, branches: Sequence[Branch]) -> str | None:
    """Why the branches do not go over one kind of tiles: those of 1x128 and 128x128 blocks keep 16-bit values of one
    dtype and know nothing of a tensor's scale; MXFP8's are its own."""
    blocked = [b.quantize.quantizer for b in branches if b.blocks and b.quantize is not None]
    if len(branches) == 1 or not blocked:
        return None
    formats = [b.quantize.quantizer for b in branches if b.quantize is not None]
    for quantizer in formats:
        if not isinstance(quantizer, Float8BlockQuantizer):
            return f"{quantizer.describe()} has other tiles than the values beside it"
    dtypes = {b.rounds(call) or torch.float32 for b in branches}
    if len(dtypes) > 1:
        return f"the results wait for their scales as {', '.join(sorted(map(str, dtypes)))}"
    if torch.float32 in dtypes:
        return "FP32 values of several results have no room to wait for their scales"
    summed = any(b.reduce is not None for b in branches)
    return refuse_room(sum(b.outs for b in branches), summed, call.arch)


def branches_of(call: Call) -> list[Branch] | str:
    """The group as branches, or why it has none."""
    makers = {n.out: n for n in call.nodes if n.prim.name == "pointwise"}
    readers: dict[Value, dict[str, Node]] = {value: {} for value in makers}
    for node in call.nodes:
        if node.prim.name == "pointwise":
            if any(v in makers for v in node.inputs):
                return f"{node.fn.name} reads a result of the same pass"
            continue
        at = readers.setdefault(node.inputs[0], {})
        if node.prim.name in at:
            return f"two {node.prim.name} nodes read one value"
        at[node.prim.name] = node
    return [
        Branch(value, makers.get(value), found.get("quantize"), found.get("reduce"))
        for value, found in readers.items()
    ]


# -- several functions of the same operands


@dataclass(frozen=True)
class _Joined:
    """Chains over one list of operands."""

    functions: tuple[Placed, ...]
    values: tuple[Value, ...]
    kinds: tuple[str, ...]
    interleave: int | None

    def source(self, call: Call, fast: bool) -> Source:
        specs = [call.spec(v) for v in self.values]
        return joined_source(self.functions, specs, self.kinds, self.interleave, fast=fast)


def _join(call: Call, branches: Sequence[Branch]) -> _Joined | str:
    """The functions of all branches, or why they are not computed in one pass."""
    chains: list[Chain] = []
    for branch in branches:
        assert branch.node is not None
        chain = compose_chain(call, (branch.node,))
        reason = refuse_chain(call, chain)
        if reason is not None or isinstance(chain, str):
            return str(reason)
        chains.append(chain)
    sizes = {_size(call, chain) for chain in chains}
    if len(sizes) > 1:
        return "the results have different shapes"
    full = [{v for v, k in zip(c.values, c.kinds, strict=True) if k == "full"} for c in chains]
    if any(not mine & set().union(*full[:i], *full[i + 1 :]) for i, mine in enumerate(full)) and (
        len(full) > 1
    ):
        return "the results share no tensor of their shape"
    gated = [c for c in chains if "pair" in c.fn.inputs or len(c.fn.out) == 2]
    interleaves = {c.interleave for c in gated}
    if len(interleaves) > 1:
        return f"the results have different interleaves {interleaves}"
    operands: dict[tuple[Value, str, str], int] = {}
    functions = []
    for chain in chains:
        keys = zip(chain.values, chain.kinds, chain.fn.inputs, strict=True)
        places = tuple(operands.setdefault(key, len(operands)) for key in keys)
        functions.append(Placed(chain.fn, places))
    return _Joined(
        tuple(functions),
        tuple(value for value, _, _ in operands),
        tuple(kind for _, kind, _ in operands),
        next(iter(interleaves), None),
    )


def _size(call: Call, chain: Chain) -> tuple[Any, ...]:
    """Leading dimensions and width of one output of a chain."""
    full = chain.kinds.index("full")
    shape = call.spec(chain.values[full]).shape
    last = int(shape[-1]) if shape else 1
    return tuple(shape[:-1]), last // 2 if chain.fn.inputs[full] == "pair" else last


def refuse_pointwise_together(call: Call) -> str | None:
    """Results that are not computed in one pass, or not by tiles."""
    branches = branches_of(call)
    if isinstance(branches, str):
        return branches
    if any(branch.node is None for branch in branches):
        return "a node reads none of the results"
    if call.rule is not None and call.rule.exact and not any(b.waits or b.blocks for b in branches):
        return "no value is read again"
    for branch in branches:
        if (reason := branch.refuse(call)) is not None:
            return reason
    if (reason := _refuse_tiles(call, branches)) is not None:
        return reason
    joined = _join(call, branches)
    if isinstance(joined, str):
        return joined
    source = joined.source(call, False)
    if source.outs > MAX_OUTS:
        return f"{source.outs} results; up to {MAX_OUTS} are computed at once"
    pairs = any(len(f.fn.out) == 2 for f in joined.functions)
    if source.scattered or (pairs and source.block != source.width):
        return f"an interleave of {source.block} columns"
    return None


def bind_pointwise_together(call: Call) -> Launch:
    """One pass over the operands (and one over each value whose scale is known only after it)."""
    branches = branches_of(call)
    assert not isinstance(branches, str)
    joined = _join(call, branches)
    assert isinstance(joined, _Joined)
    parts = [branch.part(call) for branch in branches]
    fast = all(
        p.codes or (call.spec(b.value).dtype is torch.bfloat16 and p.wanted.sums is None)
        or p.wanted.dense is torch.bfloat16
        for b, p in zip(branches, parts, strict=True)
    )  # fmt: skip
    source = joined.source(call, fast)
    run = _passes(source, parts, call.arch)
    order = tuple(call.reads.index(v) for v in joined.values)
    kinds, full = joined.kinds, joined.kinds.index("full")
    states = _states(call, branches)
    emit = _emitter(call, branches)

    def launched(*reads: torch.Tensor) -> Any:
        xs = prepare([reads[i] for i in order], kinds)
        x = xs[full]
        scales = [None if i is None else reads[i] for i in states]
        return emit(run(source.slots(xs), lead_of(x.shape), x.device, scales))

    return launched


def _passes(source: Source, parts: Sequence[Part], arch: str) -> RunParts:
    """The kernel of the parts: per-tensor formats, or those with a scale a block."""
    blocked = any(isinstance(part.quantizer, BLOCKED) for part in parts)
    return (block_parts if blocked else parts_kernel)(source, parts, arch)


def _states(call: Call, branches: Sequence[Branch]) -> list[int | None]:
    """Where the scale of each branch is among what the call reads."""
    return [None if b.quantize is None else state_place(call, b.quantize) for b in branches]


def _emitter(call: Call, branches: Sequence[Branch]) -> Any:
    """Results in the order of `call.writes`."""
    places = {v: (k, name) for k, b in enumerate(branches) for v, name in b.names().items()}
    order = [places[v] for v in call.writes]

    def emit(made: Sequence[Results]) -> Any:
        outs = tuple(getattr(made[k], name) for k, name in order)
        return outs[0] if len(outs) == 1 else outs

    return emit


# -- a tensor's copies and its sum over rows


def refuse_reduce_quantize(call: Call) -> str | None:
    """More than a sum over rows and per-tensor copies of one tensor."""
    branches = branches_of(call)
    if isinstance(branches, str):
        return branches
    if len(branches) != 1:
        return "the nodes read different tensors"
    dtype = call.spec(branches[0].value).dtype
    if dtype not in CTYPES:
        return f"reads FP32, BF16 and FP16, not {dtype}"
    return branches[0].refuse(call)


def bind_reduce_quantize(call: Call) -> Launch:
    """One pass over the tensor; current scaling quantizes in a second one."""
    branches = branches_of(call)
    assert not isinstance(branches, str)
    spec = call.spec(branches[0].value)
    width = int(spec.shape[-1]) if spec.shape else 1
    run = _passes(plain(spec.dtype, width), [branches[0].part(call)], call.arch)
    place = call.reads.index(branches[0].value)
    (state,) = _states(call, branches)
    emit = _emitter(call, branches)

    def launched(*reads: torch.Tensor) -> Any:
        x = launch.ready(reads[place])
        scale = None if state is None else reads[state]
        return emit(run((x.data_ptr(), width), lead_of(x.shape), x.device, (scale,)))

    return launched
