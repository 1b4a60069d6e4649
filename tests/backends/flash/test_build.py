"""Specs and their compiled kernels: keys, text of score modifiers, and code for Hopper without a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from te_ops.backends.cutlass import aot, cache, pool
from te_ops.backends.cutlass import versions as packages
from te_ops.backends.cutlass.family import FAMILIES, FLASH
from te_ops.backends.cutlass.gemm import device_code
from te_ops.backends.flash import versions
from te_ops.backends.flash.score import text_of
from te_ops.backends.flash.spec import FlashSpec
from te_ops.basic.score import Score, soft_cap
from te_ops.errors import PlanError
from te_ops.pointwise import elementwise

TEXT = text_of(soft_cap(30.0), backward=True)
CAPPED = FlashSpec(
    True, "bf16", 64, 64, 2,
    mask="window", left=True, right=True, packed=True,
    score=TEXT.source, function=TEXT.function, gradient=TEXT.gradient, inputs=TEXT.inputs,
)  # fmt: skip
PLAIN = FlashSpec(False, "bf16", 64, 64)


def test_spec_survives_json() -> None:
    for spec in (PLAIN, CAPPED):
        again = FAMILIES["flash"].read(json.loads(json.dumps(spec.to_dict())))
        assert again == spec
        assert again.key == spec.key
    with pytest.raises(PlanError, match="this is no FlashSpec"):
        FlashSpec.from_dict({"colour": "red"})


def test_key_holds_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [replace(PLAIN, **{name: value}) for name, value in (("values", 32), ("packed", True))]
    keys = {cache.key_of(spec, "sm_90") for spec in (PLAIN, CAPPED, *others)}
    assert len(keys) == 4
    monkeypatch.setattr(packages, "installed", lambda name: "9" if name == FLASH else "1")
    keys.add(cache.key_of(PLAIN, "sm_90"))
    monkeypatch.setattr(cache, "source_hash", lambda family: f"edited {family}")
    keys.add(cache.key_of(PLAIN, "sm_90"))
    assert len(keys) == 6


def test_source_hash_covers_what_is_traced() -> None:
    folder = Path(versions.__file__).parent
    found = {p.stem for p in cache.closure(folder, "build", FAMILIES["flash"].package)}
    assert found == {"build", "kernel", "limits", "persistent", "spec"}
    assert cache.source_hash("flash") not in ("", cache.source_hash())


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str | None] = {FLASH: versions.KNOWN[0]}
    monkeypatch.setattr(packages, "missing", lambda: None)
    monkeypatch.setattr(packages, "installed", lambda name: found[name])
    assert versions.missing() is None
    found[FLASH] = None
    assert "flash-attn-4 is missing; pip install 'te_ops[flash]'" in (versions.missing() or "")
    found[FLASH] = "4.0.0b1"
    assert "4.0.0b1 is not used: its classes change" in (versions.missing() or "")
    monkeypatch.setattr(packages, "missing", lambda: "no compiler")
    assert versions.missing() == "no compiler"


def test_modifier_and_gradient_are_text() -> None:
    assert f"def {TEXT.function}(x0):" in TEXT.source
    assert f"def {TEXT.gradient}(x0, x1):" in TEXT.source
    exact = text_of(soft_cap(30.0), backward=True, exact=True)
    assert exact.source.count("def _tanh(") == TEXT.source.count("def _tanh(") + 1, (
        "ours replaces it"
    )
    assert "/ 30.0" not in TEXT.source
    assert text_of(soft_cap(30.0), backward=False).gradient == ""
    assert text_of(None, backward=True).source == ""


@pytest.mark.skipif(versions.missing() is not None, reason=str(versions.missing()))
def test_compiles_without_a_device(tmp_path: Path) -> None:
    """Everything at once: a window of packed tokens, shared keys, a modifier, and its gradient."""
    worker = pool.Worker("sm_90")
    try:
        worker.compile(CAPPED, tmp_path / "kernel.o")
    finally:
        worker.close()
    code = device_code((tmp_path / "kernel.o").read_bytes())
    assert b"FlashAttentionBackwardSm90" in code
    assert code.count(b"FlashAttentionBackwardPostprocess") > 0


@pytest.mark.skipif(versions.missing() is not None, reason=str(versions.missing()))
def test_blocks_of_threads_that_stay_compile(tmp_path: Path) -> None:
    """Packed tokens, a window, shared keys that do not divide a block of rows, a modifier that captures, a sink."""
    scaled = elementwise("scaled", lambda s, c, h, i: s * c + h - i, *["value"] * 4)
    text = text_of(Score(scaled, ("s", "captured_c", "head", "i")), backward=False)
    spec = FlashSpec(
        False, "bf16", 80, 72, 7, "window", left=True, packed=True, sink=True,
        score=text.source, function=text.function, inputs=text.inputs,
    )  # fmt: skip
    worker = pool.Worker("sm_90")
    try:
        worker.compile(spec, tmp_path / "kernel.o")
    finally:
        worker.close()
    assert b"Persistent" in device_code((tmp_path / "kernel.o").read_bytes())


def test_files_of_specs_are_read_by_family(tmp_path: Path) -> None:
    """As they lie beside a compiled kernel."""
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([{"family": "flash", "spec": CAPPED.to_dict()}]))
    found = aot._specs(aot._parser().parse_args(["--spec", str(path)]), "sm_90")
    assert CAPPED in found.values()
    assert any(name.startswith("backward bf16, 64/64 features") for name in found)
    path.write_text(json.dumps({"family": "other", "spec": {}}))
    with pytest.raises(PlanError, match="family 'other', of which there are gemm, flash"):
        aot._specs(aot._parser().parse_args(["--spec", str(path)]), "sm_90")
