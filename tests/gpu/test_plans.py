"""Plans on a CUDA device, by the references alone and with all kernels: the CPU's numbers, no synchronisation, no
growth."""

from __future__ import annotations

import copy

import pytest
import torch

import te_ops as te
from te_ops.registry import REGISTRY
from te_ops.testing import assert_close, cases
from tests.gpu.sync import held, synchronising_is_an_error

RECIPES = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


@pytest.fixture(params=["reference", "all"], autouse=True)
def kernels(request: pytest.FixtureRequest):
    """The references alone, or every kernel that takes a step."""
    if request.param == "all":
        yield
        return
    with REGISTRY.without("cublas.", "cuda."):
        yield


def block(dtype: torch.dtype) -> te.Sequential:
    """A residual attention block and a SwiGLU MLP."""
    torch.manual_seed(0)
    return te.Sequential(
        te.Residual(
            te.RMSNorm(64, dtype=dtype),
            te.Linear(64, 192, bias=False, dtype=dtype),
            te.Attention(4, packed=True, rotary=te.RoPE(16)),
            te.Linear(64, 64, bias=False, dtype=dtype),
        ),
        te.Residual(
            te.LayerNorm(64, dtype=dtype),
            te.Linear(64, 256, dtype=dtype),
            te.SwiGLU(),
            te.Linear(128, 64, dtype=dtype),
        ),
    )


def step(model: te.Op, x: torch.Tensor, recipe: te.Recipe | None) -> list[torch.Tensor]:
    """Output and all gradients of one step."""
    x = x.detach().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    grads = torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])
    return [y.detach(), *grads]


@pytest.mark.parametrize("name", RECIPES)
def test_a_block_equals_the_cpu(name) -> None:
    recipe = RECIPES[name]
    on_cpu = block(torch.float32)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    x = torch.randn(2, 32, 64)
    # A sum in another order may move a value over a rounding border: then one code differs.
    bound = 2e-5 if recipe is None else 0.05
    for _ in range(3):
        ours, theirs = step(on_gpu, x.cuda(), recipe), step(on_cpu, x, recipe)
        for a, b in zip(ours, theirs, strict=True):
            assert a.is_cuda
            assert (a.cpu() - b).norm() <= bound * b.norm() + 1e-7
    for (key, a), (_, b) in zip(on_gpu.named_buffers(), on_cpu.named_buffers(), strict=True):
        assert a.is_cuda, key
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("quantizer", cases.QUANTIZERS, ids=lambda q: q.describe())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantizers_make_the_cpus_bytes(quantizer, dtype) -> None:
    x = torch.randn(96, 160).mul(10.0).to(dtype)
    x[3, 5], x[0, 0] = 0.0, -0.0
    kwargs = {
        "state": torch.tensor([3.0]) if quantizer.stateful else None,
        "seed": torch.tensor(7) if quantizer.stochastic else None,
    }
    on_cpu = te.quantize(x, quantizer, columnwise=True, **kwargs)
    moved = {k: v if v is None else v.cuda() for k, v in kwargs.items()}
    on_gpu = te.quantize(x.cuda(), quantizer, columnwise=True, **moved)
    for a, b in ((on_gpu.rowwise, on_cpu.rowwise), (on_gpu.columnwise, on_cpu.columnwise)):
        for s, t in zip(a.tensors(), b.tensors(), strict=True):
            a_bytes, b_bytes = (v.cpu().reshape(-1).contiguous().view(torch.uint8) for v in (s, t))
            same = a_bytes == b_bytes
            assert same.all(), f"{(~same).sum()} of {same.numel()} bytes differ"
        assert_close(a.dequantize().cpu(), b.dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_a_replayed_step_does_not_synchronise(name) -> None:
    model, x = block(torch.bfloat16).cuda(), torch.randn(2, 32, 64, device="cuda").bfloat16()
    x.requires_grad_()
    recipe = RECIPES[name]

    def run() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.ones_like(y))

    run()
    torch.cuda.synchronize()
    with synchronising_is_an_error():
        run()


@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_flat_from_the_second_step(name) -> None:
    model, x = block(torch.bfloat16).cuda(), torch.randn(2, 32, 64, device="cuda").bfloat16()

    def run() -> None:
        model.zero_grad()
        step(model, x, RECIPES[name])

    seen = held(run, 6)
    assert len(set(seen[2:])) == 1, seen


def test_another_stream_and_another_current_device_state() -> None:
    model, x = block(torch.float32).cuda(), torch.randn(2, 32, 64, device="cuda")
    expected = step(model, x, RECIPES["current"])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        actual = step(model, x, RECIPES["current"])
    torch.cuda.current_stream().wait_stream(side)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_tensor_on_the_wrong_device_is_an_error() -> None:
    with pytest.raises(te.PlanError, match=r"0 \(Linear\).*on cuda:0.*on cpu"):
        te.Sequential(te.Linear(8, 8).cuda())(torch.randn(2, 8))


def test_dropout_and_run_time_numbers() -> None:
    op = te.Sequential(te.Dropout(0.5), te.Linear(64, 64)).cuda()
    x = torch.randn(128, 64, device="cuda")
    torch.manual_seed(3)
    first = op(x)
    torch.manual_seed(3)
    assert torch.equal(op(x), first)
    assert not torch.equal(op(x), first)

    @te.pointwise
    def scaled(v, by: float):
        return v * by

    by = te.scalar(2.0)
    made = scaled(by=by)
    assert torch.equal(made(x), 2 * x)
    by.set(3.0)
    assert torch.equal(made(x), 3 * x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 128])
def test_a_small_linear_gives_torchs_bits(bias: bool, rows: int) -> None:
    """It is torch's own function then, and its own node of autograd; with the references alone it has a plan."""
    torch.manual_seed(0)
    ours = te.Linear(96, 72, bias, dtype=torch.bfloat16).cuda()
    theirs = torch.nn.Linear(96, 72, bias, dtype=torch.bfloat16, device="cuda")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(rows, 96, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(rows, 72, dtype=torch.bfloat16, device="cuda")
    found = []
    for op in (ours, theirs):
        z = x.clone().requires_grad_()
        y = op(z)
        found.append([y, *torch.autograd.grad(y, [z, *op.parameters()], dy)])
    by_torch = "_SegmentNode" not in type(found[0][0].grad_fn).__name__
    assert by_torch == all(s.kernel.startswith("cublas.") for s in ours.plan(x).forward)
    for a, b in zip(*found, strict=True):
        if by_torch:
            assert torch.equal(a, b)
        else:
            assert_close(a, b, rtol=2e-2, atol=2e-2)
