"""Whether what the compiler makes computes: a small GEMM of each kind against torch, once a device and version.

Operands are small whole numbers, so that every sum is exact and results must be equal. Row counts are odd, and memory
behind the results must stay as it was: a faulty compiler has dropped the bounds of its copies before. The verdict is
kept beside the compiled kernels.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from te_ops.backends.cutlass import cache
from te_ops.backends.cutlass.reference import DTYPES, Results, reference
from te_ops.backends.cutlass.spec import Epilogue, GemmSpec, Quantized
from te_ops.backends.cutlass.versions import target, versions
from te_ops.errors import Error
from te_ops.runtime.disk import put

_STORES = Epilogue(store="bf16")
_COPIES = Epilogue(store="bf16", rounds="bf16", quantized=Quantized("e4m3", row=True, col=True))

KINDS: dict[str, GemmSpec] = {
    "BF16": GemmSpec("bf16", "bf16", _STORES),
    "FP8, fast sums": GemmSpec("e4m3", "e4m3", _STORES, scaled=True, fast=True),
    "FP8, split sums": GemmSpec("e4m3", "e4m3", _STORES, scaled=True, fast=False),
    "FP8 copies": GemmSpec("e4m3", "e4m3", _COPIES, scaled=True, fast=True),
}
"""What is tested, by its name in messages."""
_SIZES = (130, 272, 144)  # rows, columns, contraction: no multiple of a tile
_COLUMN_SIZES = (144, 272, 144)  # where a transposed copy is written, whose rows are aligned
_GUARD = 16  # rows behind the results
_UNTOUCHED = 0x5A


def specs() -> tuple[GemmSpec, ...]:
    """The kernels that it runs."""
    return tuple(KINDS.values())


@functools.cache
def device_name(device: torch.device) -> str:
    """What verdicts are kept by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class SelfTest:
    """The test of one device. `get(spec, arch)` gives the object of a kernel, which may still be compiled."""

    def __init__(
        self, arch: str, device: torch.device, get: Callable[[GemmSpec, str], Future[Path]]
    ) -> None:
        self.arch, self.device, self.get = arch, device, get
        self.failed: str | None = None
        self._known = False
        self._objects: dict[str, Future[Path]] | None = None
        self._read()

    def objects(self) -> list[Future[Path]]:
        """What it needs to run: nothing if the verdict is known."""
        if self._known:
            return []
        if self._objects is None:
            self._objects = {}
            for kind, spec in KINDS.items():
                try:
                    self._objects[kind] = self.get(spec, self.arch)
                except Exception as error:  # noqa: BLE001  (what cannot be made is a verdict)
                    self._objects[kind] = Future()
                    self._objects[kind].set_exception(error)
        return list(self._objects.values())

    def known(self, load: Callable[[Path, GemmSpec], Callable[..., Any]]) -> bool:
        """Whether there is a verdict; the test runs as soon as its kernels are compiled."""
        if not self._known and all(f.done() for f in self.objects()):
            self.failed = self._run(load)
            self._known = True
            self._write()
        return self._known

    def _run(self, load: Callable[[Path, GemmSpec], Callable[..., Any]]) -> str | None:
        assert self._objects is not None
        for kind, future in self._objects.items():
            try:
                wrong = check(KINDS[kind], load(future.result(), KINDS[kind]), self.device)
            except concurrent.futures.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001  (compilers and loaders raise anything)
                wrong = str(error) or type(error).__name__
            if wrong is not None:
                return f"the self-test of compiled GEMMs failed ({kind}: {wrong})"
        return None

    # -- the verdict on disk

    def _path(self, *, make: bool) -> Path | None:
        folder = cache.cache_folder(make=make)
        if folder is None:
            return None
        kept = (self.arch, device_name(self.device), cache.source_hash(), repr(versions()))
        name = hashlib.blake2b("\0".join(kept).encode(), digest_size=8).hexdigest()
        return folder / f"selftest-{name}.json"

    def _read(self) -> None:
        try:
            path = self._path(make=False)
            found = {} if path is None else json.loads(path.read_text())
            passed = found.get("passed") is True
        except (Error, OSError, ValueError, AttributeError):
            return
        self._known = passed  # one that failed is tried again by the next process

    def _write(self) -> None:
        said = {
            "passed": self.failed is None,
            "why": self.failed,
            "device": device_name(self.device),
            "arch": target(self.arch),
            "versions": versions(),
        }
        with contextlib.suppress(Error, OSError):  # a folder for reading only: others test again
            path = self._path(make=True)
            if path is not None:
                put(path, json.dumps(said, indent=1).encode())


def check(spec: GemmSpec, run: Callable[..., Any], device: torch.device) -> str | None:
    """Run a kernel; None if its results are those of the reference to the bit, else which are not."""
    m, n, k = _COLUMN_SIZES if spec.epilogue.quantized is not None else _SIZES
    drawn = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-1, 2, (rows, k), generator=drawn).to(device, DTYPES[form])
        for rows, form in ((m, spec.a), (n, spec.b))
    )
    scales = tuple(torch.tensor([s], device=device) for s in (0.5, 4.0)) if spec.scaled else ()
    given: dict[str, Any] = dict(zip(("scale_a", "scale_b"), scales, strict=bool(scales)))
    scale = torch.tensor([0.25], device=device) if spec.epilogue.quantized is not None else None
    wanted = reference(spec, None, a, b, scales=scales or None, scale=scale)  # type: ignore[arg-type]
    results, whole = _results(wanted)
    if scale is not None:
        given["scale"] = scale
    run(a, b, **given, **results)
    return _difference(wanted, results, whole)


def _results(wanted: Results) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Where the kernel writes, and the same with rows behind that nobody may touch."""
    results, whole = {}, {}
    for name, like in vars(wanted).items():
        if like is None:
            continue
        if like.dim() < 2:
            results[name] = torch.zeros(1, dtype=like.dtype, device=like.device)
            continue
        size = (like.shape[0] + _GUARD, like.shape[1] * like.element_size())
        made = torch.full(size, _UNTOUCHED, dtype=torch.uint8, device=like.device)
        whole[name] = made
        results[name] = made.view(like.dtype)[: like.shape[0]]
    return results, whole


def _difference(
    wanted: Results, results: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]
) -> str | None:
    for name, found in results.items():
        right = getattr(wanted, name).reshape(found.shape)
        if not torch.equal(_bytes(found), _bytes(right)):
            return f"{name} is wrong"
        if name in whole and not bool((whole[name][-_GUARD:] == _UNTOUCHED).all()):
            return f"memory behind {name} was written"
    return None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
