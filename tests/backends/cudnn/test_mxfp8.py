"""MXFP8 attention for sm_100: what is asked for, how graphs are made, and real plans where the library can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_ops.backends.cuda.swizzle import BLOCKS, ROWS
from te_ops.backends.cudnn import library, mxfp8
from te_ops.backends.cudnn.mxfp8 import GATES, OLDEST, MxSpec, describe, refuse
from te_ops.quantizers.mxfp8 import BLOCK
from tests.backends.cudnn.conftest import Built
from tests.backends.cudnn.problems_mxfp8 import E5M2, PAIRS, TAKEN, built, spec

# -- what is asked for


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    assert refuse(TAKEN[name], "sm_100", OLDEST) is None
    assert refuse(TAKEN[name], "sm_103", 92801) is None


def test_every_gate_has_a_pair() -> None:
    assert {gate.name for gate in GATES} == set(PAIRS)
    assert len({gate.reason for gate in GATES}) == len(GATES)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_both_directions(gate: mxfp8.Gate) -> None:
    refused, taken = PAIRS[gate.name]
    assert refuse(refused, "sm_100", OLDEST) == gate.reason
    assert refuse(taken, "sm_100", OLDEST) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_other_devices_are_refused_with_the_reason(arch: str) -> None:
    assert refuse(spec(), arch, OLDEST) == (
        "MXFP8 attention needs tensor cores that multiply with scales of blocks: "
        f"sm_100 or sm_103, not {arch}"
    )


def test_older_libraries_are_refused_with_the_reason() -> None:
    assert refuse(spec(), "sm_100", 91900) == "MXFP8 attention needs cuDNN 9.21, this is 9.19"


# -- how a graph is made


class Tensor:
    """A result of a node: what is set, by name."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> Tensor:
            self.facts[name.removeprefix("set_")] = value
            return self

        return put


class Graph:
    """Records tensors and the node."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Any]] = {}
        self.given: dict[str, Any] = {}
        self.made: tuple[Tensor, ...] = ()
        self.node = ""

    def tensor(self, **facts: Any) -> str:
        assert facts["uid"] not in [each["uid"] for each in self.tensors.values()]
        self.tensors[facts["name"]] = facts
        return str(facts["name"])

    def sdpa_mxfp8(self, **given: Any) -> tuple[Tensor, ...]:
        return self._node("sdpa_mxfp8", 3, given)

    def sdpa_mxfp8_backward(self, **given: Any) -> tuple[Tensor, ...]:
        return self._node("sdpa_mxfp8_backward", 6, given)

    def _node(self, name: str, count: int, given: dict[str, Any]) -> tuple[Tensor, ...]:
        self.node, self.given = name, given
        self.made = tuple(Tensor() for _ in range(count))
        return self.made


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the frontend's enumerations stand for their values."""
    types = ("BFLOAT16", "HALF", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FLOAT", "INT32", "INT64")
    names = SimpleNamespace(
        data_type=SimpleNamespace(**{name: name for name in types}),
        tensor_reordering=SimpleNamespace(F8_128x4="F8_128x4"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"),
    )
    monkeypatch.setattr(library, "library", lambda: names)


def described(made: MxSpec) -> Graph:
    graph = Graph()
    uids = describe(graph, made)
    assert len(set(uids.values())) == len(uids)
    return graph


def test_forward(frontend: None) -> None:
    graph = described(spec((77, 1000), (96, 64), right=0))
    assert graph.node == "sdpa_mxfp8"
    given = graph.given
    assert [given[n] for n in ("q", "k", "v")] == ["q", "k", "v"]
    assert [given[f"descale_{n}"] for n in ("q", "k", "v")] == ["sf_q", "sf_k", "sf_v"]
    assert (given["diagonal_band_right_bound"], given["diagonal_alignment"]) == (0, "TOP_LEFT")
    shapes = {name: graph.tensors[f"sf_{name}"]["dim"] for name in ("q", "k", "v")}
    assert shapes == {"q": [2, 4, 128, 4], "k": [2, 2, 1024, 4], "v": [2, 2, 32, 128]}
    for name in shapes:
        facts = graph.tensors[f"sf_{name}"]
        assert (facts["data_type"], facts["reordering_type"]) == ("FP8_E8M0", "F8_128x4")
        assert facts["stride"][3] == 1
    o, stats, amax = (made.facts for made in graph.made)
    assert (o["dim"], o["data_type"]) == ([2, 4, 77, 64], "BFLOAT16")
    assert (stats["dim"], stats["data_type"]) == ([2, 4, 77, 1], "FLOAT")
    assert (amax["dim"], amax["data_type"], amax["output"]) == ([1, 1, 1, 1], "FLOAT", True)


def test_backward(frontend: None) -> None:
    made = spec((256, 384), (192, 128), (4, 4), backward=True, left=31, right=0, deterministic=True)
    graph = described(made)
    assert graph.node == "sdpa_mxfp8_backward"
    given = graph.given
    assert (given["left_bound"], given["right_bound"]) == (32, 0)
    assert given["use_deterministic_algorithm"]
    for argument, name in (("q_T", "q_t"), ("k_T", "k_t"), ("dO", "do"), ("dO_T", "do_t")):
        assert (given[argument], given[f"descale_{argument}"]) == (name, f"sf_{name}")
    assert (given["o_f16"], given["dO_f16"], given["stats"]) == ("o", "do16", "stats")
    assert graph.tensors["do16"]["data_type"] == "BFLOAT16"
    assert graph.tensors["do"]["data_type"] == graph.tensors["q_t"]["data_type"] == "FP8_E4M3"
    shapes = {name: graph.tensors[f"sf_{name}"]["dim"][2:] for name in mxfp8._BACKWARD}
    assert shapes == {
        "q": [256, 8], "q_t": [8, 256], "k": [384, 8], "k_t": [12, 256], "v": [384, 4], "do": [256, 4],
        "do_t": [8, 128],
    }  # fmt: skip
    gradients = [each.facts for each in graph.made]
    assert [each["dim"] for each in gradients[:3]] == [
        [2, 4, 256, 192], [2, 4, 384, 192], [2, 4, 384, 128],
    ]  # fmt: skip
    assert all(each["data_type"] == "FLOAT" for each in gradients[3:])


def test_names(frontend: None) -> None:
    graph = described(spec(dtype=E5M2, out=torch.float16, padding=True))
    assert graph.tensors["q"]["data_type"] == "FP8_E5M2"
    assert graph.made[0].facts["data_type"] == "HALF"
    assert graph.given["use_padding_mask"]
    assert spec(right=0).text.startswith("mxfp8 forward float8_e4m3fn b2 h4/2 s256/256 d128/128")
    assert spec() != replace(spec(), out=torch.float16)


def test_pieces_of_scales_are_those_of_products() -> None:
    assert (mxfp8.BLOCK, mxfp8.ROWS, mxfp8.BLOCKS) == (BLOCK, ROWS, BLOCKS)


# -- real plans


@pytest.mark.timeout(600)
def test_real_plans(build_plans: Callable[[str], Built]) -> None:
    lines, ended = build_plans("tests.backends.cudnn.builds_mxfp8")
    if lines and lines[0] < OLDEST:
        pytest.skip(f"cuDNN {lines[0]} has no MXFP8 attention; {OLDEST} has")
    names = [name for name, _, _ in lines[1:]]
    assert names == list(built()), f"the process ended with {ended}"
    wrong = [line for line in lines[1:] if (line[1] is None) != line[0].startswith("refused")]
    assert not wrong
