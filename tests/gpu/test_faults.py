"""Reported faults that show on a device: graphs and streams (K12), empty and odd shapes (K01, K02), leaking bytes
(K03), scale edges (K04), index overflow (K23), host overhead (K25), memory (K26), several devices (K27)."""

from __future__ import annotations

import copy
import fcntl
import gc
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.backends.cutlass import runtime
from te_ops.runtime.cache import arch_of
from tests.faults import cases
from tests.faults.cases import Case, Result
from tests.gpu import test_cutlass_kernels
from tests.gpu.sync import allocated, held

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


# -- K23: more than 2**31 elements

BIG = ((1 << 24) + 1, 128)  # 2**31 + 128 elements


@pytest.fixture
def big() -> Iterator[torch.Tensor]:
    """BF16, 4.3 GB, zeros but for the last two rows; one test of all processes at a time."""
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GB of device memory")
    with (Path(tempfile.gettempdir()) / "te_ops-big-tensor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        x = torch.zeros(BIG, dtype=torch.bfloat16, device="cuda")
        x[-2:] = torch.linspace(-3, 3, 256, device="cuda").view(2, 128)
        yield x
        del x
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "make",
    [
        te.GELU,
        te.SwiGLU,
        lambda: te.RMSNorm(128, dtype=torch.bfloat16),
        lambda: te.LayerNorm(128, dtype=torch.bfloat16),
        lambda: te.Linear(128, 128, dtype=torch.bfloat16),
        lambda: te.Bias(128, dtype=torch.bfloat16),
        lambda: te.Sequential(te.RMSNorm(128, dtype=torch.bfloat16), te.SiLU()),
    ],
    ids=["gelu", "swiglu", "rmsnorm", "layernorm", "linear", "bias", "fused"],
)
def test_k23_the_last_element_is_right(big: torch.Tensor, make: Callable[[], te.Op]) -> None:
    """B124's kind: every index is 64 bits wide."""
    op = make().cuda()
    with torch.no_grad():
        y = op(big)
        torch.testing.assert_close(y[-2:], op(big[-2:].clone()))
        torch.testing.assert_close(y[:2], op(big[:2].clone()))
    del y
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "quantizer",
    [
        te.Float8Quantizer(),
        te.Float8CurrentScalingQuantizer(),
        te.Float8BlockQuantizer(),
        te.MXFP8Quantizer(),
    ],
    ids=lambda q: q.name,
)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
def test_k23_quantize(big: torch.Tensor, quantizer: te.Quantizer, columnwise: bool) -> None:
    state = torch.tensor([3.0], device="cuda") if quantizer.stateful else None
    usage = {"rowwise": not columnwise, "columnwise": columnwise}
    found = te.quantize(big, quantizer, state=state, **usage)
    tail = te.quantize(big[-129:].clone(), quantizer, state=state, **usage)
    torch.testing.assert_close(found.dequantize()[-1:], tail.dequantize()[-1:])
    del found
    torch.cuda.empty_cache()


def test_k23_sums_over_more_than_two_to_the_31_elements(big: torch.Tensor) -> None:
    op = te.Bias(128, dtype=torch.bfloat16).cuda()
    op(big).backward(torch.ones((), dtype=torch.bfloat16, device="cuda").expand(BIG))
    assert op.bias.grad is not None
    assert (op.bias.grad == float(1 << 24)).all()
    torch.cuda.empty_cache()


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
    reason = runtime.missing() or (arch_of(CUDA) != "sm_90" and "the kernels are for sm_90") or None
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    spec = test_cutlass_kernels.specs("bias gelu", "fast")[0]
    assert runtime.wait([spec], "sm_90", CUDA)[spec] is None
    run = runtime.kernel(spec, "sm_90", CUDA)
    a, b, given = test_cutlass_kernels.operands(spec, (144, 272, 144))
    x = torch.randn(144, 144, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    ours, theirs = host_time(lambda: run(a, b, **given)), host_time(lambda: torch.mm(x, x, out=out))
    assert ours <= 3 * theirs, f"{ours * 1e6:.1f} us against {theirs * 1e6:.1f} us"


# -- K26: memory


@every_recipe
def test_k26_attention_is_flat_from_the_second_step(name: str) -> None:
    """B134: ten steps of attention and its projections."""
    recipe = RECIPES[name]
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
