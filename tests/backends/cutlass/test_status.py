"""What `te-ops info` says of fused GEMMs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from te_ops.backends.cutlass import cache, status, versions
from te_ops.backends.cutlass.spec import GemmSpec
from tests.backends.cutlass.fake import OTHER, PLAIN


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The cache and the folder made ahead of time."""
    made = tmp_path / "cutlass", tmp_path / "ahead"
    for folder in made:
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", str(made[0]))
    monkeypatch.setenv("TE_OPS_AOT_DIR", str(made[1]))
    monkeypatch.delenv("TE_OPS_JIT", raising=False)
    return made


def written(spec: GemmSpec, path: Path) -> None:
    path.write_text(spec.key)


def test_shows_what_lies_in_folders(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ahead = folders
    cache.make(PLAIN, "sm_90", ahead, written)
    with monkeypatch.context() as other:
        other.setattr(cache, "source_hash", lambda *_: "of another version")
        cache.make(OTHER, "sm_90", ahead, written)
    (ahead / "manifest.json").write_text("{}")
    (ahead / "half.json").write_text("{")
    (ahead / "bare.json").write_text('{"digest": 1}')
    said = {"passed": True, "device": "a GPU", "arch": "sm_90a", "versions": versions.versions()}
    (own / "selftest-1.json").write_text(json.dumps(said))
    (own / "selftest-2.json").write_text(json.dumps({**said, "versions": {}}))
    found = json.loads(json.dumps(status.collect()))
    assert found["jit"] == "async"
    assert found["ahead of time"] == {"folder": str(ahead), "kernels": 3, "of this version": 1}
    text = "\n".join(status.lines(found))
    assert f"{ahead}, 3 kernels, 1 of this version" in text
    assert text.count("self-test on") == 1
    assert "self-test on a GPU (sm_90a): passed" in text


def test_shows_a_test_that_failed(folders: tuple[Path, Path]) -> None:
    said = {"passed": False, "why": "y is wrong", "device": "a GPU", "arch": "sm_90a"}
    (folders[0] / "selftest-1.json").write_text(
        json.dumps({**said, "versions": versions.versions()})
    )
    assert status.lines(status.collect())[-1].endswith("(sm_90a): y is wrong")


@pytest.mark.parametrize(
    ("name", "value"), [("JIT", "perhaps"), ("CUTLASS", "perhaps"), ("JIT_WORKERS", "0")]
)
def test_a_wrong_setting_is_shown_and_breaks_nothing(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TE_OPS_{name}", value)
    found = status.collect()
    assert f"TE_OPS_{name} is" in found["wrong"]
    assert f"not used: TE_OPS_{name} is" in status.lines(found)[-1]


def test_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", "off")
    monkeypatch.setenv("TE_OPS_AOT_DIR", "off")
    monkeypatch.setattr(versions, "missing", lambda: "not available: quack-kernels is missing")
    monkeypatch.setattr(versions, "versions", lambda: {versions.QUACK: ""})
    lines = status.lines(status.collect())
    assert (
        lines[0] == "Fused GEMMs: not available: quack-kernels is missing (quack-kernels missing)"
    )
    assert lines[1].endswith("compiled ahead of time: none")
