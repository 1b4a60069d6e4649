"""Real plans for Hopper, where the library can be had: everything that is taken builds, and gates tell the truth."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.cudnn import builds


def _libraries() -> list[Path]:
    """Those of cuDNN and of the CUDA runtime, as packages install them or as the loader's path has them."""
    roots = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        roots += Path(root).glob("*/lib")
    return [
        path
        for root in roots
        for name in ("libcudnn*.so*", "libcudart.so*")
        for path in root.glob(name)
    ]


@pytest.mark.timeout(600)
def test_real_plans(tmp_path: Path) -> None:
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    libraries = _libraries()
    if not any("cudnn_graph" in path.name for path in libraries):
        pytest.skip("the cuDNN library is not installed")
    builds.stub(tmp_path, libraries)
    paths = [str(tmp_path), *dict.fromkeys(str(path.parent) for path in libraries)]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.cudnn.builds"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    names = [name for name, _, _ in lines]
    assert names == list(builds.specs()), (
        f"the process ended with {done.returncode}: {done.stderr[-800:]}"
    )
    wrong = [
        line
        for line in lines
        if (line[1] is None) != line[0].startswith("refused") or (line[1] and line[2])
    ]
    assert not wrong
