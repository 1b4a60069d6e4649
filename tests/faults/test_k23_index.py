"""K23 (B124): what counts elements is 64 bits wide, and what is numbered in 32 bits is refused beyond. On a device:
tests/gpu/test_faults_big.py, with more than 2**31 elements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import te_ops as te
from te_ops.backends.cuda import dequantize, pointwise
from te_ops.backends.cuda.compile import source_root
from te_ops.quantizers import Usage

STRUCT = re.compile(r"struct (\w+)[^;{]* \{\n(.*?)\n\};", re.DOTALL)
POINTER = re.compile(r"^  .*\*\s*\w+.*;", re.MULTILINE)
NARROW = re.compile(r"^  (?:const )?(?:int|u32|unsigned)\b([^*(]*?);", re.MULTILINE)
NO_COUNTS = {"State": {"rules", "first"}}  # of a few amaxes: flags, and a place in their list


def arguments() -> dict[str, str]:
    """Structs of the device code that are data alone and hold addresses, or structs that do, with their members."""
    found = {}
    for path in sorted(Path(source_root()).rglob("*.cuh")):
        for name, body in STRUCT.findall(path.read_text()):
            holds = POINTER.search(body) or name.endswith("Arguments")
            if holds and "TE_DEVICE" not in body:
                found[name] = body
    return found


def test_sizes_and_strides_of_every_kernel_are_64_bits_wide() -> None:
    found = arguments()
    folder = Path(te.__file__).parent / "backends" / "cuda"
    texts = "".join(path.read_text() for path in folder.glob("*.py"))
    passed = set(re.findall(r"typedef te::(\w+Arguments|KvAppend|FewMerge)\b", texts))
    assert passed
    assert passed <= set(found)
    for name, members in found.items():
        narrow = {n.strip() for part in NARROW.findall(members) for n in part.split(",")}
        narrow = {n for n in narrow if "[" not in n}  # values that a thread holds
        assert narrow <= NO_COUNTS.get(name, set()), name


def test_the_audit_sees_a_narrow_count() -> None:
    body = "  const u8* codes;\n  T* y;\n  int rows, width;  // of y"
    assert POINTER.search(body)
    assert [n.strip() for n in NARROW.findall(body)[0].split(",")] == ["rows", "width"]


@pytest.mark.parametrize("over", [0, 1])
def test_chunks_beyond_32_bits_are_refused(over: int) -> None:
    """2**35 elements in chunks of 8, on the meta device: as many as can be numbered, and one row more."""
    y = torch.empty(2**15 - 1 + over, 2**20, dtype=torch.bfloat16, device="meta")
    decoding = dequantize.decoding_of(te.MXFP8Quantizer(), Usage.ROW)
    assert decoding is not None
    checks = [
        lambda: pointwise.check_chunks(y.numel() // 8, y),
        lambda: dequantize._grid(decoding, *y.shape, y),
    ]
    for check in checks:
        if over:
            with pytest.raises(te.ShapeError, match=r"\(32768, 1048576\) is too large.*split it"):
                check()
        else:
            check()
