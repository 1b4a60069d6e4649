"""K07: saving, loading, pickling and copying, for every recipe."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_mode, every_quantizer, every_usage


def model() -> te.Sequential:
    torch.manual_seed(4)
    return te.Sequential(te.RMSNorm(32), te.Linear(32, 48), te.GELU(), te.Linear(48, 32))


def trained(recipe: te.Recipe | None, steps: int = 3) -> te.Sequential:
    m = model()
    for i in range(steps):
        cases.step(m, ((i + 1.0) * torch.randn(4, 32),), recipe)
    m.zero_grad()
    return m


def next_step(m: nn.Module, recipe: te.Recipe | None) -> cases.Result:
    torch.manual_seed(8)
    return cases.step(m, (torch.randn(4, 32, requires_grad=True),), recipe)


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    made: dict[str, Any] = torch.load(buffer, weights_only=True)
    return made


def through_safetensors(state: dict[str, Any]) -> dict[str, Any]:
    st = pytest.importorskip("safetensors.torch")
    made: dict[str, Any] = st.load(st.save({k: v.contiguous() for k, v in state.items()}))
    return made


@pytest.mark.parametrize(
    "way", [through_torch, through_safetensors, dict], ids=["torch", "safetensors", "dict"]
)
@every_mode
def test_round_trip_into_a_fresh_model_is_strict_and_exact(
    recipe: te.Recipe | None, way: Any
) -> None:
    """B041: every value is a tensor; the next step is that of the saved model, bit for bit."""
    m = trained(recipe)
    state = m.state_dict()
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    assert all("_extra_state" not in k for k in state)
    loaded = way({k: v.clone() for k, v in state.items()})
    fresh = model()
    assert fresh.load_state_dict(loaded, strict=True).missing_keys == []
    again = fresh.state_dict()
    assert set(again) == set(state)
    assert all(torch.equal(again[k], v) and again[k].dtype is v.dtype for k, v in state.items())
    cases.same(next_step(fresh, recipe), next_step(m, recipe))


@every_mode
def test_state_does_not_depend_on_the_context_it_is_saved_in(recipe: te.Recipe | None) -> None:
    m = trained(recipe)
    outside = m.state_dict()
    with cases.within(recipe):
        inside = m.state_dict()
    with te.autocast(enabled=False):
        disabled = m.state_dict()
    assert list(outside) == list(inside) == list(disabled)
    stateful = any(".delayed." in k for k in outside)
    assert stateful == (recipe in [cases.RECIPES[n] for n in cases.DELAYED])


def test_names_of_delayed_state() -> None:
    m = trained(te.recipe.DelayedScaling())
    names = {
        f"{op}.quantizer.delayed.{operand}.{part}"
        for op in ("1", "3")
        for operand in ("input", "weight", "grad_output")
        for part in ("scale", "amax_history", "nonfinite_steps")
    }
    assert {k for k in m.state_dict() if "delayed" in k} == names


@every_mode
def test_saved_before_any_forward(recipe: te.Recipe | None) -> None:
    m = model()
    state = through_torch(m.state_dict())
    fresh = trained(recipe, 0)
    fresh.load_state_dict(state)
    cases.same(next_step(fresh, recipe), next_step(m, recipe))


@every_mode
def test_plain_torch_checkpoints_load_and_ours_load_there(recipe: te.Recipe | None) -> None:
    """B039, strictly, in both directions; state that is there starts fresh or stays."""
    theirs = nn.Sequential(nn.Linear(10, 5), nn.GELU(approximate="tanh"), nn.Linear(5, 10))
    ours = te.Sequential(te.Linear(10, 5), te.GELU(), te.Linear(5, 10))
    assert ours.load_state_dict(theirs.state_dict(), strict=True).unexpected_keys == []
    x = torch.randn(3, 10)
    torch.testing.assert_close(ours(x), theirs(x))
    back = nn.Sequential(nn.Linear(10, 5), nn.GELU(approximate="tanh"), nn.Linear(5, 10))
    back.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(back(x), theirs(x))
    fresh = te.Sequential(te.Linear(10, 5), te.GELU(), te.Linear(5, 10))
    fresh.load_state_dict(theirs.state_dict(), strict=True)
    with cases.within(recipe):
        fresh(x).sum().backward()


def test_norms_and_embeddings_load_from_torch() -> None:
    for ours, theirs in (
        (te.LayerNorm(8), nn.LayerNorm(8)),
        (te.RMSNorm(8), nn.RMSNorm(8)),
        (te.Embedding(5, 8), nn.Embedding(5, 8)),
        (te.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)),
    ):
        ours.load_state_dict(theirs.state_dict(), strict=True)
        x = torch.tensor([0, 4, 2]) if isinstance(ours, te.Embedding) else torch.randn(3, 8)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
        theirs.load_state_dict(ours.state_dict(), strict=True)


def test_unknown_and_missing_keys_are_reported() -> None:
    recipe = te.recipe.DelayedScaling()
    state = trained(recipe).state_dict()
    broken = dict(state)
    del broken["1.quantizer.delayed.input.scale"]
    with pytest.raises(RuntimeError, match=r"quantizer\.delayed\.input\.scale"):
        model().load_state_dict(broken, strict=True)
    with pytest.raises(RuntimeError, match="sclae"):
        model().load_state_dict(
            {**state, "1.quantizer.delayed.input.sclae": torch.ones(1)}, strict=True
        )


@pytest.mark.parametrize("length", [1, 2, 9])
def test_history_of_another_length_loads(length: int) -> None:
    m = trained(te.recipe.DelayedScaling(amax_history_len=length))
    fresh = trained(te.recipe.DelayedScaling(amax_history_len=4))
    fresh.load_state_dict(m.state_dict(), strict=True)
    assert fresh[1].quantizer.delayed.input.amax_history.shape == (length,)


# -- copies


def _pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("way", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
@every_mode
def test_copied_models_go_on_alone_and_alike(recipe: te.Recipe | None, way: Any) -> None:
    """B043."""
    m = trained(recipe)
    twin = way(m)
    for (name, a), b in zip(m.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        assert a.data_ptr() != b.data_ptr(), name
    assert "_te_cache" not in twin.__dict__
    cases.same(next_step(twin, recipe), next_step(m, recipe))
    before = {k: v.clone() for k, v in m.state_dict().items()}
    for _ in range(2):
        cases.step(twin, (5 * torch.randn(4, 32),), recipe)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    assert all(torch.equal(before[k], v) for k, v in m.state_dict().items())


@pytest.mark.parametrize("way", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
@every_case
def test_every_op_can_be_copied_after_use(case: Case, way: Any) -> None:
    op, xs = case.fresh(), case.data(5)
    wanted = cases.run(op, xs)
    op.zero_grad()
    twin = way(op)
    cases.same(cases.run(twin, case.data(5)), wanted)
    assert repr(twin) == repr(op)


def test_shared_weights_stay_shared() -> None:
    s = te.Sequential(te.Linear(8, 8), te.Linear(8, 8))
    s[1].weight = s[0].weight
    for way in (copy.deepcopy, _pickled):
        twin = way(s)
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight is not s[0].weight


def test_requires_grad_and_training_are_copied() -> None:
    s = model().eval()
    s[1].weight.requires_grad_(False)
    for way in (copy.deepcopy, _pickled):
        twin = way(s)
        assert not twin.training
        assert [p.requires_grad for p in twin.parameters()] == [
            p.requires_grad for p in s.parameters()
        ]


# -- quantized tensors


def same_bytes(a: te.QuantizedTensor, b: te.QuantizedTensor) -> None:
    assert a.quantizer == b.quantizer
    assert a.dtype is b.dtype
    assert a.requires_grad == b.requires_grad
    for r, s in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        assert (r is None) == (s is None)
        for t, u in zip(
            () if r is None else r.tensors(), () if s is None else s.tensors(), strict=True
        ):
            assert t.dtype is u.dtype
            assert torch.equal(t.float(), u.float())
            assert t.data_ptr() != u.data_ptr()


def _saved(q: te.QuantizedTensor) -> te.QuantizedTensor:
    made: te.QuantizedTensor = through_torch({"q": q})["q"]
    return made


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, _pickled, _saved, torch.clone],
    ids=["deepcopy", "pickle", "save", "clone"],
)
@every_usage
@every_quantizer
def test_quantized_tensors_survive(
    quantizer: te.Quantizer, rowwise: bool, columnwise: bool, way: Any
) -> None:
    """B043: no requantize, no cast, independent storage."""
    q = cases.make_quantized(torch.randn(33, 48), quantizer, rowwise=rowwise, columnwise=columnwise)
    same_bytes(way(q), q)


@every_usage
@every_quantizer
def test_staging_for_an_asynchronous_checkpoint(
    quantizer: te.Quantizer, rowwise: bool, columnwise: bool
) -> None:
    """B045."""
    q = cases.make_quantized(torch.randn(33, 48), quantizer, rowwise=rowwise, columnwise=columnwise)
    staged = torch.empty_like(q, device="cpu")
    assert isinstance(staged, te.QuantizedTensor)
    staged.copy_(q)
    same_bytes(staged, q)
    same_bytes(q.to("cpu", copy=True), q)
    assert q.new_empty((33, 48)).shape == q.shape
