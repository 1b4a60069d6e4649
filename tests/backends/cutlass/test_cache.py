"""Keys and files of compiled GEMMs."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from te_ops.backends.cutlass import cache, versions
from te_ops.backends.cutlass.spec import Epilogue, GemmSpec, Load, Quantized, Tiling
from te_ops.errors import PlanError
from tests.backends.cutlass.fake import OTHER, PLAIN

ARCH = "sm_90"


def written(spec: GemmSpec, path: Path) -> None:
    path.write_text(spec.key)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cutlass"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", str(path))
    monkeypatch.setenv("TE_OPS_AOT_DIR", "off")
    return path


# -- specs as keys

FULL = GemmSpec(
    "e4m3",
    "e5m2",
    Epilogue("f", "def f(x): ...", 1, True, (Load("row", "bf16"),), 2, quantized=Quantized("e4m3")),
    Tiling(128, 192, pingpong=True),
    scaled=True,
)


@pytest.mark.parametrize("spec", [PLAIN, OTHER, FULL], ids=["plain", "scaled", "full"])
def test_spec_survives_json(spec: GemmSpec) -> None:
    again = GemmSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.key == spec.key


def test_what_is_no_spec_is_refused() -> None:
    with pytest.raises(PlanError, match=r"this is no GemmSpec: .*colour"):
        GemmSpec.from_dict({**PLAIN.to_dict(), "colour": "red"})
    with pytest.raises(PlanError, match="this is no GemmSpec"):
        GemmSpec.from_dict({"a": "bf16"})


def test_key_holds_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache.key_of(PLAIN, ARCH), cache.key_of(OTHER, ARCH), cache.key_of(PLAIN, "sm_100")}
    keys.add(cache.key_of(replace(PLAIN, epilogue=replace(PLAIN.epilogue, text="edited")), ARCH))
    monkeypatch.setattr(cache, "versions", lambda *_: {versions.DSL: "99"})
    keys.add(cache.key_of(PLAIN, ARCH))
    monkeypatch.setattr(cache, "source_hash", lambda *_: "edited")
    keys.add(cache.key_of(PLAIN, ARCH))
    assert len(keys) == 6
    assert cache.key_of(PLAIN, "sm_90a") == cache.key_of(PLAIN, ARCH)


def test_an_edited_epilogue_operation_is_another_key(tmp_path: Path) -> None:
    """Also one that is imported inside of a function, and by a module between."""
    package = cache.__package__
    (tmp_path / "gemm.py").write_text(f"def f():\n    from {package} import middle\n")
    (tmp_path / "middle.py").write_text(f"import {package}.stores\n")
    (tmp_path / "stores.py").write_text("STORE = 1\n")
    (tmp_path / "plans.py").write_text("PLAN = 1\n")
    before = cache.hash_of(tmp_path)
    (tmp_path / "plans.py").write_text("PLAN = 2\n")
    assert cache.hash_of(tmp_path) == before
    (tmp_path / "stores.py").write_text("STORE = 2\n")
    assert cache.hash_of(tmp_path) != before


def test_closure_follows_a_name_in_a_text(tmp_path: Path) -> None:
    (tmp_path / "gemm.py").write_text(f'load("{cache.__package__}.stores")\n')
    (tmp_path / "stores.py").write_text("")
    assert {p.stem for p in cache.closure(tmp_path, "gemm")} == {"gemm", "stores"}


def test_source_hash_covers_this_package() -> None:
    found = {p.stem for p in cache.closure(Path(cache.__file__).parent, cache.COMPILER)}
    assert {"gemm", "spec", "stores"} <= found
    assert found.isdisjoint({"runtime", "cache", "pool"})


# -- files


def test_made_once_and_found(folder: Path) -> None:
    calls = []

    def compiled(spec: GemmSpec, path: Path) -> None:
        calls.append(spec)
        written(spec, path)

    assert cache.find(PLAIN, ARCH) is None
    path = cache.make(PLAIN, ARCH, folder, compiled)
    assert cache.make(PLAIN, ARCH, folder, compiled) == path == cache.find(PLAIN, ARCH)
    assert path.read_text() == PLAIN.key
    assert calls == [PLAIN]
    info = json.loads(path.with_suffix(".json").read_text())
    assert GemmSpec.from_dict(info["spec"]) == PLAIN
    assert info["arch"] == "sm_90a"
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".lock", ".o"]


@pytest.mark.parametrize("damage", ["cut", "empty", "no info", "half info"])
def test_damaged_file_is_made_again(folder: Path, damage: str) -> None:
    path = cache.make(PLAIN, ARCH, folder, written)
    info = path.with_suffix(".json")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no info":
        info.unlink()
    else:
        info.write_text(info.read_text()[:30])
    assert cache.find(PLAIN, ARCH) is None
    assert cache.make(PLAIN, ARCH, folder, written) == path
    assert cache.find(PLAIN, ARCH) == path


def test_nothing_stays_of_a_compilation_that_fails(folder: Path) -> None:
    def fails(spec: GemmSpec, path: Path) -> None:
        path.write_text("half")
        raise PlanError("no")

    with pytest.raises(PlanError, match="no"):
        cache.make(PLAIN, ARCH, folder, fails)
    assert [p.suffix for p in folder.iterdir()] == [".lock"]
    assert cache.make(PLAIN, ARCH, folder, written).read_text() == PLAIN.key


def test_folder_made_ahead_of_time_comes_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = tmp_path / "ahead"
    ahead.mkdir(mode=0o755)
    cache.make(PLAIN, ARCH, folder, written)
    made = cache.make(PLAIN, ARCH, ahead, written)
    monkeypatch.setenv("TE_OPS_AOT_DIR", str(ahead))
    assert cache.find(PLAIN, ARCH) == made
    assert cache.find(OTHER, ARCH) is None
    made.write_text("damaged")
    assert cache.find(PLAIN, ARCH) == folder / made.name


def test_folder_that_others_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TE_OPS_AOT_DIR", str(tmp_path))
    with pytest.raises(PlanError, match="its files run as code"):
        cache.find(PLAIN, ARCH)
    monkeypatch.setenv("TE_OPS_AOT_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(PlanError, match="is no folder"):
        cache.find(PLAIN, ARCH)
    monkeypatch.setenv("TE_OPS_AOT_DIR", "off")
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", str(tmp_path))
    with pytest.raises(PlanError, match="can be written by others"):
        cache.find(PLAIN, ARCH)


# -- several processes


def _make(folder: str, log: str) -> None:
    def slow(spec: GemmSpec, path: Path) -> None:
        with open(log, "a") as file:  # noqa: PTH123  (appending is what counts)
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        written(spec, path)

    cache.make(PLAIN, ARCH, Path(folder), slow)


def test_processes_of_a_machine_compile_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_make, args=(str(folder), str(log))) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert len(log.read_text().splitlines()) == 1


_DIES = """
import sys, time
from pathlib import Path
from te_ops.backends.cutlass import cache
from tests.backends.cutlass.fake import PLAIN

def never(spec, path):
    path.write_text("half")
    print("locked", flush=True)
    time.sleep(60)

cache.make(PLAIN, "sm_90", Path(sys.argv[1]), never)
"""


def test_the_death_of_who_holds_the_lock_is_survived(folder: Path) -> None:
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", _DIES, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        holder.send_signal(signal.SIGKILL)
    assert cache.make(PLAIN, ARCH, folder, written).read_text() == PLAIN.key
    shutil.rmtree(folder)


# -- versions


@pytest.mark.parametrize(
    ("package", "version", "why"),
    [
        (versions.DSL, "4.8.1", None),
        (versions.DSL, "4.8", None),
        (versions.DSL, "4.8.0", None),
        (versions.DSL, "5.0.0", None),
        (versions.DSL, "4.5.1", "drops predicated copies"),
        (versions.DSL, "4.5.2", "quack 0.6 needs 4.7"),
        (versions.DSL, "4.3.5", "only beside a driver"),
        (versions.DSL, "4.7.1", "only 4.8 is known to compile"),
        (versions.QUACK, "0.6.5", None),
        (versions.QUACK, "0.6.11.post1", None),
        (versions.QUACK, "0.7.0", "not stable"),
        (versions.QUACK, "0.5.9", "another interface"),
        (versions.FFI, "0.1.15.post2", None),
        (versions.FFI, "0.1.5", "0.1.6 or later"),
    ],
)
def test_versions_that_are_not_used(package: str, version: str, why: str | None) -> None:
    found = versions.denied(package, version)
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"{package} {version} is not used: ")
        assert why in found
        assert versions.INSTALL in found


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions.importlib.util.find_spec
    monkeypatch.setattr(
        versions.importlib.util, "find_spec", lambda n: None if n == "quack" else real(n)
    )
    reason = versions.missing.__wrapped__()
    assert reason is not None
    assert versions.INSTALL in reason
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda n: object())
    monkeypatch.setattr(versions, "installed", {versions.DSL: "4.5.0"}.get)
    assert "not used: with its CUDA 13" in versions.missing.__wrapped__()
    monkeypatch.setattr(versions, "installed", {versions.DSL: "4.8.1"}.get)
    assert "quack-kernels has no metadata" in versions.missing.__wrapped__()


@pytest.mark.parametrize(
    ("arch", "name"), [("sm_90", "sm_90a"), ("sm_100a", "sm_100a"), ("sm_80", "sm_80")]
)
def test_target(arch: str, name: str) -> None:
    assert versions.target(arch) == name
    assert versions.environment(arch)["CUTE_DSL_ARCH"] == name
    assert versions.environment(arch)["QUACK_ARCH"] == name.strip("sm_a")


def test_modules_that_a_program_blocks_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocks:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "quack":
                raise ImportError("blocked")

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "quack", raising=False)
        patch.setattr(sys, "meta_path", [Blocks, *sys.meta_path])
        assert "quack-kernels is missing" in versions.missing.__wrapped__()
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))  # as programs stub it
    assert "triton is missing" in versions.missing.__wrapped__()
