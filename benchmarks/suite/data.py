"""The cases as data, and the arithmetic of their floors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

RECIPES = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
"""Recipe names; "none" computes in BF16."""
NATIVE = ("none", "delayed", "current", "block")
"""What a Hopper GPU multiplies itself."""


@dataclass(frozen=True)
class Layer:
    """One step of a pipeline: `kind` over `width` inputs, to `out` outputs where it changes them."""

    kind: str
    width: int
    out: int = 0
    bias: bool = False


def norm(width: int, kind: str = "rmsnorm") -> Layer:
    """A norm over `width` columns."""
    return Layer(kind, width, width, kind == "layernorm")


def linear(width: int, out: int, bias: bool = False) -> Layer:
    """A weight [out, width]."""
    return Layer("linear", width, out, bias)


def swiglu_mlp(hidden: int, ffn: int) -> tuple[Layer, ...]:
    """RMSNorm, Linear, SwiGLU, Linear."""
    return (
        norm(hidden),
        linear(hidden, 2 * ffn),
        Layer("swiglu", 2 * ffn, ffn),
        linear(ffn, hidden),
    )


def gelu_mlp(hidden: int, ffn: int) -> tuple[Layer, ...]:
    """LayerNorm, Linear + bias, GELU, Linear + bias."""
    return (
        norm(hidden, "layernorm"),
        linear(hidden, ffn, True),
        Layer("gelu", ffn, ffn),
        linear(ffn, hidden, True),
    )


@dataclass(frozen=True)
class Case:
    """A pipeline, forward and backward, of `rows` tokens.

    Attributes:
        graphs: also under CUDA graphs.
        steps: calls a sample.
        growth: steps after which memory and kernels a step must not have grown; 0 to not look.
    """

    name: str
    about: str
    rows: int
    layers: tuple[Layer, ...]
    graphs: bool = False
    steps: int = 2
    growth: int = 0

    @property
    def width(self) -> int:
        """Columns of the input."""
        return self.layers[0].width

    def smaller(self, rows: int, divide: int) -> Case:
        """The same with fewer rows and columns, for a CPU."""
        layers = tuple(
            replace(x, width=max(16, x.width // divide), out=max(16, x.out // divide))
            for x in self.layers
        )
        return replace(self, rows=rows, layers=layers, steps=1, growth=min(self.growth, 12))


CASES: tuple[Case, ...] = (  # the most telling first
    Case("mlp", "RMSNorm, Linear, SwiGLU, Linear", 8192, swiglu_mlp(4096, 14336), steps=4),
    Case("small", "SwiGLU MLP", 512, swiglu_mlp(1024, 2816), True, 20, growth=1000),
    Case("medium", "SwiGLU MLP", 2048, swiglu_mlp(1024, 4096), True, 20),
    Case("linear", "Linear 4096 to 4096", 8192, (linear(4096, 4096),), steps=30),
    Case("norm_linear", "RMSNorm, Linear 4096 to 6144", 8192,
         (norm(4096), linear(4096, 6144)), steps=20),
    Case("gelu_mlp", "LayerNorm, Linear + bias, GELU, Linear + bias", 8192, gelu_mlp(4096, 16384), steps=4),
)  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """A memory-bound group, timed against a copy of the same bytes.

    Attributes:
        group: which steps of the plan: "norm", "norm backward", "quantize", "gated", "gated backward", ...
        traffic: bytes read and written per element (rows x columns of the first layer's output),
            each tensor once.
        again: bytes per element of a second look that no kernel can avoid.
        recipe: recipe of the plan.
        options: of the quantizer, for "quantize".
    """

    name: str
    about: str
    rows: int
    columns: int
    group: str
    traffic: float
    recipe: str = "none"
    again: float = 0.0
    options: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """What has to be moved."""
        return int(self.rows * self.columns * (self.traffic + self.again))

    def smaller(self, rows: int, divide: int) -> Stream:
        """The same with fewer rows and columns, for a CPU."""
        return replace(self, rows=rows, columns=max(1, self.columns // divide // 128) * 128)


def _streams() -> tuple[Stream, ...]:
    rows, ffn = 8192, 14336
    scale = 4 / 128 * 2  # FP32 scales of 1x128 blocks, both ways
    norms = (("16384x4096", 16384, 4096), ("8192x8192", 8192, 8192), ("4096x16384", 4096, 16384),
             ("131072x128", 131072, 128))  # fmt: skip
    found = []
    for text, r, c in norms:
        found.append(Stream(f"norm-{text}", "RMSNorm", r, c, "norm", 4))
        found.append(Stream(f"norm_backward-{text}", "RMSNorm backward", r, c, "norm backward", 6))
    found += [
        Stream("layernorm-1024x12288", "LayerNorm", 1024, 12288, "layernorm", 4),
        Stream("layernorm_backward-1024x12288", "LayerNorm backward", 1024, 12288,
               "layernorm backward", 6),
    ]  # fmt: skip
    extra = {"delayed": (0, 0.0), "current": (1, 0.0), "block": (0, scale)}
    for recipe, (again, scales) in extra.items():
        named = f"{recipe}, row and column"
        found += [
            Stream(f"norm_quantize-{recipe}", f"RMSNorm and quantize {named}", rows, 4096,
                   "norm", 4 + scales, recipe, 2 * again),
            Stream(f"add_norm_quantize-{recipe}", f"add, RMSNorm and quantize {named}", rows, 4096,
                   "add norm", 8 + scales, recipe, 2 * again),
            Stream(f"quantize-{recipe}", f"quantize {named}", rows, ffn,
                   "quantize", 4 + scales, recipe, 2 * again),
            Stream(f"gated_quantize-{recipe}", f"SwiGLU and quantize {named}", rows, ffn,
                   "gated", 6 + scales, recipe, 4 * again),
            Stream(f"gated_backward_quantize-{recipe}", f"SwiGLU backward and quantize {named}",
                   rows, ffn, "gated backward", 10 + 2 * scales, recipe, 6 * again),
        ]  # fmt: skip
    found += [
        Stream("quantize-mxfp8", "quantize MXFP8, row and column", rows, 5120, "quantize",
               4 + 2 / 32, "mxfp8"),
        Stream("quantize-nvfp4", "quantize NVFP4, row and column", rows, 5120, "quantize",
               3 + 2 / 16, "nvfp4", 2),
        Stream("quantize-nvfp4-full", "quantize NVFP4 with Hadamard and stochastic rounding",
               rows, 5120, "quantize", 3 + 2 / 16, "nvfp4", 2, ("hadamard", "stochastic")),
        Stream("gelu-8192x16384", "GELU", rows, 16384, "gelu", 4),
        Stream("weights-delayed", "quantize the MLP's weights, row and column", 3 * ffn, 4096,
               "weights", 4, "delayed"),
        Stream("weights-current", "quantize the MLP's weights, row and column", 3 * ffn, 4096,
               "weights", 4, "current", 2),
    ]  # fmt: skip
    return tuple(found)


STREAMS: tuple[Stream, ...] = _streams()

PRESETS: Mapping[str, tuple[str, ...]] = {
    "hopper": tuple(c.name for c in CASES) + tuple(s.name for s in STREAMS),
    "pipelines": tuple(c.name for c in CASES),
    "streams": tuple(s.name for s in STREAMS),
    "norms": tuple(s.name for s in STREAMS if "norm" in s.group),
    "quantizes": tuple(s.name for s in STREAMS if "norm" not in s.group),
}
"""Names that stand for several cases."""


# -- floors


def flops(case: Case) -> int:
    """Of a forward and backward: three products a weight."""
    return sum(6 * case.rows * x.width * x.out for x in case.layers if x.kind == "linear")


def parameters(case: Case) -> int:
    """Elements of all weights, biases aside."""
    return sum(x.width * x.out for x in case.layers if x.kind == "linear")


_AROUND = {  # kind -> (read, written) per output element, (forward), (backward)
    "rmsnorm": ((2, 2), (4, 2)),
    "layernorm": ((2, 2), (4, 2)),
    "swiglu": ((4, 2), (6, 4)),
    "gelu": ((2, 2), (4, 2)),
}


def stream_bytes(case: Case, recipe: str) -> int:
    """Bytes of everything but the products: each operand read once, each result written once.

    An FP8 row and column copy together are as large as a BF16 tensor. Under current scaling operands are read twice,
    or the value is written in BF16 and read, before its scale is known: the cheaper of the two counts.
    """
    again = recipe in ("current", "nvfp4")
    total = 0
    quantized = recipe != "none"
    for i, layer in enumerate(case.layers):
        if layer.kind == "linear":
            if quantized:
                total += layer.width * layer.out * (6 if again else 4)
                if i == 0:
                    total += case.rows * layer.width * (6 if again else 4)
                if i == len(case.layers) - 1:
                    total += case.rows * layer.out * (6 if again else 4)
            continue
        for read, written in _AROUND[layer.kind]:
            total += case.rows * layer.out * (read + written)
        # The gradient of a norm is not quantized: it leaves the pipeline, or joins the residual.
        for read, written in _AROUND[layer.kind][: 1 if "norm" in layer.kind else 2]:
            total += case.rows * layer.out * (min(read, 2 * written) if again else 0)
    return total


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches: products by format in FLOP/s, a large copy in B/s (read and written)."""

    products: Mapping[str, float]
    copy: float


def floor_ms(case: Case, recipe: str, ceilings: Ceilings) -> float | None:
    """Milliseconds below which no forward and backward can be; None if a ceiling is not known."""
    rate = ceilings.products.get(recipe) or (
        ceilings.products.get("none") if recipe in ("mxfp8", "nvfp4") else None
    )
    if not rate or not ceilings.copy:
        return None
    return 1e3 * (flops(case) / rate + stream_bytes(case, recipe) / ceilings.copy)


__all__ = [
    "CASES",
    "NATIVE",
    "PRESETS",
    "RECIPES",
    "STREAMS",
    "Case",
    "Ceilings",
    "Layer",
    "Stream",
    "floor_ms",
    "flops",
    "stream_bytes",
]
