"""Golden plans: standard blocks under each recipe as JSON, and a comparison field by field."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import te_ops as te
from tests.compiler.isolation import package_rules

FOLDER = Path(__file__).parents[1] / "golden" / "plans"
D, HEADS, FFN, BATCH, LENGTH = 64, 4, 128, 2, 32


def _attention() -> te.Residual:
    return te.Residual(
        te.RMSNorm(D),
        te.Linear(D, 3 * D, bias=False),
        te.Attention(HEADS, packed=True, rotary=te.RoPE(D // HEADS)),
        te.Linear(D, D, bias=False),
    )


def _swiglu() -> list[te.Op]:
    return [
        te.RMSNorm(D),
        te.Linear(D, 2 * FFN, bias=False),
        te.SwiGLU(),
        te.Linear(FFN, D, bias=False),
    ]


def _layer() -> te.Op:
    """A decoder layer with grouped heads, norms of q and k, and biases nowhere."""
    return te.layers.TransformerLayer(
        D,
        FFN,
        HEADS,
        HEADS // 2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        attn_input_format="bshd",
        qk_norm_type="RMSNorm",
        qk_norm_before_rope=True,
        rotary=te.RoPE(D // HEADS),
    )


BLOCKS: dict[str, Callable[[], te.Op]] = {
    "linear": lambda: te.Sequential(te.Linear(D, D, bias=False)),
    "norm_linear": lambda: te.Sequential(te.RMSNorm(D), te.Linear(D, D, bias=False)),
    "swiglu_mlp": lambda: te.Sequential(*_swiglu()),
    "gelu_mlp": lambda: te.Sequential(te.Linear(D, FFN), te.GELU(), te.Linear(FFN, D)),
    "attention": lambda: te.Sequential(_attention()),
    "lm_layer": lambda: te.Sequential(_attention(), te.Residual(*_swiglu())),
    "transformer_layer": _layer,
}
RECIPES: dict[str, Callable[[], te.Recipe] | None] = {
    "fp32": None,
    "delayed": te.recipe.DelayedScaling,
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}


@dataclass(frozen=True)
class Case:
    """One golden plan; quantized ones are BF16 blocks. `fused`: every rule is taken by its composed
    kernel.
    """

    block: str
    recipe: str
    fused: bool

    @property
    def path(self) -> Path:
        return FOLDER / self.block / f"{self.recipe}{'.fused' if self.fused else ''}.json"

    def __str__(self) -> str:
        return f"{self.block}-{self.recipe}{'-fused' if self.fused else ''}"

    @contextlib.contextmanager
    def scene(self) -> Iterator[tuple[te.Op, torch.Tensor]]:
        """The block and an input, with the recipe and the registry of this case in force."""
        torch.manual_seed(0)
        recipe = RECIPES[self.recipe]
        dtype = torch.float32 if recipe is None else torch.bfloat16
        block = BLOCKS[self.block]().to(dtype)
        x = torch.randn(BATCH, LENGTH, D).to(dtype).requires_grad_()
        context = contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe())
        with package_rules(taken=self.fused), context:
            yield block, x

    def plan(self) -> dict[str, Any]:
        with self.scene() as (block, x):
            made: dict[str, Any] = block.plan(x).to_dict()
        return made


CASES = [Case(b, r, fused) for b in BLOCKS for r in RECIPES for fused in (False, True)]


# -- JSON with one step, saved value or refusal a line


def dumps(value: Any, indent: int = 0) -> str:
    """JSON in which lists and objects of plain values take one line."""
    flat = json.dumps(value)
    nested = isinstance(value, dict | list) and any(_is_deep(v) for v in _children(value))
    if not nested:
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(k)}: {dumps(v, indent + 1)}" for k, v in value.items()]
        opened, closed = "{", "}"
    else:
        lines = [pad + dumps(v, indent + 1) for v in value]
        opened, closed = "[", "]"
    return f"{opened}\n" + ",\n".join(lines) + f"\n{' ' * indent}{closed}"


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _is_deep(value: Any) -> bool:
    """Whether a child deserves a line of its own: an object, or a list of anything but plain
    values.
    """
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(v, dict) for v in value)
    )


# -- comparison


def differences(expected: Any, actual: Any, at: str = "plan") -> list[str]:
    """What differs, one line per field; steps are aligned by name and members, so that one new step
    is one line.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        found = [f"{at}: {k!r} is gone" for k in expected if k not in actual]
        found += [f"{at}: {k!r} is new" for k in actual if k not in expected]
        for key in expected:
            if key in actual:
                found += differences(expected[key], actual[key], f"{at}.{key}")
        return found
    if isinstance(expected, list) and isinstance(actual, list) and expected != actual:
        return _list_differences(expected, actual, at)
    same = type(expected) is type(actual) and expected == actual
    return [] if same else [f"{at}: expected {expected!r}, got {actual!r}"]


def _list_differences(expected: list[Any], actual: list[Any], at: str) -> list[str]:
    if not all(isinstance(v, dict) for v in (*expected, *actual)):
        return [f"{at}: expected {expected!r}, got {actual!r}"]
    found: list[str] = []
    titles = [_title(v) for v in expected], [_title(v) for v in actual]
    matcher = difflib.SequenceMatcher(None, *titles, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(a, b), range(c, d), strict=True):
                found += differences(expected[i], actual[j], f"{at}[{i}] ({titles[0][i]})")
            continue
        found += [f"{at}[{i}]: expected {titles[0][i]}, which is gone" for i in range(a, b)]
        found += [f"{at}[{j}]: {titles[1][j]} is new" for j in range(c, d)]
    return found


def _title(item: dict[str, Any]) -> str:
    """What identifies an entry: a step by place and members, else its value, place or name."""
    if "nodes" in item:
        return f"{item['name']} at {item['path']}: {' + '.join(item['nodes'])}"
    if "at" in item:
        return f"{item['rule']} at {item['at']}"
    return str(item.get("value", item.get("name", "")))
