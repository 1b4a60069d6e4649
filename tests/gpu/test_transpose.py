"""FP8 codes transposed on a GPU against the reference there."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.cuda import compile as compiler
from tests.backends.cuda.cases import BIG_SHAPES, SHAPES, drawer
from tests.backends.cuda.cases_transpose import Transposed, transpose_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing())),
]


@pytest.mark.parametrize("case", list(transpose_cases()), ids=lambda case: case.name)
def test_equals_the_reference(case: Transposed) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability()
    for shape in (*SHAPES, *BIG_SHAPES):
        assert case.check(drawer(3, device), shape, f"sm_{major}{minor}") == [], shape
