"""The kinds of kernels that are compiled here, in workers and through one cache: fused GEMMs, attention."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from te_ops.backends.cutlass.versions import PACKAGES


class Spec(Protocol):
    """What a kernel computes, as a value."""

    family: ClassVar[str]

    @property
    def key(self) -> str:
        """The same for equal specs in every process, and for no others."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values, which the class's `from_dict` takes."""


@dataclass(frozen=True)
class Family:
    """A kind of kernels.

    Attributes:
        package: it lies here: module `spec` has the class, modules that `compiler` imports are in every key.
        spec: name of the class.
        compiler: the module with `compile_to(spec, arch, path)` and `load(path, spec)`, which imports nothing itself.
        packages: those whose versions are in every key.
        name: in messages.
        tested: `selftest` runs before one is used.
    """

    package: str
    spec: str
    compiler: str
    packages: tuple[str, ...]
    name: str
    tested: bool

    def module(self) -> Any:
        """What compiles and loads; the vendors' libraries are imported when it does."""
        return importlib.import_module(f"{self.package}.{self.compiler}")

    def read(self, values: dict[str, Any]) -> Any:
        """The spec that `to_dict` wrote."""
        module = importlib.import_module(f"{self.package}.spec")
        return getattr(module, self.spec).from_dict(values)


FLASH = "flash-attn-4"

FAMILIES: dict[str, Family] = {
    "gemm": Family("te_ops.backends.cutlass", "GemmSpec", "gemm", PACKAGES, "a GEMM", True),
    "flash": Family(
        "te_ops.backends.flash", "FlashSpec", "build", (*PACKAGES, FLASH), "an attention", False
    ),
}
"""By the `family` of their specs."""
