"""K23: tensors of more than 2**31 elements, to their last one."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import te_ops as te

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


ROWS: dict[str, Callable[[], te.Op]] = {
    "gelu": te.GELU,
    "swiglu": te.SwiGLU,
    "rmsnorm": lambda: te.RMSNorm(128, dtype=torch.bfloat16),
    "layernorm": lambda: te.LayerNorm(128, dtype=torch.bfloat16),
}
"""What needs no more memory than a few tensors of this size, in backward too."""
OPS: dict[str, Callable[[], te.Op]] = {
    **ROWS,
    "linear": lambda: te.Linear(128, 128, dtype=torch.bfloat16),
    "bias": lambda: te.Bias(128, dtype=torch.bfloat16),
    "fused": lambda: te.Sequential(te.RMSNorm(128, dtype=torch.bfloat16), te.SiLU()),
}


@pytest.mark.parametrize("make", OPS.values(), ids=OPS)
def test_k23_the_last_element_is_right(big: torch.Tensor, make: Callable[[], te.Op]) -> None:
    """B124's kind: every index is 64 bits wide."""
    op = make().cuda()
    with torch.no_grad():
        y = op(big)
        torch.testing.assert_close(y[-2:], op(big[-2:].clone()))
        torch.testing.assert_close(y[:2], op(big[:2].clone()))
    del y
    torch.cuda.empty_cache()


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_k23_the_gradient_of_the_last_element_is_right(
    big: torch.Tensor, make: Callable[[], te.Op]
) -> None:
    op = make().cuda()
    tail = big[-129:].clone().requires_grad_()
    y = op(tail)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").to(y).view(y.shape))
    x = big.detach().requires_grad_()
    y = op(x)
    dy = torch.zeros_like(y)
    last = dy[-129:]
    last.copy_(torch.linspace(-1, 1, last.numel(), device="cuda").view(last.shape))
    y.backward(dy)
    assert x.grad is not None
    assert tail.grad is not None
    torch.testing.assert_close(x.grad[-129:], tail.grad)
    assert not x.grad[:-129].any()
    del x, y, dy, last
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "quantizer",
    [
        te.Float8Quantizer(),
        te.Float8CurrentScalingQuantizer(),
        te.Float8BlockQuantizer(),
        te.MXFP8Quantizer(),
        te.NVFP4Quantizer(),
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
