"""Plugins: installed packages that register rules, kernels and formats with te_ops."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.registry import PLUGINS, Rule, load_plugins, rules


@dataclass
class Entry:
    """What importlib.metadata gives for one line of an entry-point group."""

    name: str
    target: Any

    def load(self) -> Any:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretends that packages with these entry points are installed."""

    def install(*entries: Entry) -> None:
        def entry_points(*, group: str) -> tuple[Entry, ...]:
            return entries if group == "te_ops.plugins" else ()

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    before = dict(PLUGINS)
    with rules.temporary():
        yield install
    PLUGINS.clear()
    PLUGINS.update(before)


def test_a_function_is_called(installed: Callable[..., None]) -> None:
    rule = Rule("test_plugin_rule", ("gemm", "gemm"))
    installed(Entry("example", lambda: rules.add(rule)))
    assert load_plugins() == {"example": None}
    assert rules.find("test_plugin_rule") is rule


def test_a_module_is_only_imported(installed: Callable[..., None]) -> None:
    installed(Entry("example", sys))
    assert load_plugins() == {"example": None}


@pytest.mark.parametrize("how", ["import", "call"])
def test_a_broken_plugin_is_a_warning(installed: Callable[..., None], how: str) -> None:
    def fails() -> None:
        raise ValueError("no licence")

    broken = Entry("broken", ValueError("no licence") if how == "import" else fails)
    rule = Rule("test_plugin_rule", ("gemm", "gemm"))
    installed(broken, Entry("good", lambda: rules.add(rule)))
    with pytest.warns(RuntimeWarning, match="'broken' failed to load: no licence"):
        result = load_plugins()
    assert result == {"broken": "ValueError: no licence", "good": None}
    assert rules.find("test_plugin_rule") is rule


def test_plans_made_before_are_not_used_after(installed: Callable[..., None]) -> None:
    op = te.Linear(8, 8)
    x = torch.randn(2, 8)
    assert op.plan(x).forward[0].kernel == "reference"

    def register() -> None:
        @te.registry.kernel("gemm", name="test.plugin.gemm")
        def bind(call: te.registry.Call) -> Any:
            return lambda a, b: (a @ b.t()) if call.node.layout == "nt" else (a @ b)

    installed(Entry("example", register))
    load_plugins()
    assert op.plan(x).forward[0].kernel == "test.plugin.gemm"


def test_an_installed_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "te_ops_example.py").write_text(
        textwrap.dedent(
            """
            import te_ops as te

            def register():
                te.registry.rules.add(te.registry.Rule("example_rule", ("gemm", "gemm")))
            """
        )
    )
    info = tmp_path / "te_ops_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: te-ops-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[te_ops.plugins]\nexample = te_ops_example:register\n")
    code = "import te_ops as te; print(te.registry.rules.find('example_rule').chain)"
    root = Path(te.__file__).parents[1]
    paths = [str(tmp_path), str(root)]
    script = f"import sys; sys.path[:0] = {paths!r}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "('gemm', 'gemm')", done.stderr
