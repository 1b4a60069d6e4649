"""What makes tensors unlike those of the last call, by torch's comparison and by our own."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_ops.runtime import alike as module
from te_ops.runtime.alike import alike


@pytest.fixture(params=["torch", "attributes"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "attributes":
        monkeypatch.setattr(module, "_Guards", None)


def some() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), nn.Parameter(torch.randn(6))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda t: torch.randn(5, 6),
    "rank": lambda t: t[None],
    "strides": lambda t: torch.randn(6, 4).t(),
    "dtype": lambda t: t.double(),
    "device": lambda t: t.to("meta"),
    "class": lambda t: nn.Parameter(t, requires_grad=False),
    "requires_grad": lambda t: t.clone().requires_grad_(),
    "layout": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    x, p = some()
    same = alike([x, p])
    assert same(x, p)
    assert same(*some())
    assert not same(CHANGES[name](x), p)


def test_a_change_in_place_is_seen() -> None:
    x, p = some()
    same = alike([x, p])
    p.requires_grad_(False)
    assert not same(x, p)
    p.requires_grad_()
    assert same(x, p)
    p.data = torch.randn(7)
    assert not same(x, p)
    x.data = x.data.t()
    assert not alike([x])(some()[0])


def test_what_is_no_tensor_is_compared_by_its_class() -> None:
    x, _ = some()
    same = alike([x, None])
    assert same(x, None)
    assert not same(x, x)


def test_nothing_is_kept_alive() -> None:
    x, _ = some()
    seen = weakref.ref(x)
    same = alike([x])
    del x
    assert seen() is None
    assert same(some()[0])
