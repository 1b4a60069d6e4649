"""Tables from the JSON of a run: plain text for a terminal, Markdown for the pages, a plot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import targets

Table = tuple[str, list[list[str]]]
"""A title, and rows of which the first is the head."""


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Every table that the results have something for."""
    found: list[Table] = []
    for name, entry in results.get("pipelines", {}).items():
        found.append(_pipeline(name, entry, results))
    if results.get("streams"):
        found.append(_streams(results["streams"]))
    if results.get("fused"):
        found.append(_fused(results["fused"]))
    if results.get("attention"):
        found.append(_attention(results["attention"]))
    on_cpu = results["machine"]["device"] == "CPU"  # the targets are a GPU's
    verdicts = [] if on_cpu else targets.judge(results, measured_only=True)
    if verdicts:
        found.append(_targets(verdicts))
    missed = [v for v in verdicts if v["verdict"] == "missed"]
    if missed:
        found.append(_missed(missed))
    return [t for t in found if len(t[1]) > 1]


def head(results: Mapping[str, Any]) -> list[str]:
    """Machine, versions, regime, ceilings, and what is absent: one fact a line."""
    machine, settings = results["machine"], results["settings"]
    ceilings = results.get("ceilings") or {"products": {}, "copy": 0}
    rates = ", ".join(
        f"{'BF16' if k == 'none' else k} {v / 1e12:.0f} TFLOP/s"
        for k, v in ceilings["products"].items()
    )
    absent = [f"{n} {s}" for n, s in results.get("providers", {}).items() if s != "here"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, CUDA {machine['cuda']}, "
        f"Transformer Engine {machine['transformer_engine']}, te_ops {machine['commit']}",
        f"regime {settings['regime']}; weights quantized in every step; "
        f"ceilings now: {rates or 'none'}, copy {ceilings['copy'] / 1e12:.2f} TB/s",
        f"command: {machine['command']}",
    ]
    return [*lines, "; ".join(absent)] if absent else lines


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _pipeline(name: str, entry: Mapping[str, Any], results: Mapping[str, Any]) -> Table:
    rows = [["provider", "ms", "p10", "p90", "rounds", "of floor", "te_ops / it", "host us", "kernels",
             "peak MiB", "error"]]  # fmt: skip
    clock = entry.get("clock") or {}
    title = f"{name}: {entry.get('about', '')}, {entry.get('rows', '')} rows" + (
        f" (SM {clock['sm_mhz']:.0f} MHz, {clock['watt']:.0f} W)" if clock else ""
    )
    if "failed" in entry:
        return title, [["", ""], ["failed", entry["failed"]]]
    for arm, found in entry["arms"].items():
        if "time" not in found:
            rows.append([arm, "failed: " + found.get("failed", "out of time")[:70]] + [""] * 9)
            continue
        time, recipe = found["time"], arm.split("/")[-1]
        floor = entry["floor_ms"].get(recipe)
        ours = targets.time_of(results, name, f"te_ops/{recipe}")
        kernels, memory = found.get("kernels"), found.get("memory")
        rows.append(
            [
                arm,
                _number(time["ms"]),
                _number(time["p10"]),
                _number(time["p90"]),
                str(time["rounds"]),
                _number(floor / time["ms"] if floor else None, 2),
                _number(ours / time["ms"] if ours else None),
                _number(found.get("host_us"), 0),
                str(kernels["kernels"]) if kernels else "",
                _number(memory["peak"] / 2**20, 0) if memory else "",
                f"{max(found['errors'].values()):.1e}",
            ]
        )
    return title, rows


def _failed(name: str, row: Mapping[str, Any], head: list[str]) -> list[str]:
    """The line of a case that has no figures, as wide as the others."""
    return [name, "failed: " + row["failed"][:90]] + [""] * (len(head) - 2)


def _streams(rows: Mapping[str, Any]) -> Table:
    peers = list(dict.fromkeys(p for r in rows.values() for p in r.get("us", {})))
    peers = [p for p in peers if p not in ("te_ops", "copy")]
    table = [["case", "MB", "te_ops us", "copy us", "of copy", *(f"{p} us" for p in peers), "launches"]]  # fmt: skip
    for name, row in rows.items():
        if "failed" in row:
            table.append(_failed(name, row, table[0]))
            continue
        us = row["us"]
        table.append(
            [
                name,
                f"{row['bytes'] / 1e6:.0f}",
                _number(us["te_ops"], 1),
                _number(us["copy"], 1),
                _number(row["of_copy"], 2),
                *(_number(us[p], 1) if p in us else row["peers"].get(p, "")[:40] for p in peers),
                str(len(row["kernels"])),
            ]
        )
    return "memory-bound groups", table


def _fused(rows: Mapping[str, Any]) -> Table:
    table = [["case", "fused us", "product us", "best product us", "separate us", "of product", "of separate",
              "tiling"]]  # fmt: skip
    for name, row in rows.items():
        if "failed" in row:
            table.append(_failed(name, row, table[0]))
            continue
        us = row["us"]
        table.append(
            [
                name,
                *(_number(us.get(k), 0) for k in ("fused", "product", "product_best", "separate")),
                _number(row["of_product"]),
                _number(row["of_separate"]),
                row["tiling"],
            ]
        )
    return "fused GEMMs", table


_WHAT = {
    "peer": "of the best of torch",
    "fp8": "BF16 / FP8 time",
    "tile": "a tile, of causal",
    "host": "us of the host",
}


def _attention(rows: Mapping[str, Any]) -> Table:
    table = [
        ["case", "kernels", "us forward", "us backward", "forward", "backward", "figure", "error"]
    ]
    for name, row in rows.items():
        if "failed" in row:
            table.append(_failed(name, row, table[0]))
            continue
        us = (row["us"].get(side, {}) for side in ("forward", "backward"))
        table.append(
            [
                name,
                " ".join(dict.fromkeys(k.partition(".")[0] for k in row["kernels"].values())),
                *(" / ".join(f"{k} {t:.0f}" for k, t in found.items()) for found in us),
                *(_number(row.get(side)) for side in ("forward", "backward")),
                _WHAT[row["of"]],
                f"{row['error']:.1e}",
            ]
        )
    return "attention", table


def _targets(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    rows = [["target", "at most / aim", "figure", "verdict"]]
    for v in verdicts:
        limit = f"{'>= ' if v['least'] else ''}{v['limit']:g}{' ' + v['unit'] if v['unit'] else ''}"
        if v["aim"] is not None:
            limit += f" / {v['aim']:g}"
        rows.append([v["target"], limit, _number(v["figure"]), v["verdict"]])
    return "targets", rows


def _missed(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    rows = [["missed", "figure", "limit", "by"]]
    for v in verdicts:
        by = "" if not v["limit"] else f"{abs(v['figure'] / v['limit'] - 1):.0%}"
        rows.append([v["target"], _number(v["figure"]), f"{v['limit']:g}", by])
    return "missed", rows


def text(results: Mapping[str, Any]) -> str:
    """For a terminal."""
    parts = ["\n".join(head(results))]
    for title, rows in tables(results):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def markdown(results: Mapping[str, Any], only: Iterable[str] = ()) -> str:
    """For the pages; `only`: titles that start with one of these."""
    wanted = tuple(only)
    parts = ["\n".join(f"* {line}" for line in head(results))]
    for title, rows in tables(results):
        if wanted and not title.startswith(wanted):
            continue
        parts.append(f"**{title}**\n\n{markdown_table(rows)}")
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def plot(results: Mapping[str, Any], path: Path) -> bool:
    """Bars of the pipelines' times by provider and recipe, as PNG or SVG; False without matplotlib."""
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt

        cases = {n: e for n, e in results.get("pipelines", {}).items() if e.get("arms")}
        if not cases:
            return False
        figure, axes = plt.subplots(len(cases), 1, figsize=(9, 3.2 * len(cases)), squeeze=False)
        for axis, (name, entry) in zip(axes[:, 0], cases.items(), strict=True):
            bars = {a: f["time"]["ms"] for a, f in entry["arms"].items() if "time" in f}
            colours = ["tab:green" if a.startswith("te_ops") else "tab:gray" for a in bars]
            axis.barh(list(bars), list(bars.values()), color=colours)
            axis.invert_yaxis()
            axis.set_title(f"{name}: ms per forward and backward")
            axis.tick_params(labelsize=7)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)
        return True
    return False


__all__ = ["head", "markdown", "markdown_table", "plot", "tables", "text"]
