"""The clock: interleaved rounds, host time, kernels and memory of a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .peers import Arm

Call = Callable[[], Any]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Call, calls: int, device: torch.device, ahead: float = 0.0) -> float:
    """Seconds a call over `calls` calls, between two device events.

    `ahead`: seconds that the device sleeps first, so that the host has issued all calls before the first runs and
    its time does not show.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    if ahead:
        cycles = int(ahead * 2e9)  # at up to 2 GHz
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls / 1e3


def order(count: int, round_: int) -> list[int]:
    """ABBA: forwards in even rounds, backwards in odd ones."""
    found = list(range(count))
    return found[::-1] if round_ % 2 else found


def rounds(
    calls: Mapping[str, Call],
    sample: Callable[[str, Call], float],
    *,
    least: int = 20,
    seconds: float = 20.0,
    between: Call | None = None,
) -> dict[str, list[float]]:
    """Samples of every call, taken in turn, in ABBA order.

    `least` rounds, or fewer once `seconds` are over (always at least two, so that each order occurs).
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    end = time.monotonic() + seconds
    for i in range(least):
        if i >= 2 and i % 2 == 0 and time.monotonic() > end:
            break
        for j in order(len(names), i):
            if between is not None:
                between()
            samples[names[j]].append(sample(names[j], calls[names[j]]))
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of seconds, in milliseconds, and how many."""
    ordered = sorted(samples)
    return {
        "ms": 1e3 * statistics.median(ordered),
        "p10": 1e3 * percentile(ordered, 0.1),
        "p90": 1e3 * percentile(ordered, 0.9),
        "rounds": len(ordered),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation in an ascending sequence."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def host_us(arm: Arm, calls: int) -> float:
    """Microseconds that the host needs to issue one step: the median of five runs without a wait inside.

    `calls` steps must fit into the launch queue, else the device's time shows.
    """
    device, found = arm.data.device, []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            arm.step()
        found.append((time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return statistics.median(found)


def kernels(arm: Arm) -> dict[str, Any] | None:
    """Kernels, copies and fills that one step starts, and the device time of all; None on a CPU."""
    if arm.data.device.type != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    arm.step()
    synchronize(arm.data.device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        arm.step()
        synchronize(arm.data.device)
    rows = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    other = [e for e in rows if e.name.startswith(("Memset", "Memcpy"))]
    spent: dict[str, list[float]] = {}
    for e in rows:
        entry = spent.setdefault(e.name[:100], [0.0, 0])
        entry[0] += e.time_range.elapsed_us()
        entry[1] += 1
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:12]
    return {
        "kernels": len(rows) - len(other),
        "copies": len(other),
        "device_ms": sum(e.time_range.elapsed_us() for e in rows) / 1e3,
        "longest": [[name, round(us, 1), count] for name, (us, count) in longest],
    }


def memory(arm: Arm) -> dict[str, int] | None:
    """Bytes after forward and at the peak of a step; gradients None before.

    The arm's parameters, the input and its gradient's place count, what other arms hold does not. None on a CPU.
    """
    device = arm.data.device
    if device.type != "cuda":
        return None
    arm.step()
    arm.clear()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    own = sum(p.nbytes for p in arm.parameters) + arm.data.x.nbytes + arm.data.dy.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    y = arm.forward()
    after = torch.cuda.memory_allocated(device)
    torch.autograd.backward((y,), (arm.data.dy,))
    del y
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    arm.clear()
    return {"resident": own, "forward": own + after - before, "peak": own + peak - before}


def saved(arm: Arm) -> int:
    """Bytes that backward keeps: unique memory seen by saved-tensor hooks, without parameters, the input's gradient
    and copies of weights (FP8 codes in the shape of a weight, or of its transpose)."""
    own = {p.untyped_storage().data_ptr() for p in arm.parameters}
    shapes = {s for p in arm.parameters if p.dim() > 1 for s in (p.shape, p.shape[::-1])}
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        memory = x.untyped_storage()
        copied = x.element_size() == 1 and x.shape in shapes
        if x.device.type == arm.data.device.type and memory.data_ptr() not in own and not copied:
            found[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = arm.forward()
    del y
    return sum(found.values())


def growth(arm: Arm, steps: int) -> dict[str, int]:
    """How much memory and how many kernels a step the last nine tenths of `steps` steps added."""
    first, found = max(2, steps // 10), []
    for i in range(1, steps + 1):
        arm.step()
        if i in (first, steps):
            found.append(_held(arm))
    return {
        "steps": steps,
        "bytes_grown": found[-1][0] - found[0][0],
        "kernels_grown": found[-1][1] - found[0][1],
    }


def _held(arm: Arm) -> tuple[int, int]:
    """Bytes that are allocated between steps, and kernels that a step starts; 0 on a CPU."""
    if arm.data.device.type != "cuda":
        return 0, 0
    count = kernels(arm)
    arm.clear()
    synchronize(arm.data.device)
    gc.collect()
    return torch.cuda.memory_allocated(arm.data.device), count["kernels"] if count else 0


__all__ = ["growth", "host_us", "kernels", "memory", "order", "rounds", "saved", "summary", "timed"]
