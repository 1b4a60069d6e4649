"""K24: the package imports and runs without a GPU, a vendor library or a compiled part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_ops as te

VENDORS = (
    "cutlass",
    "quack",
    "cudnn",
    "cuda",
    "nvmath",
    "triton",
    "flash_attn",
    "transformer_engine",
    "apex",
    "jax",
)
OTHERS = (
    "accelerate",
    "lightning",
    "transformers",
    "onnx",
    "matplotlib",
    "ml_dtypes",
    "safetensors",
    "hypothesis",
)

BLOCK = """
import importlib.abc, sys
names = {names!r}
class Blocker(importlib.abc.MetaPathFinder):
    tried = []
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            Blocker.tried.append(name)
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
"""
TRAIN = """
import torch, te_ops as te
torch.set_num_threads(1)
m = te.Sequential(te.RMSNorm(32), te.Linear(32, 32), te.SwiGLU(), te.Linear(16, 32))
with te.autocast(recipe={recipe}):
    y = m(torch.randn(3, 32))
y.sum().backward()
assert all(p.grad is not None for p in m.parameters())
assert not torch.cuda.is_initialized()
print("trained")
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(te.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **env},
    )


@pytest.mark.parametrize(
    ("blocked", "recipe"),
    [(VENDORS, "te.recipe.DelayedScaling()"), (VENDORS + OTHERS, "te.recipe.NVFP4BlockScaling()")],
    ids=["vendors", "all"],
)
def test_trains_with_blocked_packages_and_no_gpu(blocked: tuple[str, ...], recipe: str) -> None:
    """B128."""
    code = BLOCK.format(names=set(blocked)) + TRAIN.format(recipe=recipe)
    done = run(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained"


def test_import_loads_no_vendor_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import te_ops; "  # torch may load some itself
        f"print(sorted(n for n in set(sys.modules) - before if n.partition('.')[0] in {VENDORS!r}))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


PLAN = """
import sys, torch
before = set(sys.modules)
import te_ops as te
from te_ops.backends.cutlass import choices, kernels, runtime
from te_ops.context import ARCH
from te_ops.registry import REGISTRY
m = te.Sequential(te.Linear(64, 64, device="meta", dtype=torch.bfloat16), te.GELU())
x = torch.empty(16, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
ARCH.set("sm_90")
with choices.forced("prefer"), runtime.collecting() as specs:
    REGISTRY.add(*kernels.KERNELS, replace=True)
    m.plan(x)
assert specs
print(sorted(n for n in set(sys.modules) - before if n.partition(".")[0] in {vendors!r}))
"""


def test_planning_compiled_gemms_loads_no_compiler() -> None:
    """A worker process imports it, or the process that runs what it made."""
    done = run(PLAN.format(vendors=VENDORS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_import_changes_no_global_setting_of_torch() -> None:
    code = """
import torch
def state():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state().sum(),
            torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32)
before = state()
import te_ops
assert state() == before
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


# -- B126: libraries that are here, but of another build

BROKEN = {
    "cudnn": "raise ImportError('libcudnn.so.9: undefined symbol: cudnnGetVersion, version libcudnn.so.9')",
    "cuda/bindings": "raise ImportError('_bindings.so: undefined symbol: nvrtcVersion')",  # torch itself looks for it
    "nvmath/bindings": "import ctypes; ctypes.CDLL(__file__.replace('__init__.py', 'wrong.so'))",
    "cutlass": "raise ImportError('_mlir.so: undefined symbol: _ZN3c105ErrorE')",
    "quack": "import cutlass",
    "flash_attn": "raise AttributeError('partially initialized module')",
}
REPORT = """
import json
from te_ops.backends.cublas import lt
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cudnn import library
from te_ops.cli import info
found = info.collect()
print(json.dumps({
    "libraries": {n: m for b in found["backends"].values() for n, m in b["libraries"].items()},
    "reasons": [library.missing(), lt.missing(), compiler.missing()],
}))
"""


def test_libraries_of_another_build_are_named_and_left_out(tmp_path: Path) -> None:
    """B126: the package imports and trains; `te-ops info` and the kernels' reasons say what does not load, and why."""
    for name, line in BROKEN.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(line)
        (folder / "wrong.so").write_bytes(b"not an ELF file")
    for name in ("cuda", "nvmath"):
        (tmp_path / name / "__init__.py").write_text("")
    paths = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code = paths + TRAIN.format(recipe="te.recipe.MXFP8BlockScaling()") + REPORT
    done = run(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    trained, text = done.stdout.strip().splitlines()
    assert trained == "trained"
    found = json.loads(text)
    words = {
        "cudnn": "cudnnGetVersion",
        "nvmath.bindings": "wrong.so",
        "cuda.bindings": "nvrtcVersion",
    }
    for reason, word in zip(found["reasons"], words.values(), strict=True):
        assert word in reason
    words |= {
        "cutlass": "_ZN3c105ErrorE",
        "quack": "_ZN3c105ErrorE",
        "flash_attn": "partially initialized",
    }
    for module, word in words.items():
        assert word in found["libraries"][module], module
