"""Views of a plan: the table, the data, the Mermaid chart and the page with its drawing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.attrs import Dim
from te_ops.compiler.describe import options, plain, refusals, remarks, size
from te_ops.compiler.drawing import CHAR, draw
from te_ops.compiler.explain import WIDTH, to_html, to_mermaid, to_text
from te_ops.compiler.plan import Plan, Saved, Segment, Step
from te_ops.compiler.work import Note
from te_ops.graph import Spec
from te_ops.registry import Kernel
from tests.compiler.golden import BLOCKS, RECIPES, Case
from tests.compiler.isolation import package_rules


def plan_of(block: str = "swiglu_mlp", recipe: str = "mxfp8", fused: bool = True) -> Plan:
    with Case(block, recipe, fused).scene() as (op, x):
        made: Plan = op.plan(x)
    return made


def made_up(**changes: Any) -> Plan:
    """A plan by hand: two steps forward, three backward."""

    def step(name: str, reads: str, writes: str, phase: str = "forward", **more: Any) -> Step:
        kernel = more.pop("kernel", f"cuda.{name}")
        nodes = more.pop("nodes", (name,))
        return Step(
            name, kernel, nodes, tuple(reads.split()), tuple(writes.split()), phase, "0.a", **more
        )

    members = ("rmsnorm", "quantize(e4m3 block, row+col)")
    segment = Segment(
        name="segment 0",
        imports=(0,),
        exports=(1,),
        forward_steps=(
            step(
                "norm_quantize",
                "input0 0.weight",
                "rmsnorm0.1 quantize0.row quantize0.col",
                nodes=members,
            ),
            step("gemm", "quantize0.row 1.weight", "gemm0", kernel="acme.gemm", emulated=True),
        ),
        backward_steps=(
            step("cast", "rmsnorm0.1", "cast0", "recompute"),
            step("gemm", "grad0 quantize0.col", "gemm1", "wgrad"),
            step("rmsnorm_backward", "grad0 cast0 input0", "rmsnorm_backward0", "dgrad"),
        ),
        saved_values=(
            Saved("quantize0.col", "e4m3 block 1x128 col", 1056, 2048),
            Saved("rmsnorm0.1", "float32", 64, 64),
            Saved("input0", "bfloat16", 2048, 2048),
        ),
    )
    values: dict[str, Any] = {
        "title": "Block",
        "segments": (segment,),
        "size": 2,
        "results": (),
        "single": True,
    }
    values |= {
        "notes": (),
        "key": {"arch": "sm_90", "shapes": "rows"},
        "inputs": (Spec((8, 128), torch.bfloat16),),
    }
    return Plan(**{**values, **changes})


# -- text


def test_the_table_in_full() -> None:
    expected = """\
Block on sm_90, forward and backward, unquantized
inputs    bfloat16 [8, 128]
shapes    serves every row count of the same class, whatever the leading dimensions

forward   1 norm_quantize     cuda.norm_quantize     rmsnorm + quantize(e4m3 block, row+col) at 0.a
          2 gemm              acme.gemm              gemm at 0.a (emulated)
backward  1 cast              cuda.cast              cast at 0.a (recomputed)
          2 gemm              cuda.gemm              gemm at 0.a (wgrad)
          3 rmsnorm_backward  cuda.rmsnorm_backward  rmsnorm_backward at 0.a
saved     3 tensors, 3.1 KiB (0.76x of unquantized)
            quantize0.col  e4m3 block 1x128 col  1.0 KiB of 2.0 KiB
            rmsnorm0.1     float32                             64 B
            input0         bfloat16                         2.0 KiB"""
    assert to_text(made_up()).splitlines() == expected.splitlines()


def test_refusals_are_grouped_by_reason_each_place_once() -> None:
    odd = "N = 1000 is not a multiple of 16"
    notes = (
        Note("gemm_epilogue", "gemm_nt + gelu", "cutlass.gemm_epilogue", odd),
        Note("gemm_epilogue", "gemm_nt + gelu", "cutlass.gemm_epilogue", odd),
        Note("gemm_epilogue", "gemm_nn + dgelu", "cutlass.gemm_epilogue", odd),
        Note("norm_quantize", "rmsnorm + quantize", "", "no kernel for it is registered (sm_90)"),
    )
    text = to_text(made_up(notes=notes))
    assert text.count(odd) == 1
    assert (
        text.split("\n\n")[-1]
        == f"""\
refused   cutlass.gemm_epilogue: {odd} (2 places)
            gemm_epilogue  gemm_nt + gelu
                           gemm_nn + dgelu
          no kernel for it is registered (sm_90) (1 place)
            norm_quantize  rmsnorm + quantize"""
    )


def test_what_passes_say_is_a_note_not_a_refusal() -> None:
    notes = (
        Note("quantize", "gemm_nt", "", "second rounding: mxfp8 e4m3 to e4m3 per-tensor current"),
        Note("trace", "", "", "keyed on the exact shape: reshape (1) depends on it"),
        Note("bind", "gemm_nt", "", "rows padded from 100 to 112"),
        Note("quantize", "quantize", "cuda.quantize", "needs sm_90, the tensors are on cpu"),
    )
    text = to_text(made_up(notes=notes, key={"shapes": "exact"}))
    notes_part = text.split("\n\n")[-1]
    assert notes_part.splitlines() == [
        "notes     second rounding: mxfp8 e4m3 to e4m3 per-tensor current (at gemm_nt)",
        "          keyed on the exact shape: reshape (1) depends on it",
        "          rows padded from 100 to 112 (at gemm_nt)",
    ]
    assert "serves exactly these shapes" in text
    assert [r.text for r in refusals(notes)] == [
        "cuda.quantize: needs sm_90, the tensors are on cpu"
    ]
    assert len(remarks(notes)) == 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_table_is_aligned_and_narrow(block: str, recipe: str, fused: bool) -> None:
    plan = plan_of(block, recipe, fused)
    lines = to_text(plan).splitlines()
    assert max(map(len, lines)) <= WIDTH <= 120
    assert lines == [line.rstrip() for line in lines]
    steps = [s for g in plan.segments for s in (*g.forward_steps, *g.backward_steps)]
    numbered = [line for line in lines if re.match(r"(forward |backward|        ) +\d+ \w", line)]
    assert len(numbered) == len(steps)
    for line, step in zip(numbered, steps, strict=True):
        assert line.split(" at ")[0].find(f" {step.name} ") > 0
        assert step.kernel in line
    column = {line.index(f" {step.kernel}") for line, step in zip(numbered, steps, strict=True)}
    assert len(column) == 1


def test_usages_recompute_and_emulation_are_shown() -> None:
    text = to_text(plan_of("swiglu_mlp", "mxfp8", fused=False))
    assert "quantize(mxfp8 e4m3, row+col) of rmsnorm0 at 0" not in text
    assert "quantize(mxfp8 e4m3, row+col) of rmsnorm0 at 1" in text
    assert "quantize(mxfp8 e4m3, row+col) of swiglu0 at 3" in text
    assert re.search(r"gemm_nt\S* at 1 \(emulated\)", text)
    fused = re.sub(r"\s+", " ", to_text(plan_of("swiglu_mlp", "mxfp8", fused=True)))
    assert re.search(
        r"gemm_nt\S* \+ swiglu \+ quantize\(mxfp8 e4m3, row\) at 1 \(emulated\)", fused
    )
    attention = to_text(plan_of("attention", "delayed", fused=False))
    assert re.search(r"quantize\(\S.*col\)\S* .*at \S+ \(recomputed\)", attention)
    with package_rules(taken=False), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        op = te.Sequential(te.Quantize(), te.Linear(32, 32, bias=False))
        text = op.explain(torch.randn(32, 32))
    assert "transpose_record at 1 (wgrad)" in text  # moves bytes: exact, not emulated


def test_explain_is_the_same_text() -> None:
    with Case("linear", "current", fused=False).scene() as (op, x):
        assert op.explain(x) == op.plan(x).explain() == to_text(op.plan(x))


def test_a_forward_only_plan_saves_nothing() -> None:
    with package_rules(taken=False), torch.no_grad():
        text = te.Sequential(te.Linear(16, 16)).explain(torch.randn(4, 16))
    assert "forward only" in text
    assert "backward  " not in text
    assert "saved" not in text


def test_segments_and_foreign_modules() -> None:
    with package_rules(taken=False):
        op = te.Sequential(
            te.Linear(16, 16), nn.Tanh(), te.Linear(16, 16), te.Cut(), te.Linear(16, 16)
        )
        plan = op.plan(torch.randn(4, 16, requires_grad=True))
    text = to_text(plan)
    for line in (
        "segment 0 takes input 0",
        "segment 1 (module 1, which is not planned) takes segment 0",
        "segment 2 takes segment 1",
        "segment 3 takes segment 2",
    ):
        assert line in text.splitlines()
    total = sum(s.bytes for g in plan.segments for s in g.saved_values)
    assert f"in all    saved 3 tensors, {size(total)} (1.00x of unquantized)" in text
    modules = [g["module"] for g in plan.to_dict()["segments"]]
    assert modules == [None, "1", None, None]
    chart = to_mermaid(plan)
    assert chart.count("==>") == 3
    page = to_html(plan)
    assert page.count("<svg") == 3
    Balanced().feed(page)


def test_second_rounding_is_noted() -> None:
    with package_rules(taken=False), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        op = te.Sequential(
            te.Quantize(quantizer=te.MXFP8Quantizer()), te.Linear(32, 32, bias=False)
        )
        text = op.explain(torch.randn(32, 32))
    assert "notes     second rounding: mxfp8 e4m3 to e4m3 per-tensor current" in text


def test_a_step_of_a_recompute_region_is_marked_in_backward() -> None:
    with package_rules(taken=False):
        op = te.Sequential(te.Recompute(te.Linear(16, 16, bias=False), te.GELU()))
        plan = op.plan(torch.randn(4, 16, requires_grad=True))
    backward = to_text(plan).split("\nbackward")[1]
    assert "gemm_nt at 0.0 (recomputed)" in backward


# -- data


def test_to_dict_has_exactly_these_fields() -> None:
    data = plan_of().to_dict()
    assert set(data) == {"segments", "refused", "key"}
    for segment in data["segments"]:
        assert set(segment) == {"name", "module", "forward", "backward", "saved"}
        for step in (*segment["forward"], *segment["backward"]):
            assert set(step) == {"name", "kernel", "nodes", "reads", "writes", "phase", "path"}
        for saved in segment["saved"]:
            assert set(saved) == {"value", "format", "bytes"}
    for note in plan_of(fused=False).to_dict()["refused"]:
        assert set(note) == {"rule", "at", "kernel", "reason"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_dict_is_json(recipe: str) -> None:
    data = plan_of("lm_layer", recipe, fused=False).to_dict()
    assert json.loads(json.dumps(data)) == data


def test_every_saved_value_is_made_and_read() -> None:
    """A leaf or made by the forward, and read by the backward under the same name."""
    for segment in plan_of("lm_layer", "delayed").to_dict()["segments"]:
        made = {v for s in segment["forward"] for v in s["writes"]}
        read = {v for s in segment["backward"] for v in s["reads"]}
        for saved in segment["saved"]:
            assert saved["value"] in read
            assert (
                saved["value"] in made
                or saved["value"].startswith("input")
                or "scale" in saved["value"]
            )
        names = [v for s in (*segment["forward"], *segment["backward"]) for v in s["writes"]]
        assert len(names) == len(set(names))


def test_key_values_become_plain() -> None:
    key = {"a": torch.bfloat16, "b": (Dim(3, (0, 0)), [1.5, None]), "c": {1: True}}
    assert plain(key) == {"a": "torch.bfloat16", "b": [3, [1.5, None]], "c": {"1": True}}
    assert type(plain(key)["b"][0]) is int
    assert (
        options({"recipe": "MXFP8BlockScaling", "x": [1, None]}) == "MXFP8BlockScaling(x=[1, None])"
    )


# -- Mermaid


@pytest.mark.parametrize("block", ["swiglu_mlp", "lm_layer"])
def test_mermaid_draws_each_step_and_each_saved_value(block: str) -> None:
    plan = plan_of(block, "mxfp8")
    lines = to_mermaid(plan).splitlines()
    assert lines[0] == "flowchart TB"
    nodes = [m[1] for line in lines if (m := re.match(r'    (s\d+[fb]\d+)\["[^"]*"\]$', line))]
    (segment,) = plan.segments
    assert len(nodes) == len(set(nodes)) == len(segment.forward_steps) + len(segment.backward_steps)
    edge = r'  (s\d+[fb]\d+) (?:-->|-\. "[^"]*" \.->|==>) (s\d+[fb]\d+)$'
    ends = [m.groups() for line in lines if (m := re.match(edge, line))]
    assert {n for pair in ends for n in pair} <= set(nodes)
    assert (
        sum(line.count("subgraph") for line in lines) == sum(line == "  end" for line in lines) == 2
    )
    assert len(ends) == len(lines) - len(nodes) - 5  # nothing but nodes, edges and the frames
    for saved in segment.saved_values:
        if saved.value != "input0":
            assert f"{saved.value}: {saved.format}, {size(saved.bytes)}" in "\n".join(lines)


def test_mermaid_escapes_what_would_end_a_label() -> None:
    plan = made_up()
    odd = replace(plan.segments[0].forward_steps[0], nodes=('f("a") <b> #1',))
    segment = replace(plan.segments[0], forward_steps=(odd,), backward_steps=(), saved_values=())
    chart = to_mermaid(replace(plan, segments=(segment,)))
    assert "f(#quot;a#quot;) &lt;b&gt; #35;1" in chart


# -- HTML


class Balanced(HTMLParser):
    """Fails on a tag that is closed twice or never."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_outside() -> None:
    page = to_html(plan_of("lm_layer", "delayed"))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
    for word in ("<script", "<link", "@import", "url(", "src="):
        assert word not in page
    assert "prefers-color-scheme: dark" in page


def test_the_style_is_whole() -> None:
    """Every brace closes, and both themes define every colour that a rule reads."""
    (style,) = re.findall(r"<style>(.*?)</style>", to_html(plan_of("linear", "fp32")), re.DOTALL)
    depth = [style[:i].count("{") - style[:i].count("}") for i in range(len(style) + 1)]
    assert depth[-1] == 0
    assert min(depth) == 0
    light, dark = (set(re.findall(r"(--\w+): #", part)) for part in style.split("@media"))
    assert light == dark == set(re.findall(r"var\((--\w+)\)", style))
    assert style.index("@media") < style.index("body {")
    assert depth[style.index("body {")] == depth[style.index("svg rect")] == 0


def test_the_page_shows_saved_refused_notes_and_key() -> None:
    notes = (
        Note("gemm_epilogue", "gemm_nt + <gelu>", "cutlass.gemm_epilogue", "N & K are odd"),
        Note("trace", "", "", "keyed on the exact shape: why"),
    )
    page = to_html(
        made_up(notes=notes, key={"arch": "sm_90", "recipe": {"recipe": "R", "margin": 0}})
    )
    assert "3 tensors, 3.1 KiB (0.76x of unquantized)" in page
    assert "<code>gemm_nt + &lt;gelu&gt;</code>" in page
    assert "N &amp; K are odd" in page
    assert "<li>keyed on the exact shape: why</li>" in page
    assert "<code>R(margin=0)</code>" in page


def pictures(plan: Plan) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", to_html(plan), re.DOTALL)]


SVG = "{http://www.w3.org/2000/svg}"


def rectangles(picture: ET.Element) -> list[tuple[ET.Element, float, float, float, float]]:
    found = []
    for group in picture.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        if rect is not None:
            x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
            found.append((group, x, y, x + w, y + h))
    return found


DRAWN = [
    ("linear", "fp32"),
    ("swiglu_mlp", "mxfp8"),
    ("gelu_mlp", "block"),
    ("lm_layer", "delayed"),
    ("lm_layer", "nvfp4"),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("block", "recipe"), DRAWN)
def test_boxes_are_apart_inside_the_picture_and_hold_their_text(
    block: str, recipe: str, fused: bool
) -> None:
    (picture,) = pictures(plan_of(block, recipe, fused))
    boxes = rectangles(picture)
    width, height = (float(picture.attrib[k]) for k in ("width", "height"))
    for group, left, top, right, bottom in boxes:
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= height
        for text in group.iter(f"{SVG}text"):
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            assert text.text is not None
            assert left < x
            assert x + len(text.text) * CHAR < right
            assert top + 8 < y < bottom - 3
    for (_, *a), (_, *b) in combinations(boxes, 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("block", "recipe"), DRAWN)
def test_lines_run_between_boxes_and_not_along_each_other(
    block: str, recipe: str, fused: bool
) -> None:
    (segment,) = plan_of(block, recipe, fused).segments
    drawing = draw(segment)
    for wire in drawing.wires:
        top, bottom = wire.span()
        for box in drawing.boxes:
            beside = wire.lane < box.x or wire.lane > box.x + box.width
            assert beside or bottom < box.y or top > box.y + box.height
    for a, b in combinations(drawing.wires, 2):
        if abs(a.lane - b.lane) < 3:
            assert a.span()[1] < b.span()[0] or b.span()[1] < a.span()[0]


@pytest.mark.parametrize(("block", "recipe"), DRAWN)
def test_the_picture_has_every_step_and_every_saved_value_that_a_step_makes(
    block: str, recipe: str
) -> None:
    plan = plan_of(block, recipe)
    (segment,) = plan.segments
    (picture,) = pictures(plan)
    kinds = [group.attrib["class"].split()[0] for group, *_ in rectangles(picture)]
    assert kinds.count("step") == len(segment.forward_steps) + len(segment.backward_steps)
    made = {v for s in segment.forward_steps for v in s.writes} | {"input0"}
    saved = [s for s in segment.saved_values if s.value in made]
    assert kinds.count("saved") == len(saved) > 0
    drawn = {
        "".join(t.text or "" for t in group.iter(f"{SVG}text"))
        for group, *_ in rectangles(picture)
        if group.attrib["class"] == "saved"
    }
    assert drawn == {f"{s.value}{s.format}{size(s.bytes)}" for s in saved}
    kept = [w for w in draw(segment).wires if w.kind == "kept"]
    assert len(kept) == 2 * len(saved)  # into the saved value, and on to its readers


def test_kernel_families_have_colours_and_unknown_ones_share_one() -> None:
    (picture,) = pictures(made_up())
    classes = [
        group.attrib["class"]
        for group, *_ in rectangles(picture)
        if "step" in group.attrib["class"]
    ]
    assert classes == ["step cuda", "step other", "step cuda again", "step cuda", "step cuda"]
    assert ">acme</span>" in to_html(made_up())


def test_nothing_is_rendered_when_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("rendered at plan time")

    for name in ("to_text", "to_dict", "to_mermaid", "to_html"):
        monkeypatch.setattr(f"te_ops.compiler.explain.{name}", fail)
    monkeypatch.setattr("te_ops.compiler.describe.marks", fail)
    with package_rules(taken=False):
        te.Sequential(te.Linear(16, 16))(torch.randn(4, 16))


def test_reasons_of_a_kernel_reach_the_table() -> None:
    from te_ops.backends.reference.kernels import bind_composed
    from te_ops.registry import REGISTRY

    picky = Kernel(
        "gemm_epilogue", "acme.epilogue", bind_composed, refuse=lambda _: "N = 24 is odd to me"
    )
    with package_rules(taken=False), REGISTRY.temporary(picky):
        text = te.Sequential(te.Linear(16, 24), te.GELU()).explain(torch.randn(4, 16))
    assert "refused   acme.epilogue: N = 24 is odd to me (1 place)" in text
    assert re.search(r"gemm_epilogue +gemm_nt \+ bias \+ gelu\n", text)
