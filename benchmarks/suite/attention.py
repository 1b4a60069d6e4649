"""Attention alone: its kernels against torch's, in FP8 against BF16, windows and packed tokens against their work, and
what the host needs to issue one.

The kernels are those that a plan would take, over operands made up for them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from te_ops.backends.reference.kernels import bind_reference
from te_ops.basic.attention_core import ATTENTION, ATTENTION_BACKWARD
from te_ops.basic.attention_form import Form
from te_ops.basic.attention_fp8 import ATTENTION_FP8
from te_ops.basic.band import Band
from te_ops.basic.sequences import SEQUENCE_TABLE, PackedSequences
from te_ops.context import RECORDING
from te_ops.graph import Graph, Kind, Spec, Value
from te_ops.quantizers import Float8CurrentScalingQuantizer, Record, Usage
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime.cache import arch_of

from .measure import rounds, summary, synchronize, timed

SIDES = ("forward", "backward")
TILE = 128
"""Rows and keys of the blocks that a window's work is counted in."""


@dataclass(frozen=True)
class Attend:
    """An attention.

    Attributes:
        sizes: batch, query heads, key heads, length, features of a head.
        of: what its figure is: "peer" (time of the fastest kernel of torch's), "fp8" (BF16 time over FP8 time), "tile"
            (time a block that is touched, of that of causal attention), "host" (microseconds of the host).
        left: keys that a query sees before its own; None: all.
        lengths: of packed sequences.
        limits: of the figures forward and backward, at most (of "fp8" at least); None: no figure.
    """

    name: str
    about: str
    sizes: tuple[int, int, int, int, int]
    of: Literal["peer", "fp8", "tile", "host"]
    limits: tuple[float | None, float | None]
    causal: bool = True
    left: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def band(self) -> Band:
        """Its mask."""
        return Band(self.left, 0 if self.causal else None)

    def shorter(self, length: int) -> Attend:
        """The same in all proportions, of fewer tokens: at most `length` of the longest sequence."""
        b, h, hk, s, d = self.sizes
        longest = max(self.lengths, default=s)
        if longest <= length:
            return self
        lengths = tuple(max(1, n * length // longest) for n in self.lengths)
        left = None if self.left is None else max(1, self.left * length // longest)
        return replace(
            self, sizes=(b, h, hk, sum(lengths) or length, d), lengths=lengths, left=left
        )

    def smaller(self, length: int) -> Attend:
        """The same of few tokens and heads, for a CPU."""
        made = self.shorter(length)
        b, h, hk, s, _ = made.sizes
        return replace(made, sizes=(b, h // hk, 1, s, 16))


LONG, WIDE, MANY = (1, 32, 8, 8192, 128), (4, 16, 16, 2048, 64), (2, 32, 32, 4096, 128)
_PEER = (1.02, 1.02)
_TILE = (1.1, 1.1)
CASES: tuple[Attend, ...] = (
    *(
        Attend(f"attention-{name}-{mask}", f"BF16, {mask}; {text}", sizes, "peer", _PEER, mask == "causal")
        for name, text, sizes in (
            ("8192", "1 x 8192, 32/8 heads of 128", LONG),
            ("2048", "4 x 2048, 16 heads of 64", WIDE),
            ("4096", "2 x 4096, 32 heads of 128", MANY),
        )
        for mask in ("causal", "full")
    ),
    *(
        Attend(f"attention-fp8-{sizes[3]}-{mask}", f"FP8, {mask}; {sizes[0]} x {sizes[3]}", sizes, "fp8",
               (1.4, None), mask == "causal")
        for sizes in (LONG, MANY)
        for mask in ("causal", "full")
    ),
    *(
        Attend(f"attention-window-{left}", f"a window of {left} keys; 1 x 8192", LONG, "tile", _TILE, left=left)
        for left in (512, 1024, 4096)
    ),
    *(
        Attend(f"attention-thd-{len(lengths)}x{max(lengths)}", f"packed, {len(lengths)} sequences",
               (1, 32, 8, sum(lengths), 128), "tile", _TILE, lengths=lengths)
        for lengths in ((512,) * 16, (4096, 1024, 1024, 1024, 1024), (3592, 700, 3000, 900))
    ),
    Attend("attention-host", "1 x 128, 8 heads of 64", (1, 8, 8, 128, 64), "host", (25.0, 35.0)),
)  # fmt: skip
"""With the limits of their figures."""


def tiles(length: int, band: Band) -> int:
    """Blocks of rows and keys that a mask leaves something of, one sequence, one head."""
    found = 0
    for first in range(0, length, TILE):
        rows = (first, min(first + TILE, length))
        low, high = band.keys(rows, length, length)
        found += -(-high // TILE) - low // TILE
    return found


def work(case: Attend) -> int:
    """Blocks of all sequences and heads."""
    b, h, _, s, _ = case.sizes
    return h * sum(tiles(n, case.band) for n in case.lengths or (s,) * b)


# -- calls


@dataclass(frozen=True)
class Side:
    """A direction, ready to run: the kernel's name, what is called, and what it is called with."""

    kernel: str
    call: Call
    launch: Callable[..., Any]
    operands: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.launch(*self.operands)

    def error(self) -> float:
        """Largest difference from the reference, relative to a whole result."""
        both = zip(self(), bind_reference(self.call)(*self.operands), strict=True)
        return max(
            float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in map(_numbers, both)
        )


def _spec(x: Any) -> Spec:
    kind = Kind("record", x.quantizer, Usage.ROW) if isinstance(x, Record) else Kind("dense")
    return Spec(tuple(x.shape), x.dtype, kind)


def call_of(prim: Any, operands: dict[str, Any], device: torch.device, **attrs: Any) -> Call:
    """The call of a node over these operands; two that are one tensor are one value."""
    g, inputs = Graph(), dict[int, Value]()
    for x in operands.values():
        if id(x) not in inputs:
            inputs[id(x)] = g.input(len(inputs), _spec(x))
    form = Form(operands=tuple(operands), **attrs)
    whole = {name: getattr(form, name) for name in Form.__dataclass_fields__}
    made = g.calls(prim, *(inputs[id(x)] for x in operands.values()), **whole)
    node = g.node(made[0])
    outs = [Value(node.id, i) for i in range(len(g.specs[node.id]))]
    writes = outs if prim is ATTENTION_BACKWARD else outs[:2]
    reads = tuple(dict.fromkeys(node.inputs))
    specs = {v: g.spec(v) for v in (*reads, *outs)}
    return Call((node,), reads, tuple(writes), specs, device, arch_of(device), 128)


def taken(call: Call) -> Kernel:
    """The kernel that a plan would take, once everything that has to be compiled is."""
    token = RECORDING.set(True)
    try:
        _first(call)
        REGISTRY.settle()
        return _first(call)
    finally:
        RECORDING.reset(token)


def _first(call: Call) -> Kernel:
    runs = call.node.prim.name
    found = (k for name in (runs, "*") for k in REGISTRY.kernels(name) if k.reason(call) is None)
    return next(found)


def _bound(prim: Any, operands: dict[str, Any], device: torch.device, **attrs: Any) -> Side:
    call = call_of(prim, operands, device, **attrs)
    kernel = taken(call)
    distinct = {id(x): x for x in operands.values()}
    return Side(kernel.name, call, kernel.bind(call), tuple(distinct.values()))


def _numbers(pair: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in FP32, without what is infinite in the second."""
    a, b = ((x.dequantize() if isinstance(x, Record) else x).float() for x in pair)
    return a[b.isfinite()], b[b.isfinite()]


CHECKED = 512
"""Tokens of a sequence, at most, where a case's kernels are compared with the reference."""
TOLERANCE = {"fp8": 2.0**-4}
"""Of E4M3 codes that may be one apart; of BF16 it is 2^-6."""


def check(case: Attend, device: torch.device) -> float:
    """Largest error of the case's kernels, on a shorter case.

    Raises:
        RuntimeError: it is more than the formats explain.
    """
    short = case.shorter(CHECKED)
    compared = [_fp8(short, device)] if case.of == "fp8" else [*sides(short, device).values()]
    worst = max(side.error() for side in compared)
    if not worst <= TOLERANCE.get(case.of, 2.0**-6):
        raise RuntimeError(f"{compared[0].kernel}: {worst:.2e} from the reference")
    return worst


def _attrs(case: Attend) -> dict[str, Any]:
    layout = "thd" if case.lengths else "bshd"
    return {
        "band": case.band,
        "scale": case.sizes[4] ** -0.5,
        "layout": layout,
        "kv_layout": layout,
    }


def sides(case: Attend, device: torch.device) -> dict[str, Side]:
    """Both directions of a case in BF16."""
    xs, do = _drawn(case, device)
    more: dict[str, Any] = {}
    if case.lengths:
        ends = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
        parts = SEQUENCE_TABLE.reference(PackedSequences(ends).to(device), own=True)
        more = {
            "q_starts": parts[0],
            "q_lens": parts[1],
            "kv_starts": parts[0],
            "kv_lens": parts[1],
        }
    forward = _bound(ATTENTION, {**xs, **more}, device, **_attrs(case))
    o, lse = forward()
    given = {**xs, **more, "o": o, "lse": lse, "do": do}
    return {
        "forward": forward,
        "backward": _bound(ATTENTION_BACKWARD, given, device, **_attrs(case)),
    }


def _drawn(case: Attend, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """q, k and v, and a gradient."""
    b, h, hk, s, d = case.sizes
    drawn = torch.Generator(device).manual_seed(0)
    lead = (s,) if case.lengths else (b, s)

    def made(heads: int) -> torch.Tensor:
        x = torch.randn((*lead, heads, d), generator=drawn, device=device)
        return x.to(torch.bfloat16)

    return {"q": made(h), "k": made(hk), "v": made(hk)}, made(h)


def _fp8(case: Attend, device: torch.device) -> Side:
    quantizer = Float8CurrentScalingQuantizer(force_pow_2_scales=True)
    xs, _ = _drawn(case, device)
    records = {name: quantizer.records(x, row=True, col=False)[0] for name, x in xs.items()}
    return _bound(ATTENTION_FP8, records, device, **_attrs(case))


def _peers(case: Attend, device: torch.device) -> dict[str, dict[str, Callable[[], Any]]]:
    """torch's kernels by direction, called below autograd."""
    from te_ops.backends import sdpa

    xs, do = _drawn(case, device)
    found: dict[str, dict[str, Callable[[], Any]]] = {side: {} for side in SIDES}
    for kernel in (k for k in sdpa.KERNELS if k.runs == "attention"):
        call = call_of(ATTENTION, xs, device, **_attrs(case))
        if kernel.reason(call) is not None:
            continue
        name = kernel.name.removeprefix("sdpa.").removesuffix("_attention")
        forward = functools.partial(kernel.bind(call), *xs.values())
        o, lse = forward()
        given = {**xs, "o": o, "lse": lse, "do": do}
        back = next(k for k in sdpa.KERNELS if k.name == f"{kernel.name}_backward")
        call = call_of(ATTENTION_BACKWARD, given, device, **_attrs(case))
        found["forward"][name] = forward
        found["backward"][name] = functools.partial(back.bind(call), *given.values())
    return found


# -- figures


def measure(case: Attend, device: torch.device, *, least: int, seconds: float) -> dict[str, Any]:
    """A row of the table, as plain data.

    Raises:
        RuntimeError: a result is wrong.
    """
    REGISTRY.prepare(device.type)
    error = check(case, device)
    own = sides(case, device)
    entry: dict[str, Any] = {
        "case": case.name,
        "about": case.about,
        "of": case.of,
        "kernels": {side: own[side].kernel for side in SIDES},
        "error": error,
        "us": {},
    }
    if case.of == "host":
        entry["us"] = {side: {"te_ops": host_us(own[side], device)} for side in SIDES}
        return entry | {side: entry["us"][side]["te_ops"] for side in SIDES}
    calls = _calls(case, own, device)
    for side, named in calls.items():
        samples = rounds(
            named, lambda _, call: timed(call, 3, device, 1e-3), least=least, seconds=seconds
        )
        entry["us"][side] = {n: 1e6 * statistics.median(found) for n, found in samples.items()}
        entry.setdefault("times", {})[side] = {n: summary(found) for n, found in samples.items()}
        figure = _figure(case, entry["us"][side])
        if figure is not None:
            entry[side] = figure
    return entry


def _calls(
    case: Attend, own: dict[str, Side], device: torch.device
) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is timed in the same rounds, by direction."""
    if case.of == "fp8":
        return {"forward": {"te_ops": _fp8(case, device), "bf16": own["forward"]}}
    if case.of == "peer":
        peers = _peers(case, device)
        return {side: {"te_ops": own[side], **peers[side]} for side in SIDES}
    causal = sides(_causal(case), device)
    return {side: {"te_ops": own[side], "causal": causal[side]} for side in SIDES}


def _causal(case: Attend) -> Attend:
    """Causal attention over as many tokens, in one sequence."""
    return replace(case, left=None, lengths=())


def _figure(case: Attend, us: dict[str, float]) -> float | None:
    if case.of == "fp8":
        return us["bf16"] / us["te_ops"]
    if case.of == "tile":
        return (us["te_ops"] / work(case)) / (us["causal"] / work(_causal(case)))
    others = [t for name, t in us.items() if name != "te_ops"]
    return us["te_ops"] / min(others) if others else None


def host_us(side: Callable[[], Any], device: torch.device, calls: int = 50) -> float:
    """Microseconds that the host needs to issue one: the median of nine runs without a wait inside."""
    found = []
    for _ in range(9):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            side()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    synchronize(device)
    return statistics.median(found)


__all__ = ["CASES", "Attend", "measure", "tiles", "work"]
