"""What every CUDA kernel is checked on, emulated and on a GPU: nodes over random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import KERNELS
from te_ops.backends.reference.kernels import bind_composed, bind_reference
from te_ops.basic.norm import (
    LAYERNORM,
    LAYERNORM_BACKWARD,
    LAYERNORM_DGAMMA,
    RMSNORM,
    RMSNORM_BACKWARD,
    RMSNORM_DGAMMA,
)
from te_ops.basic.pointwise import POINTWISE, REDUCE, SUM
from te_ops.basic.quantize import AMAX, QUANTIZE
from te_ops.graph import Value
from te_ops.pointwise import Fn, Input, activations
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
    Record,
)
from te_ops.registry import Call, Rule
from tests.backends.cuda.calls import Inputs, dense_strides, make_call

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BIND = {k.runs: k for k in KERNELS}

SHAPES: tuple[tuple[int, ...], ...] = (
    (0, 32), (1, 8), (5, 7), (3, 33), (1,), (16, 16), (2, 3, 40), (129, 130), (128, 256),
    (200, 392), (4, 0),
)  # fmt: skip
"""Empty, tiny, odd, not a multiple of a tile, several leading dimensions."""

BIG_SHAPES: tuple[tuple[int, ...], ...] = ((1024, 4096), (1000, 14336), (4097, 1000), (33, 12288))


@dataclass(frozen=True)
class Group:
    """Nodes to run as one kernel, and how far results may be from the reference's.

    Attributes:
        codes: how many FP8 codes of a thousand may be one off the reference's; 0: none.
        exact: dense results equal the reference's bit for bit (on one device).
    """

    runs: str
    inputs: Inputs
    nodes: tuple[Any, ...]
    writes: tuple[Value, ...]
    rule: Rule | None = None
    codes: float = 0.0
    exact: bool = False

    def call(self, arch: str, device: torch.device | str) -> Call:
        return make_call(
            self.inputs, self.nodes, self.writes, arch=arch, device=device, rule=self.rule
        )


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Callable[..., torch.Tensor], tuple[int, ...]], Group]
    wide: bool = False  # needs a matrix with columns


Draw = Callable[..., torch.Tensor]
"""draw(shape, dtype, special=False, positive=False) -> tensor"""


def drawer(seed: int, device: torch.device | str) -> Draw:
    """Random tensors; `special` puts NaN, Inf, zeros and tiny numbers in some places."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(
        shape: tuple[int, ...],
        dtype: torch.dtype = BF16,
        *,
        special: bool = False,
        scale: float = 1.0,
    ) -> Any:
        x = torch.randn(shape, generator=generator, device=device) * scale
        if special and x.numel():
            flat = x.view(-1)
            values = (0.0, -0.0, 1e-30, -1e-38, 6e4, -3e38, math.inf, math.nan)
            for i, value in enumerate(values):
                if flat.numel() > 64 * (i + 1):
                    flat[(97 * (i + 1)) % flat.numel()] = value
            if x.dim() > 1 and x.shape[0] > 2:
                x.view(-1, x.shape[-1])[1] = 0.0
        return x.to(dtype)

    return draw


# -- pointwise


def _pointwise(
    name: str, dtype: torch.dtype, out: torch.dtype, interleave: int | None = None
) -> Case:
    fn = activations[name]()

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs, paired = Inputs(), fn.inputs[0] == "pair"
        factor = 2 if paired else 1
        kinds = tuple("full" if i == 0 else "col" for i in range(len(fn.inputs)))
        x = inputs(draw((*shape[:-1], shape[-1] * factor), dtype, scale=3.0))
        rest = [inputs(draw(shape[:-1], FP32)) for _ in fn.inputs[1:]]
        y = inputs.g.call(
            POINTWISE,
            x,
            *rest,
            fn=fn,
            dtype=out,
            broadcast=kinds,
            interleave=interleave if paired else None,
        )
        return Group("pointwise", inputs, (inputs.g.node(y),), (y,))

    label = f"pointwise-{name}-{_s(dtype)}-{_s(out)}" + (f"-i{interleave}" if interleave else "")
    return Case(label, make)


def _gradient(name: str, dtype: torch.dtype, interleave: int | None = None) -> Case:
    fn = activations[name]().grad(0)

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        factor = 2 if fn.inputs[0] == "pair" else 1
        x = inputs(draw((*shape[:-1], shape[-1] * factor), dtype, scale=3.0))
        dy = inputs(draw(shape, dtype))
        y = inputs.g.call(
            POINTWISE, x, dy, fn=fn, dtype=dtype, broadcast=("full", "full"),
            interleave=interleave if factor == 2 else None,
        )  # fmt: skip
        return Group("pointwise", inputs, (inputs.g.node(y),), (y,))

    return Case(f"pointwise-d{name}-{_s(dtype)}" + (f"-i{interleave}" if interleave else ""), make)


def _broadcast(dtype: torch.dtype) -> Case:
    """x * scalar + row, times a byte mask."""
    fn = Fn("affine", ("value",) * 4, (Input(0) * Input(1) * Input(3) + Input(2),))

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x, row = inputs(draw(shape, dtype)), inputs(draw(shape[-1:], FP32))
        scalar = inputs(draw((), FP32).cpu())
        mask = inputs(draw(shape, FP32) > 0)
        y = inputs.g.call(
            POINTWISE, x, scalar, row, mask, fn=fn, dtype=dtype,
            broadcast=("full", "scalar", "row", "full"),
            interleave=None,
        )  # fmt: skip
        return Group("pointwise", inputs, (inputs.g.node(y),), (y,))

    return Case(f"pointwise-broadcast-{_s(dtype)}", make)


def _sum(count: int, dtype: torch.dtype) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        y = inputs.g.call(SUM, *(inputs(draw(shape, dtype)) for _ in range(count)), dtype=dtype)
        return Group("sum", inputs, (inputs.g.node(y),), (y,), exact=True)

    return Case(f"sum-{count}-{_s(dtype)}", make)


def _reduce(over: str, dtype: torch.dtype, out: torch.dtype) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        y = inputs.g.call(REDUCE, inputs(draw(shape, dtype)), over=over, dtype=out)
        return Group("reduce", inputs, (inputs.g.node(y),), (y,))

    return Case(f"reduce-{over}-{_s(dtype)}-{_s(out)}", make)


def _pointwise_reduce(over: str) -> Case:
    fn = activations["gelu"]().grad(0)

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x, dy = inputs(draw(shape)), inputs(draw(shape))
        y = inputs.g.call(
            POINTWISE, x, dy, fn=fn, dtype=FP32, broadcast=("full", "full"), interleave=None
        )
        total = inputs.g.call(REDUCE, y, over=over, dtype=FP32)
        nodes = (inputs.g.node(y), inputs.g.node(total))
        return Group(
            "pointwise_reduce",
            inputs,
            nodes,
            (total,),
            Rule("pointwise_reduce", ("pointwise", "reduce")),
        )

    return Case(f"pointwise_reduce-{over}", make)


# -- quantize


def _quantize(quantizer: Quantizer, dtype: torch.dtype, live: tuple[int, ...]) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x = inputs(draw(shape, dtype, special=True))
        state = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
        outs = inputs.g.calls(QUANTIZE, x, *state, quantizer=quantizer, stream=0)
        return Group("quantize", inputs, (inputs.g.nodes[-1],), _pick(outs, live))

    return Case(
        f"quantize-{quantizer.describe()}-{_s(dtype)}-{''.join('rca'[i] for i in live)}", make
    )


def _amax(dtype: torch.dtype) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        y = inputs.g.call(AMAX, inputs(draw(shape, dtype, special=True)))
        return Group("amax", inputs, (inputs.g.node(y),), (y,), exact=True)

    return Case(f"amax-{_s(dtype)}", make)


def _pick(outs: tuple[Value, ...], live: tuple[int, ...]) -> tuple[Value, ...]:
    return tuple(outs[i] for i in live)


# -- norms


def _norm(layer: bool, dtype: torch.dtype, gamma: torch.dtype, zero_centered: bool) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        outs = _norm_node(inputs, draw, shape, layer, dtype, gamma, zero_centered)
        return Group("layernorm" if layer else "rmsnorm", inputs, (inputs.g.nodes[-1],), outs)

    return Case(
        f"{'layer' if layer else 'rms'}norm-{_s(dtype)}-{_s(gamma)}"
        f"{'-zc' if zero_centered else ''}",
        make,
        True,
    )


def _norm_node(
    inputs: Inputs, draw: Draw, shape: tuple[int, ...], layer: bool, dtype: torch.dtype, *more: Any
) -> tuple[Value, ...]:
    gamma, zero_centered = more
    x = inputs(draw(shape, dtype) + (0.5 if layer else 0.0))
    weights = [inputs(draw(shape[-1:], gamma)) for _ in range(1 + layer)]
    prim = LAYERNORM if layer else RMSNORM
    return inputs.g.calls(prim, x, *weights, eps=1e-5, zero_centered=zero_centered)


def _norm_backward(layer: bool, dtype: torch.dtype, gamma: bool) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x, dy, weight = draw(shape, dtype), draw(shape, dtype), draw(shape[-1:], FP32)
        wide = x.float()
        mean = wide.mean(-1) if layer else torch.zeros(shape[:-1], device=x.device)
        rstd = torch.rsqrt((wide - mean.unsqueeze(-1)).square().mean(-1) + 1e-5)
        statistics = [inputs(rstd), *([inputs(mean)] if layer else [])]
        if gamma:
            prim = LAYERNORM_DGAMMA if layer else RMSNORM_DGAMMA
            out = inputs.g.call(prim, inputs(dy), inputs(x), *statistics, dtype=FP32)
        else:
            prim = LAYERNORM_BACKWARD if layer else RMSNORM_BACKWARD
            out = inputs.g.call(
                prim, inputs(dy), inputs(x), inputs(weight), *statistics, zero_centered=False
            )
        return Group(prim.name, inputs, (inputs.g.node(out),), (out,))

    return Case(
        f"{'layer' if layer else 'rms'}norm_{'dgamma' if gamma else 'backward'}-{_s(dtype)}",
        make,
        True,
    )


# -- fused


def _norm_quantize(layer: bool, quantizer: Quantizer, dense: bool) -> Case:
    rule = Rule("norm_quantize", ("rmsnorm|layernorm", "quantize"))

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        outs = _norm_node(inputs, draw, shape, layer, BF16, BF16, False)
        norm = inputs.g.nodes[-1]
        state = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
        quantized = inputs.g.calls(QUANTIZE, outs[0], *state, quantizer=quantizer, stream=0)
        writes = (*(outs if dense else outs[1:]), *quantized)
        return Group("norm_quantize", inputs, (norm, inputs.g.nodes[-1]), writes, rule, codes=2.0)

    kind = "layer" if layer else "rms"
    return Case(
        f"norm_quantize-{kind}-{quantizer.describe()}{'-dense' if dense else ''}", make, True
    )


def _pointwise_quantize(name: str, grad: bool, quantizer: Quantizer, dense: bool) -> Case:
    fn = activations[name]().grad(0) if grad else activations[name]()
    rule = Rule("pointwise_quantize", ("pointwise*", "pointwise", "quantize"))
    if isinstance(
        quantizer, Float8BlockQuantizer | MXFP8Quantizer
    ):  # their values are kept rounded
        rule = Rule("pointwise_quantize_rounded", ("pointwise", "quantize"), exact=True)

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        width = shape[-1] if quantizer.stateful or not grad else -(-shape[-1] // 128) * 128
        paired = fn.inputs[0] == "pair"
        values = [inputs(draw((*shape[:-1], width * (2 if paired else 1)), BF16, scale=3.0))]
        values += [inputs(draw((*shape[:-1], width))) for _ in fn.inputs[1:]]
        y = inputs.g.call(
            POINTWISE,
            *values,
            fn=fn,
            dtype=BF16,
            broadcast=("full",) * len(values),
            interleave=None,
        )
        node = inputs.g.nodes[-1]
        state = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
        quantized = inputs.g.calls(QUANTIZE, y, *state, quantizer=quantizer, stream=0)
        writes = (*((y,) if dense else ()), *quantized)
        return Group(rule.name, inputs, (node, inputs.g.nodes[-1]), writes, rule, codes=2.0)

    label = f"pointwise_quantize-{'d' if grad else ''}{name}-{quantizer.describe()}"
    label += "-dense" if dense else ""
    return Case(label, make, True)


def _bias_chain(quantizer: Quantizer) -> Case:
    """x + bias, GELU, quantize: two pointwise nodes."""
    rule = Rule("pointwise_quantize", ("pointwise*", "pointwise", "quantize"))
    bias = Fn("bias", ("value", "value"), (Input(0) + Input(1),))

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x, row = inputs(draw(shape)), inputs(draw(shape[-1:], BF16))
        z = inputs.g.call(
            POINTWISE, x, row, fn=bias, dtype=BF16, broadcast=("full", "row"), interleave=None
        )
        y = inputs.g.call(
            POINTWISE, z, fn=activations["gelu"](), dtype=BF16, broadcast=("full",), interleave=None
        )
        nodes = (inputs.g.node(z), inputs.g.node(y))
        state = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
        quantized = inputs.g.calls(QUANTIZE, y, *state, quantizer=quantizer, stream=0)
        return Group(
            "pointwise_quantize", inputs, (*nodes, inputs.g.nodes[-1]), quantized, rule, codes=2.0
        )

    return Case(f"pointwise_quantize-bias+gelu-{quantizer.describe()}", make, True)


def _s(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")


DELAYED, CURRENT = Float8Quantizer(), Float8CurrentScalingQuantizer()
BLOCK = Float8BlockQuantizer()
QUANTIZERS: tuple[Quantizer, ...] = (
    DELAYED,
    Float8Quantizer(E5M2),
    CURRENT,
    Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True, amax_epsilon=1e-3),
    BLOCK,
    Float8BlockQuantizer(force_pow_2_scales=False),
    Float8BlockQuantizer(E5M2, block_scaling_dim=2),
    Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False, amax_epsilon=1e-4),
    MXFP8Quantizer(),
    MXFP8Quantizer(E5M2, with_2d_quantization=True),
)
USAGES = ((0, 1, 2), (0,), (1,), (0, 2))


def cases() -> Iterator[Case]:
    """All of them."""
    for family in (_activations, _sums, _quantizes, _norms, _fused):
        yield from family()


def _activations() -> Iterator[Case]:
    for name in (
        "gelu",
        "gelu_erf",
        "relu",
        "silu",
        "softplus",
        "swiglu",
        "scaled_swiglu",
        "geglu",
    ):
        if name in activations:
            yield _pointwise(name, BF16, BF16)
    yield _pointwise("silu", FP32, FP32)
    yield _pointwise("tanh", FP16, FP16)
    yield _pointwise("swiglu", FP32, BF16, interleave=1)
    yield _pointwise("swiglu", BF16, BF16, interleave=8)
    yield _gradient("gelu", BF16)
    yield _gradient("swiglu", BF16)
    yield _gradient("swiglu", FP32)
    yield _gradient("swiglu", BF16, interleave=1)


def _sums() -> Iterator[Case]:
    for dtype in (BF16, FP32, FP16):
        yield _broadcast(dtype)
        yield _sum(3, dtype)
        yield _amax(dtype)
        for over in ("rows", "cols", "all"):
            yield _reduce(over, dtype, FP32)
    yield _reduce("rows", BF16, BF16)
    for over in ("rows", "cols", "all"):
        yield _pointwise_reduce(over)


def _quantizes() -> Iterator[Case]:
    for quantizer in QUANTIZERS:
        for live in USAGES:
            yield _quantize(quantizer, BF16, live)
        yield _quantize(quantizer, FP32, (0, 1, 2))
        yield _quantize(quantizer, FP16, (0, 1))


def _norms() -> Iterator[Case]:
    for layer in (False, True):
        yield _norm(layer, BF16, BF16, False)
        yield _norm(layer, BF16, FP32, True)
        yield _norm(layer, FP32, FP32, False)
        for gamma in (False, True):
            yield _norm_backward(layer, BF16, gamma)
            yield _norm_backward(layer, FP32, gamma)
        for quantizer in (DELAYED, BLOCK, MXFP8Quantizer()):
            yield _norm_quantize(layer, quantizer, False)
        yield _norm_quantize(layer, DELAYED, True)


def _fused() -> Iterator[Case]:
    for quantizer in (DELAYED, Float8Quantizer(E5M2), BLOCK, MXFP8Quantizer()):
        for name, grad in (("gelu", False), ("swiglu", False), ("swiglu", True)):
            yield _pointwise_quantize(name, grad, quantizer, False)
        yield _bias_chain(quantizer)
    yield _pointwise_quantize("swiglu", True, DELAYED, True)
    yield _pointwise_quantize("swiglu", False, BLOCK, True)


# -- checking


def check(group: Group, arch: str, device: torch.device | str) -> list[str]:
    """Run a group by its kernel and by the reference; what differs, in words."""
    call = group.call(arch, device)
    kernel = BIND[group.runs]
    reason = kernel.refuse(call)
    if reason is not None:
        return [f"refused: {reason}"]
    given = tuple(group.inputs.tensors[v] for v in call.reads)
    got, again = (_run(kernel.bind(call), given, call) for _ in range(2))
    expected = _run((bind_composed if group.rule else bind_reference)(call), given, call)
    exact = [x.double() if x.is_floating_point() else x for x in given]
    dense = all(node.prim not in (QUANTIZE, AMAX) for node in group.nodes)
    precise = _double(group, exact, arch, device) if dense else None
    found = []
    for i, (a, b, c) in enumerate(zip(got, expected, again, strict=True)):
        where = f"output {i}"
        if isinstance(a, Record):
            assert isinstance(b, Record)
            found += _records(a, b, where, group.codes)
            found += [f"{where}: not the same twice" for _ in (0,) if not _same(a.data, c.data)]
            continue
        if tuple(a.shape) != tuple(b.shape) or a.dtype is not b.dtype:
            found.append(
                f"{where}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
            )
            continue
        if not _same(a, c):
            found.append(f"{where}: not the same twice")
        found += _dense(a, b, None if precise is None else precise[i], where, group)
    return found


def _run(launched: Any, given: tuple[torch.Tensor, ...], call: Call) -> tuple[Any, ...]:
    made = launched(*given)
    return made if len(call.writes) > 1 else (made,)


def _double(
    group: Group, given: list[torch.Tensor], arch: str, device: torch.device | str
) -> tuple[Any, ...]:
    """The references in FP64, one after the other: nothing is rounded in between."""
    values: dict[Value, Any] = dict(zip(group.call(arch, device).reads, given, strict=True))
    for node in group.nodes:
        attrs = dict(node.attrs)
        if "dtype" in attrs:
            attrs["dtype"] = torch.float64
        made = node.prim.reference(*(values[v] for v in node.inputs), **attrs)
        for i, x in enumerate(made if isinstance(made, tuple) else (made,)):
            values[Value(node.id, i)] = x
    return tuple(values[v] for v in group.writes)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b)) or bool(
        torch.equal(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0))
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _dense(
    a: torch.Tensor, b: torch.Tensor, precise: torch.Tensor | None, where: str, group: Group
) -> list[str]:
    if not a.numel() or _same(a, b):
        return []
    if group.exact:
        return [f"{where}: {int((_bytes(a) != _bytes(b)).sum())} bytes differ"]
    if not torch.equal(a.isnan(), b.isnan()):
        return [f"{where}: NaN in other places"]
    x, y = a.double().nan_to_num(0.0), b.double().nan_to_num(0.0)
    if precise is None:
        worst = ((x - y).abs() / (y.abs() + 1e-2)).max().item()
        return [] if worst < 1e-2 else [f"{where}: {worst:.2e} from the reference"]
    z = precise.double().nan_to_num(0.0)
    # A statistic near 0 is made of numbers near 1.
    largest = max(z.abs().max().item(), 1.0 if a.dtype is FP32 else 0.0)
    unit = torch.finfo(a.dtype).eps * largest
    if "reduce" in group.runs or "dgamma" in group.runs:  # what a sum's rounding errors grow with
        given = group.inputs.tensors.values()
        unit += 4 * torch.finfo(torch.float32).eps * max(x.float().norm().item() for x in given)
    ours, theirs = (x - z).norm().item(), (y - z).norm().item()
    most, their_most = (x - z).abs().max().item(), (y - z).abs().max().item()
    slack = 0.5 * unit * (a.numel() ** 0.5 if a.dtype is FP32 else 1.0)
    if ours > 2.0 * theirs + slack or most > 2.0 * their_most + 2.0 * unit:
        return [
            f"{where}: error {ours:.3e} (max {most:.3e}), the reference's is {theirs:.3e} "
            f"(max {their_most:.3e})"
        ]
    return []


def _records(a: Record, b: Record, where: str, codes: float) -> list[str]:
    found = []
    for name in ("usage", "shape", "quantizer"):
        if getattr(a, name) != getattr(b, name):
            found.append(f"{where}.{name}: {getattr(a, name)} instead of {getattr(b, name)}")
    for name in ("data", "scale_inv") + ("amax",) * (b.amax is not None):
        x, y = getattr(a, name), getattr(b, name)
        if x.shape != y.shape or x.dtype is not y.dtype or not dense_strides(x):
            found.append(
                f"{where}.{name}: {x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
            )
            continue
        u, v = _bytes(x), _bytes(y)
        if torch.equal(u, v):
            continue
        if not codes:
            bad = (u != v).nonzero()[:3].view(-1).tolist()
            found.append(
                f"{where}.{name}: {int((u != v).sum())} of {u.numel()} bytes differ, e.g. {bad}"
            )
        elif not _close(a, b, codes):
            found.append(f"{where}.{name}: values differ by more than a code, or too many")
    return found


def _close(a: Record, b: Record, codes: float) -> bool:
    """Whether values are one code apart at most, and few are.

    Where a whole block is tiny against the tensor, a reference that cancels (torch's GELU) decides
    about its codes; what counts there is the distance against the tensor.
    """
    x, y = (r.dequantize(torch.float32).nan_to_num(0.0) for r in (a, b))
    step = 0.13 if a.data.dtype is E4M3 else 0.26
    near = (x - y).abs() <= step * torch.maximum(x.abs(), y.abs()) + 1e-6 * y.abs().max()
    u, v = (r.data.reshape(-1).view(torch.uint8).int() for r in (a, b))
    beside = ((u - v).abs() <= 1).view(a.data.shape)
    if a.data.shape != x.shape:  # a transposed copy
        beside = beside.movedim(0, -1)
    same = (x - y).abs() <= 1e-5 * y.abs().max()
    return bool((near | beside).all()) and int((~same).sum()) <= codes / 1000 * x.numel() + 2
