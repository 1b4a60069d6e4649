"""Where a plan is cut, and what goes into which segment (core contract 1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.compiler import Plan
from te_ops.compiler.cut import CUT_BYTES
from te_ops.graph import Graph, Value
from te_ops.pointwise import activations

WIDTH = 2600  # a square FP32 matrix of this width is just over 25 MB
X = torch.empty(2, WIDTH, device="meta")


def big(bias: bool = False) -> te.Linear:
    return te.Linear(WIDTH, WIDTH, bias=bias, device="meta")


def paths(plan: Plan) -> list[list[str]]:
    """Op paths of each segment's GEMMs, or the path of its module."""
    return [
        [s.module]
        if s.module is not None
        else [step.path for step in s.forward_steps if step.name == "gemm"]
        for s in plan.segments
    ]


def test_the_threshold() -> None:
    assert CUT_BYTES <= WIDTH * WIDTH * 4
    assert (WIDTH - 100) ** 2 * 4 < CUT_BYTES


def test_children_gather_to_the_threshold() -> None:
    small = te.Linear(WIDTH - 100, WIDTH - 100, bias=False, device="meta")
    again = te.Linear(WIDTH - 100, WIDTH - 100, bias=False, device="meta")
    last = te.Linear(WIDTH - 100, WIDTH - 100, bias=False, device="meta")
    plan = te.Sequential(small, again, last).plan(torch.empty(2, WIDTH - 100, device="meta"))
    assert paths(plan) == [["0", "1"], ["2"]]


def test_an_activation_stays_with_its_product() -> None:
    """Its gradient is quantized for the product's backward in the pass that makes it."""
    plan = te.Sequential(te.RMSNorm(WIDTH, device="meta"), big(True), te.GELU(), big(), big()).plan(
        X
    )
    assert paths(plan) == [["1", "3"], ["4"]]
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        plan = te.Sequential(
            big(), te.SiLU(), big(True), te.RMSNorm(WIDTH, device="meta"), big()
        ).plan(torch.empty(16, WIDTH, device="meta"))
    assert paths(plan) == [["0", "2"], ["4"]]


def test_streams_take_over_from_children() -> None:
    """With a Residual in the pipeline, only residual-stream values are cut."""
    plan = te.Sequential(
        big(), te.GELU(), te.Residual(big(), big()), big(), te.Residual(big())
    ).plan(X)
    assert paths(plan) == [["0"], ["2.0", "2.1"], ["3"], ["4.0"]]


def test_inside_of_a_residual_is_not_cut() -> None:
    plan = te.Sequential(te.Residual(big(), te.Residual(big(), big()), big())).plan(X)
    assert paths(plan) == [["0.0", "0.1.0", "0.1.1", "0.2"]]


def test_nested_pipelines_are_not_cut_between_their_children() -> None:
    plan = te.Sequential(te.Sequential(big(), big()), big()).plan(X)
    assert paths(plan) == [["0.0", "0.1"], ["1"]]


def test_without_gradients_nothing_is_cut() -> None:
    with torch.no_grad():
        assert len(te.Sequential(big(), big()).plan(X).segments) == 1


def test_forced_cuts() -> None:
    model = te.Sequential(
        te.Linear(4, 4), te.Cut(), te.GELU(), te.Sequential(te.Linear(4, 4), te.Cut(), te.SiLU())
    )
    assert paths(model.plan(torch.ones(2, 4))) == [["0"], ["3.0"], []]
    with torch.no_grad():
        assert len(model.plan(torch.ones(2, 4)).segments) == 3


def test_a_cut_at_an_end_or_twice_adds_no_segment() -> None:
    model = te.Sequential(te.Cut(), te.Linear(4, 4), te.Cut(), te.Cut(), te.GELU(), te.Cut())
    plan = model.plan(torch.ones(2, 4))
    assert [[s.name for s in seg.forward_steps] for seg in plan.segments] == [
        ["gemm", "pointwise"],
        ["pointwise"],
    ]


def test_modules_and_hooks_are_segments() -> None:
    hooked = te.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    plan = te.Sequential(te.Linear(4, 4), nn.Linear(4, 4), hooked, te.Linear(4, 4)).plan(
        torch.ones(2, 4)
    )
    assert paths(plan) == [["0"], ["1"], ["2"], ["3"]]


def test_skip_edge_over_a_module_is_a_plain_tensor() -> None:
    model = te.Sequential(te.Residual(te.Linear(4, 4), nn.Tanh(), te.Linear(4, 4)))
    plan = model.plan(torch.ones(2, 4))
    assert paths(plan) == [["0.0"], ["0.1"], ["0.2"]]
    assert 0 in plan.segments[2].imports  # the pipeline's input


def test_casts_of_weights_belong_to_their_reader() -> None:
    shared = te.Linear(4, 4, bias=False)
    model = te.Sequential(te.Linear(4, 4, bias=False), te.Cut(), shared, te.Cut(), shared)
    with torch.autocast("cpu", torch.bfloat16):
        plan = model.plan(torch.ones(2, 4))
    casts = [[s.nodes for s in seg.forward_steps if s.nodes == ("cast",)] for seg in plan.segments]
    assert [len(c) for c in casts] == [
        2,
        1,
        0,
    ]  # x and W0; the shared weight once, for its first reader
    assert len(plan.segments[1].exports) == 2


class Table(te.Op):
    """Adds a table made from a leading dimension alone: a prologue."""

    def emit(self, g: Graph, x: Value) -> Value:
        table = g.call(ROWS, g.dim(x, 0))
        return te.basic.pointwise.pointwise(
            g, activations["add"](), x, table, broadcast=("full", "col")
        )


@te.graph.prim(
    "test_rows", infer=lambda n: te.graph.Spec(n.shape, torch.float32), differentiable=False
)
def ROWS(n: tuple[int, ...]) -> Tensor:
    return torch.arange(n[0], dtype=torch.float32)


def test_tables_from_positions_are_made_once() -> None:
    model = te.Sequential(Table(), te.Cut(), Table(), te.Cut(), Table())
    x = torch.zeros(3, 4, requires_grad=True)
    plan = model.plan(x)
    made = [step.name for seg in plan.segments for step in seg.forward_steps]
    assert made.count("test_rows") == 1
    y = model(x)
    assert torch.equal(y.detach(), 3 * torch.arange(3.0)[:, None].expand(3, 4))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))


@pytest.mark.parametrize("n", [1, 3])
def test_environment_slots_are_dropped_after_their_last_segment(n: int) -> None:
    layers: list[nn.Module] = []
    for _ in range(n):
        layers += [te.Linear(4, 4), te.Cut()]
    plan = te.Sequential(*layers, te.GELU()).plan(torch.ones(2, 4))
    assert [set(dead) for dead in plan.dead] == [{i} for i in range(n + 1)]
