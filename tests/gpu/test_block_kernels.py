"""Block formats on a GPU against the reference there: NVFP4, dequantize, where scales lie."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.cublas.scaled import tile_scale, vector_scale
from te_ops.backends.cuda import compile as compiler
from te_ops.quantizers import Float8BlockQuantizer
from tests.backends.cuda.cases import Case, check, drawer
from tests.backends.cuda.cases_block import Decoded, dequantize_cases, nvfp4_cases, sums_cases
from tests.backends.cuda.test_block import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing())),
]
SHAPES = ((0, 32), (1,), (5, 7), (2, 3, 40), (129, 131), (1000, 4112), (4097, 1000))


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@pytest.mark.parametrize("case", list(nvfp4_cases()), ids=lambda case: case.name)
def test_nvfp4_has_the_bytes_of_the_reference(case: Case) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for i, shape in enumerate(SHAPES):
        assert check(case.make(drawer(i, device), shape), arch(), device) == [], shape


@pytest.mark.parametrize("case", list(sums_cases()), ids=lambda case: case.name)
def test_sums_beside_the_copies(case: Case) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for i, shape in enumerate(((0, 300), (5, 7), (300, 140), (4097, 1000))):
        assert check(case.make(drawer(i, device), shape), arch(), device) == [], shape


@pytest.mark.parametrize("case", list(dequantize_cases()), ids=lambda case: case.name)
def test_dequantize_equals_the_reference(case: Decoded) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for i, shape in enumerate(SHAPES):
        assert case.check(drawer(i, device), shape, arch()) == [], shape
    assert case.check(drawer(7, device), (33, 70), arch(), scale=1e-37, stray=True) == []


def test_scales_lie_as_the_gemm_reads_them() -> None:
    x = drawer(0, torch.device("cuda", torch.cuda.current_device()))((272, 700), torch.bfloat16)
    for record in quantized(Float8BlockQuantizer(), x, arch()):
        assert record.scale_inv is not None
        assert vector_scale(record.scale_inv, 0).data_ptr() == record.scale_inv.data_ptr()
    for record in quantized(Float8BlockQuantizer(block_scaling_dim=2), x, arch()):
        assert record.scale_inv is not None
        made = tile_scale(record.scale_inv)
        assert made.data_ptr() == record.scale_inv.data_ptr()
        assert not made[record.scale_inv.shape[1] :].any()
