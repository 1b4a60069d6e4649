"""Plans on disk: the next process builds nothing, and whatever does not fit is built anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from te_ops.backends.cudnn import blobs, plans
from te_ops.backends.cudnn.specs import spec_of
from tests.backends.cudnn import test_launch as dense
from tests.backends.cudnn.fake import FakeCudnn
from tests.backends.cudnn.problems import Case


@pytest.fixture
def folder(cudnn: FakeCudnn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "plans"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_PLAN_CACHE", str(made))
    return made


def built(cudnn: FakeCudnn) -> int:
    return sum("check_support" in graph.steps and graph._plans != [] for graph in cudnn.graphs)


def test_the_next_process_loads(cudnn: FakeCudnn, folder: Path) -> None:
    for _ in range(2):  # forgetting plans is what a new process does
        dense.GEN.manual_seed(0)
        dense.agree(*dense.causal())
        dense.agree(*dense.tokens())
        plans.forget()
    assert len(list(folder.iterdir())) == 4
    assert built(cudnn) == 4
    assert len(cudnn.calls) == 8
    assert cudnn.public == 0, "loaded plans are issued as directly as built ones"


def test_loaded_plans_may_lack_the_direct_call(
    cudnn: FakeCudnn, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense.agree(*dense.causal())
    plans.forget()
    monkeypatch.setattr("tests.backends.cudnn.fake.FakeGraph._variant_pack_uids", lambda self: None)
    dense.agree(*dense.causal())
    assert built(cudnn) == 2
    assert cudnn.public == 2


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": "another"}\n0', None])
def test_damaged_files_are_built_anew(cudnn: FakeCudnn, folder: Path, damage: bytes | None) -> None:
    dense.agree(*dense.causal())
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x" if damage is None else damage)
    plans.forget()
    dense.agree(*dense.causal())
    assert built(cudnn) == 4


def test_what_is_in_the_key() -> None:
    spec = spec_of(Case().problem(), Case().operands())
    keys = {
        blobs.key_of(spec, "H200, cuDNN 91900", None),
        blobs.key_of(spec, "H200, cuDNN 91901", None),
        blobs.key_of(spec, "H200, cuDNN 91900", "eng6"),
        blobs.key_of(replace(spec, deterministic=True), "H200, cuDNN 91900", None),
        blobs.key_of(replace(spec, strides=()), "H200, cuDNN 91900", None),
    }
    assert len(keys) == 5


def test_off_and_unwritable(
    cudnn: FakeCudnn, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OPS_PLAN_CACHE", "off")
    dense.agree(*dense.causal())
    assert not list(folder.iterdir())
    monkeypatch.setenv("TE_OPS_PLAN_CACHE", str(folder))
    folder.chmod(0o777)  # of others too: nothing is loaded from there
    plans.forget()
    dense.agree(*dense.causal())
    assert not list(folder.iterdir())


def test_the_choice_of_tuning_is_another_plan(cudnn: FakeCudnn, folder: Path) -> None:
    spec = spec_of(Case().problem(), Case().operands())
    place = plans.place(0)
    assert plans.plan(0, spec) is not None
    plans.forget()
    plans.TABLE.add(place, {spec.text: "second"})
    found = plans.plan(0, spec)
    assert found is not None
    assert found.name == "second"
