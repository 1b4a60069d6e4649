"""Recipes (which quantizer for which operand), per-layer recipes, and `autocast`.

A recipe is a strict frozen value: unknown arguments are errors, equal values are equal keys.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch

from te_ops.errors import RecipeError
from te_ops.graph import Phase
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

Override = Literal["high_precision", "dequantized"]
Accumulation = Literal["fast", "split"]


class Format(enum.Enum):
    """FP8 formats by pass: HYBRID is E4M3 forward and E5M2 for gradients."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    @property
    def forward(self) -> torch.dtype:
        """dtype of inputs and weights."""
        return self.value[0]

    @property
    def backward(self) -> torch.dtype:
        """dtype of output gradients."""
        return self.value[1]


@dataclass(frozen=True)
class Role:
    """An operand of a primitive: what a recipe decides about.

    `operand` is "input", "weight" or "grad_output" for GEMMs, "q", "k", "v", "do" for attention; where
    its output may be quantized too, "o" of the prim "attention_fp8" is asked for. `path` is the op's path in the
    pipeline (`0`, `layers.3.fc1`).
    """

    prim: str
    phase: Phase
    operand: str
    path: str

    @property
    def is_grad(self) -> bool:
        """Whether the operand is a gradient."""
        return self.operand in _GRADIENT_OPERANDS


_GRADIENT_OPERANDS = frozenset({"grad_output", "do", "dp"})
_ATTENTION = frozenset({"attention", "attention_backward", "attention_fp8"})
_QUANTIZED = {"attention": ("q", "k", "v"), "attention_fp8": ("o",)}  # of FP8 attention


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. A recipe of your own overrides `quantizer(role)`.

    `backward_override`: None quantizes the backward GEMMs; "high_precision" saves the unquantized operands and
    "dequantized" the quantized ones, and both run the backward GEMMs in the compute dtype.
    """

    backward_override: Override | None = None
    split_accumulator: ClassVar[tuple[bool, bool, bool]] = (False, True, True)

    def __post_init__(self) -> None:
        _one_of(self, "backward_override", (None, "high_precision", "dequantized"))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) != isinstance(value, bool):
                wanted = "True or False" if isinstance(field.default, bool) else "no bool"
                raise RecipeError(
                    f"{type(self).__name__}: {field.name} must be {wanted}, got {value!r}"
                )

    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer of an operand, or None to leave it dense."""
        raise RecipeError(f"{type(self).__name__} does not define quantizer(role)")

    def for_path(self, path: str) -> Recipe | None:
        """The recipe that holds for the op at this path."""
        return self

    def delayed(self, role: Role) -> DelayedScaling | None:
        """How the state of a stateful quantizer moves; None for stateless recipes."""
        return None

    def keeps_quantized(self, role: Role) -> bool:
        """Whether a quantized output that ends a pipeline is returned as a QuantizedTensor."""
        return False

    def accumulation(self, phase: Phase) -> Accumulation:
        """How FP8 tensor cores sum: "fast" or "split" (two-level), by GEMM."""
        fprop, dgrad, wgrad = self.split_accumulator
        split = {
            Phase.FORWARD: fprop,
            Phase.RECOMPUTE: fprop,
            Phase.DGRAD: dgrad,
            Phase.WGRAD: wgrad,
        }[phase]
        return "split" if split else "fast"

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values that `te.recipe.from_dict` turns back into an equal recipe.

        Raises:
            RecipeError: a field is a callable.
        """
        return {"recipe": type(self).__name__} | {
            f.name: _plain(getattr(self, f.name), f"{type(self).__name__}.{f.name}")
            for f in dataclasses.fields(self)
        }


@dataclass(frozen=True, kw_only=True)
class ScalingRecipe(Recipe):
    """A recipe that may quantize attention too.

    `fp8_dpa`: attention multiplies per-tensor E4M3 (docs/guide/attention), with scales of its own for q, k and v;
    its backward is dense, on what the forward read. `fp8_mha`, which needs `fp8_dpa`: its output stays FP8 where it
    leaves a pipeline, as a QuantizedTensor for the projection that follows. Both are off by default.
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_mha and not self.fp8_dpa:
            raise RecipeError(
                f"{type(self).__name__}: fp8_mha=True keeps the output of FP8 attention in FP8; it needs fp8_dpa=True"
            )

    def keeps_quantized(self, role: Role) -> bool:
        """The output of attention, with `fp8_mha`."""
        return self.fp8_mha and role.prim == "attention_fp8"

    def attention_quantizer(self, role: Role) -> Float8CurrentScalingQuantizer | None:
        """That of an operand or the output of attention. Scales are powers of two, so that the 16-bit numbers that
        backward reads are exactly those that forward multiplied."""
        if not self.fp8_dpa or role.operand not in _QUANTIZED.get(role.prim, ()):
            return None
        return Float8CurrentScalingQuantizer(torch.float8_e4m3fn, force_pow_2_scales=True)


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(ScalingRecipe):
    """Per-tensor FP8 with scales from the amax history of earlier steps (numbers: docs/guide/recipes).

    `amax_compute_algo`: "max", "most_recent" or f(history) -> amax; `scaling_factor_compute_algo`: None or
    f(amax, old_scale, fp8_max, recipe) -> scale; `use_power_2_scales` rounds scales down to powers of two.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    use_power_2_scales: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_format(self)
        if self.backward_override is not None:
            raise RecipeError(
                "DelayedScaling: backward_override must be None (its gradients have their own state)"
            )
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise RecipeError(
                f"DelayedScaling: amax_history_len must be an int >= 1, got {self.amax_history_len!r}"
            )
        if not (isinstance(self.margin, int) and -126 <= self.margin <= 127):
            raise RecipeError(
                f"DelayedScaling: margin must be an int within [-126, 127] (2^margin is FP32), got {self.margin!r}"
            )
        if not callable(self.amax_compute_algo):
            _one_of(self, "amax_compute_algo", ("max", "most_recent"))
        algo = self.scaling_factor_compute_algo
        if not (algo is None or callable(algo)):
            raise RecipeError(
                f"DelayedScaling: scaling_factor_compute_algo must be None or a function, got {algo!r}"
            )

    def quantizer(self, role: Role) -> Quantizer | None:
        """Float8Quantizer in the format of the pass; the output of attention has the scale of v."""
        if role.prim in _ATTENTION:
            made = self.attention_quantizer(role)
            return made if made is None or role.operand == "o" else Float8Quantizer(made.dtype)
        return Float8Quantizer(
            self.fp8_format.backward if role.is_grad else self.fp8_format.forward
        )

    def delayed(self, role: Role) -> DelayedScaling:
        """Itself; for attention, whose scales are powers of two, the recipe that says so."""
        return _with_powers_of_two(self) if role.prim == "attention" else self


@functools.lru_cache(64)
def _with_powers_of_two(recipe: DelayedScaling) -> DelayedScaling:
    """One value for a recipe: states find their formulas by identity, and by equality more slowly."""
    return dataclasses.replace(recipe, use_power_2_scales=True)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(ScalingRecipe):
    """Per-tensor FP8 with the scale of this very tensor."""

    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    fp8_format: Format = Format.HYBRID
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_format(self)
        number = isinstance(self.amax_epsilon, int | float)
        if not (number and 0 <= self.amax_epsilon < math.inf):
            raise RecipeError(
                f"Float8CurrentScaling: amax_epsilon must be a finite number >= 0, got {self.amax_epsilon!r}"
            )
        _check_split(self)

    def quantizer(self, role: Role) -> Quantizer | None:
        """Float8CurrentScalingQuantizer in the format of the pass."""
        if role.prim in _ATTENTION:
            made = self.attention_quantizer(role)
            return made and dataclasses.replace(made, amax_epsilon=float(self.amax_epsilon))
        return Float8CurrentScalingQuantizer(
            self.fp8_format.backward if role.is_grad else self.fp8_format.forward,
            force_pow_2_scales=self.use_power_2_scales,
            amax_epsilon=float(self.amax_epsilon),
        )


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(ScalingRecipe):
    """FP8 with one FP32 scale per 1x128 or 128x128 block; scales are powers of two unless `use_f32_scales`."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    split_accumulator: ClassVar[tuple[bool, bool, bool]] = (True, True, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_format(self)
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            _one_of(self, name, (1, 2))
        dims = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        for a, b, gemm in ((0, 1, "fprop"), (2, 1, "dgrad"), (2, 0, "wgrad")):
            if dims[a] == dims[b] == 2:
                raise RecipeError(
                    f"Float8BlockScaling: {gemm} would multiply two operands with 128x128 blocks, which no GEMM does; "
                    "give one of them 1x128 blocks"
                )

    def quantizer(self, role: Role) -> Quantizer | None:
        """Float8BlockQuantizer with the block shape of the operand."""
        if role.prim in _ATTENTION:
            return self.attention_quantizer(role)
        dims = {"weight": self.w_block_scaling_dim, "grad_output": self.grad_block_scaling_dim}
        return Float8BlockQuantizer(
            self.fp8_format.backward if role.is_grad else self.fp8_format.forward,
            block_scaling_dim=dims.get(role.operand, self.x_block_scaling_dim),
            force_pow_2_scales=not self.use_f32_scales,
        )


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(ScalingRecipe):
    """OCP MXFP8: blocks of 32 along the contracted dimension with E8M0 scales."""

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_format(self)

    def quantizer(self, role: Role) -> Quantizer | None:
        """MXFP8Quantizer; 32x32 blocks for weights if asked."""
        if role.prim in _ATTENTION:
            return self.attention_quantizer(role)
        return MXFP8Quantizer(
            self.fp8_format.backward if role.is_grad else self.fp8_format.forward,
            with_2d_quantization=self.enable_2d_quantization and role.operand == "weight",
        )


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(ScalingRecipe):
    """NVFP4: E2M1 values, an E4M3 scale per 16, one FP32 scale per tensor; weights in 16x16 blocks, random Hadamard
    transform on columnwise inputs and gradients, stochastic rounding of gradients."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "nvfp4_4over6", _WHERE)
        _one_of(self, "nvfp4_4over6_e4m3_use_256", _WHERE)
        _one_of(self, "nvfp4_4over6_err_mode", ("MAE", "MSE"))

    def quantizer(self, role: Role) -> Quantizer | None:
        """NVFP4Quantizer with the options of the operand."""
        if role.prim in _ATTENTION:
            return self.attention_quantizer(role)
        weight = role.operand == "weight"
        kind = "weights" if weight else "activations"
        four_over_six = not role.is_grad and self.nvfp4_4over6 in ("all", kind)
        return NVFP4Quantizer(
            with_2d_quantization=weight and not self.disable_2d_quantization,
            with_rht=not (weight or self.disable_rht or four_over_six),
            stochastic_rounding=role.is_grad and not self.disable_stochastic_rounding,
            row_scaled=self.row_scaled_activation and role.operand == "input",
            four_over_six=four_over_six,
            four_over_six_bound=256 if self.nvfp4_4over6_e4m3_use_256 in ("all", kind) else 448,
            four_over_six_error=self.nvfp4_4over6_err_mode,
        )


_WHERE = ("none", "weights", "activations", "all")


@dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """`qfactory(role)` returns a quantizer, a DelayedScaling value (per-tensor FP8 with that state), or None (dense).

    The factory is part of the plan's key by identity: make it once, not in the training loop.
    """

    qfactory: Callable[[Role], Any] | None = None
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_split(self)
        if not callable(self.qfactory):
            raise RecipeError(
                f"CustomRecipe: qfactory must be a function of a Role, got {self.qfactory!r}"
            )

    def _answer(self, role: Role) -> Any:
        made = cast(Callable[[Role], Any], self.qfactory)(role)
        if not (made is None or isinstance(made, Quantizer | DelayedScaling)):
            raise RecipeError(
                f"CustomRecipe: qfactory({role}) returned a {type(made).__name__}; it must return a Quantizer, a "
                "DelayedScaling value or None"
            )
        return made

    def quantizer(self, role: Role) -> Quantizer | None:
        """What the factory says."""
        made = self._answer(role)
        if isinstance(made, DelayedScaling):
            return made.quantizer(role)
        if isinstance(made, Quantizer) and made.stateful:
            raise RecipeError(
                f"CustomRecipe: qfactory({role}) returned a delayed-scaling quantizer; return the "
                "te.recipe.DelayedScaling value that says how its state moves"
            )
        return cast("Quantizer | None", made)

    def delayed(self, role: Role) -> DelayedScaling | None:
        """The DelayedScaling value that the factory returned, if it did."""
        made = self._answer(role)
        return made.delayed(role) if isinstance(made, DelayedScaling) else None


@dataclass(frozen=True, kw_only=True)
class PerLayer(Recipe):
    """Recipes by op path: the first `fnmatch` pattern that matches wins, then `default` (None: not quantized).

    >>> PerLayer(layers={"head": None, "*": DelayedScaling()}).for_path("head") is None
    True
    """

    layers: Mapping[str, Recipe | None] | tuple[tuple[str, Recipe | None], ...] = ()
    default: Recipe | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward_override is not None:
            raise RecipeError("PerLayer: set backward_override on the recipes of the layers")
        items = self.layers.items() if isinstance(self.layers, Mapping) else self.layers
        try:
            pairs = tuple((pattern, recipe) for pattern, recipe in items)
        except TypeError:
            raise RecipeError(
                f"PerLayer: layers must map patterns to recipes, got {self.layers!r}"
            ) from None
        for pattern, recipe in (*pairs, ("default", self.default)):
            if not isinstance(pattern, str) or not (recipe is None or isinstance(recipe, Recipe)):
                raise RecipeError(
                    f"PerLayer: {pattern!r} must map to a recipe or None, got {recipe!r}"
                )
        object.__setattr__(self, "layers", pairs)

    def for_path(self, path: str) -> Recipe | None:
        """The recipe of the first pattern that matches."""
        for pattern, recipe in cast("tuple[tuple[str, Recipe | None], ...]", self.layers):
            if fnmatch.fnmatchcase(path, pattern):
                return recipe.for_path(path) if recipe is not None else None
        return self.default.for_path(path) if self.default is not None else None

    def quantizer(self, role: Role) -> Quantizer | None:
        """That of the layer's recipe."""
        recipe = self.for_path(role.path)
        return None if recipe is None else recipe.quantizer(role)

    def delayed(self, role: Role) -> DelayedScaling | None:
        """That of the layer's recipe."""
        recipe = self.for_path(role.path)
        return None if recipe is None else recipe.delayed(role)


RECIPES: dict[str, type[Recipe]] = {
    r.__name__: r
    for r in (
        DelayedScaling,
        Float8CurrentScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
        PerLayer,
    )
}


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_dict` described.

    Raises:
        RecipeError: unknown recipe name or field.
    """
    data = dict(values)
    name = data.pop("recipe", None)
    if name not in RECIPES:
        raise RecipeError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    kind = RECIPES[name]
    unknown = set(data) - {f.name for f in dataclasses.fields(kind)}
    if unknown:
        raise RecipeError(
            f"{name} has no field {sorted(unknown)}; it has {[f.name for f in dataclasses.fields(kind)]}"
        )
    if data.get("fp8_format", "E4M3") not in Format.__members__:
        raise RecipeError(
            f"{name}: fp8_format must be one of {list(Format.__members__)}, got {data['fp8_format']!r}"
        )
    if "fp8_format" in data:
        data["fp8_format"] = Format[data["fp8_format"]]
    if "layers" in data:
        data["layers"] = tuple((k, v and from_dict(v)) for k, v in data["layers"])
        data["default"] = data.get("default") and from_dict(data["default"])
    if "split_accumulator" in data:
        data["split_accumulator"] = tuple(data["split_accumulator"])
    return kind(**data)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Recipe):
        return value.to_dict()
    if isinstance(value, Format):
        return value.name
    if isinstance(value, tuple):
        return [_plain(item, name) for item in value]
    if callable(value):
        raise RecipeError(f"{name} is a function, which a dict cannot carry")
    return value


def _one_of(recipe: Recipe, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(recipe, name)
    if isinstance(value, bool) or value not in allowed:
        raise RecipeError(
            f"{type(recipe).__name__}: {name} must be one of {allowed}, got {value!r}"
        )


def _check_format(recipe: Any) -> None:
    if not isinstance(recipe.fp8_format, Format):
        raise RecipeError(
            f"{type(recipe).__name__}: fp8_format must be Format.E4M3 or Format.HYBRID, got {recipe.fp8_format!r} "
            "(E5M2 for everything loses too much precision in forward)"
        )


def _check_split(recipe: Any) -> None:
    split = recipe.split_accumulator
    if not (
        isinstance(split, tuple) and len(split) == 3 and all(isinstance(s, bool) for s in split)
    ):
        raise RecipeError(
            f"{type(recipe).__name__}: split_accumulator is three bools (fprop, dgrad, wgrad), got {split!r}"
        )


def default_recipe() -> Recipe:
    """The device's default: MXFP8 on sm_100 to sm_119, current scaling on sm_120 and later, else delayed scaling.

    A machine without a GPU counts as sm_90. (Rule: Transformer Engine's `get_default_fp8_recipe`.)
    """
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    if 10 <= major < 12:
        return MXFP8BlockScaling()
    return Float8CurrentScaling() if major >= 12 else DelayedScaling()


def reduces(recipe: Recipe | None) -> bool:
    """Whether a recipe has delayed-scaling amaxes to reduce."""
    if isinstance(recipe, PerLayer):
        layers = cast("tuple[tuple[str, Recipe | None], ...]", recipe.layers)
        return any(reduces(r) for r in (recipe.default, *(r for _, r in layers)))
    return isinstance(recipe, DelayedScaling) and recipe.reduce_amax
