"""The providers of a pipeline: te_ops and its peers, each built from the same weights.

A provider is a row of `PROVIDERS`. What is not installed raises ImportError when it is built and is reported as
absent; what a provider does not have (a recipe, a pipeline) raises `Unsupported` and makes no row.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_ops as te

from . import blocks
from .data import DPA, Case, Layer

EPS = 1e-5


class Unsupported(Exception):
    """The provider has no such recipe or pipeline."""


@dataclass
class Data:
    """What all providers of a case share: input, gradient, and the weights in the order of the layers."""

    case: Case
    device: torch.device
    x: Tensor
    dy: Tensor
    weights: list[Tensor]

    @classmethod
    def draw(cls, case: Case, device: torch.device, seed: int = 0) -> Data:
        """Random BF16 data; weights as an initialization would have them."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            made = torch.randn(shape, generator=generator, device=device) * scale + shift
            return made.to(torch.bfloat16)

        weights = []
        for layer in case.layers:
            if layer.kind == "transformer":
                weights += [draw(*s, scale=a, shift=m) for s, a, m in blocks.shapes(layer)]
            elif layer.kind == "linear":
                weights.append(draw(layer.out, layer.width, scale=layer.width**-0.5))
            elif layer.kind in ("rmsnorm", "layernorm"):
                weights.append(draw(layer.width, scale=0.1, shift=1.0))
            if layer.bias:
                weights.append(draw(layer.out, scale=0.1))
        x = draw(*case.shape, case.width).requires_grad_()
        return cls(case, device, x, draw(*case.shape, case.layers[-1].out), weights)


@dataclass
class Arm:
    """One provider with one recipe, ready to step.

    `parameters` are in the order of `Data.weights`.
    """

    provider: str
    recipe: str
    data: Data
    call: Callable[[Tensor], Any]
    parameters: list[Tensor]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    keep: Any = None  # what must live as long as the arm
    note: str = ""
    samples: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`provider/recipe`."""
        return f"{self.provider}/{self.recipe}"

    def forward(self) -> Tensor:
        """The output."""
        with self.context():
            y: Tensor = self.call(self.data.x)
            return y

    def clear(self) -> None:
        """Gradients None."""
        self.data.x.grad = None
        for p in self.parameters:
            p.grad = None

    def step(self) -> Tensor:
        """Gradients None, forward, backward."""
        self.clear()
        y = self.forward()
        torch.autograd.backward((y,), (self.data.dy,))
        return y

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of one step."""
        y = self.step().detach()
        found = {"y": y, "dx": self.data.x.grad}
        found |= {f"dw{i}": p.grad for i, p in enumerate(self.parameters)}
        missing = [name for name, t in found.items() if t is None]
        if missing:
            raise RuntimeError(f"no gradient arrived at {', '.join(missing)}")
        return found  # type: ignore[return-value]


Build = Callable[[Data, str], Arm]


@dataclass(frozen=True)
class Provider:
    """A row of the table. `graph`: needs the case to want CUDA graphs; `extra`: only when asked for."""

    name: str
    build: Build
    graph: bool = False
    extra: bool = False


LIBRARIES = ("transformer_engine.pytorch", "torchao.float8", "liger_kernel.transformers", "quack")


def preload() -> None:
    """Import the peers' libraries before anything else loads CUDA's: some bring their own and fail afterwards."""
    _torchs_cudnn()
    for name in LIBRARIES:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)  # an arm that needs it says what is wrong
    # torch complains once if that loaded another cuDNN than it was built for; the graphs of all arms then use that one.
    with contextlib.suppress(RuntimeError):
        torch.backends.cudnn.version()  # type: ignore[no-untyped-call]


_CUDNN = ("", "_graph", "_ops", "_adv", "_cnn", "_heuristic", "_engines_precompiled",
          "_engines_runtime_compiled")  # fmt: skip


def _torchs_cudnn() -> None:
    """Load the cuDNN that torch was built for, where pip has installed it: what is loaded later finds it by name, and
    not another one of the system."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for name in _CUDNN:
                with contextlib.suppress(OSError):
                    ctypes.CDLL(f"{folder}/lib/libcudnn{name}.so.9", mode=ctypes.RTLD_GLOBAL)


# -- te_ops


def te_recipe(name: str) -> te.Recipe | None:
    """The recipe of this name."""
    recipes = te.recipe
    made: dict[str, Callable[[], te.Recipe | None]] = {
        "none": lambda: None,
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "nvfp4": recipes.NVFP4BlockScaling,
        "delayed" + DPA: lambda: recipes.DelayedScaling(fp8_dpa=True),
        "current" + DPA: lambda: recipes.Float8CurrentScaling(fp8_dpa=True),
    }
    return made[name]()


_TE_OPS: dict[str, Callable[[Layer, dict[str, Any]], nn.Module]] = {
    "rmsnorm": lambda x, kw: te.RMSNorm(x.width, EPS, **kw),
    "layernorm": lambda x, kw: te.LayerNorm(x.width, EPS, **kw),
    "linear": lambda x, kw: te.Linear(x.width, x.out, bias=x.bias, **kw),
    "swiglu": lambda x, kw: te.SwiGLU(),
    "gelu": lambda x, kw: te.GELU(),
    "transformer": blocks.ours,
}


def _assemble(data: Data, table: dict[str, Any]) -> list[nn.Module]:
    return _made(data.case.layers, table, data.device)


def _made(layers: Sequence[Layer], table: dict[str, Any], device: torch.device) -> list[nn.Module]:
    if any(layer.kind not in table for layer in layers):
        raise Unsupported("a step that it does not have")
    keywords = {"device": device, "dtype": torch.bfloat16}
    return [table[layer.kind](layer, keywords) for layer in layers]


def modules(layers: Sequence[Layer], device: torch.device) -> list[nn.Module]:
    """The layers as te_ops ops, weights as they come."""
    return _made(layers, _TE_OPS, device)


def _adopt(modules: Sequence[nn.Module], data: Data) -> list[Tensor]:
    """Copy the weights into modules in the order of the layers; the parameters in that order."""
    found: list[Tensor] = []
    for module in modules:
        found += blocks.parameters(module)
        for name in ("weight", "bias"):
            p = getattr(module, name, None)
            if isinstance(p, Tensor):
                found.append(p)
    return _copy(found, data)


def _copy(parameters: list[Tensor], data: Data) -> list[Tensor]:
    if [tuple(p.shape) for p in parameters] != [tuple(w.shape) for w in data.weights]:
        raise RuntimeError(
            f"parameters {[tuple(p.shape) for p in parameters]} do not fit the weights "
            f"{[tuple(w.shape) for w in data.weights]}"
        )
    with torch.no_grad():
        for p, w in zip(parameters, data.weights, strict=True):
            p.copy_(w)
    return parameters


def _needs_attention(data: Data, recipe: str) -> None:
    """Without attention, a recipe that differs in it is another one twice."""
    if recipe.endswith(DPA) and all(x.kind != "transformer" for x in data.case.layers):
        raise Unsupported("no attention to quantize")


def _ours(data: Data, recipe: str) -> Arm:
    _needs_attention(data, recipe)
    ops = modules(data.case.layers, data.device)
    model = te.Sequential(*ops)
    made = te_recipe(recipe)

    def context() -> AbstractContextManager[Any]:
        return te.autocast(recipe=made) if made is not None else contextlib.nullcontext()

    return Arm("te_ops", recipe, data, model, _adopt(ops, data), context, model)


def _ours_graph(**options: Any) -> Build:
    def build(data: Data, recipe: str) -> Arm:
        arm = _ours(data, recipe)
        with arm.context():
            arm.call = te.make_graphed(arm.keep, (data.x,), **options)
        return arm

    return build


# -- torch


class _SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


_TORCH: dict[str, Callable[[Layer, dict[str, Any]], nn.Module]] = {
    "rmsnorm": lambda x, kw: nn.RMSNorm(x.width, EPS, **kw),
    "layernorm": lambda x, kw: nn.LayerNorm(x.width, EPS, **kw),
    "linear": lambda x, kw: nn.Linear(x.width, x.out, bias=x.bias, **kw),
    "swiglu": lambda x, kw: _SwiGLU(),
    "gelu": lambda x, kw: nn.GELU(approximate="tanh"),
    "transformer": lambda x, kw: blocks.TorchLayer(x, **kw),
}


def _torch(data: Data, recipe: str) -> Arm:
    if recipe != "none":
        raise Unsupported("BF16 only")
    parts = _assemble(data, _TORCH)
    model = nn.Sequential(*parts)
    return Arm("torch", recipe, data, model, _adopt(parts, data), keep=model)


def _torch_graph(data: Data, recipe: str) -> Arm:
    arm = _torch(data, recipe)
    arm.call = torch.cuda.make_graphed_callables(arm.keep, (data.x.detach().requires_grad_(),))
    return arm


def _compiled(**options: Any) -> Build:
    def build(data: Data, recipe: str) -> Arm:
        arm = _torch(data, recipe)
        arm.call = torch.compile(arm.keep, **options)
        return arm

    return build


def _torchao(kind: str) -> Build:
    def build(data: Data, recipe: str) -> Arm:
        if recipe != "current":
            raise Unsupported("dynamic scaling only")
        float8 = importlib.import_module("torchao.float8")
        arm = _torch(data, "none")
        config = float8.Float8LinearConfig.from_recipe_name(kind)
        model = float8.convert_to_float8_training(arm.keep, config=config)
        arm.recipe, arm.keep, arm.call = recipe, model, torch.compile(model)
        arm.parameters = _adopt(list(model), data)
        return arm

    return build


# -- Transformer Engine


def _te() -> tuple[Any, Any]:
    """Its modules and its recipes."""
    return (
        importlib.import_module("transformer_engine.pytorch"),
        importlib.import_module("transformer_engine.common.recipe"),
    )


def _te_recipe(recipe: str) -> Any:
    _, recipes = _te()
    names = {
        "delayed": "DelayedScaling",
        "current": "Float8CurrentScaling",
        "block": "Float8BlockScaling",
    }
    if recipe == "none":
        return None
    name = names.get(recipe.removesuffix(DPA))
    if name is None:
        raise Unsupported(f"{recipe} does not run on Hopper")
    return getattr(recipes, name)(**({"fp8_dpa": True} if recipe.endswith(DPA) else {}))


def _te_context(recipe: Any) -> Callable[[], AbstractContextManager[Any]]:
    if recipe is None:
        return contextlib.nullcontext
    library, _ = _te()
    return lambda: library.autocast(enabled=True, recipe=recipe)


# kinds of the layers -> (class, its keywords, names of its parameters)
_TE_MODULES: dict[tuple[str, ...], tuple[str, dict[str, Any], tuple[str, ...]]] = {
    ("linear",): ("Linear", {}, ("weight", "bias")),
    ("rmsnorm", "linear"): (
        "LayerNormLinear", {"normalization": "RMSNorm"}, ("layer_norm_weight", "weight", "bias"),
    ),
    ("rmsnorm", "linear", "swiglu", "linear"): (
        "LayerNormMLP", {"normalization": "RMSNorm", "activation": "swiglu"},
        ("layer_norm_weight", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
    ),
    ("layernorm", "linear", "gelu", "linear"): (
        "LayerNormMLP", {"normalization": "LayerNorm", "activation": "gelu"},
        ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight",
         "fc2_bias"),
    ),
}  # fmt: skip


def _te_module(data: Data, recipe: str) -> Arm:
    _needs_attention(data, recipe)
    library, _ = _te()
    made = _te_recipe(recipe)
    layers = data.case.layers
    if [x.kind for x in layers] == ["transformer"]:
        layer = blocks.transformer_engine(layers[0], data.x.shape[1], data.device)
        weights = _adopt([layer], data)
        return Arm("te-module", recipe, data, layer, weights, _te_context(made), layer)
    entry = _TE_MODULES.get(tuple(x.kind for x in layers))
    if entry is None:
        raise Unsupported("no module for this pipeline")
    name, keywords, names = entry
    linears = [x for x in layers if x.kind == "linear"]
    model = getattr(library, name)(
        linears[0].width,
        linears[-1].width if name == "LayerNormMLP" else linears[0].out,
        bias=linears[0].bias,
        params_dtype=torch.bfloat16,
        device=data.device,
        **keywords,
    )
    biased = linears[0].bias
    wanted = [n for n in names if biased or not n.endswith("bias") or n == "layer_norm_bias"]
    parameters = _copy([getattr(model, n) for n in wanted], data)
    return Arm("te-module", recipe, data, model, parameters, _te_context(made), model)


def _te_sequential(data: Data, recipe: str) -> Arm:
    _needs_attention(data, recipe)
    _te()
    ops = importlib.import_module("transformer_engine.pytorch.ops")
    made = _te_recipe(recipe)
    table: dict[str, Callable[[Layer, dict[str, Any]], nn.Module]] = {
        "rmsnorm": lambda x, kw: ops.RMSNorm(x.width, eps=EPS, **kw),
        "layernorm": lambda x, kw: ops.LayerNorm(x.width, eps=EPS, **kw),
        "linear": lambda x, kw: ops.Linear(x.width, x.out, bias=x.bias, **kw),
        "swiglu": lambda x, kw: ops.SwiGLU(),
        "gelu": lambda x, kw: ops.GELU(),
    }
    parts = _assemble(data, table)
    model = ops.Sequential(*parts)
    return Arm(
        "te-ops", recipe, data, model, _adopt(parts, data), _te_context(made), (model, parts)
    )


def _te_graph(data: Data, recipe: str) -> Arm:
    library, _ = _te()
    arm = _te_module(data, recipe)
    made = _te_recipe(recipe)
    sample = data.x.detach().clone().requires_grad_()
    arm.call = library.make_graphed_callables(
        arm.keep, (sample,), enabled=made is not None, recipe=made
    )
    return arm


# -- Liger, quack


def _liger(data: Data, recipe: str) -> Arm:
    if recipe != "none":
        raise Unsupported("BF16 only")
    kinds = {x.kind for x in data.case.layers}
    if not kinds & {"rmsnorm", "swiglu"}:
        raise Unsupported("no kernel for this pipeline")
    library = importlib.import_module("liger_kernel.transformers")
    function = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            y: Tensor = function.apply(gate.contiguous(), up.contiguous())
            return y

    table = {
        **_TORCH,
        "rmsnorm": lambda x, kw: library.LigerRMSNorm(x.width, eps=EPS).to(**kw),
        "swiglu": lambda x, kw: Gate(),
    }
    parts = _assemble(data, table)
    model = nn.Sequential(*parts)
    return Arm("liger", recipe, data, model, _adopt(parts, data), keep=model)


def _quack(data: Data, recipe: str) -> Arm:
    if recipe != "none":
        raise Unsupported("BF16 only")
    kinds = tuple(x.kind for x in data.case.layers)
    if kinds != ("rmsnorm", "linear", "swiglu", "linear"):
        raise Unsupported("no module for this pipeline")
    library = importlib.import_module("quack.mlp")
    rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm
    hidden, ffn = data.case.width, data.case.layers[2].out
    mlp = library.MLP(
        hidden, ffn, hidden, activation="swiglu", device=data.device, dtype=torch.bfloat16,
        tuned=False, concat_layout=True,
    )  # fmt: skip
    gamma = nn.Parameter(torch.empty_like(data.weights[0]))
    parameters = _copy([gamma, mlp.fc1.weight, mlp.fc2.weight], data)
    return Arm(
        "quack", recipe, data, lambda x: mlp(rmsnorm(x, gamma, eps=EPS)), parameters, keep=mlp,
        note="its default configuration, not tuned",
    )  # fmt: skip


PROVIDERS: tuple[Provider, ...] = (
    Provider("te_ops", _ours),
    # The graphs of the peers hand out their own memory too, which the next replay writes again.
    Provider("te_ops-graph", _ours_graph(copies=False), graph=True),
    Provider("te_ops-graph-copies", _ours_graph(), graph=True, extra=True),
    Provider("torch", _torch),
    Provider("torch-graph", _torch_graph, graph=True),
    Provider("compile", _compiled()),
    Provider("compile-max", _compiled(mode="max-autotune-no-cudagraphs"), extra=True),
    Provider("compile-graph", _compiled(mode="reduce-overhead"), graph=True, extra=True),
    Provider("te-module", _te_module),
    Provider("te-ops", _te_sequential),
    Provider("te-graph", _te_graph, graph=True),
    Provider("torchao", _torchao("tensorwise"), extra=True),
    Provider("torchao-row", _torchao("rowwise"), extra=True),
    Provider("liger", _liger, extra=True),
    Provider("quack", _quack, extra=True),
)


# -- the reference


def reference(data: Data) -> dict[str, Tensor]:
    """Output and gradients in FP64, from plain torch functions on the same BF16 numbers."""
    x = data.x.detach().double().requires_grad_()
    weights = [w.double().requires_grad_() for w in data.weights]
    y, left = x, iter(weights)
    for layer in data.case.layers:
        y = _apply(layer, y, left)
    grads = torch.autograd.grad(y, [x, *weights], data.dy.double())
    return {"y": y.detach(), "dx": grads[0], **{f"dw{i}": g for i, g in enumerate(grads[1:])}}


def _apply(layer: Layer, x: Tensor, weights: Any) -> Tensor:
    if layer.kind == "transformer":
        return blocks.reference(layer, x, [next(weights) for _ in blocks.shapes(layer)])
    if layer.kind == "linear":
        return F.linear(x, next(weights), next(weights) if layer.bias else None)
    if layer.kind == "rmsnorm":
        return F.rms_norm(x, (layer.width,), next(weights), EPS)
    if layer.kind == "layernorm":
        return F.layer_norm(x, (layer.width,), next(weights), next(weights), EPS)
    if layer.kind == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(x, approximate="tanh")


_STEP = {"none": 2.0**-9, "delayed": 2.0**-4, "current": 2.0**-4, "block": 2.0**-4,
         "mxfp8": 2.0**-4, "nvfp4": 2.0**-2}  # fmt: skip
"""Largest relative rounding error of a normal number; E5M2 gradients twice E4M3's."""


def tolerance(case: Case, recipe: str) -> float:
    """How far ‖result - reference‖ / ‖reference‖ may be.

    Rounding errors are independent: each of r roundings on the way adds its mean square, (step / sqrt 3)^2 at the
    worst position in a binade. A Linear rounds three operands, gradients in E5M2 with twice the step; every layer
    rounds its BF16 result both ways. The factors are for what later layers amplify, and for sums over rows whose
    terms a provider rounds to BF16.
    """
    whole = sum(x.kind == "transformer" for x in case.layers)  # of ten steps, four of them Linears
    # FP8 attention rounds queries, keys, values, probabilities and its output.
    linears = sum(x.kind == "linear" for x in case.layers) + (4 + recipe.endswith(DPA)) * whole
    recipe = recipe.removesuffix(DPA)
    squares = 4.0**2 * 4 * (len(case.layers) + 9 * whole) * _STEP["none"] ** 2 / 3
    if recipe != "none":
        step = _STEP[recipe]
        gradient = 2 * step if recipe in ("delayed", "current") else step
        squares += 2.0**2 * linears * (2 * step**2 + gradient**2) / 3
    return float(squares**0.5)


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each result; NaN stays NaN."""
    return {
        name: float((found[name].double() - t).norm() / t.norm().clamp_min(1e-300))
        for name, t in right.items()
    }


__all__ = [
    "PROVIDERS",
    "Arm",
    "Data",
    "Provider",
    "Unsupported",
    "errors",
    "reference",
    "tolerance",
]
