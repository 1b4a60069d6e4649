"""`autocast`: which recipe holds, and the region in which delayed scaling observes (one context variable)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from te_ops.errors import RecipeError
from te_ops.recipe import Recipe, default_recipe, reduces


class Observed:
    """Delayed-scaling observations that wait for a commit: by state, and after these whole sheets of calls that have
    not been spread over their states (`te_ops.runtime.observed`)."""

    __slots__ = ("by_state", "sheets")

    def __init__(self) -> None:
        self.by_state: dict[Any, Any] = {}
        self.sheets: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self.sheets or self.by_state)


class Region:
    """Delayed-scaling observations between entry and exit of the outermost autocast; committed at exit."""

    __slots__ = ("depth", "gradients", "groups", "observed")
    # Rolls what was observed, in these reduction groups; filled by the runtime.
    commit: ClassVar[Callable[[Observed, dict[Any, None]], None] | None] = None

    def __init__(self) -> None:
        self.depth = 0  # how many autocasts are in it
        self.observed = Observed()
        # Reduction groups: a rank that observed nothing takes part too.
        self.groups: dict[Any, None] = {}
        # Where backwards of calls in this region put what they observe, instead of committing it (a graph's capture).
        self.gradients: Observed | None = None

    def close(self, failed: bool) -> None:
        """Commit what was observed, or drop it if the region ended with an exception."""
        observed, groups = self.observed, self.groups
        if not (observed.sheets or observed.by_state or groups):
            return
        commit = Region.commit
        if commit is not None and not failed:
            commit(observed, groups)
        self.observed, self.groups = Observed(), {}


@dataclass(eq=False, slots=True)
class Frame:
    """What one active autocast says; `key` is its part of a plan's key. Never changed but for `ended`."""

    recipe: Recipe | None
    enabled: bool
    calibrating: bool
    group: Any
    region: Region
    key: Key
    outer: Frame | None
    ended: bool = False


class Key:
    """A value that hashes once: recipes are in the key of every call."""

    __slots__ = ("hash", "value")

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value = value
        self.hash = hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.value == other.value)

    def __repr__(self) -> str:
        return repr(self.value)


_KEYS: dict[tuple[int, bool, bool, Any], Key] = {}


def _key(recipe: Recipe | None, enabled: bool, calibrating: bool, name: Any) -> Key:
    """The key of a frame, found by the recipe's identity: it stays alive in the key, and hashes slowly."""
    place = (id(recipe), enabled, calibrating, name)
    found = _KEYS.get(place)
    if found is None:
        if len(_KEYS) >= 64:
            _KEYS.clear()
        found = _KEYS[place] = Key((recipe, enabled, calibrating, name))
    return found


def _name(group: Any) -> Any:
    """A process group as part of a key: by name, since plans outlive it and must not keep its threads alive."""
    return getattr(group, "group_name", group)


FRAME: ContextVar[Frame | None] = ContextVar("te_ops_autocast", default=None)
"""The innermost active autocast, as `current` gives it."""


PLACE: ContextVar[str] = ContextVar("te_ops_place", default="")
"""Path of the op that is called, in the outermost pipeline: "" for that pipeline itself."""


FROZEN: ContextVar[Any] = ContextVar("te_ops_frozen", default=None)
"""The copies of quantized weights that calls in this context share (`te.weights_frozen`), None outside of a scope."""


RECORDING: ContextVar[bool] = ContextVar("te_ops_recording", default=False)
"""Whether calls in this context rehearse or record a CUDA graph. Graphs do not nest: an inner one joins the outer."""


ARCH: ContextVar[str | None] = ContextVar("te_ops_arch", default=None)
"""The architecture that plans are made for; None: that of their device."""


def join_path(outer: str, inner: str) -> str:
    """`a.b`, or the one that is not empty."""
    return f"{outer}.{inner}".strip(".")


def current() -> Frame | None:
    """The innermost active autocast of this thread (or task)."""
    return FRAME.get()


@contextlib.contextmanager
def observing_into(region: Region) -> Iterator[None]:
    """Within, the autocast in force stays, and what its calls observe goes to `region`, which nobody commits."""
    frame = FRAME.get()
    token = None if frame is None else FRAME.set(replace(frame, region=region))
    region.depth += 1
    try:
        yield
    finally:
        region.depth -= 1
        if token is not None:
            FRAME.reset(token)


class autocast:  # noqa: N801  (a context manager, named like torch.autocast)
    """Quantize the ops called inside by a recipe; nests, and an inner `enabled=False` turns quantization off.

    Args:
        enabled: quantize.
        calibrating: record the statistics of stateful recipes, in any grad mode, even with `enabled=False`.
        recipe: a `te.recipe` value; None takes the device's default.
        amax_reduction_group: process group over which delayed scaling's amaxes are reduced at exit.
        dtype: `torch.float8_e4m3fn`, as another way to ask for the default recipe.

    Raises:
        RecipeError: a wrong recipe, a dtype that is not FP8, or re-entry of an instance that is active.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise RecipeError(
                f"autocast: recipe must be a te.recipe value, got a {type(recipe).__name__}"
            )
        if dtype is not None and dtype is not torch.float8_e4m3fn:
            raise RecipeError(
                f"autocast: dtype must be torch.float8_e4m3fn, got {dtype}; use torch.autocast for BF16 and FP16"
            )
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):
                raise RecipeError(f"autocast: {name} must be True or False, got {value!r}")
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = recipe
        self.group = amax_reduction_group
        self._token: Any = None

    def __enter__(self) -> autocast:
        if self._token is not None:
            raise RecipeError("autocast: this instance is active already; make another one to nest")
        outer = FRAME.get()
        enabled, calibrating, group = self.enabled, self.calibrating, self.group
        recipe = (self.recipe or default_recipe()) if enabled or calibrating else None
        region = outer.region if outer is not None else Region()
        key = _key(recipe, enabled, calibrating, None if group is None else _name(group))
        frame = Frame(recipe, enabled, calibrating, group, region, key, outer)
        if (
            self.group is not None
            and (torch.is_grad_enabled() or self.calibrating)
            and reduces(recipe)
        ):
            frame.region.groups[self.group] = None
        region.depth += 1
        self._token = (FRAME.set(frame), frame)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        token, frame = self._token
        outer = frame.outer
        if FRAME.get() is frame and (outer is None or not outer.ended):
            FRAME.reset(token)
        else:
            _leave(frame)
        self._token = None
        frame.ended = True
        region = frame.region
        region.depth -= 1
        if not region.depth:
            region.close(failed=kind is not None)


def _leave(frame: Frame) -> None:
    """End an autocast out of turn, as one of a generator may: each holds from its own entry to its exit.

    Raises:
        RecipeError: it was entered in another thread or task.
    """
    innermost = within = FRAME.get()
    while within is not None and within is not frame:
        within = within.outer
    if within is None:
        raise RecipeError(
            "autocast: the exit is in another thread or task than the entry; a region belongs to one of them"
        )
    left = innermost
    while left is not None and (left.ended or left is frame):
        left = left.outer
    if left is not innermost:
        FRAME.set(left)
