"""The machine: versions, clocks and power, and its ceilings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import te_ops

from .data import Ceilings

_PACKAGES = ("transformer_engine", "torchao", "liger_kernel", "quack-kernels", "nvmath-python",
             "cuda-bindings", "triton")  # fmt: skip


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit; packages that are not here are "absent"."""
    found: dict[str, Any] = {
        "te_ops": te_ops.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": "CPU",
        "command": " ".join(["te-ops", *sys.argv[1:]]),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["driver"] = _smi("driver_version")
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _commit() -> str:
    root = Path(te_ops.__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return "not a checkout"
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _smi(query: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is absent"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    return done.stdout.strip() or done.stderr.strip()[:80]


class Watch:
    """SM clock (MHz), power (W) and temperature (C), read beside the run every `seconds`."""

    def __init__(self, seconds: float = 2.0) -> None:
        self.seconds = seconds
        self.seen: list[tuple[float, float, float]] = []
        self._end = threading.Event()

    @contextlib.contextmanager
    def running(self, active: bool) -> Iterator[Watch]:
        """Read while the block runs."""
        thread = threading.Thread(target=self._loop, daemon=True)
        if active and shutil.which("nvidia-smi"):
            thread.start()
        try:
            yield self
        finally:
            self._end.set()
            if thread.is_alive():
                thread.join(timeout=15)

    def _loop(self) -> None:
        while not self._end.wait(self.seconds):
            parts = _smi("clocks.sm,power.draw,temperature.gpu").split(",")
            with contextlib.suppress(ValueError):
                clock, power, heat = (float(x) for x in parts)
                self.seen.append((clock, power, heat))

    def since(self, start: int) -> dict[str, float] | None:
        """Medians of what was read from index `start` on; None if nothing was."""
        rows = self.seen[start:]
        if not rows:
            return None
        clock, power, heat = (statistics.median(column) for column in zip(*rows, strict=True))
        return {"sm_mhz": clock, "watt": power, "celsius": heat}


def heat(device: torch.device, seconds: float) -> None:
    """Keep the device multiplying for a while, so that clocks are those of a long run."""
    if device.type != "cuda" or seconds <= 0:
        return
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize(device)


def products(device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Plain square products of random numbers by kind: bf16, and in FP8 fast, split, tiles (1x128 by 128x128 blocks),
    vectors (1x128 by 1x128), as far as the device and this torch have them. Each is `work(device)` operations."""
    size = extent(device)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    left, right = a.bfloat16(), b.bfloat16()
    found: dict[str, Callable[[], torch.Tensor]] = {"bf16": lambda: torch.mm(left, right)}
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return found
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    vectors = torch.ones(size // 128, size, device=device).t()
    tiles = torch.ones(size // 128, size // 128, device=device).t()

    def tensorwise(fast: bool) -> Callable[[], torch.Tensor]:
        return lambda: torch._scaled_mm(
            x, y, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def blocks(scale: torch.Tensor, tiled: bool) -> Callable[[], torch.Tensor]:
        kinds = torch.nn.functional.ScalingType
        vector, tile = int(kinds.BlockWise1x128.value), int(kinds.BlockWise128x128.value)
        return lambda: torch._scaled_mm_v2(
            x, y, [vectors], [vector], [], [scale], [tile if tiled else vector], [], None,
            torch.bfloat16,
        )  # fmt: skip

    kinds = {
        "fast": tensorwise(True),
        "split": tensorwise(False),
        "tiles": blocks(tiles, True),
        "vectors": blocks(vectors, False),
    }
    for name, call in kinds.items():
        with contextlib.suppress(RuntimeError, AttributeError, ValueError):  # not in this torch
            call()
            found[name] = call
    return found


def extent(device: torch.device) -> int:
    """Rows and columns of the products."""
    return 8192 if device.type == "cuda" else 128


def work(device: torch.device) -> int:
    """Floating-point operations of a product."""
    return int(2 * extent(device) ** 3)


def rates(seconds: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """FLOP/s of a forward and backward by recipe, from the seconds of the products.

    One product of three is forward, with fast accumulation, and two are split; under block scaling one of three, that
    of the weight's gradient, has vectors on both sides.
    """
    operations = work(device)
    found: dict[str, float] = {}
    if "bf16" in seconds:
        found["none"] = operations / seconds["bf16"]
    if {"fast", "split"} <= seconds.keys():
        mixed = 3 * operations / (seconds["fast"] + 2 * seconds["split"])
        found |= {"delayed": mixed, "current": mixed}
    if {"tiles", "vectors"} <= seconds.keys():
        found["block"] = 3 * operations / (2 * seconds["tiles"] + seconds["vectors"])
    return found


def ceilings(device: torch.device) -> Ceilings:
    """Rates of plain products and of a large copy, as the device is now (heated before, if asked)."""
    seconds = {name: _seconds(call, device) for name, call in products(device).items()}
    big = torch.empty(2**30 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    big.random_()
    other = torch.empty_like(big)
    copy = 2 * big.numel() / _seconds(lambda: other.copy_(big), device)
    return Ceilings(rates(seconds, device), copy)


def _seconds(call: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Of one call: the median of five samples."""
    from .measure import timed

    call()
    return statistics.median(timed(call, calls, device) for _ in range(5))


__all__ = ["Watch", "ceilings", "describe", "heat", "products", "rates"]
