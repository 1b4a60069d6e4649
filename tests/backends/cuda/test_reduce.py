"""Sums over rows on the host: by clusters in one launch, by slices in two, whatever the tile."""

from __future__ import annotations

from typing import Any

import pytest

from te_ops.backends.cuda import launch, reduce
from tests.backends.cuda import emulator
from tests.backends.cuda.cases import cases, check, drawer

pytestmark = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")
BY_NAME = {case.name: case for case in cases()}
SHAPES = ((0, 32), (3, 40), (300, 131), (530, 264))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are built, in order."""
    names: list[str] = []

    def build(name: str, *args: Any, **options: Any) -> launch.Function:
        names.append(name)
        return emulator.build(name, *args, **options)

    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)
    return names


@pytest.mark.parametrize(
    ("arch", "kernels"), [("sm_90", ["sum_rows"]), ("sm_80", ["sum_rows", "sum_slices"])]
)
@pytest.mark.parametrize("name", ["reduce-rows-bf16-f32", "pointwise_reduce-rows"])
def test_one_launch_where_there_are_clusters(
    name: str, arch: str, kernels: list[str], built: list[str]
) -> None:
    for shape in SHAPES:
        assert check(BY_NAME[name].make(drawer(7, "cpu"), shape), arch, "cpu") == [], shape
    assert built == kernels * 2 * len(SHAPES)  # each is built, and run, twice


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_every_tile_gives_the_sum(
    columns: int, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduce, "cluster_columns", lambda *_: columns)
    case = BY_NAME["reduce-rows-f32-f32"]
    for shape in SHAPES:
        assert check(case.make(drawer(8, "cpu"), shape), "sm_90", "cpu") == [], shape
    assert set(built) == {"sum_rows"}


def test_wide_sums_go_by_slices() -> None:
    assert reduce.cluster_columns(14336, "sm_90") is None
    assert reduce.cluster_columns(1024, "sm_80") is None
    assert [reduce.cluster_columns(w, "sm_100") for w in (1024, 4096)] == [64, 128]
