"""Attention of a few queries, and KV caches, on a device: against the reference, as plans take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import few_queries
from te_ops.registry import REGISTRY
from te_ops.runtime.cache import arch_of
from te_ops.testing import assert_close
from tests.backends.cuda.cases import drawer
from tests.backends.cuda.cases_few_queries import Few, few_queries_cases, kv_append_cases
from tests.gpu.sync import synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing())),
]
CUDA = torch.device("cuda", 0)
CASES: dict[str, Any] = {
    case.name: case for cases in (few_queries_cases(), kv_append_cases()) for case in cases
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    for more in (0, 3000):
        assert CASES[name].check(drawer(0, CUDA), (more,), arch_of(CUDA)) == []


def test_nothing_waits_and_graphs_take_it() -> None:
    case = Few("", (2, 1, 900), (8, 2), (128, 128), lengths=True)
    xs = case.operands(drawer(0, CUDA), 0)
    run = few_queries.bind(case.call(xs))
    xs["kv_starts"] = xs["kv_starts"].long()
    wanted = run(*xs.values())
    with synchronising_is_an_error():
        run(*xs.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(*xs.values())
    graph.replay()
    for x, y in zip(made, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("cache", [{}, {"page_size": 16}, {"window": 200}], ids=str)
def test_token_by_token_equals_all_at_once(cache: dict[str, Any]) -> None:
    attend = te.Attention(
        8, 2, packed=True, window_size=(199, 0) if "window" in cache else None
    ).eval()
    tokens = torch.randn(2, 304, 12 * 64, device=CUDA).bfloat16()
    attend.cache = te.KVCache(2, 320, 2, 64, device=CUDA, dtype=torch.bfloat16, **cache)
    with torch.no_grad():
        found = [attend(part) for part in tokens.split([300, 1, 1, 2], 1)]
        text = attend.explain(tokens[:, :1])
        attend.cache = None
        with REGISTRY.without("flash.", "cudnn.", "sdpa.", "cuda.attention"):
            whole = attend(tokens)
    assert "cuda.attention_few" in text.partition("refused")[0]
    assert "cuda.kv_append" in text
    assert_close(torch.cat(found, 1), whole, rtol=0.02, atol=0.01)
