"""Marked regions of the pages, filled from the JSON of runs: a figure is never typed.

A region starts with `<!-- bench: NAME -->` and ends with `<!-- end -->`, each on a line of its own. Names: `machine`,
a pipeline's name, `streams`, `fused`, `attention`, `targets`, `missed`, `kernels` (the report of
scripts/kernel_report.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import report, targets

_REGION = re.compile(r"(<!-- bench: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PARTS = ("pipelines", "streams", "fused", "attention", "providers")
_SAME = ("commit", "torch", "cuda", "device", "transformer_engine")


def merge(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several runs on the same machine and commit; a case that ran twice is the last one's.

    Raises:
        ValueError: the runs differ in device, commit, versions or regime, or there is none.
    """
    if not runs:
        raise ValueError("there are no results to merge")
    first = runs[0]
    made: dict[str, Any] = {**first, **{part: {} for part in _PARTS}}
    commands: list[str] = []
    for run in runs:
        for key in _SAME:
            if run["machine"].get(key) != first["machine"].get(key):
                raise ValueError(
                    f"the runs differ in {key}: {first['machine'].get(key)} and "
                    f"{run['machine'].get(key)}"
                )
        if run["settings"]["regime"] != first["settings"]["regime"]:
            raise ValueError("one run is sustained, another burst")
        commands.append(run["machine"]["command"])
        for part in _PARTS:
            made[part] |= run.get(part, {})
    made["machine"] = {**first["machine"], "command": "; ".join(dict.fromkeys(commands))}
    return made


def regions(results: Mapping[str, Any]) -> dict[str, str]:
    """Markdown of every region that the results can fill."""
    found = {"machine": "\n".join(f"* {line}" for line in report.head(results))}
    tables = dict(report.tables(results))
    for title, rows in tables.items():
        name = title.partition(":")[0]
        if name in results["pipelines"]:
            found[name] = f"**{title}**\n\n{report.markdown_table(rows)}"
    named = {
        "memory-bound groups": "streams",
        "fused GEMMs": "fused",
        "attention": "attention",
        "targets": "targets",
        "missed": "missed",
    }
    found |= {
        region: report.markdown_table(tables[title])
        for title, region in named.items()
        if title in tables
    }
    if "targets" in found and "missed" not in found:
        found["missed"] = "Every target that was measured is met."
    if "targets" in found and (unmeasured := _unmeasured(targets.judge(results))):
        found["targets"] += "\n\nNot measured in this run: " + "; ".join(unmeasured) + "."
    return found


def _unmeasured(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Targets without a figure; of a case that has none at all, its name."""

    def case(verdict: Mapping[str, Any]) -> str:
        return re.split("[,:]", verdict["target"], maxsplit=1)[0]

    measured = {case(v) for v in verdicts if v["verdict"] != "not measured"}
    missing = [v for v in verdicts if v["verdict"] == "not measured"]
    return list(dict.fromkeys(v["target"] if case(v) in measured else case(v) for v in missing))


def fill(page: str, made: Mapping[str, str]) -> str:
    """The page with the regions that are in `made` replaced; the others stay.

    Raises:
        ValueError: the page has no region, or one that is not closed.
    """
    opened, closed = page.count("<!-- bench: "), page.count("<!-- end -->")
    if not opened or opened != closed:
        raise ValueError(f"the page opens {opened} regions and closes {closed}")

    def replaced(match: re.Match[str]) -> str:
        text = made.get(match["name"])
        return (
            match.group()
            if text is None
            else f"{match.group(1)}\n{text.strip()}\n\n{match.group(3)}"
        )

    return _REGION.sub(replaced, page)


__all__ = ["fill", "merge", "regions"]
