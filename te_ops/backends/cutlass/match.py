"""Which fused GEMM a group of the graph is: the spec of the kernel, and where its operands and results come from."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from te_ops.backends.chains import Chain, compose_chain, rounding
from te_ops.backends.cutlass import blocks
from te_ops.backends.cutlass.reference import FORMATS
from te_ops.backends.cutlass.spec import (
    Epilogue,
    Format,
    GemmSpec,
    Load,
    Quantized,
    Rebuilt,
    Shape,
)
from te_ops.graph import Node, Spec, Value
from te_ops.pointwise import Const, Expr, Fn, lower, prelude, symbol
from te_ops.pointwise.expr import intern, walk
from te_ops.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_ops.registry import Call

PER_TENSOR = (Float8Quantizer, Float8CurrentScalingQuantizer)
MULTIPLE = 16
"""Of every extent that is contiguous in memory: 16 bytes of FP8, which is what the copy engine moves at least."""

_HALF = (torch.bfloat16, torch.float16)
_STORED = (*_HALF, torch.float32)
_SHAPES: dict[str, Shape] = {"full": "tile", "row": "row", "col": "column", "scalar": "scalar"}


@dataclass(frozen=True)
class Match:
    """A group as one kernel.

    Attributes:
        spec: of the kernel, with no tiling chosen yet.
        fn: the function of its epilogue; None if it has none.
        gemm: the product; its inputs are the operands.
        loads: values that the epilogue reads, in the order of the spec's.
        value: what the epilogue makes.
        quantize, reduce: the nodes of the group that read that value.
        total: what the value is added to.
        rebuilt: the quantize node of a copy that is rebuilt of the loads.
        second: the function of what it reads.
    """

    spec: GemmSpec
    fn: Fn | None
    gemm: Node
    loads: tuple[Value, ...]
    value: Value
    quantize: Node | None = None
    reduce: Node | None = None
    total: Value | None = None
    rebuilt: Node | None = None
    second: Fn | None = None

    @property
    def waits(self) -> bool:
        """Whether the codes are made in a second pass: their scale is known only when all values are."""
        node = self.quantize
        return node is not None and isinstance(node.quantizer, Float8CurrentScalingQuantizer)

    def extents(self, call: Call) -> Extents:
        """Of the shapes that the plan was made for."""
        a, b = (call.spec(v).shape for v in self.gemm.inputs)
        return extents_of(self.gemm.layout, a, b)


class Extents(NamedTuple):
    """Of a product; of a paired accumulator N counts both halves. A plan serves several row counts, and these are M,
    or K where rows are contracted."""

    m: int
    n: int
    k: int
    contracts: bool = False

    @property
    def rows(self) -> int:
        """What differs between calls of a plan."""
        return self.k if self.contracts else self.m

    def at(self, rows: int) -> Extents:
        """The same product over another number of rows."""
        return self._replace(k=rows) if self.contracts else self._replace(m=rows)


def extents_of(layout: str, a: Sequence[int], b: Sequence[int]) -> Extents:
    """The extents of a gemm over operands of these logical shapes."""
    rows, last = math.prod(map(int, a[:-1])), int(a[-1])
    if layout == "tn":
        return Extents(last, int(b[-1]), rows, contracts=True)
    return Extents(rows, int(b[0 if layout == "nt" else 1]), last)


def match_of(call: Call) -> Match | str:
    """The kernel of a group, or why there is none.

    The group starts with a gemm; a chain of pointwise and sum nodes may follow, whose last value may be quantized and
    summed over rows, and another value of the chain's operands quantized beside it; or the product is added to a
    tensor.
    """
    gemm, *rest = call.nodes
    rest, beside = _linked(gemm, rest)
    operands = _operands(call, gemm)
    if isinstance(operands, str):
        return operands
    if rest and rest[0].prim.name == "accumulate":
        return _accumulated(call, operands, gemm, rest)
    chain = [n for n in rest if n.prim.name in ("pointwise", "sum")]
    readers = _readers(rest, (chain[-1] if chain else gemm).out)
    if isinstance(readers, str):
        return readers
    made = _epilogue(call, operands, gemm, chain, readers)
    return _with_rebuilt(call, made, beside) if beside and isinstance(made, Match) else made


def _linked(gemm: Node, rest: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes that are made of the product, and the others."""
    linked: dict[int, Node] = {gemm.id: gemm}
    for node in rest:
        if any(v.node in linked for v in node.inputs):
            linked[node.id] = node
    return [n for n in rest if n.id in linked], [n for n in rest if n.id not in linked]


# -- the operands of the product


def _operands(call: Call, gemm: Node) -> GemmSpec | str:
    """The spec of the product alone."""
    specs = [call.spec(v) for v in gemm.inputs]
    if gemm.dtype not in _STORED:
        return f"makes BF16, FP16 and FP32, not {gemm.dtype}"
    reason = _aligned(call, gemm, specs)
    if reason is not None:
        return reason
    if all(s.kind.name == "dense" for s in specs):
        if specs[0].dtype is not specs[1].dtype or specs[0].dtype not in _HALF:
            return f"multiplies BF16 or FP16 tensors, not {specs[0].dtype} and {specs[1].dtype}"
        dtype = FORMATS[specs[0].dtype]
        return GemmSpec(
            dtype,
            dtype,
            a_major="mn" if gemm.layout == "tn" else "k",
            b_major="k" if gemm.layout == "nt" else "mn",
        )
    return _records(call, gemm, specs)


def _records(call: Call, gemm: Node, specs: Sequence[Spec]) -> GemmSpec | str:
    """The product of two records, each with one scale, or with scales of blocks where tensor cores take them."""
    if any(spec.kind.name != "record" for spec in specs):
        return "one operand is quantized and the other is not"
    if call.arch == blocks.ARCH and all(map(_has_blocks, specs)):
        return blocks.product(gemm, specs)
    formats: list[Format] = []
    for spec, usage in zip(specs, blocks.LAYOUTS[gemm.layout], strict=True):
        quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)
        if not isinstance(quantizer, PER_TENSOR):
            return f"multiplies FP8 with one scale a tensor, not {quantizer.describe()}"
        if spec.kind.usage is not usage:
            return f"gemm {gemm.layout} reads a {usage.value} record here, this one is {spec.kind.usage.value}"
        formats.append(FORMATS[quantizer.dtype])
    fast = gemm.attrs.get("accumulation") == "fast"
    return GemmSpec(formats[0], formats[1], scaled=True, fast=fast)


def _aligned(call: Call, gemm: Node, specs: Sequence[Spec]) -> str | None:
    """Why extents are not what the kernel's copies need, None if they are. Row counts are known as a class."""
    found = extents_of(gemm.layout, specs[0].shape, specs[1].shape)
    along = _along(specs[0], found.contracts)
    fixed = {"M": (found.m, MULTIPLE)} if found.contracts else {"K": (found.k, along)}
    for name, (extent, multiple) in {"N": (found.n, MULTIPLE), **fixed}.items():
        if extent % multiple:
            return f"{name} = {extent} is not a multiple of {multiple}"
    if found.contracts and call.align % along:
        codes = "FP8" if along == MULTIPLE else "E2M1"
        return f"the row count is a multiple of {call.align}; {codes} is contracted over multiples of {along} rows"
    return None


def _along(spec: Spec, contracts: bool) -> int:
    """What the extent that is contracted is a multiple of: 16 bytes of the first operand, where it is contiguous."""
    quantizer = spec.kind.quantizer if spec.kind.name == "record" else None
    if contracts and (quantizer is None or isinstance(quantizer, MXFP8Quantizer)):
        return 1
    return 2 * MULTIPLE if isinstance(quantizer, NVFP4Quantizer) else MULTIPLE


def _has_blocks(spec: Spec) -> bool:
    return blocks.has_blocks(spec.kind.quantizer.of_usage(spec.kind.usage))


# -- what follows it


def _readers(rest: Sequence[Node], value: Value) -> dict[str, Node] | str:
    """The quantize and the reduce node of a group, which read this value."""
    found: dict[str, Node] = {}
    for node in rest:
        name = node.prim.name
        if name in ("pointwise", "sum"):
            continue
        if name not in ("quantize", "reduce"):
            return f"has no {name} epilogue"
        if name in found:
            return f"two {name} nodes read one value"
        if node.inputs[0] != value:
            return f"{name} does not read what the epilogue makes"
        found[name] = node
    return found


def _accumulated(call: Call, product: GemmSpec, gemm: Node, rest: Sequence[Node]) -> Match | str:
    """The product added to a tensor."""
    node = rest[0]
    total, part = node.inputs
    if len(rest) > 1 or gemm.out in call.writes:
        return "adds the product to a tensor, and nothing more"
    if part != gemm.out or total == gemm.out:
        return "the product is what is added to"
    dtype = call.spec(total).dtype
    if dtype not in _STORED:
        return f"adds to BF16, FP16 and FP32, not {dtype}"
    epilogue = Epilogue(store=FORMATS[dtype], accumulate=True)
    return Match(replace(product, epilogue=epilogue), None, gemm, (), node.out, total=total)


def _epilogue(
    call: Call,
    product: GemmSpec,
    gemm: Node,
    nodes: Sequence[Node],
    readers: dict[str, Node],
) -> Match | str:
    """The product with a function of it, and what is made of that."""
    quantize, reduce = readers.get("quantize"), readers.get("reduce")
    dtype = (nodes[-1] if nodes else gemm).dtype
    value = (nodes[-1] if nodes else gemm).out
    written = value in call.writes
    rounds = rounding(call, written, dtype)
    reason = _refuse_readers(call, quantize, reduce, rounds) or _refuse_exact(call, quantize, nodes)
    if reason is None and dtype not in _STORED:
        reason = f"makes BF16, FP16 and FP32, not {dtype}"
    if reason is not None:
        return reason
    waits = quantize is not None and isinstance(quantize.quantizer, Float8CurrentScalingQuantizer)
    made = Epilogue(
        rounds=_half(rounds),
        store=FORMATS[dtype] if written or waits else None,
        quantized=None if quantize is None else _quantized(call, quantize),
        sums=reduce is not None,
    )
    if not nodes:
        return Match(replace(product, epilogue=made), None, gemm, (), value, quantize, reduce)
    function = _function(call, gemm, nodes, made)
    if isinstance(function, str):
        return function
    epilogue, fn, loads = function
    return Match(replace(product, epilogue=epilogue), fn, gemm, loads, value, quantize, reduce)


def _with_rebuilt(call: Call, made: Match, nodes: Sequence[Node]) -> Match | str:
    """A match with the transposed copy of another function of its loads."""
    if [n.prim.name for n in nodes] != ["pointwise", "quantize"]:
        return (
            "beside the chain one function of its operands is quantized, and nothing more is made"
        )
    if made.spec.fast:
        return "beside fast sums a rebuilt copy has not been compared on a device yet"
    source, node = nodes
    reason = _refuse_rebuilt(call, source, node)
    chain = compose_chain(call, [source])
    if reason is not None or isinstance(chain, str):
        return reason or str(chain)
    if chain.interleave is not None or len(chain.fn.out) != 1:
        return "what is rebuilt is one value of halves that are not interleaved"
    shapes = [(load.shape, load.pair) for load in made.spec.epilogue.loads]
    loaded = list(zip(made.loads, shapes, strict=True))
    places = []
    for value, kind, form in zip(chain.values, chain.kinds, chain.fn.inputs, strict=True):
        read = value, (_SHAPES[kind], form == "pair")
        if read not in loaded:
            return "what is rebuilt reads an operand that the epilogue does not"
        places.append(loaded.index(read))
    fn = _without_division(chain.fn)
    rebuilt = Rebuilt(symbol(fn), _text(fn, True), tuple(places), FORMATS[node.quantizer.dtype])
    epilogue = replace(made.spec.epilogue, rebuilt=rebuilt)
    return replace(made, spec=replace(made.spec, epilogue=epilogue), rebuilt=node, second=fn)


def _refuse_rebuilt(call: Call, source: Node, node: Node) -> str | None:
    copies = [i for i in range(3) if Value(node.id, i) in call.writes]
    if node.inputs[0] != source.out or source.out in call.writes or copies != [1]:
        return "what is rebuilt is a transposed copy, and nothing else of it is wanted"
    if type(node.quantizer) is not Float8Quantizer:
        return (
            f"{node.quantizer.describe()}: a copy that is rebuilt has a scale that is there before"
        )
    if call.spec(node.inputs[1]).dtype is not torch.float32:
        return f"the scale is {call.spec(node.inputs[1]).dtype}; FP32 is read"
    if call.align % MULTIPLE:
        return f"the row count is a multiple of {call.align}; a transposed copy has multiples of {MULTIPLE} rows"
    return None


def _half(dtype: torch.dtype | None) -> Format | None:
    """A rounding; to FP32 is none."""
    return FORMATS[dtype] if dtype in _HALF else None


def _refuse_readers(
    call: Call, quantize: Node | None, reduce: Node | None, rounds: torch.dtype | None
) -> str | None:
    if reduce is not None and reduce.over != "rows":
        return f"a sum over {reduce.over}"
    if reduce is not None and reduce.dtype not in _STORED:
        return f"sums in BF16, FP16 and FP32, not {reduce.dtype}"
    if quantize is None:
        return None
    quantizer = quantize.quantizer
    if type(quantizer) not in PER_TENSOR:
        return f"{quantizer.describe()} has other tiles than the product: a kernel of its own quantizes it"
    if quantize.attrs.get("known", False):
        return "the scale is made from an amax that is known, in a kernel of its own"
    if quantizer.stateful and call.spec(quantize.inputs[1]).dtype is not torch.float32:
        return f"the scale is {call.spec(quantize.inputs[1]).dtype}; FP32 is read"
    if not quantizer.stateful and rounds is None:
        return "current scaling reads its values again, and this rule does not round them"
    width = int(call.spec(quantize.inputs[0]).shape[-1])
    if quantizer.stateful and Value(quantize.id, 0) in call.writes and width % MULTIPLE:
        return f"rows of {width} codes do not begin on {MULTIPLE} bytes"
    if Value(quantize.id, 1) in call.writes and call.align % MULTIPLE:
        return f"the row count is a multiple of {call.align}; a transposed copy has multiples of {MULTIPLE} rows"
    return None


def _refuse_exact(call: Call, quantize: Node | None, nodes: Sequence[Node]) -> str | None:
    """Rules that round are there for what reads its values again."""
    if call.rule is None or not call.rule.exact:
        return None
    if quantize is None or quantize.quantizer.stateful:
        return "no value is read again"
    return "values inside the chain are not rounded" if len(nodes) > 1 else None


def _quantized(call: Call, node: Node) -> Quantized:
    """What the kernel makes of the value; current scaling wants its amax, and the codes come after it."""
    row, col, amax = (Value(node.id, i) in call.writes for i in range(3))
    if not node.quantizer.stateful:
        row, col, amax = False, False, True
    return Quantized(FORMATS[node.quantizer.dtype], row, col, amax)


def _function(
    call: Call, gemm: Node, nodes: Sequence[Node], made: Epilogue
) -> tuple[Epilogue, Fn, tuple[Value, ...]] | str:
    """The epilogue with the function of a chain, and the values that it reads beside the product."""
    chain = compose_chain(call, nodes)
    if isinstance(chain, str):
        return chain
    places = [i for i, v in enumerate(chain.values) if v == gemm.out]
    if len(places) != 1 or chain.kinds[places[0]] != "full":
        return "the product is not read as it is, once"
    if chain.interleave is not None:
        return f"gates are halves, not interleaved by {chain.interleave}"
    acc = places[0]
    loads = _loads(call, chain, acc)
    if isinstance(loads, str):
        return loads
    stored = gemm.out in call.writes
    fast = made.store == "bf16" or (made.store is None and made.quantized is not None)
    fn = _without_division(chain.fn) if fast else chain.fn
    epilogue = Epilogue(
        function=symbol(fn),
        text=_text(fn, fast),
        acc=acc,
        acc_pair=chain.fn.inputs[acc] == "pair",
        loads=loads,
        outs=len(fn.out),
        rounds_acc=_half(rounding(call, stored, gemm.dtype)),
        rounds=made.rounds,
        acc_store=FORMATS[gemm.dtype] if stored else None,
        store=made.store,
        quantized=made.quantized,
        sums=made.sums,
    )
    values = tuple(v for i, v in enumerate(chain.values) if i != acc)
    return epilogue, fn, values


@functools.lru_cache(maxsize=1024)
def _without_division(fn: Fn) -> Fn:
    """`fn` with divisions by constants as products, at most a rounding apart: an exact division is a dozen instructions
    for each element, in an epilogue that has no time for them. What a step depends on stays: 49 / 49 >= 1 is true, and
    49 * (1 / 49) >= 1 is false.
    """
    exact = set(walk(arg for node in walk(fn.out) if _steps(node) for arg in node.args))
    new: dict[Expr, Expr] = {}
    for node in walk(fn.out):
        args = tuple(new[arg] for arg in node.args)
        factor = _reciprocal(node.args[1]) if node.op == "div" and node not in exact else None
        if factor is not None:
            new[node] = intern("mul", (args[0], Const(factor)))
        else:
            new[node] = intern(node.op, args, node.payload, node.is_mask)
    return Fn(fn.name, fn.inputs, [new[out] for out in fn.out])


def _steps(node: Expr) -> bool:
    """Whether the least change of its arguments may change it by much."""
    return node.is_mask or node.op in ("floor", "sign")


def _reciprocal(node: Expr) -> float | None:
    """1 / a constant, if both are normal numbers in FP32."""
    low, high = 2.0**-126, 2.0**126
    if not node.is_const or not low <= abs(node.payload) <= high:
        return None
    return 1.0 / float(node.payload)


@functools.lru_cache(maxsize=1024)
def _text(fn: Fn, fast: bool) -> str:
    return f"{prelude('cutedsl', fast=fast)}\n\n{lower(fn, 'cutedsl')}"


def _loads(call: Call, chain: Chain, acc: int) -> tuple[Load, ...] | str:
    """The operands of the function beside the product."""
    found = []
    for i, (value, kind) in enumerate(zip(chain.values, chain.kinds, strict=True)):
        if i == acc:
            continue
        dtype = call.spec(value).dtype
        if call.spec(value).kind.name != "dense" or dtype not in _STORED:
            return f"the epilogue reads BF16, FP16 and FP32 tensors; an operand of {chain.fn.name} is {dtype}"
        found.append(Load(_SHAPES[kind], FORMATS[dtype], chain.fn.inputs[i] == "pair"))
    return tuple(found)
