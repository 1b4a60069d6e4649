"""Every CUDA kernel on a GPU against its reference there: values, bytes, tails, capture."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import targets
from te_ops.errors import PlanError
from te_ops.quantizers import Record
from tests.backends.cuda.cases import BIG_SHAPES, BIND, SHAPES, Case, cases, check, drawer
from tests.backends.cuda.cases_norm import backward
from tests.backends.cuda.cases_pointwise import cases as together
from tests.gpu.sync import synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing())),
]
BY_NAME = {case.name: case for case in cases()}


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def fits(case: Case, shape: tuple[int, ...]) -> bool:
    if case.wide and (len(shape) < 2 or not shape[-1]):
        return False
    return not ("-i8" in case.name and shape[-1] % 8) and not (
        "reduce-rows" in case.name and not shape[-1]
    )


@pytest.mark.parametrize("case", [*cases(), *together()], ids=lambda case: case.name)
def test_equals_the_reference(case: Case) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for i, shape in enumerate((*SHAPES, *BIG_SHAPES)):
        if fits(case, shape):
            assert check(case.make(drawer(i, device), shape), arch(), device) == [], shape


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_results_that_no_cache_holds(scaling: str) -> None:
    """They leave L2 by other instructions."""
    device = torch.device("cuda", torch.cuda.current_device())
    shape = (4097, 14336)
    assert 2 * shape[0] * shape[1] > targets.PASSING
    case = BY_NAME[f"quantize-e4m3 per-tensor {scaling}-bf16-rca"]
    assert check(case.make(drawer(0, device), shape), arch(), device) == []


@pytest.mark.parametrize(
    "case", [c for c in cases() if "norm" in c.name], ids=lambda case: case.name
)
def test_short_rows(case: Case) -> None:
    """As heads have them: a thread has several rows at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    for i, rows in enumerate((1, 37, 4099)):
        assert check(case.make(drawer(i, device), (rows, 128)), arch(), device) == [], rows


GRADIENTS = [
    (backward(True, "gb", torch.bfloat16, torch.bfloat16), (301, 12288)),
    (backward(True, "gbs", torch.bfloat16, torch.bfloat16), (301, 12288)),
    (backward(False, "g", torch.bfloat16, torch.bfloat16), (301, 16384)),
]


@pytest.mark.parametrize(("case", "shape"), GRADIENTS, ids=lambda x: getattr(x, "name", str(x)))
def test_sums_that_begin_before_their_terms_are_there(case: Case, shape: tuple[int, ...]) -> None:
    """Launched one behind the other, many times, and recorded: the second waits for the first."""
    device = torch.device("cuda", torch.cuda.current_device())
    group = case.make(drawer(0, device), shape)
    assert check(group, arch(), device) == []
    call = group.call(arch(), device)
    launched, given = BIND[group.runs].bind(call), [group.inputs.tensors[v] for v in call.reads]
    expected = flat(launched(*given))
    made = [flat(launched(*given)) for _ in range(50)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [flat(launched(*given)) for _ in range(3)]
    graph.replay()
    torch.cuda.synchronize()
    for found in made + captured:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def bound(name: str, shape: tuple[int, ...]) -> tuple[Any, tuple[torch.Tensor, ...]]:
    device = torch.device("cuda", torch.cuda.current_device())
    group = BY_NAME[name].make(drawer(1, device), shape)
    call = group.call(arch(), device)
    return BIND[group.runs].bind(call), tuple(group.inputs.tensors[v] for v in call.reads)


def flat(made: Any) -> list[torch.Tensor]:
    outs: list[torch.Tensor] = []
    for item in made if isinstance(made, tuple) else (made,):
        outs += item.tensors() if isinstance(item, Record) else [item]
    return [t.reshape(-1).view(torch.uint8) for t in outs]


NAMES = (
    "quantize-e4m3 per-tensor current-bf16-rca",
    "norm_quantize-rms-e4m3 per-tensor delayed-dense",
)


@pytest.mark.parametrize("name", NAMES)
def test_capture_and_replay(name: str) -> None:
    launched, given = bound(name, (256, 512))
    expected = flat(launched(*given))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flat(launched(*given))
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_from_a_thread_that_never_used_the_device(name: str) -> None:
    launched, given = bound(name, (256, 512))
    expected = flat(launched(*given))
    results: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: results.append(flat(launched(*given))))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results[0], expected, strict=True))


def test_no_synchronisation() -> None:
    launched, given = bound(NAMES[0], (256, 512))
    launched(*given)
    with synchronising_is_an_error():
        launched(*given)


def test_an_unseen_kernel_cannot_be_captured() -> None:
    x = torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            with pytest.raises(PlanError, match="captured"):
                compiler.cubin('extern "C" __global__ void never_seen() {}', arch())
            x += 1
        finally:
            graph.capture_end()


def test_a_strided_input_is_read_right() -> None:
    launched, given = bound("pointwise-silu-f32-f32", (64, 96))
    x = given[0]
    padded = torch.empty(64, 128, device=x.device)
    padded[:, 1:97] = x
    assert torch.equal(launched(padded[:, 1:97]), launched(x))
