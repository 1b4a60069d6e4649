"""What is compiled ahead of time."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from te_ops.backends.cutlass import aot, cache, limits, manifest, selftest, versions
from te_ops.backends.cutlass.pool import Pool
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.errors import PlanError
from tests.backends.cutlass.fake import OTHER, PLAIN, Compiler, command

# -- the manifest


def test_has_what_the_models_ask_for() -> None:
    rows = manifest.rows()
    assert set(selftest.specs()) <= set(rows.values())
    assert all(limits.refuse(spec) is None for spec in rows.values())
    kinds = {name.split(" [")[0] for name in rows}
    for fast in ("fast", "split"):
        assert f"e4m3*e4m3 {fast} pair->1 acc:bf16 e4m3:row+col+amax" in kinds
        assert f"e5m2*e4m3 {fast} 1->2 tiles:bf16 e5m2:row+col+amax" in kinds
        assert f"e4m3*e4m3 {fast} 1->1 row:bf16 acc:bf16 e4m3:row+col+amax" in kinds
        assert f"e5m2*e4m3 {fast} 1->1 tile:bf16 row:bf16 e5m2:row+col+amax sums" in kinds
        assert f"e5m2*e4m3 {fast} plain y+=fp32" in kinds
    assert "bf16*bf16 pair->1 acc:bf16 y:bf16" in kinds
    assert list(rows) == sorted(rows)


def test_is_what_each_architecture_has() -> None:
    hopper, blackwell = (
        set(manifest.rows(["llama-8b"], arch=arch).values()) for arch in manifest.ARCHES
    )
    assert {s.epilogue for s in blackwell if not s.blocks} < {s.epilogue for s in hopper}
    assert all(limits.refuse(spec, "sm_100a") is None for spec in blackwell)
    assert set(selftest.specs("sm_90")) <= hopper
    assert set(selftest.specs("sm_100")) <= blackwell


def test_is_the_same_every_time() -> None:
    assert manifest.rows() == manifest.rows()


def test_one_model_with_every_tiling() -> None:
    few, many = manifest.rows(["projection"]), manifest.rows(["projection"], every=True)
    assert len(few) < len(many)
    assert {s.epilogue for s in many.values()} == {s.epilogue for s in few.values()}
    with pytest.raises(PlanError, match=r"no model is named 'gpt'; models: llama-8b, "):
        manifest.rows(["gpt"])


# -- the command


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In place of the worker processes."""
    made = Compiler()

    class InProcess:
        def __init__(self, arch: str, most: int) -> None:
            pass

        def submit(self, job: Callable[..., Path]) -> Future[Path]:
            future: Future[Path] = Future()
            try:
                future.set_result(job(made.compile_to))
            except PlanError as error:
                future.set_exception(error)
            return future

        def close(self) -> None:
            pass

    monkeypatch.setattr(aot, "Pool", InProcess)
    monkeypatch.setattr(selftest, "KINDS", {"BF16": PLAIN})
    monkeypatch.setattr(selftest, "BLOCK_KINDS", {})
    monkeypatch.setattr(versions, "missing", lambda: None)
    return made


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A file with two specs: one as it is, one as it lies beside a compiled kernel."""
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([PLAIN.to_dict(), {"format": 1, "spec": OTHER.to_dict()}]))
    return path


def test_writes_a_folder_that_programs_find(
    compiler: Compiler,
    specs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = ["--arch", "sm_90a", "sm_100a", "--spec", str(specs), "--out", str(out)]
    assert aot.main(arguments) == 0
    assert "2 kernels for sm_100a" in capsys.readouterr().out
    monkeypatch.setenv("TE_OPS_AOT_DIR", str(out))
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", "off")
    for arch in ("sm_90", "sm_100"):
        for spec in (PLAIN, OTHER):
            found = cache.find(spec, arch)
            assert found is not None
            assert found.read_text() == spec.key
            assert found.stat().st_mode == found.with_suffix(".json").stat().st_mode
    index = json.loads((out / aot.INDEX).read_text())
    assert index["sm_90a"][manifest.name_of(PLAIN)] == cache.key_of(PLAIN, "sm_90")
    assert stat.S_IMODE((out / aot.INDEX).stat().st_mode) == 0o644
    made = len(compiler.made)
    assert aot.main(arguments) == 0, "what is there is not compiled again"
    assert len(compiler.made) == made == 4


def test_specs_come_with_the_self_test(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing else compiles, none would be used without it."""
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"spec": OTHER.to_dict()}))
    assert aot.main(["--spec", str(path), "--out", str(tmp_path / "out")]) == 0
    assert set(compiler.made) == {OTHER, PLAIN}


def test_without_out_it_is_the_folder_that_is_looked_into(
    compiler: Compiler, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TE_OPS_AOT_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", "off")
    assert aot.main(["--spec", str(specs)]) == 0
    assert cache.find(PLAIN, "sm_90") is not None


def test_list_compiles_nothing(
    compiler: Compiler, specs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert aot.main(["--list", "--spec", str(specs), "--out", str(out)]) == 0
    assert not out.exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["sm_90a", "missing"]] * 2
    aot.main(["--spec", str(specs), "--out", str(out)])
    capsys.readouterr()
    aot.main(["--list", "--spec", str(specs), "--out", str(out)])
    assert capsys.readouterr().out.count("compiled") == 2


def test_says_which_kernels_failed(
    compiler: Compiler, specs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.error = PlanError("ptxas gives up")
    assert aot.main(["--spec", str(specs), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.count("ptxas gives up") == 2
    assert manifest.name_of(PLAIN) in said


def test_a_damaged_index_is_written_anew(compiler: Compiler, specs: Path, tmp_path: Path) -> None:
    for damaged in ("{", "[]"):
        (tmp_path / aot.INDEX).write_text(damaged)
        assert aot.main(["--spec", str(specs), "--out", str(tmp_path)]) == 0
        assert manifest.name_of(PLAIN) in json.loads((tmp_path / aot.INDEX).read_text())["sm_90a"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "sm_80"], "choose from"),
        (["--arch", "hopper"], "choose from"),
        (["--processes", "0"], "a whole number from 1 on, got '0'"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        aot.main(["--list", *arguments])
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(
    compiler: Compiler, specs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert aot.main(["--spec", str(specs), "--out", f"{specs}/out"]) == 2
    assert "--out" in capsys.readouterr().err
    assert compiler.made == []


@pytest.mark.parametrize("text", ["no json", '[{"a": "bf16"}]', '["spec"]'])
def test_file_that_holds_no_specs(
    text: str, tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    assert aot.main(["--spec", str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err


def test_without_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, specs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "missing", lambda: "not available: quack-kernels is missing")
    assert aot.main(["--spec", str(specs)]) == 2
    assert "quack-kernels is missing" in capsys.readouterr().err


def test_is_a_module_that_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "te_ops.backends.cutlass.aot", "--list", "--model", "projection"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sm_90a" in done.stdout


def test_workers_make_the_files(tmp_path: Path) -> None:
    """As the command does it, with processes."""
    pool = Pool("sm_90", 2, command())
    try:
        started = aot.compile_all({"a": PLAIN, "b": OTHER}, "sm_90", tmp_path, pool)
        for spec, future in started.values():
            assert future.result(100).read_text() == f"{spec.key} sm_90a sm_90a 90"
    finally:
        pool.close()


def test_keys_of_rows_are_different() -> None:
    rows: dict[str, GemmSpec] = manifest.rows(["projection"], every=True)
    assert len({cache.key_of(spec, "sm_90") for spec in rows.values()}) == len(rows)
