"""NVRTC: what compiles without spills, the cache, and what is said when something is missing."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import kernel_report
from te_ops.backends.cuda import KERNELS, launch
from te_ops.backends.cuda import compile as compiler
from te_ops.errors import PlanError
from te_ops.registry import REGISTRY

TEXT = 'extern "C" __global__ void k(float* p) { p[0] = 1.0f; }'
needs_nvrtc = pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / "kernels"
    monkeypatch.setenv("TE_OPS_CUDA_CACHE", str(made))
    compiler.forget()
    yield made
    compiler.forget()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures of every compilation, which costs nothing here."""
    seen: list[str] = []

    def fake(text: str, arch: str, *, options: tuple[str, ...] = ()) -> compiler.Compiled:
        seen.append(arch)
        return compiler.Compiled(f"{text} for {arch}".encode(), "")

    monkeypatch.setattr(compiler, "compile_text", fake)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(compiler, "driver_version", lambda: 13000)
    return seen


# -- machine code


@needs_nvrtc
@pytest.mark.timeout(
    900
)  # minutes where other work shares the processors, a second where nothing changed
@pytest.mark.parametrize("arch", kernel_report.ARCHES)
def test_every_kernel_compiles_and_nothing_spills(arch: str) -> None:
    reports = kernel_report.collect([arch], processes=2)
    assert {k: r for r in reports if (r.wrong and (k := f"{r.kernel}: {r.wrong}"))} == {}
    assert len(reports) > 100
    assert all(0 < r.registers <= 255 for r in reports)


@needs_nvrtc
def test_every_kernel_of_the_backend_is_reported() -> None:
    named = {
        word.value.value
        for path in Path(launch.__file__).parent.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "text_of"
        for word in call.keywords
        if word.arg == "name" and isinstance(word.value, ast.Constant)
    }
    assert named >= {"norm", "gemm_block", "copy_several", "update_state", "swizzle"}
    assert set(kernel_report.instances("sm_90").values()) == named


SPILLING = """extern "C" __global__ void __launch_bounds__(1024) k(float* p) {
  float a[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) a[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) p[i * 1024 + 1023 - threadIdx.x] = a[i] * a[(i + 64) % 128];
}"""
ON_STACK = """extern "C" __global__ void k(float* p, int n) {
  __shared__ float s[32];
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = p[i];
  s[threadIdx.x] = p[n];
  for (int i = 0; i < n; ++i) p[i] = a[p[i] > 0 ? i & 63 : n & 63] + s[i & 31];
}"""


@needs_nvrtc
@pytest.mark.parametrize("arch", kernel_report.ARCHES)
def test_a_spill_and_a_stack_frame_are_seen(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spilling = kernel_report.examine(("k", SPILLING, arch))
    assert spilling.spilled
    assert spilling.wrong
    assert kernel_report.examine(("k", TEXT, arch)).wrong == ""
    # A compiler whose log says nothing: the machine code does.
    original = compiler.compile_text
    silent = lambda *a, **k: replace(original(*a, **k), log="")  # noqa: E731
    monkeypatch.setattr(compiler, "compile_text", silent)
    assert "stack frame" in kernel_report.examine(("k", SPILLING, arch)).wrong
    on_stack = kernel_report.examine(("k", ON_STACK, arch))
    assert (on_stack.stack, on_stack.spilled, on_stack.shared) == (256, None, 128)
    assert kernel_report.examine(("k", TEXT, arch)).wrong == ""


@needs_nvrtc
def test_what_does_not_compile_is_reported() -> None:
    made = kernel_report.examine(("k", "__global__ void k() { nonsense; }", "sm_90"))
    assert "nonsense" in made.wrong


@needs_nvrtc
def test_the_log_is_in_the_error() -> None:
    with pytest.raises(PlanError, match=r"refuses a kernel for sm_90a[\s\S]*nonsense"):
        compiler.compile_text("__global__ void k() { nonsense; }", "sm_90")


def test_targets() -> None:
    assert [compiler.target(a) for a in ("sm_80", "sm_89", "sm_90", "sm_100")] == [
        "sm_80", "sm_89", "sm_90a", "sm_100a",
    ]  # fmt: skip


# -- cache


def test_one_compilation_in_memory_and_on_disk(folder: Path, compiled: list[str]) -> None:
    first = compiler.cubin(TEXT, "sm_90")
    assert compiler.cubin(TEXT, "sm_90") == first
    compiler.forget()
    assert compiler.cubin(TEXT, "sm_90") == first
    assert compiled == ["sm_90"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_the_key_covers(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        compiler.cache_key(TEXT, "sm_90"),
        compiler.cache_key(TEXT + " ", "sm_90"),
        compiler.cache_key(TEXT, "sm_80"),
    }
    for name, value in (
        ("source_hash", "other"),
        ("nvrtc_version", (13, 1)),
        ("driver_version", 13010),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compiler, name, lambda value=value: value)
            keys.add(compiler.cache_key(TEXT, "sm_90"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", ("--std=c++20",))
        keys.add(compiler.cache_key(TEXT, "sm_90"))
    assert len(keys) == 7


def test_a_damaged_file_is_made_again(folder: Path, compiled: list[str]) -> None:
    first = compiler.cubin(TEXT, "sm_90")
    (file,) = folder.glob("*.cubin")
    file.write_bytes(file.read_bytes()[:-1])
    compiler.forget()
    assert compiler.cubin(TEXT, "sm_90") == first
    assert len(compiled) == 2


def test_threads_compile_once(folder: Path, compiled: list[str]) -> None:
    threads = [threading.Thread(target=compiler.cubin, args=(TEXT, "sm_90")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["sm_90"]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused(
    folder: Path, compiled: list[str], mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PlanError, match="can be written by others"):
        compiler.cubin(TEXT, "sm_90")
    assert compiled == []


def test_the_disk_cache_can_be_off(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OPS_CUDA_CACHE", "off")
    compiler.cubin(TEXT, "sm_90")
    assert compiler.cache_folder() is None
    assert not folder.exists()
    assert compiled == ["sm_90"]


def test_no_compilation_while_a_graph_is_captured(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = compiler.cubin(TEXT, "sm_90")
    monkeypatch.setattr(compiler.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiler.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compiler.cubin(TEXT, "sm_90") == ready
    with pytest.raises(PlanError, match="captured"):
        compiler.cubin(TEXT + " ", "sm_90")


# -- what is missing


def test_import_brings_no_vendor_library() -> None:
    code = (
        "import sys, torch\n"
        "seen = set(sys.modules)  # some versions of torch bring cuda.bindings\n"
        "import te_ops.backends.cuda\n"  # registering, before a device's first plan, looks for NVRTC
        "print([m for m in sys.modules if m.split('.')[0] == 'cuda' and m not in seen])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_cuda(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "cuda":
            raise ModuleNotFoundError("No module named 'cuda'", name="cuda")
        return original(name, *args, **kwargs)

    compiler.missing.cache_clear()
    compiler.nvrtc_version.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", without_cuda)
            reason = KERNELS[0].available()
    finally:
        compiler.missing.cache_clear()
        compiler.nvrtc_version.cache_clear()
    assert reason is not None
    assert reason.startswith("not available: cuda is missing")


def test_every_kernel_has_a_name_of_its_own() -> None:
    names = [k.name for k in KERNELS]
    assert len(set(names)) == len(names)
    with REGISTRY.temporary(*KERNELS):
        assert REGISTRY.kernels("quantize")[0].name == "cuda.quantize"
        assert REGISTRY.kernels("quantize")[0].arch.refuse("cpu") is not None
