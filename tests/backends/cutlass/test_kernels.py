"""Plans with fused GEMMs: which groups they take, and that a training step gives what the reference gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import choices, launch
from te_ops.backends.cutlass.spec import GemmSpec, Load
from te_ops.graph import Graph, Value
from te_ops.registry import REGISTRY
from te_ops.testing import check_kernel
from tests.backends.cuda import emulator
from tests.backends.cutlass import standin

needs_compiler = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")

RECIPES: dict[str, te.Recipe | None] = {
    "dense": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
}


@te.pointwise
def softcap(x: Any, cap: float) -> Any:
    """An op of a user's own."""
    return cap * te.math.tanh(x / cap)


def gated() -> te.Sequential:
    return te.Sequential(
        te.RMSNorm(64), te.Linear(64, 96, bias=False), te.SwiGLU(), te.Linear(48, 64, bias=False)
    )


def biased(own: Callable[[], te.Op] = te.GELU) -> te.Sequential:
    return te.Sequential(te.Linear(64, 96), own(), te.Linear(96, 64))


MODELS: dict[str, Callable[[], te.Sequential]] = {
    "swiglu": gated,
    "gelu": biased,
    "own": lambda: biased(lambda: softcap(cap=3.0)),
    "residual": lambda: te.Sequential(te.Residual(te.Linear(64, 64), te.SiLU(), te.Linear(64, 64))),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.hopper(monkeypatch):
        yield


def steps_of(plan: te.Plan, *phases: str) -> list[tuple[str, list[str]]]:
    """Kernel and nodes of the steps with a gemm."""
    found = []
    for segment in plan.to_dict()["segments"]:
        for phase in phases or ("forward", "backward"):
            found += [
                (step["kernel"], [n.partition("(")[0] for n in step["nodes"]])
                for step in segment[phase]
                if any("gemm" in n for n in step["nodes"])
            ]
    return found


def planned(model: te.Op, made: te.Recipe | None, rows: int = 32) -> te.Plan:
    x = torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=made is not None, recipe=made):
        return model.plan(x)


# -- what is fused

FUSED = {
    ("swiglu", "delayed"): (
        ["gemm_nt", "swiglu", "quantize"],
        ["gemm_nn", "dswiglu", "quantize", "swiglu", "quantize"],
    ),
    ("swiglu", "current"): (["gemm_nt", "swiglu", "quantize"], ["gemm_nn", "dswiglu", "quantize"]),
    ("swiglu", "dense"): (["gemm_nt", "swiglu"], ["gemm_nn", "dswiglu"]),
    ("gelu", "delayed"): (
        ["gemm_nt", "bias + gelu", "quantize"],
        ["gemm_nn", "dbias + gelu/d0", "reduce", "quantize", "bias + gelu", "quantize"],
    ),
    ("gelu", "current"): (
        ["gemm_nt", "bias + gelu", "quantize"],
        ["gemm_nn", "dbias + gelu/d0", "reduce", "quantize"],
    ),
    ("gelu", "dense"): (["gemm_nt", "bias + gelu"], ["gemm_nn", "dbias + gelu/d0", "reduce"]),
    ("own", "delayed"): (
        ["gemm_nt", "bias + softcap", "quantize"],
        ["gemm_nn", "dbias + softcap/d0", "reduce", "quantize", "bias + softcap", "quantize"],
    ),
}


@pytest.mark.parametrize(("model", "name"), FUSED)
def test_an_activation_runs_in_the_gemm_before_it_and_its_gradient_in_the_one_behind(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standin.hopper(monkeypatch, emulated=False):
        plan = planned(MODELS[model]().bfloat16(), RECIPES[name])
    forward, backward = FUSED[model, name]
    steps = steps_of(plan)
    assert forward in [nodes for _, nodes in steps_of(plan, "forward")]
    assert backward in [nodes for _, nodes in steps_of(plan, "backward")]
    assert all(kernel.startswith("cutlass.") for kernel, _ in steps)


def test_a_bias_and_a_residual_are_added_in_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.hopper(monkeypatch, emulated=False):
        plan = planned(MODELS["residual"]().bfloat16(), None)
    assert ["gemm_nt", "bias + add"] in [nodes for _, nodes in steps_of(plan, "forward")]


def test_what_is_saved_is_not_rebuilt_in_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.hopper(monkeypatch, emulated=False):
        plan = planned(gated().bfloat16(), RECIPES["delayed"])
    backward = [s.name for s in plan.segments[0].backward_steps]
    assert not any(name.startswith("pointwise") for name in backward)


def test_a_gradient_that_rebuilds_nothing_has_its_copy_from_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a kernel for it, the copy is saved: a byte an element."""
    kept = {}
    for rebuilds in (True, False):
        with standin.hopper(monkeypatch, emulated=False):
            if not rebuilds:
                refuse = _refuse_rebuilt
                monkeypatch.setattr(standin.Limits, "refuse", staticmethod(refuse))
            plan = planned(gated().bfloat16(), RECIPES["delayed"])
            kept[rebuilds] = plan.saved_bytes
            backward = [nodes for _, nodes in steps_of(plan, "backward")]
            whole = ["gemm_nn", "dswiglu", "quantize", "swiglu", "quantize"]
            assert (whole if rebuilds else whole[:3]) in backward
    rows, width = 32, 48
    assert kept[False] - kept[True] == rows * width


class Twice(te.Op):
    """One layer that is called twice: its activations share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.last = te.Linear(64, 64), te.GELU(), te.Linear(64, 64)

    def emit(self, g: Graph, x: Value) -> Value:
        for _ in range(2):
            x = self.act.emit(g, self.inner.emit(g, x))
        made: Value = self.last.emit(g, x)
        return made


def test_a_layer_that_is_called_twice_has_both_its_copies_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with standin.hopper(monkeypatch, emulated=False):
        plan = planned(Twice().bfloat16(), RECIPES["delayed"])
    whole = FUSED["gelu", "delayed"][1]
    assert [nodes for _, nodes in steps_of(plan, "backward")].count(whole) == 2


def _refuse_rebuilt(spec: GemmSpec, _: str = "") -> str | None:
    return "no copy is rebuilt" if spec.epilogue.rebuilt is not None else None


def test_an_activation_and_its_gradient_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that backward rebuilds has the codes that forward multiplied with."""
    torch.manual_seed(0)
    made = gated().bfloat16()
    copies: list[torch.Tensor] = []

    def kernel(spec: GemmSpec, *_: Any) -> Any:
        inner = standin.kernel(spec)

        def run(*args: Any, **named: Any) -> None:
            inner(*args, **named)
            if spec.epilogue.acc_pair:
                copies.append(named["row"].view(torch.uint8).t().clone())
            if spec.epilogue.rebuilt is not None:
                copies.append(named["rebuilt"].view(torch.uint8).clone())
                assert named["rebuilt_inv"] == 1 / named["rebuilt_scale"]

        return run

    monkeypatch.setattr(standin.Runtime, "kernel", staticmethod(kernel))
    with standin.hopper(monkeypatch):
        step(made, RECIPES["delayed"], (32,))
    assert len(copies) == 4, "two steps"
    for forward, again in (copies[:2], copies[2:]):
        assert torch.equal(forward, again)


# -- what it computes


def step(model: te.Op, made: te.Recipe | None, rows: tuple[int, ...]) -> list[torch.Tensor]:
    """Results and gradients of the second of two steps."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x = torch.randn(*rows, 64, generator=generator).bfloat16().requires_grad_()
        with te.autocast(enabled=made is not None, recipe=made):
            y = model(x)
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@needs_compiler
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_training_step(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = MODELS[model]().bfloat16()
    theirs = step(made, RECIPES[name], (2, 16))
    with standin.hopper(monkeypatch):
        ours = step(made, RECIPES[name], (2, 16))
        kinds = {len(s.epilogue.function) > 0 for s in standin.SPECS}
    assert True in kinds
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a.float() - b.float()).norm() <= 3e-2 * b.float().norm()


@needs_compiler
@pytest.mark.parametrize("runs", ["gemm", "gemm_epilogue", "gemm_epilogue_together"])
def test_kernels_equal_the_reference_of_their_group(runs: str, on_hopper: None) -> None:
    model = biased().bfloat16()
    recipes = ("dense", "delayed") if "together" in runs else ("dense", "current")
    calls = check_kernel(
        f"cutlass.{runs}", model, (16, 64), rows=(16, 32, 0), dtypes=(torch.bfloat16,),
        recipes=[RECIPES[r] for r in recipes], device="cpu",
    )  # fmt: skip
    assert calls


@needs_compiler
def test_current_scaling_quantizes_the_rounded_value(on_hopper: None) -> None:
    assert check_kernel(
        "cutlass.gemm_epilogue_rounded", gated().bfloat16(), (16, 64), rows=(16, 48),
        dtypes=(torch.bfloat16,), recipes=["current"], device="cpu",
    )  # fmt: skip
    assert any(s.epilogue.quantized and not s.epilogue.quantized.row for s in standin.SPECS)


def test_a_gradient_is_added_to_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(64, 32, bias=False, accumulate_into_main_grad=True)).bfloat16()
    weight = model[0].weight
    x = torch.randn(16, 64).bfloat16()
    totals = []
    for fused in (False, True):
        weight.main_grad = torch.ones(32, 64)
        with pytest.MonkeyPatch.context() as patch:
            if fused:
                with standin.hopper(patch):
                    model(x).sum().backward()
                    assert standin.SPECS[-1].epilogue.accumulate
            else:
                model(x).sum().backward()
        totals.append(weight.main_grad)
    assert torch.allclose(totals[0], totals[1])


@pytest.mark.parametrize(
    "total",
    [torch.ones(64, 32).t(), torch.ones(32, 128)[:, ::2], torch.ones(32 * 64 + 1)[1:].view(32, 64)],
    ids=["transposed", "strided", "not on 16 bytes"],
)
def test_a_main_grad_lies_as_it_likes(total: torch.Tensor, on_hopper: None) -> None:
    model = te.Sequential(te.Linear(64, 32, bias=False, accumulate_into_main_grad=True)).bfloat16()
    weight, x = model[0].weight, torch.randn(16, 64).bfloat16()
    weight.main_grad = total
    model(x).sum().backward()
    assert standin.SPECS[-1].epilogue.accumulate
    wanted = 1 + x.float().sum(0).expand(32, 64)
    assert torch.allclose(weight.main_grad, wanted, rtol=1e-2, atol=1e-2)


def test_a_run_time_number_is_read_on_the_device(on_hopper: None) -> None:
    """`te.scalar` is a number of the host; a kernel gets an address."""
    cap = te.scalar(3.0)
    model = te.Sequential(te.Linear(64, 96), softcap(cap=cap), te.Linear(96, 64)).bfloat16()
    x = torch.randn(16, 64).bfloat16()
    first = model(x)
    assert any(load.shape == "scalar" for s in standin.SPECS for load in s.epilogue.loads)
    cap.set(0.01)
    assert not torch.equal(model(x), first)
    on_host = torch.tensor(2.5)
    made = launch._load(on_host, Load("scalar", "fp32"), torch.device("meta"))
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.float32, (1,))


@pytest.mark.parametrize("recompute", [te.checkpoint, torch_checkpoint])
@pytest.mark.parametrize(("before", "after"), [("off", "prefer"), ("prefer", "off")])
def test_a_recompute_takes_the_plan_of_its_forward(
    before: str, after: str, recompute: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may begin to be used between the two, at the step of another optimizer."""
    model, x = biased().bfloat16(), torch.randn(16, 64).bfloat16().requires_grad_()
    with standin.hopper(monkeypatch, before):
        more = {} if recompute is te.checkpoint else {"use_reentrant": False}
        loss = recompute(model, x, **more).sum()
        with choices.forced(after):
            loss.backward()
        assert bool(standin.SPECS) is (before == "prefer")


# -- what is not fused


def test_off_and_unmeasured_groups_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, words in (("off", "TE_OPS_CUTLASS is off"), ("measured", "te.tune")):
        with (
            pytest.MonkeyPatch.context() as patch,
            standin.hopper(patch, mode, emulated=False),
        ):
            plan = planned(biased().bfloat16(), RECIPES["delayed"])
        assert not any(kernel.startswith("cutlass.") for kernel, _ in steps_of(plan))
        reasons = [n.reason for n in plan.notes if n.kernel.startswith("cutlass.gemm_epilogue")]
        assert any(words in reason for reason in reasons)


REFUSED: dict[str, tuple[Callable[[], te.Op], te.Recipe | None, str]] = {
    "odd columns": (
        lambda: te.Sequential(te.Linear(64, 40), te.GELU(), te.Linear(40, 64)), None,
        "N = 40 is not a multiple of 16",
    ),
    "interleaved": (
        lambda: te.Sequential(te.Linear(64, 64), te.SwiGLU(glu_interleave_size=16)), None,
        "interleaved by 16",
    ),
    "blocks": (biased, recipe.Float8BlockScaling(), "one scale a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_reasons(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made, words = REFUSED[case]
    with standin.hopper(monkeypatch, emulated=False):
        plan = planned(make().bfloat16(), made)
    assert any(words in n.reason for n in plan.notes if n.kernel.startswith("cutlass."))


def test_odd_row_counts_have_no_transposed_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.hopper(monkeypatch, emulated=False):
        plan = planned(gated().bfloat16(), RECIPES["delayed"], rows=24)
    notes = [n.reason for n in plan.notes if n.kernel.startswith("cutlass.")]
    assert any("multiple of 8" in reason for reason in notes)


def test_a_kernel_that_is_being_compiled_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with standin.hopper(monkeypatch, emulated=False):
        monkeypatch.setattr(standin.Runtime, "refuse", lambda *_: "it is being compiled")
        plan = planned(biased().bfloat16(), RECIPES["delayed"])
    assert not any(kernel.startswith("cutlass.") for kernel, _ in steps_of(plan))
    assert any(n.reason == "it is being compiled" for n in plan.notes)


def test_the_names_are_registered() -> None:
    REGISTRY.prepare("cuda")
    for runs in ("gemm", "gemm_epilogue", "gemm_accumulate"):
        assert REGISTRY.find(f"cutlass.{runs}").arch.text == "sm_90..sm_100"
