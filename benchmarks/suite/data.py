"""The cases as data, and the arithmetic of their floors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

DPA = "-dpa"
"""After the name of a recipe: attention multiplies FP8 too, on both sides (`fp8_dpa=True`)."""
RECIPES = (
    "none",
    "delayed",
    "current",
    "block",
    "mxfp8",
    "nvfp4",
    "delayed" + DPA,
    "current" + DPA,
)
"""Recipe names; "none" computes in BF16."""
NATIVE = ("none", "delayed", "current", "block")
"""What a Hopper GPU multiplies itself."""


@dataclass(frozen=True)
class Layer:
    """One step of a pipeline: `kind` over `width` inputs, to `out` outputs where it changes them.

    Of a "transformer", a whole layer: `heads` of queries, `groups` of keys and values, and `ffn` features inside.
    """

    kind: str
    width: int
    out: int = 0
    bias: bool = False
    heads: int = 0
    groups: int = 0
    ffn: int = 0

    def smaller(self, divide: int) -> Layer:
        """The same with fewer columns, for a CPU; heads of sixteen features."""
        width, out = max(16, self.width // divide), max(16, self.out // divide)
        if self.kind != "transformer":
            return replace(self, width=width, out=out)
        share = self.heads // self.groups
        groups = max(1, width // 16 // share)
        heads = groups * share
        return replace(self, width=16 * heads, out=16 * heads, heads=heads, groups=groups,
                       ffn=max(16, self.ffn // divide))  # fmt: skip


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


def transformer(hidden: int, ffn: int, heads: int, groups: int) -> Layer:
    """RMSNorm, causal attention with RoPE, RMSNorm, SwiGLU MLP, with their residuals."""
    return Layer("transformer", hidden, hidden, heads=heads, groups=groups, ffn=ffn)


@dataclass(frozen=True)
class Case:
    """A pipeline, forward and backward, of `rows` tokens.

    Attributes:
        batch: sequences that the rows are; 0 where no layer looks at more than a row.
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
    batch: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input and of the output, without columns."""
        return (self.batch, self.rows // self.batch) if self.batch else (self.rows,)

    @property
    def width(self) -> int:
        """Columns of the input."""
        return self.layers[0].width

    def smaller(self, rows: int, divide: int) -> Case:
        """The same with fewer rows and columns, for a CPU."""
        layers = tuple(x.smaller(divide) for x in self.layers)
        return replace(self, rows=rows, layers=layers, steps=1, growth=min(self.growth, 12))


CASES: tuple[Case, ...] = (  # the most telling first
    Case("mlp", "RMSNorm, Linear, SwiGLU, Linear", 8192, swiglu_mlp(4096, 14336), steps=4),
    Case("small", "SwiGLU MLP", 512, swiglu_mlp(1024, 2816), True, 20, growth=1000),
    Case("medium", "SwiGLU MLP", 2048, swiglu_mlp(1024, 4096), True, 20),
    Case("linear", "Linear 4096 to 4096", 8192, (linear(4096, 4096),), steps=30),
    Case("norm_linear", "RMSNorm, Linear 4096 to 6144", 8192,
         (norm(4096), linear(4096, 6144)), steps=20),
    Case("gelu_mlp", "LayerNorm, Linear + bias, GELU, Linear + bias", 8192, gelu_mlp(4096, 16384), steps=4),
    Case("layer", "TransformerLayer of Llama 3 8B, one sequence", 8192,
         (transformer(4096, 14336, 32, 8),), steps=2, batch=1),
    Case("layer_small", "TransformerLayer, two sequences", 2048, (transformer(1024, 4096, 16, 16),),
         True, 20, batch=2),
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


def weights(layer: Layer) -> int:
    """Elements of all weights that multiply."""
    if layer.kind == "transformer":
        kv = layer.width // layer.heads * layer.groups
        return layer.width * (2 * layer.width + 2 * kv + 3 * layer.ffn)
    return layer.width * layer.out if layer.kind == "linear" else 0


def flops(case: Case) -> int:
    """Of a forward and backward: three products a weight. Attention aside."""
    return sum(6 * case.rows * weights(x) for x in case.layers)


def attention_flops(case: Case) -> int:
    """Two products forward, five backward, of the scores that a causal mask leaves."""
    length = case.rows // max(case.batch, 1)
    return sum(7 * case.rows * length * x.width for x in case.layers if x.kind == "transformer")


def parameters(case: Case) -> int:
    """Elements of all weights, biases and gains aside."""
    return sum(weights(x) for x in case.layers)


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
    again = recipe.removesuffix(DPA) in ("current", "nvfp4")
    total = 0
    quantized = recipe != "none"
    for i, layer in enumerate(case.layers):
        if layer.kind == "transformer":
            total += case.rows * _layer_bytes(layer, quantized, again)
            total -= case.rows * _spared(layer) * recipe.endswith(DPA)
            total += weights(layer) * (6 if again else 4) * quantized
            continue
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


def _layer_bytes(layer: Layer, quantized: bool, again: bool) -> int:
    """Of a token: norms, turns, sums, the gate, and what the gradients of the outputs and the packed heads are
    quantized from; attention's own operands belong to it."""
    hidden, packed = layer.width, layer.width + 2 * layer.width // layer.heads * layer.groups
    norms = 2 * (2 + 2 + 6 + 2) * hidden  # backward reads the residual gradient too
    turns = 2 * (2 + 2) * packed
    sums = 2 * (4 + 2) * hidden
    gate = (4 + 2 + 6 + 4) * layer.ffn
    if not quantized:
        return norms + turns + sums + gate
    operands = (2 + 2) * hidden * 3  # the attention's output, the gradients of the two sums
    second = 2 * (2 * hidden + packed + 3 * hidden + 3 * layer.ffn) if again else 0
    return norms + turns + sums + gate + operands + second


def _spared(layer: Layer) -> int:
    """Of a token's bytes, what FP8 attention spares: turned heads are written as codes, and its output is codes."""
    return layer.width + 2 * layer.width // layer.heads * layer.groups + 2 * layer.width


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches: products by format in FLOP/s, a large copy in B/s (read and written)."""

    products: Mapping[str, float]
    copy: float


def floor_ms(case: Case, recipe: str, ceilings: Ceilings) -> float | None:
    """Milliseconds below which no forward and backward can be; None if a ceiling is not known."""
    rate = ceilings.products.get(recipe.removesuffix(DPA)) or (
        ceilings.products.get("none") if recipe in ("mxfp8", "nvfp4") else None
    )
    if not rate or not ceilings.copy:
        return None
    dense = ceilings.products.get("none", rate)
    forward = rate if recipe.endswith(DPA) else dense
    attention = attention_flops(case) * (2 / forward + 5 / dense) / 7
    return 1e3 * (flops(case) / rate + attention + stream_bytes(case, recipe) / ceilings.copy)


__all__ = [
    "CASES",
    "DPA",
    "NATIVE",
    "PRESETS",
    "RECIPES",
    "STREAMS",
    "Case",
    "Ceilings",
    "Layer",
    "Stream",
    "attention_flops",
    "floor_ms",
    "flops",
    "stream_bytes",
]
