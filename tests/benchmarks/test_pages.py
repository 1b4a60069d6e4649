"""Pages filled from results."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import data, pages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance" / "index.md"


def results(**arms: float) -> dict[str, Any]:
    time = {name: {"ms": ms, "p10": ms, "p90": ms, "rounds": 20} for name, ms in arms.items()}
    return {
        "machine": {"device": "NVIDIA H200", "torch": "2.11", "cuda": "13.0", "commit": "abc",
                    "transformer_engine": "2.20", "command": "te-ops bench mlp"},
        "settings": {"regime": "sustained"},
        "ceilings": {"products": {"none": 7e14}, "copy": 4.2e12},
        "providers": {"te_ops": "here", "liger": "absent (liger_kernel)"},
        "pipelines": {"mlp": {"about": "MLP", "rows": 8192, "floor_ms": {"none": 12.0},
                              "arms": {n.replace("__", "/"): {"time": t, "errors": {"y": 1e-3}}
                                       for n, t in time.items()}}},
        "streams": {},
    }  # fmt: skip


def test_regions_hold_figures_verdicts_and_what_was_not_measured() -> None:
    made = pages.regions(pages.merge([results(te_ops__none=13.0, **{"te-module__none": 12.5})]))
    assert "NVIDIA H200, torch 2.11" in made["machine"]
    assert "liger absent" in made["machine"]
    assert "| te_ops/none | 13.000 |" in made["mlp"]
    assert "| 1.040 |" in made["mlp"]  # of Transformer Engine
    assert (
        "| mlp, BF16: of the best of Transformer Engine | 1.01 / 1 | 1.040 | missed |"
        in (made["targets"])
    )
    assert "Not measured in this run: mlp, delayed: of the best" in made["targets"]
    assert "| 3% |" in made["missed"]
    better = pages.regions(results(te_ops__none=12.5, **{"te-module__none": 12.5}))
    assert better["missed"] == "Every target that was measured is met."


def test_a_page_is_filled_and_filled_again() -> None:
    page = "# A\n<!-- bench: mlp -->\nold\n<!-- end -->\nkept\n<!-- bench: other -->\nstays\n<!-- end -->\n"
    once = pages.fill(page, {"mlp": "new | table"})
    assert "old" not in once
    assert "new | table" in once
    assert "kept" in once
    assert "stays" in once
    assert pages.fill(once, {"mlp": "new | table"}) == once
    for wrong in ("no region", "<!-- bench: mlp -->\nopen"):
        with pytest.raises(ValueError, match="regions"):
            pages.fill(wrong, {})


def test_runs_merge_only_if_they_are_of_one_machine_and_commit() -> None:
    first, second = results(te_ops__none=13.0), results(te_ops__none=12.0)
    second["machine"]["command"] = "te-ops bench linear"
    second["pipelines"] = {"linear": second["pipelines"].pop("mlp")}
    merged = pages.merge([first, second])
    assert set(merged["pipelines"]) == {"mlp", "linear"}
    assert merged["machine"]["command"] == "te-ops bench mlp; te-ops bench linear"
    for part, key in (("machine", "commit"), ("machine", "torch"), ("settings", "regime")):
        other = copy.deepcopy(second)
        other[part][key] = "another"
        with pytest.raises(ValueError, match=r"differ|another"):
            pages.merge([first, other])
    with pytest.raises(ValueError, match="no results"):
        pages.merge([])


def test_the_page_has_a_region_for_everything_that_is_measured() -> None:
    page = PAGE.read_text()
    names = ["machine", *(c.name for c in data.CASES), "streams", "targets", "missed", "kernels"]
    assert [n for n in names if f"<!-- bench: {n} -->" not in page] == []
    assert pages.fill(page, {}) == page


def test_the_script_prints_fills_and_refuses(tmp_path: Path) -> None:
    page, table, made = tmp_path / "page.md", tmp_path / "kernels.md", tmp_path / "results.json"
    page.write_text("<!-- bench: kernels -->\n<!-- end -->\n<!-- bench: mlp -->\n<!-- end -->\n")
    table.write_text("| norm | 40 |\n")
    made.write_text(json.dumps(results(te_ops__none=13.0)))

    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert "te_ops/none" in script(made).stdout
    assert script().returncode == 2
    assert script("--kernels", table, "--page", page).returncode == 0
    assert "| norm | 40 |" in page.read_text()
    assert script(made, "--page", page).returncode == 0
    assert "| norm | 40 |" in page.read_text()
    assert "| te_ops/none | 13.000 |" in page.read_text()
