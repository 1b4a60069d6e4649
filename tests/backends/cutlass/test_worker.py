"""Processes that compile: what they are told, what they answer, and what happens when they do not."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from te_ops.backends.cutlass import cache, pool, worker
from te_ops.backends.cutlass.pool import Compile, Pool, Worker
from te_ops.errors import Error, PlanError
from tests.backends.cutlass.fake import OTHER, PLAIN, command


@pytest.fixture
def made() -> Iterator[list[Pool | Worker]]:
    """What a test starts, and what is ended behind it."""
    found: list[Pool | Worker] = []
    yield found
    for item in found:
        item.close()


def test_answers_one_line_a_job(tmp_path: Path) -> None:
    def compile_to(spec: object, arch: str, path: Path) -> None:
        if spec == OTHER:
            raise ValueError("a tile that is too large")
        path.write_text(arch)

    jobs = [
        {
            "family": "gemm",
            "spec": s.to_dict(),
            "arch": "sm_90a",
            "path": str(tmp_path / "x.o"),
            "source": source,
        }
        for s, source in (
            (PLAIN, cache.source_hash()),
            (OTHER, cache.source_hash()),
            (PLAIN, "old"),
        )
    ]
    text = "".join(f"{json.dumps(job)}\n" for job in jobs) + "no job\n"
    out = io.StringIO()
    worker.serve(io.StringIO(text), out, SimpleNamespace(compile_to=compile_to))
    first, second, edited, third = (
        json.loads(line)["error"] for line in out.getvalue().splitlines()
    )
    assert first is None
    assert (tmp_path / "x.o").read_text() == "sm_90a"
    assert "ValueError: a tile that is too large" in second
    assert "compile_to" in second  # where it was
    assert "the files of te_ops have changed since the program started" in edited
    assert "JSONDecodeError" in third


def test_worker_sees_its_architecture_and_no_device(
    tmp_path: Path, made: list[Pool | Worker]
) -> None:
    body = 'print(os.environ["CUDA_VISIBLE_DEVICES"] + "printed"); assert os.path.isdir(os.environ["QUACK_CACHE_DIR"])'
    one = Worker("sm_90", command(body))
    made.append(one)
    one.compile(PLAIN, tmp_path / "a.o")
    process = one._process
    one.compile(OTHER, tmp_path / "b.o")
    assert one._process is process
    assert (tmp_path / "a.o").read_text() == f"{PLAIN.key} sm_90a sm_90a 90"
    assert (tmp_path / "b.o").read_text() == f"{OTHER.key} sm_90a sm_90a 90"


def test_error_of_the_compiler_is_told(tmp_path: Path, made: list[Pool | Worker]) -> None:
    one = Worker("sm_100", command('raise RuntimeError("ptxas")'))
    made.append(one)
    with pytest.raises(PlanError, match=r"does not compile for sm_100a: RuntimeError: ptxas"):
        one.compile(PLAIN, tmp_path / "a.o")


def test_dead_worker_is_told_and_replaced(tmp_path: Path, made: list[Pool | Worker]) -> None:
    mark = tmp_path / "died"
    body = f"""if not os.path.exists({str(mark)!r}):
        Path({str(mark)!r}).touch()
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(9)"""
    one = Worker("sm_90", command(body))
    made.append(one)
    with pytest.raises(PlanError, match="for sm_90a ends with 9: out of memory"):
        one.compile(PLAIN, tmp_path / "a.o")
    one.compile(PLAIN, tmp_path / "a.o")
    assert (tmp_path / "a.o").exists()


def test_endless_compilation_is_given_up(
    tmp_path: Path, made: list[Pool | Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LONGEST", 0.2)
    one = Worker("sm_90", command("time.sleep(60)"))
    made.append(one)
    with pytest.raises(PlanError, match="needs more than 0 s"):
        one.compile(PLAIN, tmp_path / "a.o")


def test_pool_uses_as_many_threads_as_it_may(
    tmp_path: Path, made: list[Pool | Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "IDLE", 0.1)
    two = Pool("sm_90", 2)
    made.append(two)
    seen: set[int] = set()
    both = threading.Barrier(2)

    def job(_: Compile) -> Path:
        seen.add(threading.get_ident())
        both.wait(20)
        return tmp_path

    futures = [two.submit(job) for _ in range(6)]
    assert [f.result(30) for f in futures] == [tmp_path] * 6
    assert len(seen) == 2
    deadline = time.monotonic() + 20
    while two._threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert two._threads == 0
    assert two.submit(lambda _: tmp_path / "later").result(30) == tmp_path / "later"


def test_pool_hands_errors_over(made: list[Pool | Worker]) -> None:
    def job(_: Compile) -> Path:
        raise PlanError("no")

    one = Pool("sm_90", 1)
    made.append(one)
    with pytest.raises(PlanError, match="no"):
        one.submit(job).result(30)


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert pool.workers() == 4
    monkeypatch.setenv("TE_OPS_JIT_WORKERS", "7")
    assert pool.workers() == 7
    for wrong in ("none", "0", "-1"):
        monkeypatch.setenv("TE_OPS_JIT_WORKERS", wrong)
        with pytest.raises(Error, match="TE_OPS_JIT_WORKERS is a whole number from 1 on"):
            pool.workers()


def test_command_is_this_interpreter() -> None:
    assert pool.WORKER[0] == sys.executable
    assert worker.__name__ == pool.WORKER[-1]


def test_a_forked_child_leaves_the_folder_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end runs what the parent registered for its own."""
    owner = Worker("sm_90")
    parent = os.getpid()
    for pid, there in ((parent + 1, True), (parent, False)):
        folder, remove = pool.scratch(owner)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda pid=pid: pid)
            remove()
        assert folder.exists() is there
        shutil.rmtree(folder, ignore_errors=True)
