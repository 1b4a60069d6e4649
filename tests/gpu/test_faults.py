"""Reported faults that show on a device: graphs and streams (K12), empty and odd shapes (K01, K02), leaking bytes
(K03), scale edges (K04), host overhead (K25), memory (K26), several devices (K27). K23 is in test_faults_big.py."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.backends.cutlass import runtime
from te_ops.runtime.cache import arch_of
from tests.faults import cases
from tests.faults.cases import Case, Result
from tests.faults.experts import experts, routed
from tests.gpu import test_cutlass_kernels
from tests.gpu.sync import allocated, held
from tests.runtime.graph_engine import data
from tests.runtime.test_graphs_gradients import Heads, Scaled

RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
CUDA = torch.device("cuda", 0)
every_recipe = pytest.mark.parametrize("name", RECIPES)


def pairs(quantized: Sequence[str], keep: Callable[[Case], bool] = lambda _: True) -> list[object]:
    """Every case without a recipe, and those that quantize with some."""
    return [
        pytest.param(case, name, id=f"{case.name}-{name}")
        for case in cases.CASES
        if keep(case)
        for name in ("none", *quantized)
        if name == "none" or case.quantized
    ]


def moved(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().cuda().requires_grad_(x.requires_grad) for x in xs)


def backward(outputs: Sequence[torch.Tensor]) -> None:
    live = [y for y in outputs if y.requires_grad]
    weights = cases.loss_weights([torch.empty(y.shape, dtype=y.dtype) for y in live])
    torch.autograd.backward(live, [w.cuda() for w in weights])


def step(
    run: Callable[..., object], op: nn.Module, xs: Sequence[torch.Tensor], recipe: te.Recipe | None
) -> Result:
    """One step on the device; results on the CPU."""
    torch.manual_seed(3)
    with cases.within(recipe):
        outputs = cases.outputs_of(run(*xs))
    if any(y.requires_grad for y in outputs):
        backward(outputs)
    return Result(
        [y.detach().cpu() for y in outputs],
        [None if x.grad is None else x.grad.cpu() for x in xs],
        {n: None if p.grad is None else p.grad.cpu() for n, p in op.named_parameters()},
    )


def compiled_gemm(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[..., None]]:
    """A GEMM with bias and GELU by the DSL, and its launch."""
    reason = runtime.missing() or (arch_of(CUDA) != "sm_90" and "the kernels are for sm_90") or None
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    spec = test_cutlass_kernels.specs("bias gelu", "fast")[0]
    assert runtime.wait([spec], "sm_90", CUDA)[spec] is None
    return spec, runtime.kernel(spec, "sm_90", CUDA)


# -- K12: graphs and streams


def holds_weights(case: Case) -> bool:
    return any(True for _ in case.fresh().parameters())


@pytest.mark.parametrize(("case", "name"), pairs(["delayed", "current"], holds_weights))
def test_k12_replays_accumulate_what_eager_calls_do(case: Case, name: str) -> None:
    """B065: three microbatches by replay, every op with weights: gradients and states are eager's, bit for bit."""
    recipe = RECIPES[name]
    eager = case.fresh(torch.bfloat16).cuda()
    model = copy.deepcopy(eager)
    graphed = te.make_graphed(model)
    for _ in range(2):
        for run in (graphed, eager):
            with cases.within(recipe):
                for i in range(3):
                    torch.manual_seed(i)
                    backward(cases.outputs_of(run(*moved(case.data(32, torch.bfloat16)))))
        for (n, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert p.grad is not None, n
            assert torch.equal(p.grad, q.grad), n
        found = dict(model.named_buffers())
        for n, b in eager.named_buffers():
            assert torch.equal(found[n], b), n
    assert graphed.captured == 1


@pytest.mark.parametrize(("case", "name"), pairs(["delayed", "current", "block"]))
def test_k12_every_kernel_runs_on_the_callers_stream(case: Case, name: str) -> None:
    """B069: the inputs appear late, on the caller's stream: a kernel on another one would read zeros."""
    op = case.fresh(torch.bfloat16).cuda()
    twin = copy.deepcopy(op)
    good = moved(case.data(32, torch.bfloat16))
    expected = step(twin, twin, good, RECIPES[name])
    late = tuple(torch.zeros_like(x).requires_grad_(x.requires_grad) for x in good)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x, value in zip(late, good, strict=True):
                x.data.copy_(value)
        found = step(op, op, late, RECIPES[name])
    torch.cuda.synchronize()
    cases.same(found, expected)


def test_k12_compiled_kernels_run_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """B069, of a GEMM with its epilogue: operands appear late, on the caller's stream."""
    spec, run = compiled_gemm(monkeypatch)
    a, b, given = test_cutlass_kernels.operands(spec, (144, 272, 144))
    run(a, b, **given)
    expected, late, stream = given["y"].clone(), torch.zeros_like(a), torch.cuda.Stream()
    given["y"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        run(late, b, **given)
    torch.cuda.synchronize()
    assert torch.equal(given["y"], expected)


@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_k12_outputs_without_a_gradient_are_those_of_eager_calls(name: str) -> None:
    """What only they reach has none, and observes nothing; a buffer written before the backward is an error."""
    model = Heads().cuda()
    eager = copy.deepcopy(model)
    graphed = te.make_graphed(model)
    for i, mask in enumerate(((1, 1, 1), (1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 1, 1))):
        for run in (graphed, eager):
            xs = moved((data(seed=i), data(seed=i + 50)))
            with cases.within(RECIPES[name]):
                outputs = run(*xs)
            sum(m * y.square().sum() for y, m in zip(outputs, mask, strict=True) if m).backward()  # type: ignore[union-attr]
        for (n, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            assert p.grad is None or torch.equal(p.grad, q.grad), n
            p.grad = q.grad = None
        found = dict(model.named_buffers())
        assert all(torch.equal(found[n], b) for n, b in eager.named_buffers())
    assert graphed.captured == 1
    scaled = Scaled().cuda()
    written = te.make_graphed(scaled, data().cuda())
    y = written(data().cuda().requires_grad_()).sum()
    scaled.by.mul_(2.0)
    with pytest.raises(te.PlanError, match="a buffer has been changed in place"):
        y.backward()


# -- K01, K02, K03: shapes


@pytest.mark.parametrize(("case", "name"), pairs(["delayed", "block", "mxfp8"]))
def test_k01_zero_rows(case: Case, name: str) -> None:
    op = case.fresh(torch.bfloat16).cuda()
    before = [p.detach().clone() for p in op.parameters()]
    full = step(op, op, moved(case.data(4, torch.bfloat16)), RECIPES[name])
    op.zero_grad()
    xs = moved(case.data(0, torch.bfloat16))
    empty = step(op, op, xs, RECIPES[name])
    for a, b in zip(empty.outputs, full.outputs, strict=True):
        assert a.dtype is b.dtype
        assert a.numel() == 0
    for x, g in zip(xs, empty.input_grads, strict=True):
        assert not x.requires_grad or (g is not None and g.shape == x.shape)
    for n, g in empty.param_grads.items():
        assert g is not None, n
        assert not g.any(), n
    assert all(torch.equal(a, b) for a, b in zip(before, op.parameters(), strict=True))


@every_recipe
def test_k01_most_of_many_experts_have_no_tokens(name: str) -> None:
    """B007: 256 experts, 12 tokens, all of two of them; the first, or the first and the last, get none."""
    torch.manual_seed(0)
    every = [expert.cuda() for expert in experts(256, 64, 32, torch.bfloat16)]
    for ends in ((3, 255), (100, 101)):
        splits = [5 if i == ends[0] else 7 if i == ends[1] else 0 for i in range(256)]
        x = torch.randn(12, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for expert in every:
            expert.zero_grad()
        with cases.within(RECIPES[name]):
            y = routed(every, x, splits)
        y.float().sum().backward()
        parts = zip(every, x.detach().split(splits), y.detach().split(splits), strict=True)
        for i, (expert, part, made) in enumerate(parts):
            assert expert.weight.grad is not None
            assert bool(expert.weight.grad.any()) == (i in ends), i
            if len(part):
                wanted = nn.functional.linear(part, expert.weight, expert.bias)
                assert cases.relative_error(made, wanted) <= 0.3, i
        assert x.grad is not None
        assert bool(x.grad.any(1).all())


@pytest.mark.parametrize("rows", [1, 3, 17, 33, 127, 129])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_k02_odd_rows_and_k03_nothing_leaks(case: Case, rows: int) -> None:
    """Against FP64, in memory that is full of NaN before: tails and padding may not be read."""
    cpu = case.fresh()
    op = case.fresh().cuda()
    expected = case.expected(cpu, case.data(rows))
    poison = [torch.full((1 << k,), torch.nan, device="cuda") for k in range(8, 22)]
    del poison
    found = step(op, op, moved(case.data(rows)), None)
    cases.compare(found, expected, 2e-4)


@pytest.mark.parametrize("rows", [1, 17, 33, 129])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("core", cases.CORE)
def test_k02_k03_odd_rows_under_recipes(core: str, name: str, rows: int) -> None:
    case = cases.BY_NAME[core]
    cpu, op = case.fresh(), case.fresh().cuda()
    expected = case.expected(cpu, case.data(rows))
    poison = [torch.full((1 << k,), torch.nan, device="cuda") for k in range(8, 22)]
    del poison
    found = step(op, op, moved(case.data(rows)), RECIPES[name])
    cases.compare(found, expected, 0.6 if name == "nvfp4" else 0.15)


# -- K04: scale edges


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@pytest.mark.parametrize("values", cases.VALUES, ids=lambda v: v.name)
@pytest.mark.parametrize("quantizer", cases.QUANTIZERS, ids=lambda q: q.describe())
def test_k04_hard_values_make_the_cpus_bytes(quantizer: te.Quantizer, values: cases.Values) -> None:
    torch.manual_seed(2)
    x = values.fill((96, 160))
    kwargs = {
        "state": torch.tensor([3.0]) if quantizer.stateful else None,
        "seed": torch.tensor(7) if quantizer.stochastic else None,
    }
    on_cpu = te.quantize(x, quantizer, columnwise=True, **kwargs)
    there = {k: v if v is None else v.cuda() for k, v in kwargs.items()}
    on_gpu = te.quantize(x.cuda(), quantizer, columnwise=True, **there)
    for a, b in ((on_gpu.rowwise, on_cpu.rowwise), (on_gpu.columnwise, on_cpu.columnwise)):
        for s, t in zip(a.tensors(), b.tensors(), strict=True):
            left, right = (v.cpu().reshape(-1).contiguous() for v in (s, t))
            if left.dtype in _FLOATS:  # NaN has many codes, of which each device makes its own
                assert torch.equal(left.isnan(), right.isnan())
                left, right = left.nan_to_num(), right.nan_to_num()
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("values", cases.VALUES, ids=lambda v: v.name)
@every_recipe
@pytest.mark.parametrize("core", ["Linear", "MLP"])
def test_k04_training_steps_on_hard_values(core: str, name: str, values: cases.Values) -> None:
    """Through the fused kernels: finite stays finite, states are finite whatever came, and a NaN shows in its row."""
    op = cases.BY_NAME[core].fresh(torch.bfloat16).cuda()
    torch.manual_seed(2)
    x = values.fill((33, cases.WIDTH)).to("cuda", torch.bfloat16).requires_grad_()
    for _ in range(2):
        x.grad = None
        op.zero_grad()
        found = step(op, op, (x,), RECIPES[name])
    if values.finite and values.name != "huge":
        for what, t in found.tensors():
            assert t is None or torch.isfinite(t).all(), what
    rows = x.isnan().any(-1).cpu()
    assert found.outputs[0].isnan().any(-1)[rows].all(), "a NaN was hidden"
    for what, t in op.state_dict().items():
        if ".delayed." in f".{what}" and not what.endswith("nonfinite_steps"):
            assert torch.isfinite(t).all(), what


# -- K25: host overhead


def host_time(run: Callable[[], object], count: int = 1000) -> float:
    """Seconds of host time for a call, the best of five rounds."""
    for _ in range(50):
        run()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, (time.perf_counter() - start) / count)
    return best


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_k25_a_linear_costs_at_most_half_more_than_torchs(grad: bool) -> None:
    """B130: 1000 forwards of a tiny Linear in BF16, issued without waiting."""
    ours = te.Linear(64, 64, dtype=torch.bfloat16).cuda()
    theirs = nn.Linear(64, 64, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(8, 64, dtype=torch.bfloat16, device="cuda")
    with torch.set_grad_enabled(grad):
        a, b = host_time(lambda: ours(x)), host_time(lambda: theirs(x))
    assert a <= 1.5 * b, f"{a * 1e6:.1f} us against {b * 1e6:.1f} us"


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_k25_a_pipeline_costs_at_most_half_more_than_torchs(grad: bool) -> None:
    options = {"dtype": torch.bfloat16}
    ours = te.Sequential(
        te.RMSNorm(64, **options),
        te.Linear(64, 64, **options),
        te.GELU(),
        te.Linear(64, 64, **options),
    ).cuda()
    theirs = nn.Sequential(
        nn.RMSNorm(64, **options),
        nn.Linear(64, 64, **options),
        nn.GELU("tanh"),
        nn.Linear(64, 64, **options),
    ).cuda()
    x = torch.randn(8, 64, dtype=torch.bfloat16, device="cuda")
    with torch.set_grad_enabled(grad):
        a, b = host_time(lambda: ours(x)), host_time(lambda: theirs(x))
    assert a <= 1.5 * b, f"{a * 1e6:.1f} us against {b * 1e6:.1f} us"


def test_k25_a_launch_of_a_compiled_gemm_is_bound_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B132: whatever the DSL's version does around a call, a launch costs no more than three of torch.mm."""
    spec, run = compiled_gemm(monkeypatch)
    a, b, given = test_cutlass_kernels.operands(spec, (144, 272, 144))
    x = torch.randn(144, 144, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    ours, theirs = host_time(lambda: run(a, b, **given)), host_time(lambda: torch.mm(x, x, out=out))
    assert ours <= 3 * theirs, f"{ours * 1e6:.1f} us against {theirs * 1e6:.1f} us"


# -- K26: memory


ATTENTION: dict[str, te.Recipe | None] = {
    **RECIPES,
    "delayed, attention too": te.recipe.DelayedScaling(amax_history_len=4, fp8_dpa=True),
    "current, attention too": te.recipe.Float8CurrentScaling(fp8_dpa=True),
    "mxfp8, attention too": te.recipe.MXFP8BlockScaling(fp8_dpa=True),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_k26_attention_is_flat_from_the_second_step(name: str) -> None:
    """B134: ten steps of attention and its projections."""
    recipe = ATTENTION[name]
    model = te.Sequential(
        te.Linear(128, 384, bias=False, dtype=torch.bfloat16),
        te.Attention(4, packed=True),
        te.Linear(128, 128, bias=False, dtype=torch.bfloat16),
    ).cuda()
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def once() -> None:
        model.zero_grad()
        x.grad = None
        with cases.within(recipe):
            y = model(x)
        y.float().square().mean().backward()

    seen = held(once, 10)
    assert len(set(seen[3:])) == 1, seen  # recorded launches take the place of bound ones before


def test_k26_first_use_of_a_kernel_keeps_nothing_of_the_caller() -> None:
    """B136: a big local at the first use of a kernel dies when it is dropped, without the collector."""

    @te.pointwise
    def fresh(x, a: float):  # type: ignore[no-untyped-def]
        return a * te.math.sin(x) + 0.125 * x

    gc.disable()
    try:
        big = torch.randn(1 << 20, device="cuda")
        ref = weakref.ref(big)
        fresh(a=1.7)(big)
        del big
        assert ref() is None
    finally:
        gc.enable()


@every_recipe
def test_k26_workspaces_can_be_freed(name: str) -> None:
    """B138: after a step, memory comes back to parameters and state; the next step works; twice is fine."""
    recipe = RECIPES[name]
    model = cases.BY_NAME["MLP"].fresh(torch.bfloat16).cuda()
    xs = moved(cases.BY_NAME["MLP"].data(64, torch.bfloat16))

    def once() -> None:
        with cases.within(recipe):
            (y,) = cases.outputs_of(model(*xs))
        y.sum().backward()
        model.zero_grad()
        for x in xs:
            x.grad = None

    once()
    te.free_workspaces()
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *xs))
    for _ in range(5):
        once()
        te.free_workspaces()
        te.free_workspaces()
        seen = allocated()
    for _ in range(5):
        once()
    te.free_workspaces()
    assert allocated() == seen
    assert resident <= seen


def test_k26_quantized_weights_are_not_kept_twice() -> None:
    """After a forward and a backward, no copy of a weight is left on the device."""
    model = te.Linear(2048, 2048, bias=False, dtype=torch.bfloat16).cuda()
    x = torch.randn(128, 2048, dtype=torch.bfloat16, device="cuda")
    with cases.within(RECIPES["current"]):
        model(x).sum().backward()
    model.zero_grad()
    te.free_workspaces()
    before = allocated()
    with cases.within(RECIPES["current"]):
        model(x).sum().backward()
    model.zero_grad()
    te.free_workspaces()
    assert allocated() - before < model.weight.numel()


# -- K27: more than one device


@every_recipe
def test_k27_layers_on_two_devices(name: str) -> None:
    """B139: three steps with the first device current; states, outputs and gradients are where they belong."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    first, second = te.Linear(64, 64).to("cuda:0"), te.Linear(64, 64).to("cuda:1")
    plain = copy.deepcopy(first), copy.deepcopy(second).to("cuda:0")
    for i in range(3):
        x = torch.randn(32, 64, device="cuda:0", requires_grad=True)
        torch.manual_seed(i)
        with cases.within(RECIPES[name]):
            y = second(first(x).to("cuda:1"))
        y.square().sum().backward()
        assert y.device.index == 1
        torch.manual_seed(i)
        with cases.within(RECIPES[name]):
            z = plain[1](plain[0](x.detach()))
        z.square().sum().backward()
        torch.testing.assert_close(y.to("cuda:0"), z)
    for op, device in ((first, 0), (second, 1)):
        for t in (*op.parameters(), *op.buffers(), *(p.grad for p in op.parameters())):
            assert t.device.index == device
    for a, b in zip((first, second), plain, strict=True):
        for s, t in zip(a.buffers(), b.buffers(), strict=True):
            torch.testing.assert_close(s.to("cuda:0"), t)


def test_k27_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    op = te.Sequential(te.RMSNorm(64), te.Linear(64, 64), te.GELU()).to("cuda:1")
    x = torch.randn(32, 64, device="cuda:1")
    with torch.cuda.device(0), cases.within(RECIPES["current"]):
        y = op(x)
    with torch.cuda.device(1), cases.within(RECIPES["current"]):
        assert torch.equal(op(x), y)
    assert y.device.index == 1
