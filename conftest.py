"""Test set-up: threads, seeds, order, and the Python blocks of the Markdown pages."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

# Both are read when a library loads, so they come before torch and matplotlib.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist already uses every core
for devices in (torch.cuda, torch.xpu, torch.mtia):
    # Tests seed often. Where there is no such device, torch keeps each call for later with its stack trace: a
    # millisecond, and memory that is never given back.
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None
hypothesis.settings.register_profile("te_ops", derandomize=True, deadline=None)
hypothesis.settings.load_profile("te_ops")

ROOT = Path(__file__).parent

# Modules whose first lines import a library that need not be here: looking into them for doctests
# would fail. Their tests say `pytest.importorskip`.
OPTIONAL = {
    "te_ops/backends/cutlass": "cutlass",
    "te_ops/backends/cudnn": "cudnn",
    "te_ops/backends/cuda": "cuda",
    "te_ops/backends/cublas": "nvmath",
    "te_ops/integrations/accelerate": "accelerate",
    "te_ops/integrations/lightning": "lightning",
    "te_ops/jax": "jax",
}
collect_ignore_glob = [
    pattern
    for where, library in OPTIONAL.items()
    if importlib.util.find_spec(library) is None
    for pattern in (f"{where}/*", f"{where}.py")
]
# They import a compiler for seconds, and hold no doctest.
collect_ignore_glob += [f"te_ops/backends/flash/{name}.py" for name in ("kernel", "persistent")]

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ModuleNotFoundError:  # a GPU machine without it still runs everything but the pages

    class Page(pytest.File):
        def collect(self) -> list[pytest.Item]:
            pytest.skip("needs sybil")

    def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
        return Page.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None

else:
    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"]
    ).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("shuffle")
    return None if seed is None else f"order: --shuffle {seed}"


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(ROOT / "tests" / "gpu"):
        item.add_marker(pytest.mark.gpu)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = _shuffled(items, random.Random(seed))  # xdist's workers all get the same order


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected stays to the end: the garbage collector need not walk 16,000 tests at each `gc.collect()`."""
    gc.collect()
    gc.freeze()


def _shuffled(items: Sequence[pytest.Item], rng: random.Random) -> list[pytest.Item]:
    """Files in random order, and the tests of each, but not the blocks of a page."""
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    rng.shuffle(files)
    for file in files:
        if file[0].path.suffix != ".md":
            rng.shuffle(file)
    return [item for file in files for item in file]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)
    random.seed(0)
