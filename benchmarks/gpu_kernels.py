"""The CUDA kernels on a GPU: each against its reference, then its time against its bytes.

    python benchmarks/gpu_kernels.py [--out FOLDER] [--only TEXT] [--skip-check] [--skip-time]
                                     [--seconds 210]

Prints failures and a table; writes gpu_kernels.json to --out (default: the current
folder). Times are medians of interleaved rounds by device events. `copy` is a copy that moves the
same bytes, in the same rounds; `torch` the reference on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import te_ops as te  # noqa: E402
from te_ops import recipe  # noqa: E402
from te_ops.backends import cuda as backend  # noqa: E402
from te_ops.backends.cuda import compile as compiler  # noqa: E402
from te_ops.backends.cuda import launch  # noqa: E402
from te_ops.backends.reference.kernels import bind_composed, bind_reference  # noqa: E402
from te_ops.errors import PlanError  # noqa: E402
from te_ops.quantizers import Float8BlockQuantizer, MXFP8Quantizer, Record  # noqa: E402
from te_ops.registry import REGISTRY  # noqa: E402
from tests.backends.cuda import cases as c  # noqa: E402

START = time.monotonic()
ROWS = 8192
WIDTHS = (4096, 14336, 28672)


def elapsed() -> float:
    """Seconds since the start."""
    return time.monotonic() - START


# -- what is timed


@dataclass(frozen=True)
class Timed:
    """A group to time, as a case makes it."""

    name: str
    make: Callable[[Any, tuple[int, ...]], c.Group]
    rereads: int = 0  # how often the first input has to be read again


def timed() -> Iterator[Timed]:
    """Every kernel that is timed."""
    bf16, fp32 = torch.bfloat16, torch.float32
    square = Float8BlockQuantizer(block_scaling_dim=2)
    plain = (
        ("gelu", c._pointwise("gelu", bf16, bf16)),
        ("swiglu", c._pointwise("swiglu", bf16, bf16)),
        ("dgelu", c._gradient("gelu", bf16)),
        ("dswiglu", c._gradient("swiglu", bf16)),
        ("sum2", c._sum(2, bf16)),
        ("reduce rows", c._reduce("rows", bf16, fp32)),
        ("amax", c._amax(bf16)),
        ("rmsnorm", c._norm(False, bf16, bf16, False)),
        ("layernorm", c._norm(True, bf16, bf16, False)),
        ("rmsnorm backward", c._norm_backward(False, bf16, False)),
        ("layernorm backward", c._norm_backward(True, bf16, False)),
        ("rmsnorm dgamma", c._norm_backward(False, bf16, True)),
        ("quantize delayed row", c._quantize(c.DELAYED, bf16, (0, 2))),
        ("quantize delayed row+col", c._quantize(c.DELAYED, bf16, (0, 1, 2))),
        ("quantize delayed col", c._quantize(c.DELAYED, bf16, (1, 2))),
        ("quantize block 1x128 row", c._quantize(c.BLOCK, bf16, (0,))),
        ("quantize block 1x128 row+col", c._quantize(c.BLOCK, bf16, (0, 1))),
        ("quantize block 128x128 row+col", c._quantize(square, bf16, (0, 1))),
        ("quantize mxfp8 row", c._quantize(MXFP8Quantizer(), bf16, (0,))),
        ("quantize mxfp8 row+col", c._quantize(MXFP8Quantizer(), bf16, (0, 1))),
        ("rmsnorm+quantize delayed row+col", c._norm_quantize(False, c.DELAYED, False)),
        ("rmsnorm+quantize block row+col", c._norm_quantize(False, c.BLOCK, False)),
        ("gelu+quantize delayed row+col", c._pointwise_quantize("gelu", False, c.DELAYED, False)),
        (
            "swiglu+quantize delayed row+col",
            c._pointwise_quantize("swiglu", False, c.DELAYED, False),
        ),
        (
            "dswiglu+quantize delayed row+col",
            c._pointwise_quantize("swiglu", True, c.DELAYED, False),
        ),
        ("swiglu+quantize block row+col", c._pointwise_quantize("swiglu", False, c.BLOCK, False)),
        ("dswiglu+quantize block row+col", c._pointwise_quantize("swiglu", True, c.BLOCK, False)),
    )
    for name, case in plain:
        yield Timed(name, case.make)
    yield Timed("quantize current row+col", c._quantize(c.CURRENT, bf16, (0, 1)).make, 1)
    yield Timed("quantize current row", c._quantize(c.CURRENT, bf16, (0,)).make, 1)


# -- compile everything first, on all cores


def jobs(only: str) -> list[tuple[str, str]]:
    """(name, text) of every kernel that the checks and timings need."""
    texts: dict[tuple[str, str], None] = {}

    def record(name: str, text: str, arch: str, threads: int, slots: int, **_: Any) -> Any:
        texts[name, text] = None
        return lambda *_: None

    saved, launch.build = launch.build, record
    try:
        cpu = c.drawer(0, "cpu")
        small = [
            (case, shape)
            for case in c.cases()
            for shape in shapes_of(case, (*c.SHAPES, *widths_only()))
        ]
        for case, shape in small:
            if only in case.name:
                bind(case.make(cpu, shape))
        for item in timed():
            for width in WIDTHS:
                bind(item.make(cpu, (2, width)))
    finally:
        launch.build = saved
    return list(texts)


def widths_only() -> tuple[tuple[int, ...], ...]:
    """Two rows of each large width."""
    return tuple((2, shape[-1]) for shape in c.BIG_SHAPES)


def bind(group: c.Group) -> None:
    """Ask for the texts of a group."""
    call = group.call("sm_90", "cpu")
    kernel = c.BIND[group.runs]
    if kernel.refuse(call) is None:
        kernel.bind(call)


def compile_one(job: tuple[str, str, str]) -> tuple[str, str | None]:
    """Compile in a worker: (name, why it failed)."""
    name, text, arch = job
    compiler.refuse_capture = lambda: None  # a worker never captures, and asking would start CUDA
    try:
        compiler.cubin(text, arch)
    except Exception as error:  # noqa: BLE001
        return name, str(error)[:500]
    return name, None


def precompile(arch: str, only: str) -> dict[str, Any]:
    """Fill the disk cache with all kernels."""
    found = jobs(only)
    workers = max(1, min(16, (os.cpu_count() or 2)))
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.map(compile_one, [(*job, arch) for job in found], chunksize=4)
    failed = [(name, why) for name, why in results if why]
    for name, why in failed[:5]:
        print(f"compile {name}: {why}")
    seconds = time.monotonic() - begin
    print(
        f"compiled {len(found)} kernels for {arch} in {seconds:.1f} s on {workers} processes, "
        f"{len(failed)} failed"
    )
    return {"kernels": len(found), "seconds": seconds, "failed": failed}


def shapes_of(case: c.Case, shapes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, ...]]:
    """The shapes that a case and its reference take."""
    for shape in shapes:
        if case.wide and (len(shape) < 2 or not shape[-1]):
            continue
        if "-i8" in case.name and shape[-1] % 8:
            continue
        if "reduce-rows" in case.name and not shape[-1]:
            continue
        yield shape


# -- correctness


def check_all(arch: str, only: str, until: float) -> dict[str, Any]:
    """Every case and shape against the reference on the GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    done, failures, stopped = 0, [], None
    for shapes in (c.SHAPES, c.BIG_SHAPES):
        for case in c.cases():
            if only not in case.name:
                continue
            for shape in shapes_of(case, shapes):
                if elapsed() > until:
                    stopped = stopped or f"{case.name} {shape}"
                    continue
                try:
                    found = c.check(case.make(c.drawer(done, device), shape), arch, device)
                    torch.cuda.synchronize()
                except Exception as error:  # noqa: BLE001
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    found = [
                        f"{type(error).__name__}: {str(error)[:300]} "
                        f"({Path(where.filename).name}:{where.lineno})"
                    ]
                    if "CUDA error" in str(error) or "ILLEGAL" in str(error):
                        print(f"FATAL {case.name} {shape}: {found[0]}")
                        return {
                            "checked": done,
                            "failures": [*failures, (case.name, shape, found)],
                            "fatal": True,
                        }
                done += 1
                if found:
                    failures.append((case.name, shape, found))
                    if len(failures) <= 40:
                        print(f"FAIL {case.name} {shape}: {'; '.join(found[:2])[:240]}")
    print(
        f"checked {done} in {elapsed():.0f} s, {len(failures)} failed"
        + (f"; stopped at {stopped}" if stopped else "")
    )
    return {"checked": done, "failures": failures, "stopped": stopped}


def check_replay(arch: str) -> list[str]:
    """CUDA-graph capture and replay, other streams, other threads."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for case in (
        c._quantize(c.CURRENT, torch.bfloat16, (0, 1)),
        c._norm_quantize(False, c.DELAYED, True),
    ):
        group = case.make(c.drawer(1, device), (256, 512))
        call = group.call(arch, device)
        launched = c.BIND[group.runs].bind(call)
        given = tuple(group.inputs.tensors[v] for v in call.reads)
        expected = flat(launched(*given))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launched(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = flat(launched(*given))
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        if not all(c._same(a, b) for a, b in zip(captured, expected, strict=True)):
            found.append(f"{case.name}: a replay differs")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(flat(launched(*given))))  # noqa: B023
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        if not results or not all(c._same(a, b) for a, b in zip(results[0], expected, strict=True)):
            found.append(f"{case.name}: another thread's result differs")
    for line in found:
        print("FAIL", line)
    return found


def flat(made: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    outs = []
    for item in made if isinstance(made, tuple) else (made,):
        outs += item.tensors() if isinstance(item, Record) else [item]
    return outs


def check_pipeline() -> dict[str, Any]:
    """A whole pipeline with these kernels against the same with the reference."""
    results: dict[str, Any] = {}
    recipes = {
        "bf16": None,
        "delayed": recipe.DelayedScaling(),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }
    for name, made in recipes.items():
        for kernel in backend.KERNELS:
            with contextlib.suppress(PlanError):
                REGISTRY.remove(kernel.name)
        try:
            theirs, _ = train_once(made)
            backend.register()
            ours, kernels = train_once(made)
            errors = [
                ((a.float() - b.float()).norm() / b.float().norm()).item()
                for a, b in zip(ours, theirs, strict=True)
            ]
            results[name] = {"worst": max(errors), "kernels": kernels}
        except Exception as error:  # noqa: BLE001
            traceback.print_exc(limit=-3)
            results[name] = f"{type(error).__name__}: {str(error)[:300]}"
        print("pipeline", name, results[name])
    backend.register()
    return results


def train_once(made: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Output, gradients and kernels of two steps of a fresh model."""
    torch.manual_seed(0)
    model = te.Sequential(
        te.RMSNorm(512),
        te.Linear(512, 2048, bias=False),
        te.SwiGLU(),
        te.Linear(1024, 512, bias=False),
    ).to(device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        with te.autocast(enabled=made is not None, recipe=made):
            y = model(given)
            plan = model.plan(given).to_dict()
        y.backward(dy)
    kernels = {
        step["kernel"]
        for segment in plan["segments"]
        for phase in ("forward", "backward")
        for step in segment[phase]
    }
    return [y.detach(), given.grad, *(p.grad for p in model.parameters())], sorted(kernels)


# -- time


def events(launched: Callable[[int], Any], count: int) -> float:
    """Microseconds a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(count):
        launched(i)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count * 1e3


def time_one(item: Timed, width: int, arch: str, rounds: int = 5) -> dict[str, Any]:
    """A row of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    groups = [item.make(draw_on(device, seed), (ROWS, width)) for seed in range(2)]
    calls = [g.call(arch, device) for g in groups]
    kernel = c.BIND[groups[0].runs]
    reason = kernel.refuse(calls[0])
    if reason is not None:
        return {"name": item.name, "width": width, "refused": reason}
    launched = kernel.bind(calls[0])
    theirs = (bind_composed if groups[0].rule else bind_reference)(calls[0])
    given = [
        tuple(g.inputs.tensors[v] for v in k.reads) for g, k in zip(groups, calls, strict=True)
    ]
    outs = flat(launched(*given[0]))
    moved = sum(t.nbytes for t in given[0]) + sum({t.data_ptr(): t.nbytes for t in outs}.values())
    moved += item.rereads * given[0][0].nbytes
    # of whole pages of 4 KiB: any other size takes half as long again
    half = torch.empty(2, max(moved // 4 >> 11 << 11, 8), dtype=torch.bfloat16, device=device)
    del outs
    run: dict[str, tuple[Callable[[int], Any], int]] = {
        "kernel": (lambda i: launched(*given[i % 2]), 8),
        "copy": (lambda i: half[i % 2].copy_(half[1 - i % 2]), 8),
    }
    for call, _ in run.values():
        for i in range(3):
            call(i)
    theirs(*given[0])
    samples: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(rounds):
        for name, (call, count) in run.items():
            samples[name].append(events(call, count))
    reference = min(events(lambda i: theirs(*given[i % 2]), 1) for _ in range(2))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "name": item.name,
        "width": width,
        "bytes": moved,
        "kernel_us": medians["kernel"],
        "copy_us": medians["copy"],
        "torch_us": reference,
        "ratio": medians["copy"] / medians["kernel"],
        "spread": max(samples["kernel"]) / min(samples["kernel"]),
    }


def draw_on(device: torch.device, seed: int) -> Any:
    """Random tensors made on the device, for timing."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        *,
        special: bool = False,
        scale: float = 1.0,
    ) -> Any:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    return draw


def time_host(arch: str) -> dict[str, float]:
    """Microseconds of host time a launch, on tensors too small to fill the queue."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = {}
    for item in timed():
        group = item.make(draw_on(device, 0), (128, 1024))
        call = group.call(arch, device)
        if c.BIND[group.runs].refuse(call) is not None:
            continue
        launched = c.BIND[group.runs].bind(call)
        given = tuple(group.inputs.tensors[v] for v in call.reads)
        best = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                launched(*given)
            best.append((time.perf_counter() - begin) / 50 * 1e6)
        found[item.name] = statistics.median(best)
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--only", default="")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-time", action="store_true")
    parser.add_argument("--seconds", type=float, default=210.0)
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}"
    result: dict[str, Any] = {
        "arch": arch,
        "torch": torch.__version__,
        "nvrtc": compiler.nvrtc_version(),
    }
    result["missing"] = compiler.missing()
    if result["missing"]:
        print(result["missing"])
        return 1
    result["compile"] = precompile(arch, options.only)
    try:
        if not options.skip_check:
            share = 0.45 if not options.skip_time else 1.0
            result["check"] = check_all(arch, options.only, options.seconds * share)
            if not result["check"].get("fatal"):
                result["replay"] = guarded(check_replay, arch)
                result["pipeline"] = guarded(check_pipeline)
        if not options.skip_time:
            result["host_us"] = guarded(time_host, arch)
            result["time"] = time_all(arch, options)
    finally:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_kernels.json").write_text(json.dumps(result, indent=1, default=str))
        print(f"{elapsed():.0f} s; wrote {folder / 'gpu_kernels.json'}")
    return 0


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    """The result, or the error as text."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        print(f"{function.__name__} fails: {type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc(limit=-3)
        return str(error)


def time_all(arch: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The table."""
    rows = []
    print(
        f"{'kernel':36s} {'width':>6s} {'MB':>6s} {'us':>8s} {'copy us':>8s} {'ratio':>6s} "
        f"{'torch us':>9s}"
    )
    for width in WIDTHS:
        for item in timed():
            if options.only not in item.name and options.only:
                continue
            if elapsed() > options.seconds:
                rows.append({"name": item.name, "width": width, "skipped": "out of time"})
                continue
            try:
                row = time_one(item, width, arch)
            except Exception as error:  # noqa: BLE001
                row = {
                    "name": item.name,
                    "width": width,
                    "failed": f"{type(error).__name__}: {str(error)[:200]}",
                }
            rows.append(row)
            torch.cuda.empty_cache()
            if "kernel_us" in row:
                print(
                    f"{row['name']:36s} {width:6d} {row['bytes'] / 1e6:6.0f} "
                    f"{row['kernel_us']:8.1f} "
                    f"{row['copy_us']:8.1f} {row['ratio']:6.2f} {row['torch_us']:9.1f}"
                )
            else:
                print(f"{row['name']:36s} {width:6d} {row}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
