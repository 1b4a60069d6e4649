"""Saved sets and the place of recomputed steps."""

from __future__ import annotations

import torch

import te_ops as te
from te_ops.compiler import Plan


def order(plan: Plan) -> list[tuple[str, str]]:
    return [(s.phase, s.path) for segment in plan.segments for s in segment.backward_steps]


def saved(plan: Plan) -> list[str]:
    return [s.value for segment in plan.segments for s in segment.saved_values]


def test_region_runs_again_before_its_first_reader() -> None:
    region = te.Recompute(te.Linear(8, 8, bias=False), te.RMSNorm(8), te.Linear(8, 8, bias=False))
    model = te.Sequential(te.Linear(8, 8, bias=False), region, te.Linear(8, 8, bias=False))
    found = order(model.plan(torch.randn(4, 8)))
    again = [i for i, (phase, path) in enumerate(found) if phase == "recompute"]
    assert again
    assert found[again[0]][1] == "1.0"
    first_backward_of_region = next(
        i for i, (p, path) in enumerate(found) if p != "recompute" and path.startswith("1")
    )
    assert again[0] < first_backward_of_region
    before = [path for phase, path in found[: again[0]] if phase in ("dgrad", "wgrad")]
    assert (
        "2" in before
    )  # the layer behind runs its backward first: the region's values live shortly


def test_only_what_enters_the_region_is_saved() -> None:
    region = te.Recompute(te.Linear(8, 64, bias=False), te.GELU(), te.Linear(64, 8, bias=False))
    plan = te.Sequential(te.RMSNorm(8), region).plan(torch.randn(16, 8))
    assert max(s.bytes for s in plan.segments[0].saved_values) == 16 * 8 * 4


def test_weight_quantizes_are_not_repeated() -> None:
    region = te.Recompute(te.Linear(32, 32, bias=False), te.GELU(), te.Linear(32, 32, bias=False))
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        plan = te.Sequential(te.RMSNorm(32), region).plan(torch.randn(32, 32))
    repeated = [
        s
        for s in plan.segments[0].backward_steps
        if s.name == "quantize" and s.phase == "recompute"
    ]
    assert all("weight" not in " ".join(s.reads) for s in repeated)
    assert len([s for s in plan.segments[0].saved_values if "(weight)" in s.format]) >= 1


def test_nested_regions() -> None:
    inner = te.Recompute(te.Linear(8, 8), te.GELU())
    model = te.Sequential(te.Recompute(te.Linear(8, 8), inner, te.SiLU()), te.Linear(8, 8))
    plain = te.Sequential(te.Linear(8, 8), te.Linear(8, 8), te.GELU(), te.SiLU(), te.Linear(8, 8))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        a.data = b.data
    x = torch.randn(4, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(a).square().sum().backward()
    plain(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_forward_steps_are_in_topological_order() -> None:
    model = te.Sequential(te.Branch(te.Linear(8, 8), te.GELU()), te.Add(), te.Linear(8, 8))
    plan = model.plan(torch.randn(4, 8, requires_grad=True))
    for segment in plan.segments:
        for steps, given in (
            (segment.forward_steps, set()),
            (segment.backward_steps, {s.value for s in segment.saved_values}),
        ):
            made: set[str] = set(given)
            written = {w for s in steps for w in s.writes}
            for step in steps:
                assert {r for r in step.reads if r in written} <= made
                made |= set(step.writes)
