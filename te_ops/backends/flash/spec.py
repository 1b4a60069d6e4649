"""What a FlashAttention kernel computes, as a value: the key of every cache and what the compiler is asked for.

It names what is compiled in; sizes, the scale, the sides of a window, and where sequences start are the caller's.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from te_ops.basic.score import PLACES
from te_ops.errors import PlanError

Format: TypeAlias = Literal["bf16", "fp16"]
Mask: TypeAlias = Literal["full", "causal", "window"]


@dataclass(frozen=True)
class FlashSpec:
    """One kernel, forward, or backward with what comes before and after it.

    Attributes:
        backward: gradients of q, k and v, instead of o and the lse.
        dtype: of all tensors but the lse.
        features: of a head of q and k. values: of v.
        group: query heads that share a head of keys.
        mask: "causal" is a window without a left side, whose right side is 0. Diagonals end at the last key.
        left, right: which sides a window has.
        packed: tokens of sequences, [tokens, heads, features], which start and end where tensors say.
        score: source of the function of a score (`lower(fn, "cutedsl")` with its prelude), "" for none.
        function: its name in the source. gradient: that of its gradient, which takes one more argument.
        sink: forward, one more key a head of value 0, whose score a tensor has.
        inputs: what the function reads, in order: "s", "i", "j", "head", "batch", and others that are captured.
    """

    family: ClassVar[str] = "flash"

    backward: bool
    dtype: Format
    features: int
    values: int
    group: int = 1
    mask: Mask = "full"
    left: bool = False
    right: bool = False
    packed: bool = False
    score: str = field(default="", repr=False)
    function: str = ""
    gradient: str = ""
    inputs: tuple[str, ...] = ()
    sink: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FlashSpec:
        """The spec that `to_dict` wrote, also after a way through JSON.

        Raises:
            PlanError: a name is not known, or one that has no default is missing.
        """
        try:
            return cls(**{**values, "inputs": tuple(values.get("inputs", ()))})
        except TypeError as error:
            raise PlanError(
                f"this is no FlashSpec: {error}; `to_dict` shows what one is"
            ) from error

    @property
    def captured(self) -> tuple[str, ...]:
        """Inputs of the function that a tensor has, one number a head."""
        return tuple(name for name in self.inputs if name != "s" and name not in PLACES)

    @property
    def key(self) -> str:
        """Short and stable: the same for equal specs in every process."""
        text = repr(sorted(self.to_dict().items()))
        return hashlib.blake2b(f"flash {text}".encode(), digest_size=12).hexdigest()

    @property
    def text(self) -> str:
        """In words, for messages."""
        way = "backward" if self.backward else "forward"
        extra = f", score {self.function}" if self.function else ""
        packed = ", packed" if self.packed else ""
        packed += ", a sink" if self.sink else ""
        heads = f"{self.features}/{self.values} features, {self.group} heads a key head"
        return f"{way} {self.dtype}, {heads}, {self.mask}{packed}{extra}"
