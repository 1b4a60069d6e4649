"""What is compared or explained, by name: a recipe, and the dtype of torch.autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import te_ops as te
from te_ops.errors import Error


@dataclass(frozen=True)
class Arm:
    """A named way to compute: `recipe` quantizes the Linears, `dtype` is torch.autocast's."""

    name: str
    recipe: te.Recipe | None = None
    dtype: torch.dtype | None = None

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Within, ops compute this way."""
        with contextlib.ExitStack() as stack:
            if self.dtype is not None:
                stack.enter_context(torch.autocast(device.type, self.dtype))
            if self.recipe is not None:
                stack.enter_context(te.autocast(recipe=self.recipe))
            yield

    def sparing(self, path: str) -> Arm:
        """This arm without quantization at a path."""
        if self.recipe is None:
            return self
        layers: dict[str, te.Recipe | None] = {path: None}
        return replace(self, recipe=te.recipe.PerLayer(layers=layers, default=self.recipe))

    def quantizer(self, role: te.Role) -> te.Quantizer | None:
        """What rounds an operand: the recipe's quantizer, else the cast to `dtype`, else None."""
        made = None if self.recipe is None else self.recipe.quantizer(role)
        if made is None and self.dtype is not None:
            return te.IdentityQuantizer(self.dtype)
        return made


_RECIPES: dict[str, Callable[[], te.Recipe | None]] = {
    "fp32": lambda: None,
    "bf16": lambda: None,
    "delayed": te.recipe.DelayedScaling,
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}
NAMES = tuple(_RECIPES)
SABOTAGED = "sabotaged"


def arm(name: str, dtype: torch.dtype | None = None) -> Arm:
    """The arm of this name, unless fp32 or bf16 in `dtype`.

    Raises:
        Error: no arm has this name.
    """
    if name == SABOTAGED:
        return Arm(name, _sabotaged(), dtype)
    if name not in _RECIPES:
        raise Error(f"no recipe is named {name!r}; choose from {', '.join(NAMES)}")
    made = Arm(name, _RECIPES[name](), dtype)
    if name == "fp32":
        return replace(made, dtype=None)
    return replace(made, dtype=torch.bfloat16) if name == "bf16" else made


def _sabotaged() -> te.Recipe:
    """Delayed scaling whose scale is fixed far too small, so that most values become zero.

    It exists to show that the checks of `te-ops train` can fail.
    """
    wrong = te.recipe.DelayedScaling(
        scaling_factor_compute_algo=_fixed_scale, amax_history_len=1, margin=0
    )
    return te.recipe.CustomRecipe(qfactory=lambda role: wrong)


def _fixed_scale(amax: Any, scale: torch.Tensor, fp8_max: float, recipe: Any) -> torch.Tensor:
    return torch.full_like(scale, 2.0**-8)


__all__ = ["NAMES", "SABOTAGED", "Arm", "arm"]
