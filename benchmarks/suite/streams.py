"""Memory-bound groups: the very launches of a plan, against a copy of the same bytes and against peers.

A small pipeline is run with every kernel noting its launches and their operands; those of the group are then timed
alone, on several sets of operands in turn, so that nothing is found in the L2 cache that a training step would not
find there. The host runs ahead of the device, so its time does not show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import te_ops as te
from te_ops.backends.reference.kernels import bind_composed, bind_reference
from te_ops.graph import Value
from te_ops.quantizers import Record
from te_ops.registry import REGISTRY, Call, Kernel

from .data import Stream
from .measure import rounds, summary, timed
from .peers import EPS, Unsupported, te_recipe

L2 = 60 * 2**20
NARROW = 128  # columns of the products that only exist so that something is quantized for them


# -- what te_ops launches


@dataclass(frozen=True)
class Launch:
    """One launch of a plan: what it was asked for, and its operands."""

    call: Call
    run: Callable[..., Any]
    operands: tuple[Any, ...]
    kernel: str


@contextlib.contextmanager
def recording(found: list[Launch]) -> Iterator[None]:
    """Within, plans are made anew and every launch is noted."""

    def wrap(kernel: Kernel) -> Kernel:
        def bind(call: Call) -> Callable[..., Any]:
            inner = kernel.bind(call)

            def launch(*operands: Any) -> Any:
                found.append(Launch(call, inner, operands, kernel.name))
                return inner(*operands)

            return launch

        return dataclasses.replace(kernel, bind=bind, recorded=False)

    REGISTRY.prepare("cuda" if torch.cuda.is_available() else "cpu")
    kernels = [wrap(k) for k in REGISTRY.all() if isinstance(k, Kernel)]
    with REGISTRY.temporary(*kernels):
        yield


@dataclass(frozen=True)
class Group:
    """How to make a plan that holds the group.

    `model(columns, keywords)`; `shapes(rows, columns)` of its inputs; launches of `backward` or forward count that
    are no products and touch a value of at least `least(rows, columns)` elements.
    """

    model: Callable[[int, dict[str, Any]], te.Op]
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    backward: bool = False
    least: Callable[[int, int], int] = lambda rows, columns: rows * columns


def _plain(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    return ((rows, columns),)


def _norm(kind: type, columns: int, kw: dict[str, Any], **more: Any) -> te.Op:
    norm = kind(columns, EPS, device=kw["device"], dtype=kw["dtype"], **more)
    if kw["recipe"] == "none":
        return te.Sequential(norm)
    return te.Sequential(norm, _linear(columns, NARROW, kw))


def _linear(width: int, out: int, kw: dict[str, Any]) -> te.Linear:
    return te.Linear(width, out, bias=False, device=kw["device"], dtype=kw["dtype"])


GROUPS: dict[str, Group] = {
    "norm": Group(lambda c, kw: _norm(te.RMSNorm, c, kw), _plain),
    "norm backward": Group(lambda c, kw: _norm(te.RMSNorm, c, kw), _plain, True),
    "layernorm": Group(lambda c, kw: _norm(te.LayerNorm, c, kw), _plain),
    "layernorm backward": Group(lambda c, kw: _norm(te.LayerNorm, c, kw), _plain, True),
    "add norm": Group(
        lambda c, kw: _norm(te.RMSNorm, c, kw, residual=True), lambda r, c: ((r, c), (r, c))
    ),
    "quantize": Group(lambda c, kw: te.Sequential(_linear(c, NARROW, kw)), _plain),
    "gradient quantize": Group(
        lambda c, kw: te.Sequential(_linear(NARROW, c, kw)), lambda r, c: ((r, NARROW),), True
    ),
    "gated": Group(
        lambda c, kw: te.Sequential(te.SwiGLU(), _linear(c, NARROW, kw)), lambda r, c: ((r, 2 * c),)
    ),
    "gated backward": Group(
        lambda c, kw: te.Sequential(
            _linear(NARROW, 2 * c, kw), te.SwiGLU(), _linear(c, NARROW, kw)
        ),
        lambda r, c: ((r, NARROW),),
        True,
    ),
    "gelu": Group(lambda c, kw: te.Sequential(te.GELU()), _plain),
    "weights": Group(
        lambda c, kw: te.Sequential(_linear(c, 28672 * c // 4096, kw), te.SwiGLU(),
                                    _linear(14336 * c // 4096, c, kw)),
        lambda r, c: ((NARROW, c),),
        least=lambda r, c: c * c,
    ),
}  # fmt: skip


def recipe_of(stream: Stream) -> te.Recipe | None:
    """The recipe of a stream; NVFP4 without Hadamard transform and stochastic rounding unless it asks for them."""
    if stream.recipe == "nvfp4":
        return te.recipe.NVFP4BlockScaling(
            disable_rht="hadamard" not in stream.options,
            disable_stochastic_rounding="stochastic" not in stream.options,
        )
    return te_recipe(stream.recipe)


def group_of(stream: Stream) -> Group:
    """Its group; stochastic rounding is what gradients get."""
    return GROUPS["gradient quantize" if "stochastic" in stream.options else stream.group]


def pipeline(stream: Stream, device: torch.device) -> tuple[te.Op, tuple[tuple[int, ...], ...]]:
    """The pipeline whose plan holds the group, and the shapes of its inputs."""
    group = group_of(stream)
    keywords = {"device": device, "dtype": torch.bfloat16, "recipe": stream.recipe}
    model = group.model(stream.columns, keywords)
    return model, group.shapes(stream.rows, stream.columns)


def launches(stream: Stream, device: torch.device, sets: int) -> list[list[Launch]]:
    """For each set of operands, the launches of the group in order."""
    group, recipe = group_of(stream), recipe_of(stream)
    model, shapes = pipeline(stream, device)
    all_sets = []
    for seed in range(sets):
        generator = torch.Generator(device).manual_seed(seed)
        inputs = [
            torch.randn(shape, generator=generator, device=device)
            .to(torch.bfloat16)
            .requires_grad_()
            for shape in shapes
        ]
        found: list[Launch] = []
        with recording(found):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                made = model(*inputs)
            outs = made if isinstance(made, tuple) else (made,)
            if group.backward:
                dys = [
                    torch.randn(y.shape, generator=generator, device=device).to(y.dtype)
                    for y in outs
                ]
                torch.autograd.backward(outs, dys)
        least = group.least(stream.rows, stream.columns)
        all_sets.append([x for x in found if _belongs(x, group, least)])
    if not all_sets[0]:
        raise RuntimeError(f"no launch of the plan belongs to {stream.name}")
    return all_sets


def _belongs(launch: Launch, group: Group, least: int) -> bool:
    backward = any(n.phase.is_backward for n in launch.call.nodes)
    if backward != group.backward or any(n.prim.name == "gemm" for n in launch.call.nodes):
        return False
    return any(_elements(t) >= least for t in launch.operands)


def _elements(x: Any) -> int:
    if isinstance(x, Record):
        return int(x.data.numel())
    return int(x.numel()) if isinstance(x, Tensor) else 0


def tensors(x: Any) -> list[Tensor]:
    """All tensors in a result or operand."""
    if isinstance(x, tuple | list):
        return [t for item in x for t in tensors(item)]
    if isinstance(x, Record):
        return [t for t in x.tensors() if t is not None]
    return [x] if isinstance(x, Tensor) else []


def moved(group: Sequence[Launch], results: Sequence[Any]) -> int:
    """Bytes of the distinct operands and results; what passes from one launch of the group to the next counts at
    neither end."""
    read: dict[Value, int] = {}
    made: dict[Value, int] = {}
    for launch, result in zip(group, results, strict=True):
        outs = result if len(launch.call.writes) > 1 else (result,)
        read |= {v: size(x) for v, x in zip(launch.call.reads, launch.operands, strict=True)}
        made |= {v: size(x) for v, x in zip(launch.call.writes, outs, strict=True)}
    inner = made.keys() & read.keys()
    return sum(n for v, n in (made | read).items() if v not in inner)


def size(x: Any) -> int:
    """Bytes of a tensor or record."""
    return sum(t.nbytes for t in tensors(x))


def worst(group: Sequence[Launch]) -> float:
    """Largest relative difference from the reference, over all results of all launches."""
    found = [0.0]
    for launch in group:
        bind = bind_composed if launch.call.rule else bind_reference
        ours, theirs = launch.run(*launch.operands), bind(launch.call)(*launch.operands)
        pairs = [(ours, theirs)] if not isinstance(ours, tuple) else zip(ours, theirs, strict=True)
        for a, b in pairs:
            if a is None or b is None:
                continue
            a, b = (t.dequantize(torch.float32) if isinstance(t, Record) else t for t in (a, b))
            a, b = a.detach().double(), b.detach().double()
            found.append(float((a - b).norm() / b.norm().clamp_min(1e-300)))
            if found[-1] != found[-1]:
                return found[-1]
    return max(found)


TOLERANCE = 2.0**-5
"""BF16 results may be a rounding apart (2^-9), and of E5M2 codes a few of a thousand one code: 2^-2 * sqrt(0.008)."""


# -- peers


def _amax(y: Tensor) -> Tensor:
    return y.abs().amax().float()


def _per_tensor(y: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    top = torch.finfo(dtype).max
    q = (y.float() * scale).clamp(-top, top).to(dtype)
    return q, q.t().contiguous()


def _delayed(y: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (*_per_tensor(y, scale, dtype), _amax(y))


def _current(y: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    now = torch.finfo(dtype).max / _amax(y).clamp_min(1e-12)
    return (*_per_tensor(y, now, dtype), now)


def _block(y: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for t in (y, y.t()):
        blocks = t.float().reshape(t.shape[0], -1, 128)
        now = torch.exp2(torch.floor(torch.log2(448.0 / blocks.abs().amax(-1).clamp_min(1e-12))))
        found += [(blocks * now.unsqueeze(-1)).to(dtype).reshape(t.shape).contiguous(), 1 / now]
    return tuple(found)


_QUANTIZE: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "none": lambda y, scale, dtype: (y,),
    "delayed": _delayed,
    "current": _current,
    "block": _block,
}


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).mul(up.float()).to(x.dtype)


def _swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    gate, up = (t.float() for t in x.chunk(2, dim=-1))
    s = torch.sigmoid(gate)
    d = dy.float()
    return torch.cat([d * up * (s + gate * s * (1 - s)), d * gate * s], -1).to(x.dtype)


def _rmsnorm_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    hat, g = x.float() * rstd, dy.float() * w.float()
    dx = rstd * (g - hat * (g * hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * hat).sum(0).to(w.dtype)


def _layernorm_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    mean = x.float().mean(-1, keepdim=True)
    centred = x.float() - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    hat, d = centred * rstd, dy.float()
    g = d * w.float()
    dx = rstd * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * hat).sum(0).to(w.dtype), d.sum(0).to(w.dtype)


# group -> what it computes before quantizing, of operands drawn by `_operands`
_VALUE: dict[str, Callable[..., Any]] = {
    "norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS),
    "norm backward": _rmsnorm_backward,
    "layernorm": lambda x, w: F.layer_norm(x, (x.shape[-1],), w, w, EPS),
    "layernorm backward": _layernorm_backward,
    "quantize": lambda x: x,
    "gated": _swiglu,
    "gated backward": _swiglu_backward,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


def _operands(stream: Stream, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Operands of the peers: gradient first, then the value, then gamma or the residual."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    r, c = stream.rows, stream.columns
    wide = 2 * c if stream.group.startswith("gated") else c
    found = [draw(r, wide)]
    if stream.group.endswith("backward"):
        found.insert(0, draw(r, c))
    if "norm" in stream.group:
        found.append(draw(c))
    if stream.group == "add norm":
        found.append(draw(r, c))
    if stream.group == "weights":
        found = [draw(7 * c, c), draw(c, 7 * c // 2)]
    return tuple(found)


def _gradient(stream: Stream) -> bool:
    """Whether what is quantized is a gradient, in E5M2 under per-tensor scaling."""
    return stream.group == "gated backward" and stream.recipe in ("delayed", "current")


def _compile(stream: Stream, device: torch.device) -> Callable[..., Any]:
    quantize = _QUANTIZE.get(stream.recipe)
    if quantize is None or stream.group == "weights":
        raise Unsupported("not written for torch.compile")
    dtype = torch.float8_e5m2 if _gradient(stream) else torch.float8_e4m3fn
    scale = torch.ones((), device=device)

    def function(*xs: Tensor) -> Any:
        if stream.group == "add norm":
            x, w, other = xs
            total = x + other
            return (total, *quantize(_VALUE["norm"](total, w), scale, dtype))
        value = _VALUE[stream.group](*xs)
        return value if isinstance(value, tuple) else quantize(value, scale, dtype)

    return torch.compile(function, dynamic=False)


def _te_quantizer(stream: Stream, device: torch.device) -> Any:
    pytorch = importlib.import_module("transformer_engine.pytorch")
    types = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    dtype = types[torch.float8_e5m2 if _gradient(stream) else torch.float8_e4m3fn]
    if stream.recipe == "none":
        return None
    if stream.recipe == "delayed":
        one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
        return pytorch.Float8Quantizer(one, zero, dtype)
    if stream.recipe == "current":
        return pytorch.Float8CurrentScalingQuantizer(dtype, device)
    if stream.recipe == "block":
        return pytorch.Float8BlockQuantizer(
            dtype, rowwise=True, columnwise=True, block_scaling_dim=1
        )
    raise Unsupported(f"{stream.recipe} does not run on Hopper")


def _te(stream: Stream, device: torch.device) -> Callable[..., Any]:
    importlib.import_module("transformer_engine.pytorch")
    tex = importlib.import_module("transformer_engine_torch")
    types = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    quantizer, bf16 = _te_quantizer(stream, device), types[torch.bfloat16]

    def norm(x: Tensor, w: Tensor) -> Any:
        return tex.rmsnorm_fwd(x, w, EPS, None, quantizer, bf16, 0, False)

    def add_norm(x: Tensor, w: Tensor, other: Tensor) -> Any:
        total = x + other
        return total, norm(total, w)

    def backward(name: str) -> Callable[..., Any]:
        made: dict[int, Any] = {}

        def run(dy: Tensor, x: Tensor, w: Tensor) -> Any:
            if x.data_ptr() not in made:  # the statistics, as forward leaves them
                forward = tex.rmsnorm_fwd if name == "rmsnorm" else tex.layernorm_fwd
                given = (x, w) if name == "rmsnorm" else (x, w, w)
                _, mean, rstd = forward(*given, EPS, None, None, bf16, 0, False)
                made[x.data_ptr()] = (rstd,) if name == "rmsnorm" else (mean, rstd)
            function = tex.rmsnorm_bwd if name == "rmsnorm" else tex.layernorm_bwd
            return function(dy, x, *made[x.data_ptr()], w, 0, False)

        return run

    table: dict[str, Callable[..., Any]] = {
        "norm": norm,
        "norm backward": backward("rmsnorm"),
        "layernorm": lambda x, w: tex.layernorm_fwd(
            x, w, w, EPS, None, quantizer, bf16, 0, False
        ),
        "layernorm backward": backward("layernorm"),
        "add norm": add_norm,
        "quantize": lambda x: tex.quantize(x, quantizer),
        "weights": lambda *ws: [tex.quantize(w, quantizer) for w in ws],
        "gated": lambda x: tex.swiglu(x, quantizer),
        "gated backward": lambda dy, x: tex.dswiglu(dy, x, quantizer),
        "gelu": lambda x: tex.gelu(x, quantizer),
    }  # fmt: skip
    return table[stream.group]


def _quack(stream: Stream, device: torch.device) -> Callable[..., Any]:
    if stream.recipe != "none" or stream.group not in ("norm", "norm backward"):
        raise Unsupported("RMSNorm only")
    library = importlib.import_module("quack.rmsnorm")
    if stream.group == "norm":
        return lambda x, w: library.rmsnorm_fwd(x, w, eps=EPS)
    rstds: dict[int, Tensor] = {}

    def backward(dy: Tensor, x: Tensor, w: Tensor) -> Any:
        if x.data_ptr() not in rstds:
            rstds[x.data_ptr()] = library.rmsnorm_fwd(x, w, eps=EPS, store_rstd=True)[2]
        return library.rmsnorm_bwd(x, w, dy, rstds[x.data_ptr()])

    return backward


def _liger(stream: Stream, device: torch.device) -> Callable[..., Any]:
    if stream.recipe != "none" or stream.group != "norm":
        raise Unsupported("RMSNorm only")
    ops = importlib.import_module("liger_kernel.ops.rms_norm")
    return lambda x, w: ops.rms_norm_forward(x, w, EPS, 0.0, "llama", False)


PEERS: dict[str, Callable[[Stream, torch.device], Callable[..., Any]]] = {
    "te": _te,
    "compile": _compile,
    "quack": _quack,
    "liger": _liger,
}
DEFAULT = ("te", "compile", "quack")


# -- timing


@dataclass
class Row:
    """What a stream gave: seconds by name, errors by name."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    kernels: list[str] = field(default_factory=list)
    error: float | None = None


def measure(
    stream: Stream, device: torch.device, peers: Sequence[str], *, least: int, seconds: float
) -> dict[str, Any]:
    """A row of the table, as plain data: te_ops, the copy and the peers, interleaved.

    Raises:
        RuntimeError: the plan has no launch of this group, or a result is wrong.
    """
    sets = max(2, min(6, -(-4 * L2 // stream.bytes))) if device.type == "cuda" else 2
    groups = launches(stream, device, sets)
    results = [[x.run(*x.operands) for x in group] for group in groups]
    row = Row(bytes=moved(groups[0], results[0]), kernels=[x.kernel for x in groups[0]])
    del results
    row.error = worst(groups[0])
    if not row.error <= TOLERANCE:
        raise RuntimeError(
            f"{row.error:.2e} from the reference, more than {TOLERANCE:.2e}: {row.kernels}"
        )
    floor = row.bytes + int(stream.again * stream.rows * stream.columns)
    if len(groups[0]) > 1:  # what passes between launches may also be a result of the group
        floor = max(floor, stream.bytes)
    calls: dict[str, Callable[[int], Any]] = {
        "te_ops": lambda i: [x.run(*x.operands) for x in groups[i]],
        "copy": _copier(floor, sets, device),
    }
    for name in peers:
        made = _peer(name, stream, device, sets, row)
        if made is not None:
            calls[name] = made
    row.samples = _interleaved(calls, sets, device, least=least, seconds=seconds)
    return _result(stream, row, floor)


def _copier(bytes_: int, sets: int, device: torch.device) -> Callable[[int], Any]:
    """A copy that reads half of the bytes and writes the other half, in whole pages of 4 KiB: a large copy of any other
    size takes half as long again (173 us against 113 for 224 MiB on an H200)."""
    half = max(bytes_ // 2 >> 12 << 12, 4096)
    source = [torch.empty(half, dtype=torch.uint8, device=device).random_() for _ in range(sets)]
    target = [torch.empty_like(x) for x in source]
    return lambda i: target[i].copy_(source[i])


def _peer(
    name: str, stream: Stream, device: torch.device, sets: int, row: Row
) -> Callable[[int], Any] | None:
    """The peer's call on its sets of operands; None, with a note, if there is none."""
    try:
        function = PEERS[name](stream, device)
        operands = [_operands(stream, device, seed) for seed in range(sets)]
        with torch.no_grad():
            for given in operands:
                function(*given)
    except ImportError:
        row.notes[name] = "absent"
        return None
    except Unsupported:
        return None
    except Exception as error:  # noqa: BLE001  (a peer may fail as it likes; the rest goes on)
        row.notes[name] = f"failed: {type(error).__name__}: {str(error)[:160]}"
        return None
    return lambda i: function(*operands[i])


def _interleaved(
    calls: dict[str, Callable[[int], Any]],
    sets: int,
    device: torch.device,
    *,
    least: int,
    seconds: float,
) -> dict[str, list[float]]:
    kept: deque[Any] = deque(maxlen=sets)  # results rotate too
    host: dict[str, float] = {}
    many = 3 * sets

    def each(name: str) -> Callable[[], None]:
        def run() -> None:
            for i in range(many):
                kept.append(calls[name](i % sets))

        return run

    with torch.no_grad():
        runs = {name: each(name) for name in calls}
        for name, run in runs.items():
            run()
            timed(lambda: None, 1, device)
            start = time.perf_counter()
            run()
            host[name] = time.perf_counter() - start
        return rounds(
            runs,
            lambda name, run: timed(run, 1, device, ahead=1.3 * host[name] + 1e-4) / many,
            least=least,
            seconds=seconds,
        )


def _result(stream: Stream, row: Row, floor: int) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in row.samples.items()}
    ours, copy = medians["te_ops"], medians["copy"]
    return {
        "case": stream.name,
        "about": stream.about,
        "shape": [stream.rows, stream.columns],
        "recipe": stream.recipe,
        "bytes": floor,
        "operand_bytes": row.bytes,
        "kernels": row.kernels,
        "error": row.error,
        "us": {name: 1e6 * value for name, value in medians.items()},
        "spread": {name: summary(values) for name, values in row.samples.items()},
        "of_copy": copy / ours,
        "peers": row.notes,
    }


__all__ = ["GROUPS", "PEERS", "launches", "measure", "moved", "recording"]
