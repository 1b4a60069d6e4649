"""The driver's calls that record and launch a graph, on a stand-in of its library."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch

from te_ops.backends.cuda import bundle, launch
from te_ops.errors import PlanError

DEVICE = torch.device("cuda", 0)


class Driver:
    """Names of the calls in order; `fails` names one that fails."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.fails: dict[str, int] = {}
        self.handles = iter(range(100, 1000))

    def _call(self, name: str, *values: Any, out: Any = None) -> int:
        self.log.append((name, *values))
        if code := self.fails.get(name, 0):
            return code
        if out is not None:
            ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = next(self.handles)
        return 0

    def cuStreamCreate(self, out: Any, flags: int) -> int:
        return self._call("create", flags, out=out)

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> int:
        return self._call("begin", stream, mode)

    def cuStreamEndCapture(self, stream: int, out: Any) -> int:
        return self._call("end", stream, out=out)

    def cuGraphInstantiateWithFlags(self, out: Any, graph: Any, flags: int) -> int:
        return self._call("instantiate", graph.value, flags, out=out)

    def cuGraphDestroy(self, graph: Any) -> int:
        return self._call("drop", graph.value)

    def cuGraphLaunch(self, graph: int, stream: int) -> int:
        return self._call("launch", graph, stream)

    def cuGraphExecDestroy(self, graph: int) -> int:
        return self._call("destroy", graph)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(bundle, "driver", lambda: made)
    monkeypatch.setattr(launch, "error_text", lambda code: f"error {code}")
    return made


def test_what_is_called(driver: Driver) -> None:
    bundler, seen = bundle.Bundler(), []
    made = bundler.bundle(DEVICE, 7, [seen.append, seen.append])
    assert made is not None
    assert seen == [100, 100]  # on the recording stream, not the caller's
    assert driver.log == [
        ("create", 1),
        ("begin", 100, 2),
        ("end", 100),
        ("instantiate", 101, 0),
        ("drop", 101),
    ]
    made(7)
    made(7)
    assert driver.log[5:] == [("launch", 102, 7)] * 2
    del made
    gc.collect()
    assert driver.log[-1] == ("destroy", 102)


def test_each_stream_records_on_one_of_its_own(driver: Driver) -> None:
    bundler, seen = bundle.Bundler(), []
    for stream in (7, 8, 7):
        bundler.bundle(DEVICE, stream, [seen.append])
    assert seen[0] == seen[2] != seen[1]
    assert [name for name, *_ in driver.log].count("create") == 2


@pytest.mark.parametrize("name", ["create", "begin", "end", "instantiate"])
def test_a_driver_that_does_not_record(name: str, driver: Driver) -> None:
    driver.fails[name] = 900
    assert bundle.Bundler().bundle(DEVICE, 7, [lambda stream: None]) is None
    names = [n for n, *_ in driver.log]
    assert ("begin" in names and name != "begin") == ("end" in names)
    assert ("drop" in names) == (name == "instantiate")


def test_a_launch_that_does_not_record(driver: Driver) -> None:
    def fail(stream: int) -> None:
        raise ValueError("no")

    assert bundle.Bundler().bundle(DEVICE, 7, [fail]) is None
    assert [n for n, *_ in driver.log] == ["create", "begin", "end", "drop"]


def test_a_graph_that_does_not_launch(driver: Driver) -> None:
    made = bundle.Bundler().bundle(DEVICE, 7, [])
    assert made is not None
    driver.fails["launch"] = 700
    with pytest.raises(PlanError, match="launching a graph fails with error 700"):
        made(7)
