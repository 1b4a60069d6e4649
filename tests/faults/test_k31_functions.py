"""K31 (B153): no keyword of caches, sequences and functions is accepted and then ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.runtime import engines
from tests.faults.options import differs, keywords
from tests.runtime.graph_engine import Rerun

Observe = Callable[[dict[str, Any], Path], Any]


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    """Recordings are run again: the CPU has graphs."""
    engines.ENGINES["cpu"] = Rerun()
    yield
    del engines.ENGINES["cpu"]


def _seen(make: Callable[[], Any]) -> Any:
    try:
        torch.manual_seed(0)
        return make()
    except te.Error as error:
        return ["error", str(error)]


def _cache(given: dict[str, Any], _: Path) -> Any:
    """What is allocated, and whether two tokens of twelve can be taken back."""
    cache = te.KVCache(**{**CACHE, **given})
    seen: list[Any] = [(n, b.shape, b.dtype, b.device) for n, b in cache.named_buffers()]
    if not cache.k.is_meta and cache.window is not None:
        op = te.Attention(4, packed=True, window_size=(cache.window - 1, 0)).eval()
        op.cache = cache
        with torch.no_grad():
            for _ in range(40):
                op(torch.randn(2, 1, 12 * 16))
        seen.append(_seen(lambda: cache.truncate(cache.lengths - 2)))
    return seen


CACHE: dict[str, Any] = {
    "max_batch_size": 2, "max_sequence_length": 8, "num_heads_kv": 4, "head_dim_k": 16,
}  # fmt: skip


def _sequences(given: dict[str, Any], _: Path) -> Any:
    made = te.PackedSequences(**{"cu_q": [0, 3, 5], **given})
    numbers = None if made.is_meta else made.tolist()
    return [numbers, made.shape, made.device, made.max_q, made.max_kv]


def _graphed(given: dict[str, Any], _: Path) -> Any:
    """How often the module ran, what was captured, and whose memory comes out, over a few calls."""
    calls: list[int] = []

    class Counted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return 2 * x

    graphed = te.make_graphed(Counted(), **given)
    seen: list[Any] = [len(calls), graphed.captured]
    waiting = [graphed(torch.ones(4, requires_grad=True)) for _ in range(5)]
    seen.append(len(calls))
    del waiting  # the lanes are free
    for rows in (5, 6, 7, 5, 6, 7):
        with torch.no_grad():
            graphed.capture(torch.ones(rows))
            first = graphed(torch.ones(rows))
            graphed(3 * torch.ones(rows))
            seen.append((graphed.captured, first.tolist()))
    return seen


def _warmed(given: dict[str, Any], _: Path) -> Any:
    calls: list[int] = []

    @te.pointwise
    def twice(x):  # type: ignore[no-untyped-def]
        return 2 * x

    model = torch.nn.Sequential(twice())
    model.register_forward_hook(lambda *_: calls.append(1))
    te.warmup(model, torch.ones(3), **given)
    return calls


def _saved(given: dict[str, Any], folder: Path) -> Any:
    te.save_file(te.Bias(8), folder / "model.safetensors", **given)
    return (folder / "model.safetensors").read_bytes()


def _loaded(given: dict[str, Any], folder: Path) -> Any:
    te.save_file(te.Bias(8), folder / "model.safetensors")
    try:
        return str(te.load_file(te.Linear(8, 8), folder / "model.safetensors", **given))
    except RuntimeError as error:
        return ["error", str(error)]


def _pipeline(given: dict[str, Any], _: Path) -> Any:
    model = te.Sequential(te.GELU(), **given)
    for _ in range(3):
        model(torch.ones(4))
    engine = engines.ENGINES["cpu"]
    assert isinstance(engine, Rerun)
    return engine.replayed


def _prepared(given: dict[str, Any], _: Path) -> Any:
    return list(te.prepare(te.Linear(8, 8), **given).state_dict())


THINGS: dict[str, tuple[Any, Observe, dict[str, tuple[Any, ...]]]] = {
    "KVCache": (
        te.KVCache, _cache,
        {
            "max_batch_size": (2, 3), "max_sequence_length": (8, 80), "num_heads_kv": (4, 2),
            "head_dim_k": (16, 8), "head_dim_v": (None, 8), "window": (None, 3),
            "rollback": (0, 4, {"window": 3}), "page_size": (None, 4),
            "total_num_pages": (None, 9, {"page_size": 4}), "device": ("cpu", "meta"),
            "dtype": (None, torch.bfloat16),
        },
    ),
    "PackedSequences": (
        te.PackedSequences, _sequences,
        {
            "cu_q": ([0, 3, 5], [0, 2, 5]), "cu_kv": (None, [0, 4, 6]), "cu_q_padded": (None, [0, 4, 8]),
            "cu_kv_padded": (None, [0, 4, 8], {"cu_kv": [0, 3, 5]}), "max_q": (None, 7),
            "max_kv": (None, 7), "device": (None, "meta"),
        },
    ),
    "make_graphed": (
        te.make_graphed, _graphed,
        {
            "sample": (None, torch.ones(4)), "in_flight": (1, 3), "limit": (8, 1),
            "copies": (True, False), "warmup": (3, 1),
        },
    ),
    "warmup": (te.warmup, _warmed, {"passes": (3, 1)}),
    "save_file": (te.save_file, _saved, {"metadata": (None, {"a": "b"})}),
    "load_file": (te.load_file, _loaded, {"strict": (False, True)}),
    "Sequential": (te.Sequential, _pipeline, {"cuda_graph": (False, True)}),
    "prepare": (te.prepare, _prepared, {"recipe": (te.recipe.MXFP8BlockScaling(), te.recipe.DelayedScaling())}),
}  # fmt: skip
SUBJECTS = {"module", "model", "path"}  # what a function works on
KEYWORDS = [
    pytest.param(name, keyword, id=f"{name}-{keyword}")
    for name, (_, _, options) in THINGS.items()
    for keyword in options
]
# Those of `quantize` and `autocast` are in test_k31_recipes.py, those of `tune` in tests/runtime/test_tune.py; the
# arguments of `checkpoint` belong to what it calls.
ELSEWHERE = {"quantize", "tune", "checkpoint", "autocast"}


def test_every_public_function_and_keyword_is_in_the_table() -> None:
    functions = {
        name for name, f in vars(te).items()
        if inspect.isfunction(f) and keywords(f) and not name.startswith(("_", "register_"))
    }  # fmt: skip
    assert functions - {"pointwise"} <= set(THINGS) | ELSEWHERE
    for name, (thing, _, options) in THINGS.items():
        assert set(keywords(thing)) - SUBJECTS == set(options), name


@pytest.mark.parametrize(("name", "keyword"), KEYWORDS)
def test_keyword_changes_something(name: str, keyword: str, tmp_path: Path) -> None:
    _, observe, options = THINGS[name]
    a, b, *more = options[keyword]
    fixed = more[0] if more else {}
    seen = [_seen(lambda v=v: observe({**fixed, keyword: v}, tmp_path)) for v in (a, b)]
    assert not (seen[0] and seen[0][0] == "error"), seen[0]
    assert differs(*seen)


@pytest.mark.parametrize("name", THINGS)
def test_unknown_keywords_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        THINGS[name][1]({"interval": 1}, tmp_path)
