"""FP8 launches over a stand-in for the library against the reference; and their dense twin, where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_ops.backends import twin
from te_ops.backends.cudnn import KERNELS, launch, launch_fp8
from te_ops.backends.reference.kernels import bind_reference
from te_ops.quantizers import Record
from te_ops.registry import REGISTRY, ArchRange, Kernel
from te_ops.runtime.tape import recording
from te_ops.testing import assert_close
from tests.backends.cudnn import test_launch as dense
from tests.backends.cudnn.calls import PER_TENSOR, call_of, quantized, run
from tests.backends.cudnn.fake import FakeCudnn

CASES: tuple[Callable[[], dense.Made], ...] = (
    dense.causal, dense.window, dense.sequence_first, dense.packed, dense.sink, dense.right_padding,
)  # fmt: skip


def operands(case: Callable[[], dense.Made]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Records for q, k and v; NaN in rows of no sequence stays NaN there."""
    dense.GEN.manual_seed(0)
    xs, attrs = case()
    made: dict[str, Any] = dict(xs)
    for name in ("q", "k", "v"):
        finite = xs[name].nan_to_num(0.0)
        record = PER_TENSOR.records(finite, row=True, col=False)[0]
        assert record is not None
        codes = record.data.view(torch.uint8).masked_fill(xs[name].isnan(), 0x7F)
        made[name] = record.with_tensors((codes.view(record.data.dtype), record.scale_inv))
    return made, {"scale": 0.25, **attrs}


def same(got: Any, wanted: Any, *, atol: float = 0.02) -> None:
    for a, b in zip(got, wanted, strict=True):
        if isinstance(a, Record):
            assert torch.equal(a.scale_inv, b.scale_inv)
            assert a.shape == b.shape
            assert a.dtype is b.dtype
            a, b = a.dequantize(torch.float32), b.dequantize(torch.float32)
        assert_close(a.float(), b.float(), rtol=0.13, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_like_the_reference(cudnn: FakeCudnn, case: Callable[[], dense.Made]) -> None:
    xs, attrs = operands(case)
    call = call_of(xs, writes=(0, 1), **attrs)
    same(run(call, launch_fp8.bind(call), xs), run(call, bind_reference(call), xs))
    assert len(cudnn.calls) == 1
    assert cudnn.graphs[0].options["io_data_type"] == "FP8_E4M3"


def test_the_plain_case_reads_scales_where_they_lie(cudnn: FakeCudnn) -> None:
    """A second call with other records runs the same plan, and other scales count."""
    xs, attrs = operands(dense.causal)
    call = call_of(xs, writes=(0, 1), **attrs)
    launched, wanted = launch_fp8.bind(call), bind_reference(call)
    for factor in (1.0, 4.0, 0.25):
        other = {name: x.dequantize() * factor for name, x in xs.items()}
        given = quantized(other)
        same(run(call, launched, given), run(call, wanted, given))
    assert len(cudnn.graphs) == 1
    assert isinstance(next(iter(launched.made.values())), launch_fp8.PlainFp8)


def test_every_shape_has_a_plan_of_its_own(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STATIC", 0)
    xs, attrs = operands(dense.causal)
    call = call_of(xs, writes=(0, 1), **attrs)
    run(call, launch_fp8.bind(call), xs)
    assert not cudnn.graphs[0].node[1].get("use_padding_mask")


def test_a_recorded_launch_reads_the_scales_it_is_given(cudnn: FakeCudnn) -> None:
    xs, attrs = operands(dense.causal)
    call = call_of(xs, writes=(0, 1), **attrs)
    launched = launch_fp8.bind(call)
    run(call, launched, xs)
    with recording() as made:
        o, _ = run(call, launched, xs)
    assert made.reason is None
    (issued,) = made.issued
    names = issued.issue.operands
    memory = (ctypes.c_int64 * len(issued.words))(*issued.words)
    other, scale = torch.empty_like(o.data), 4 * xs["q"].scale_inv
    given = {"o": other, "descale_q": scale}
    for name, x in given.items():
        memory[names.index(name)] = x.data_ptr()
    words = memoryview(memory).cast("B").cast("q")
    issued.issue.prepare(words, ctypes.addressof(memory))(7)
    steep = {**xs, "q": xs["q"].with_tensors((xs["q"].data, scale))}
    wanted = run(call, launched, steep)[0]
    assert torch.equal(other.view(torch.uint8), wanted.data.view(torch.uint8))
    assert not torch.equal(other.view(torch.uint8), o.data.view(torch.uint8))
    constants = {issued.words[names.index(name)] for name in launch_fp8.CONSTANTS}
    assert constants == {x.data_ptr() for x in made.kept}


def test_kernels_are_registered_for_it() -> None:
    (found,) = [k for k in KERNELS if k.runs == "attention_fp8"]
    assert found.recorded


def _dense(name: str, refuse: Callable[[Any], str | None] = lambda call: None) -> Kernel:
    return Kernel("attention", name, launch.bind, ArchRange("any"), 50, refuse=refuse)


def test_the_twin(cudnn: FakeCudnn) -> None:
    """What FP8 graphs do not take runs by the dense kernel, decoded and encoded again."""
    xs, attrs = operands(dense.bottom_right)
    call = call_of(xs, writes=(0, 1), **attrs)
    # A device's own kernels are there once any test has planned for one; here the CPU stands for it.
    with REGISTRY.temporary(_dense("test.dense")), REGISTRY.without("cuda."):
        assert twin.refuse(call) is None
        same(run(call, twin.bind(call), xs), run(call, bind_reference(call), xs), atol=0.06)
        only = call_of(xs, writes=(1,), **attrs)
        same(run(only, twin.bind(only), xs), run(only, bind_reference(only), xs))
    assert {graph.options["io_data_type"] for graph in cudnn.graphs} == {"BFLOAT16"}


def test_the_twin_needs_a_dense_kernel(cudnn: FakeCudnn) -> None:
    xs, attrs = operands(dense.causal)
    call = call_of(xs, writes=(0, 1), **attrs)
    refusing = _dense("test.dense", lambda call: "no")
    # Those of a device are there once any test has planned for one.
    with REGISTRY.temporary(refusing), REGISTRY.without("cudnn.", "sdpa.", "flash."):
        assert twin.refuse(call) == "no kernel takes the same attention over dense operands"
