"""Two gloo processes: a compiled kernel begins to be used on both at the same `te.step()`, or on none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import te_ops as te
from te_ops.backends.cutlass import runtime, selftest
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.errors import PlanError
from tests.backends.cutlass.fake import OTHER, PLAIN, Compiler, Pool

ARCH, CPU = "sm_90", torch.device("cpu")


def _used(kernels: runtime.Kernels, *specs: GemmSpec) -> list[bool]:
    return [kernels.refuse(spec, ARCH, CPU) is None for spec in specs]


def _steps(rank: int) -> list[list[bool]]:
    """Which kernels each step used: rank 1 is slow with one of them, and fails with the other."""
    compiler = Compiler()
    pool = Pool(compiler, os.getpid())
    runtime.compiler = lambda *_: compiler
    runtime.prepare = lambda: None
    runtime.Pool = lambda arch, most: pool  # type: ignore[assignment]
    selftest.KINDS.clear()
    kernels = runtime.KERNELS = runtime.Kernels()
    found: list[list[bool]] = []
    te.step()  # steps are marked: plans need not wait
    if rank == 1:
        compiler.go.clear()
    kernels.refuse(PLAIN, ARCH, CPU)
    assert not kernels.settle()
    if rank == 0:
        pool.join()
    for step in range(4):
        found.append(_used(kernels, PLAIN))
        if step == 1 and rank == 1:
            compiler.go.set()
            pool.join()
        te.step()
    compiler.error = PlanError("no memory") if rank == 1 else None
    for _ in range(3):
        found.append(_used(kernels, PLAIN, OTHER))
        pool.join()
        te.step()
    said = str(kernels.refuse(OTHER, ARCH, CPU))
    assert said.endswith("no memory" if rank == 1 else "rank 1 has not got it: no memory")
    return found


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.pop("TE_OPS_JIT", None)
    os.environ["TE_OPS_AOT_DIR"] = "off"
    os.environ["TE_OPS_CUTLASS_CACHE"] = f"{folder}/{rank}"  # two machines
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    Path(folder, f"{rank}.json").write_text(json.dumps(_steps(rank)))
    dist.barrier()  # the other one may still be reading
    dist.destroy_process_group()


def test_ranks_switch_at_one_step() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(folder,), nprocs=2)
        first, second = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == [[False], [False], [True], [True], *[[True, False]] * 3]
