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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from te_ops.backends.cutlass import blocks, cache, limits
from te_ops.backends.cutlass.reference import DTYPES, Results, reference
from te_ops.backends.cutlass.spec import Epilogue, Format, GemmSpec, Quantized
from te_ops.backends.cutlass.versions import target, versions
from te_ops.errors import Error
from te_ops.pointwise import activations, lower, prelude, symbol
from te_ops.quantizers.e2m1 import encode_e2m1, pack_e2m1
from te_ops.runtime.disk import put

_STORES = Epilogue(store="bf16")
_COPIES = Epilogue(store="bf16", rounds="bf16", quantized=Quantized("e4m3", row=True, col=True))

KINDS: dict[str, GemmSpec] = {
    "BF16": GemmSpec("bf16", "bf16", _STORES),
    "FP8, fast sums": GemmSpec("e4m3", "e4m3", _STORES, scaled=True, fast=True),
    "FP8, split sums": GemmSpec("e4m3", "e4m3", _STORES, scaled=True, fast=False),
    "FP8 copies": GemmSpec("e4m3", "e4m3", _COPIES, scaled=True, fast=True),
    "FP8 copies, threads of their own": GemmSpec(
        "e4m3", "e4m3", _COPIES, limits.APART, scaled=True, fast=False
    ),
}
"""What is tested, by its name in messages."""
_GATE = activations["reglu"]()  # whole numbers of whole numbers
_PAIRS = Epilogue(
    symbol(_GATE),
    f"{prelude('cutedsl', fast=True)}\n\n{lower(_GATE, 'cutedsl')}",
    acc_pair=True,
    store="bf16",
)
_MX = GemmSpec("e4m3", "e4m3", _STORES, limits.BLOCK_TILINGS[0], blocks=32)
_NV = GemmSpec("e2m1", "e2m1", _STORES, limits.BLOCK_TILINGS[0], scaled=True, blocks=16)
BLOCK_KINDS: dict[str, GemmSpec] = {
    "MXFP8": _MX,
    "MXFP8, codes along rows": replace(_MX, a="e5m2", a_major="mn", b_major="mn"),
    "MXFP8, pairs": replace(_MX, epilogue=_PAIRS),
    "NVFP4": _NV,
    "NVFP4, pairs": replace(_NV, epilogue=_PAIRS),
}
"""Besides, where tensor cores multiply with scales of blocks."""
_SIZES = (130, 272, 144)  # rows, columns, contraction: no multiple of a tile
_COLUMN_SIZES = (
    144,
    272,
    144,
)  # where a transposed matrix is written or read, whose rows are aligned
_BLOCK_K = 160  # 16 bytes of E2M1 are 32
_GUARD = 16  # rows behind the results
_UNTOUCHED = 0x5A


def kinds(arch: str) -> dict[str, GemmSpec]:
    """What is tested on an architecture."""
    built = target(arch)
    made = {**KINDS, **(BLOCK_KINDS if built == target(blocks.ARCH) else {})}
    return {name: spec for name, spec in made.items() if limits.refuse(spec, built) is None}


def specs(arch: str = "sm_90") -> tuple[GemmSpec, ...]:
    """The kernels that it runs."""
    return tuple(kinds(arch).values())


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
            for kind, spec in kinds(self.arch).items():
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
        tested = kinds(self.arch)
        for kind, future in self._objects.items():
            try:
                wrong = check(tested[kind], load(future.result(), tested[kind]), self.device)
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
    across = spec.epilogue.quantized is not None or spec.a_major == "mn"
    m, n, k = _COLUMN_SIZES if across else _SIZES
    if spec.blocks:
        k = _BLOCK_K
    drawn = torch.Generator().manual_seed(0)
    a, b = (
        _lying(_codes(rows, k, form, drawn).to(device), major)
        for rows, form, major in ((m, spec.a, spec.a_major), (n, spec.b, spec.b_major))
    )
    scales = tuple(torch.tensor([s], device=device) for s in (0.5, 4.0)) if spec.scaled else ()
    given: dict[str, Any] = dict(zip(("scale_a", "scale_b"), scales, strict=bool(scales)))
    scale = torch.tensor([0.25], device=device) if spec.epilogue.quantized is not None else None
    of_blocks = _of_blocks(spec, (m, n), k, drawn, device)
    fn = _GATE if spec.epilogue.function else None
    wanted = reference(spec, fn, a, b, scales=scales or None, blocks=of_blocks, scale=scale)  # type: ignore[arg-type]
    results, whole = _results(wanted)
    if of_blocks is not None:
        given |= dict(zip(("blocks_a", "blocks_b"), of_blocks, strict=True))
    if scale is not None:
        given["scale"] = scale
    run(a, b, **given, **results)
    return _difference(wanted, results, whole)


def _codes(rows: int, k: int, form: Format, drawn: torch.Generator) -> torch.Tensor:
    """-1, 0 and 1."""
    values = torch.randint(-1, 2, (rows, k), generator=drawn)
    if form == "e2m1":
        return pack_e2m1(encode_e2m1(values.float())).view(DTYPES[form])
    return values.to(DTYPES[form])


def _lying(x: torch.Tensor, major: str) -> torch.Tensor:
    """The same matrix, contiguous along its rows or its columns."""
    return x if major == "k" else x.t().contiguous().t()


def _of_blocks(
    spec: GemmSpec, rows: tuple[int, int], k: int, drawn: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales of blocks, 1/2, 1 and 2, each of which has to meet its own block."""
    if not spec.blocks:
        return None
    dtype = torch.float8_e8m0fnu if spec.blocks == 32 else torch.float8_e4m3fn
    a, b = (
        torch.randint(-1, 2, (count, -(-k // spec.blocks)), generator=drawn).float().exp2()
        for count in rows
    )
    return blocks.swizzled(a.to(dtype)).to(device), blocks.swizzled(b.to(dtype)).to(device)


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
