"""GEMM kernels of te_ops on one GPU: correct first, then timed against the plain torch call.

    python benchmarks/gpu_gemm.py --out gemm.json

1. correctness: every format, layout and awkward extent, as error against FP64 and its ratio to the
   error of the FP32 reference in the same dtype.
2. times: the three GEMMs of the four linears of a Llama-8B layer; arms run interleaved, medians.
3. odd extents: what filling up costs. 4. host: microseconds to issue a call.
5. algorithms: every candidate of cuBLASLt, and of the best ones a table as the package ships it (--table).

A failure is kept as text in the JSON and does not stop the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import te_ops as te
from te_ops.backends.cublas import DIRECT, KERNELS, lt
from te_ops.backends.cublas.choices import Trial
from te_ops.backends.cublas.scaled import tile_scale, vector_scale
from te_ops.basic.gemm import GEMM
from te_ops.basic.pointwise import cast, pointwise
from te_ops.graph import Graph, Kind, Spec
from te_ops.pointwise import activations
from te_ops.quantizers import Quantizer, Record, Usage
from te_ops.registry import Call, Kernel, Rule
from te_ops.runtime.cache import arch_of
from te_ops.runtime.tune import measured

Run = Callable[[], Any]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
NATIVE, FUSED, EMULATED = KERNELS
EPILOGUE = Rule("gemm_epilogue", ("gemm", "pointwise*"))
USAGES = {
    "nt": (Usage.ROW, Usage.ROW),
    "nn": (Usage.ROW, Usage.COL),
    "tn": (Usage.COL, Usage.COL),
}
CURRENT = te.Float8CurrentScalingQuantizer
BLOCK = te.Float8BlockQuantizer
PAIRS: dict[str, tuple[Quantizer | None, Quantizer | None]] = {
    "bf16": (None, None),
    "tensor": (CURRENT(), CURRENT()),
    "tensor e5m2 x e4m3": (CURRENT(E5M2), CURRENT()),
    "1x128 x 128x128": (BLOCK(), BLOCK(block_scaling_dim=2)),
    "128x128 x 1x128": (BLOCK(block_scaling_dim=2), BLOCK()),
    "1x128 x 1x128": (BLOCK(), BLOCK()),
    "1x128 x 1x128, fp32 scales": (
        BLOCK(force_pow_2_scales=False),
        BLOCK(force_pow_2_scales=False),
    ),
    "mxfp8 (emulated)": (te.MXFP8Quantizer(), te.MXFP8Quantizer()),
    "nvfp4 (emulated)": (te.NVFP4Quantizer(), te.NVFP4Quantizer()),
}


# -- problems


def shapes(layout: str, rows: int, columns: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Logical shapes of the operands of a product [rows, columns] over k."""
    return {
        "nt": ((rows, k), (columns, k)),
        "nn": ((rows, k), (k, columns)),
        "tn": ((k, rows), (k, columns)),
    }[layout]


def operands(
    pair: str, layout: str, extents: tuple[int, int, int], device: str, dtype: torch.dtype = BF16
) -> list[Any]:
    """Random operands in the formats of the pair."""
    made: list[Any] = []
    for shape, quantizer, usage in zip(
        shapes(layout, *extents), PAIRS[pair], USAGES[layout], strict=True
    ):
        x = torch.randn(shape, device=device, dtype=dtype)
        if quantizer is not None:
            row = usage is Usage.ROW
            records = quantizer.records(x, row=row, col=not row)
            x = records[0 if row else 1]
        made.append(x)
    return made


def _spec(x: Any) -> Spec:
    if isinstance(x, Record):
        return Spec(tuple(x.shape), x.dtype, Kind("record", x.quantizer, x.usage))
    return Spec(tuple(x.shape), x.dtype)


def problem(
    xs: list[Any], layout: str, arch: str, *, then: str = "", accumulation: str = "split"
) -> Call:
    """One gemm in the operands' dtype, alone or with "bias" (third operand) or "fp32"."""
    g = Graph()
    values = [g.input(i, _spec(x)) for i, x in enumerate(xs)]
    y = g.call(GEMM, *values[:2], layout=layout, dtype=xs[0].dtype, accumulation=accumulation)
    nodes = [g.node(y)]
    if then:
        z = (
            pointwise(g, activations["bias"](), y, values[2])
            if then == "bias"
            else cast(g, y, FP32)
        )
        nodes.append(g.node(z))
    specs = {v: g.spec(v) for v in (*values, *(n.out for n in nodes))}
    where, rule = (xs[0].device, arch), EPILOGUE if then else None
    return Call(tuple(nodes), tuple(values), (nodes[-1].out,), specs, *where, 16, rule)


def bound(call: Call, pair: str, *, direct: bool = False) -> Callable[..., torch.Tensor]:
    """The launch of the kernel that the pair is for, through torch or cuBLASLt itself."""
    single, fused = DIRECT[:2] if direct else (NATIVE, FUSED)
    kernel: Kernel = EMULATED if "emulated" in pair else single
    if len(call.nodes) > 1:
        kernel = fused
    reason = kernel.reason(call)
    if reason is not None:
        raise RuntimeError(f"refused: {reason}")
    return kernel.bind(call)


# -- 1. correctness


def _norm(x: torch.Tensor, of: torch.Tensor) -> float:
    return float((x.double() - of).norm() / of.norm())


def check(case: dict[str, Any], device: str, arch: str) -> dict[str, Any]:
    """Error of one case against FP64, and of the reference."""
    pair, layout, then = case["pair"], case["layout"], case.get("then", "")
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    xs = operands(pair, layout, case["extents"], device, dtype)
    wide = [x.dequantize(torch.float64) if isinstance(x, Record) else x.double() for x in xs]
    expected: torch.Tensor = GEMM.reference(*wide, layout=layout, dtype=torch.float64)
    reference = GEMM.reference(*xs, layout=layout, dtype=dtype)
    if then == "bias":
        xs.append(torch.randn(case["extents"][1], device=device, dtype=dtype))
        expected = expected + xs[2].double()
        reference = (reference.float() + xs[2].float()).to(dtype)
    call = problem(xs, layout, arch, then=then, accumulation=case.get("accumulation", "split"))
    y = bound(call, pair, direct=case["way"] == "cublaslt")(*xs)
    ours, theirs = _norm(y, expected), _norm(reference, expected)
    return {
        "error": ours,
        "reference": theirs,
        "ratio": ours / theirs if theirs else None,
        "dtype": str(y.dtype).removeprefix("torch."),
        "same_shape": y.shape == expected.shape,
        "finite": bool(y.isfinite().all()),
    }


def cases() -> Iterator[dict[str, Any]]:
    """What is checked, through torch and, where its bindings are there, through cuBLASLt itself."""
    for way in ("torch", "cublaslt") if lt.missing() is None else ("torch",):
        for case in problems():
            if way == "torch" or "emulated" not in case["pair"]:
                yield case | {"way": way}


def problems() -> Iterator[dict[str, Any]]:
    """Formats, layouts and awkward extents."""
    inner = ((256, 512), (1, 256), (130, 272))
    for pair in PAIRS:
        for layout in USAGES:
            for columns, k in inner:
                for rows in (1, 7, 24, 50, 1912):
                    extents = (k, columns, rows) if layout == "tn" else (rows, columns, k)
                    yield {"pair": pair, "layout": layout, "extents": extents}
        for dtype in ("float16", "float32") if "emulated" not in pair else ():
            yield {"pair": pair, "layout": "tn", "extents": (256, 384, 1024), "dtype": dtype}
        for rows, columns in ((7, 50), (7, 512), (256, 50), (256, 512)):
            if "emulated" not in pair:
                yield {
                    "pair": pair,
                    "layout": "nt",
                    "extents": (rows, columns, 144),
                    "then": "bias",
                }
        if "emulated" not in pair:
            yield {"pair": pair, "layout": "tn", "extents": (256, 384, 1912), "then": "fp32"}
        for accumulation in ("fast", "split"):
            yield {
                "pair": pair, "layout": "nt", "extents": (1024, 1024, 14336),
                "accumulation": accumulation,
            }  # fmt: skip


def attempt(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The result, or the first line of what went wrong."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001  a case that fails is a result of this program
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}


def correctness(device: str, arch: str) -> list[dict[str, Any]]:
    """All cases; prints the worst of each pair and whatever failed."""
    made: list[dict[str, Any]] = [case | attempt(check, case, device, arch) for case in cases()]
    for pair in PAIRS:
        ours = [c for c in made if c["pair"] == pair]
        fine = [c for c in ours if "failed" not in c]
        bf16 = [c["ratio"] for c in fine if c["dtype"] == "bfloat16" and c["ratio"]]
        worst = max(bf16, default=0)
        print(f"{pair:28} {len(fine):3} of {len(ours)} ran, worst BF16 ratio {worst:.2f}")
        for reason, count in _counted(c["failed"] for c in ours if "failed" in c):
            first = next(c for c in ours if c.get("failed") == reason)
            shown = {k: v for k, v in first.items() if k not in ("failed", "pair")}
            print(f"    {count} x {reason}  first: {shown}")
        for c in fine:
            if not (c["finite"] and c["same_shape"]):
                print(f"    WRONG {c}")
    return made


def _counted(reasons: Iterator[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return list(counts.items())


# -- 2. times

LINEARS = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
RECIPES = {  # recipe -> pair of fprop, dgrad, wgrad
    "bf16": ("bf16", "bf16", "bf16"),
    "tensor": ("tensor", "tensor e5m2 x e4m3", "tensor e5m2 x e4m3"),
    "block": ("1x128 x 128x128", "1x128 x 128x128", "1x128 x 1x128"),
}


def gemms(tokens: int, out: int, inner: int) -> dict[str, tuple[str, tuple[int, int, int], str]]:
    """Layout, extents and accumulation of the three GEMMs of a linear."""
    return {
        "fprop": ("nt", (tokens, out, inner), "fast"),
        "dgrad": ("nn", (tokens, inner, out), "split"),
        "wgrad": ("tn", (out, inner, tokens), "split"),
    }


def plain(xs: list[Any], layout: str, accumulation: str) -> Run:
    """torch's own call, with everything around it prepared."""
    a, b = xs
    if not isinstance(a, Record):
        left = a.t() if layout == "tn" else a
        right = b.t() if layout == "nt" else b
        return lambda: torch.mm(left, right)
    x, w = a.data, b.data.t()
    fast = accumulation == "fast"
    if a.scale_inv.numel() == 1:
        return lambda: torch._scaled_mm(
            x, w, a.scale_inv, b.scale_inv, out_dtype=BF16, use_fast_accum=fast
        )
    kinds = torch.nn.functional.ScalingType
    scales, names = [], []
    for record in xs:
        tiled = record.quantizer.block_scaling_dim == 2
        scales.append(tile_scale(record.scale_inv) if tiled else vector_scale(record.scale_inv, 0))
        names.append(kinds.BlockWise128x128 if tiled else kinds.BlockWise1x128)
    return lambda: torch.nn.functional.scaled_mm(
        x, w, scales[0], names[0], scales[1], names[1], output_dtype=BF16
    )


def elapsed(run: Run, repeats: int, device: str) -> float:
    """Milliseconds a call."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) * 1e3 / repeats
    begin, end = _events()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    spent: float = begin.elapsed_time(end)
    return spent / repeats


def _events() -> tuple[Any, Any]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def interleaved(arms: dict[str, Run], rounds: int, repeats: int, device: str) -> dict[str, float]:
    """Median of each arm; arms take turns, in alternating order."""
    for run in arms.values():
        run()
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds):
        for name in arms if i % 2 == 0 else reversed(arms):
            seen[name].append(elapsed(arms[name], repeats, device))
    return {name: statistics.median(times) for name, times in seen.items()}


def arm_pair(recipe: str, which: int, spec: Any, device: str, arch: str) -> dict[str, Run]:
    """te_ops and plain torch for one GEMM of a recipe."""
    layout, extents, accumulation = spec
    pair = RECIPES[recipe][which]
    xs = operands(pair, layout, extents, device)
    launch = bound(problem(xs, layout, arch, accumulation=accumulation), pair)
    arms = {
        f"{recipe} te_ops": partial(launch, *xs),
        f"{recipe} torch": plain(xs, layout, accumulation),
    }
    if lt.missing() is None:
        direct = bound(problem(xs, layout, arch, accumulation=accumulation), pair, direct=True)
        arms[f"{recipe} cublaslt"] = partial(direct, *xs)
    if recipe == "block":  # as a quantize kernel could write them
        turned = [
            x.with_tensors([x.data, vector_scale(x.scale_inv, 0)])
            if x.quantizer.block_scaling_dim == 1
            else x
            for x in xs
        ]
        arms["block te_ops, scales in place"] = partial(launch, *turned)
    return arms


def times(tokens: int, device: str, arch: str, rounds: int) -> list[dict[str, Any]]:
    """The GEMMs of a layer by every recipe."""
    made = []
    for linear, (out, inner) in LINEARS.items():
        for which, (gemm, spec) in enumerate(gemms(tokens, out, inner).items()):
            arms: dict[str, Run] = {}
            row: dict[str, Any] = {"linear": linear, "gemm": gemm, "extents": spec[1]}
            for recipe in RECIPES:
                try:
                    arms |= arm_pair(recipe, which, spec, device, arch)
                except Exception as error:  # noqa: BLE001  as in `attempt`
                    row.setdefault("failed", {})[recipe] = str(error).splitlines()[0][:300]
            ms = interleaved(arms, rounds, 3, device)
            flop = 2 * spec[1][0] * spec[1][1] * spec[1][2]
            row |= {"ms": ms, "tflops": {n: flop / t / 1e9 for n, t in ms.items()}}
            made.append(row)
            print(f"{linear:5} {gemm:6}" + "".join(f"  {n} {t:.3f} ms" for n, t in ms.items()))
    return made


# -- 3. odd extents and 4. host


def odd(device: str, arch: str, rounds: int) -> list[dict[str, Any]]:
    """The same GEMM with friendly and with odd row counts, in ms."""
    made = []
    for pair in ("bf16", "tensor", "1x128 x 1x128", "1x128 x 128x128"):
        for layout in ("nt", "tn"):
            arms: dict[str, Run] = {}
            for rows in (2048, 2032, 2041):  # by 128, by 16, odd
                extents = (4096, 4096, rows) if layout == "tn" else (rows, 4096, 4096)
                xs = operands(pair, layout, extents, device)
                launch = bound(problem(xs, layout, arch), pair)
                arms[str(rows)] = partial(launch, *xs)
            ms = interleaved(arms, rounds, 5, device)
            made.append({"pair": pair, "layout": layout, "ms": ms})
            print(f"{pair:16} {layout}" + "".join(f"  {n} rows {t:.4f} ms" for n, t in ms.items()))
    return made


def host(device: str, arch: str) -> list[dict[str, Any]]:
    """Microseconds to issue one call of a small product."""
    made = []
    for pair in ("bf16", "tensor", "1x128 x 128x128", "1x128 x 1x128"):
        xs = operands(pair, "nt", (256, 256, 512), device)
        launch = bound(problem(xs, "nt", arch), pair)
        arms = {
            "te_ops": partial(launch, *xs),
            "torch": plain(xs, "nt", "split"),
        }
        if lt.missing() is None:
            arms["cublaslt"] = partial(bound(problem(xs, "nt", arch), pair, direct=True), *xs)
        row: dict[str, Any] = {"pair": pair}
        for name, run in arms.items():
            row[name] = statistics.median(_issue(run, device) for _ in range(5))
        made.append(row)
        print(f"{pair:16} issue: " + ", ".join(f"{n} {row[n]:.1f} us" for n in arms))
    return made


def _issue(run: Run, device: str, calls: int = 200) -> float:
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    spent = (time.perf_counter() - start) * 1e6 / calls
    if device == "cuda":
        torch.cuda.synchronize()
    return spent


# -- 5. algorithms

FP8_SCALES = {
    "tensor": ("tensor", "tensor"),
    "block": ("1x128", "128x128"),
    "block wgrad": ("1x128", "1x128"),
}


def products(tokens: int) -> Iterator[lt.Product]:
    """The GEMMs of the linears as plans ask for them, weight gradients also added in FP32."""
    for out, inner in LINEARS.values():
        for role, (layout, (m, n, k), _) in gemms(tokens, out, inner).items():
            wgrad, extents = role == "wgrad", {"m": m, "n": n, "k": k}
            gradient = E4M3 if role == "fprop" else E5M2
            block = FP8_SCALES["block wgrad" if wgrad else "block"]
            fp8 = {"b": E4M3, "scales": FP8_SCALES["tensor"], "fast": role == "fprop"}
            for d, add in ((BF16, False), (FP32, True)) if wgrad else ((BF16, False),):
                to = {**extents, "d": d, "accumulate": add}
                yield lt.Product(a=BF16, b=BF16, a_k=not wgrad, b_k=layout == "nt", **to)
                yield lt.Product(a=gradient, **fp8, **to)
                yield lt.Product(a=E4M3, b=E4M3, scales=block, **to)


def algorithms(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Every candidate of these products, timed; "choice" where another than the first is better."""
    made: list[dict[str, Any]] = []
    for product in products(tokens):
        tuned = measured(Trial(0, product), rounds)
        if tuned is None or tuned.first is None:
            continue
        row = {"where": tuned.where, "key": tuned.key, "us": tuned.first, "best us": tuned.best}
        if tuned.best != tuned.first:
            row["choice"] = tuned.choice
        made.append(row)
        print(tuned)
    return made


def table(rows: list[dict[str, Any]]) -> str:
    """As te_ops/backends/cublas/measured.json holds it."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if "choice" in row:
            found.setdefault(row["where"], {})[row["key"]] = row["choice"]
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


# -- program


def section(report: dict[str, Any], name: str, run: Callable[[], list[dict[str, Any]]]) -> None:
    """One part of the report, with how long it took."""
    print(f"\n{name}")
    start = time.perf_counter()
    try:
        report[name] = run()
    except Exception as error:  # noqa: BLE001  the other parts are still wanted
        report[name] = [{"failed": f"{type(error).__name__}: {error}"[:600]}]
        print(report[name])
    report["seconds"][name] = time.perf_counter() - start


def main(arguments: list[str]) -> int:
    """Run every part; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--table", type=Path, help="where the table of the best algorithms goes")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 1
    device, arch = "cuda", arch_of(torch.device("cuda", 0))
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "arch": arch, "torch": torch.__version__,
        "cuda": torch.version.cuda, "seconds": {},
    }  # fmt: skip
    print(report)
    section(report, "correctness", lambda: correctness(device, arch))
    section(report, "times", lambda: times(options.tokens, device, arch, options.rounds))
    section(report, "odd", lambda: odd(device, arch, options.rounds))
    section(report, "host", lambda: host(device, arch))
    if lt.missing() is None:
        section(report, "algorithms", lambda: algorithms(options.tokens, options.rounds))
        if options.table is not None:
            options.table.write_text(table(report["algorithms"]))
    print(report["seconds"])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
