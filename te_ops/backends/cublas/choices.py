"""Which algorithm a product runs with: what `te.tune` measured, else what was measured beforehand, else the library's.

Algorithms belong to a device and a version of the library, and are checked again before they are used.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable
from typing import Any

import torch

from te_ops.backends.cublas import lt
from te_ops.runtime.tune import GAIN, TABLE, drawn

SHIPPED = "measured.json"
"""Beside this file: place -> product -> algorithm."""
OWN = "te_ops"
"""What `te.tune` files instead of an algorithm where a kernel of another backend was faster."""


@functools.cache
def place(index: int) -> str:
    """What measurements are valid for: a device by its name, and the library's version."""
    return f"{lt.device_name(index)}, cuBLASLt {lt.version()}"


@functools.cache
def shipped() -> dict[str, dict[str, str]]:
    """The table in this package: algorithms as hexadecimal text without the zeros at their end."""
    text = importlib.resources.files(__package__).joinpath(SHIPPED).read_text()
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def packed(algo: bytes) -> str:
    """An algorithm as a table holds it."""
    return algo.rstrip(b"\0").hex()


def unpacked(text: str) -> bytes:
    """An algorithm that `packed` wrote."""
    return bytes.fromhex(text).ljust(64, b"\0")


def choose(index: int, product: lt.Product) -> lt.Candidate | None:
    """The algorithm for a product on a device; None if the library does not multiply it."""
    where, key = place(index), product.key
    for text in (TABLE.get(where, key), shipped().get(where, {}).get(key)):
        if text and text != OWN:
            found = lt.checked(index, product, unpacked(text))
            if found is not None:
                return found
    return _first(index, product)


@functools.lru_cache(4096)
def _first(index: int, product: lt.Product) -> lt.Candidate | None:
    found = lt.candidates(index, product, 1)
    return found[0] if found else None


class Trial:
    """A product of a model with its candidates, over operands made up for it (see `te_ops.runtime.tune.Trial`)."""

    gain = GAIN

    def __init__(self, index: int, product: lt.Product) -> None:
        self.index, self.product = index, product
        self.where, self.key = place(index), product.key
        self.device = lt.device(index)

    def candidates(self) -> list[str]:
        """The library's algorithms for it, the heuristic's favourite first.

        For block scales the heuristic offers few: there, variations of them are tried too.
        """
        found = lt.candidates(self.index, self.product)
        if "128" in "".join(self.product.scales):
            found += lt.variations(self.index, self.product, found)
        return [packed(c.algo) for c in found]

    def start(self) -> Callable[[str], Callable[[], None]]:
        """Allocate operands; gives a run for each candidate."""
        p = self.product
        kept = {"a": drawn(p.m, p.k, p.a, self.device), "b": drawn(p.n, p.k, p.b, self.device)}
        for name in ("d", "c") if p.plus else ("d",):
            kept[name] = torch.zeros(p.m, p.n, dtype=p.d, device=self.device)
        if p.bias is not None:
            kept["bias"] = torch.zeros(p.n, dtype=p.bias, device=self.device)
        for name, rows, mode in zip(("scale_a", "scale_b"), (p.m, p.n), p.scales, strict=True):
            if mode:
                kept[name] = torch.ones(_scales(mode, rows, p.k), device=self.device)
        words = [kept[w].data_ptr() if w in kept else 0 for w in lt.WORDS]

        def run(text: str) -> Callable[[], None]:
            prepared = self.prepared(text)

            def once() -> None:
                assert kept  # the operands live as long as the run
                prepared.run(words, lt.stream_of(self.index))

            return once

        return run

    def prepared(self, text: str) -> Any:
        """The product by a candidate: a `te_ops.backends.cublas.direct.Product`."""
        found = lt.checked(self.index, self.product, unpacked(text))
        assert found is not None  # the library offered it
        return lt.Prepared(self.index, self.product, found)


def _scales(mode: str, rows: int, k: int) -> int:
    blocks = -(-k // 128)
    if mode == "1x128":
        return rows * blocks
    if mode == "128x128":
        return -(-rows // 128) * -(-blocks // 4) * 4
    return rows if mode == "row" else 1
