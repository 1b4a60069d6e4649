"""Two gloo processes: delayed-scaling amaxes are reduced once per region, and a NaN on any rank is seen by all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import te_ops as te

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
Buffers = dict[str, torch.Tensor]
Ranks = tuple[dict[str, Buffers], dict[str, Buffers]]
RECIPE = te.recipe.DelayedScaling(amax_history_len=4)


def _train(rank: int, scales: list[list[float]]) -> Buffers:
    """Steps with a rank's own input magnitude; returns the state buffers."""
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(8, 8), te.Linear(8, 8))
    for step in scales:
        x = torch.ones(4, 8)
        x[0, 0] = step[rank]
        with te.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
            y = model(x)
        y.sum().backward()
    return {name: b.clone() for name, b in model.named_buffers()}


def _uneven(rank: int) -> Buffers:
    """The second op runs on rank 0 only: both ranks must still agree, and nobody may hang."""
    torch.manual_seed(0)
    a, b = te.Sequential(te.Linear(8, 8)), te.Sequential(te.Linear(8, 8))
    for m in (a, b):
        te.prepare(m, RECIPE)
    for step in range(3):
        with (
            torch.no_grad(),
            te.autocast(recipe=RECIPE, calibrating=True, amax_reduction_group=dist.group.WORLD),
        ):
            y = a(torch.full((2, 8), 2.0))
            if rank == 0 or step == 0:
                b(y)
    return {
        f"{i}.{name}": buf.clone() for i, m in enumerate((a, b)) for name, buf in m.named_buffers()
    }


def _silent(rank: int) -> Buffers:
    """Only rank 0 runs the model inside the region."""
    torch.manual_seed(0)
    model = te.prepare(te.Sequential(te.Linear(8, 8)), RECIPE)
    with te.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        if rank == 0:
            model(torch.full((2, 8), 3.0))
    return {name: b.clone() for name, b in model.named_buffers()}


NAN_ON = {rank: [math.nan if r == rank else 8.0 for r in range(2)] for rank in range(2)}
JOBS: dict[str, Callable[[int], Buffers]] = {
    "largest": lambda rank: _train(rank, [[2.0, 32.0], [16.0, 4.0]]),
    **{f"nan {n}": lambda rank, bad=bad: _train(rank, [[2.0, 32.0], bad]) for n, bad in NAN_ON.items()},
    "uneven": _uneven,
    "silent": _silent,
}  # fmt: skip


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({name: job(rank) for name, job in JOBS.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each job gave on both ranks; the processes start once, which takes longer than all jobs."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_worker, args=(str(folder),), nprocs=2)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    return first, second


def _equal(a: Buffers, b: Buffers) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_ranks_share_the_largest_amax(ranks: Ranks) -> None:
    first, second = (results["largest"] for results in ranks)
    _equal(first, second)
    history = first["0.quantizer.delayed.input.amax_history"]
    assert history.tolist() == [0.0, 0.0, 32.0, 16.0]
    assert first["0.quantizer.delayed.input.scale"].item() == 448 / 32


@pytest.mark.parametrize("where", [0, 1])
def test_a_nan_on_either_rank_is_counted_on_both(ranks: Ranks, where: int) -> None:
    first, second = (results[f"nan {where}"] for results in ranks)
    _equal(first, second)
    prefix = "0.quantizer.delayed.input"
    assert first[f"{prefix}.nonfinite_steps"].item() == 1
    assert first[f"{prefix}.scale"].item() == 448 / 32  # one bad step leaves the scale alone
    assert first[f"{prefix}.amax_history"].tolist() == [0.0, 0.0, 32.0, 0.0]


def test_an_op_that_ran_on_one_rank_only_rolls_on_all(ranks: Ranks) -> None:
    first, second = (results["uneven"] for results in ranks)
    _equal(first, second)
    assert int((first["1.0.quantizer.delayed.input.amax_history"] > 0).sum()) == 3


def test_a_rank_that_observed_nothing_takes_part(ranks: Ranks) -> None:
    first, second = (results["silent"] for results in ranks)
    _equal(first, second)
    assert first["0.quantizer.delayed.input.amax_history"].tolist() == [0.0, 0.0, 0.0, 3.0]
