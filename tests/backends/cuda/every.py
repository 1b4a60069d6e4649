"""Every case of every `cases*.py` beside this file: what reports and sanitizers go through.

A file gives its cases by functions `cases` and `..._cases`; a case is a `Case`, or has a `check` of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from te_ops.errors import ShapeError
from tests.backends.cuda.cases import BIND, SHAPES, Case, Draw

Shape = tuple[int, ...]


def every_case() -> Iterator[Any]:
    """Cases by file, then in the order of the file."""
    for path in sorted(Path(__file__).parent.glob("cases*.py")):
        module = importlib.import_module(f"tests.backends.cuda.{path.stem}")
        for name, made in vars(module).items():
            own = getattr(made, "__module__", None) == module.__name__
            if own and callable(made) and (name == "cases" or name.endswith("_cases")):
                yield from made()


def every_pair() -> Iterator[tuple[Any, Shape]]:
    """Every case at every odd shape that it takes."""
    for case in every_case():
        for shape in SHAPES:
            if not (getattr(case, "wide", False) and len(shape) < 2):
                yield case, shape


def bound(case: Any, draw: Draw, shape: Shape, arch: str, device: torch.device | str) -> bool:
    """Bind a case, and launch it on a GPU; False if the kernel refuses it or the operation has no such shape."""
    if not isinstance(case, Case):
        return not any("refused" in line for line in case.check(draw, shape, arch))
    try:
        group = case.make(draw, shape)
    except ShapeError:
        return False
    call, kernel = group.call(arch, device), BIND[group.runs]
    if kernel.refuse(call) is not None:
        return False
    launch = kernel.bind(call)
    if torch.device(device).type == "cuda":
        launch(*(group.inputs.tensors[v] for v in call.reads))
        torch.cuda.synchronize(device)
    return True
