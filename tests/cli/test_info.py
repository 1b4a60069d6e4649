from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import te_ops
from te_ops.cli import info, main
from te_ops.registry import REGISTRY, ArchRange, Kernel


def _json(capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["info", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys)
    assert found["versions"]["te_ops"] == te_ops.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["arch"] == "cpu"
    assert found["backends"]["reference"] == {"included": True, "kernels": 1, "libraries": {}}
    assert {r["name"] for r in found["rules"]} >= {"norm_quantize", "gemm_epilogue"}


def test_kernels_say_why_they_are_not_available(capsys: pytest.CaptureFixture[str]) -> None:
    def bind(call: object) -> object:
        raise AssertionError("info binds nothing")

    made = [
        Kernel("gemm", "test.far", bind, ArchRange("sm_90+")),
        Kernel("gemm", "test.gone", bind, available=lambda: "its library is missing"),
    ]
    with REGISTRY.temporary(*made):
        found = {k["name"]: k["refused"] for k in _json(capsys)["kernels"]}
        assert main(["info"]) == 0
        shown = capsys.readouterr().out
    assert found["test.far"]["cpu"] == "needs sm_90+, the tensors are on cpu"
    assert found["test.gone"]["cpu"] == "its library is missing"
    assert found["reference"]["cpu"] is None
    assert "its library is missing" in shown


def test_libraries_are_reported_and_never_break_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "te_ops_test_fine.py").write_text("import warnings; warnings.warn('noisy')\n")
    (tmp_path / "te_ops_test_needs.py").write_text("import te_ops_test_absent\n")
    (tmp_path / "te_ops_test_bad.py").write_text("raise OSError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    why = {name: info._importable(f"te_ops_test_{name}") for name in ("fine", "needs", "bad", "no")}
    assert why == {
        "fine": None,
        "needs": "te_ops_test_absent is missing",
        "bad": "OSError: no driver",
        "no": "not installed",
    }


def test_caches_and_what_lies_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    (folder / "a.cubin").write_bytes(b"12345")
    (folder / "a.lock").touch()
    monkeypatch.setenv("TE_OPS_CUDA_CACHE", str(folder))
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", "off")
    found = _json(capsys)
    kernels, tuned = found["caches"]["compiled kernels"], found["caches"]["tuned products"]
    assert (kernels["folder"], kernels["files"], kernels["bytes"]) == (str(folder), 1, 5)
    assert (tuned["folder"], tuned["files"], tuned["refused"]) == (None, 0, None)
    assert all(count > 0 for count in found["measured"].values())
    folder.chmod(0o777)
    assert "can be written by others" in _json(capsys)["caches"]["compiled kernels"]["refused"]
    main(["info"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "can be written by others" in shown
    assert "Cache of tuned products (TE_OPS_TUNE_CACHE): none, or off" in shown


def test_variables_and_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TE_OPS_SOMETHING", "7")
    monkeypatch.setenv("TE_OPS_JIT", "off")
    monkeypatch.setitem(te_ops.registry.PLUGINS, "mine", "ValueError: broken")
    found = _json(capsys)
    assert found["unknown variables"] == ["TE_OPS_SOMETHING"]
    assert found["variables"]["TE_OPS_SOMETHING"] == "7"
    assert found["plugins"]["mine"] == "ValueError: broken"
    main(["info"])
    shown = capsys.readouterr().out
    assert "mine: ValueError: broken" in shown
    assert "not read by this version: TE_OPS_SOMETHING" in shown


def test_importing_the_command_imports_no_vendor_library_nor_matplotlib() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import te_ops.cli; "
        "absent = {'nvmath', 'cuda', 'cutlass', 'quack', 'cudnn', 'matplotlib'}; "
        "print(sorted(absent & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
