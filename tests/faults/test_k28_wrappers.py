"""K28: two gloo processes whose wrappers hold the parameters: steps are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_ops as te
from tests.faults import cases

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
NAMES = ("none", "delayed", "current_high", "block_hybrid", "mxfp8_hybrid", "nvfp4_plain", "custom")
Results = dict[str, dict[str, torch.Tensor]]


def _sharded(each: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        for child in model.children() if each else ():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": _sharded(each=False),
    "fsdp of each op": _sharded(each=True),
}


def _fresh() -> te.Sequential:
    made = cases.BY_NAME["MLP"].fresh()
    assert isinstance(made, te.Sequential)
    return made


def _trained(
    model: nn.Module, run: nn.Module, recipe: te.Recipe | None, average: bool = False
) -> dict[str, torch.Tensor]:
    """Three steps on a rank's own rows, their number included; parameters and states after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank = dist.get_rank()
    for step in range(3):
        gen = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(5 + 3 * rank, cases.WIDTH, generator=gen)
        with te.autocast(recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = run(x)
        y.square().mean().backward()
        for p in model.parameters() if average else ():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        n: getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for n, t in found.items()
    }


def _frozen() -> dict[str, torch.Tensor]:
    """A frozen weight that is a record, other bytes on each rank: DDP makes them those of the first."""
    torch.manual_seed(dist.get_rank())
    model = te.Sequential(te.Linear(64, 64), te.GELU(), te.Linear(64, 32))
    record = te.quantize(model[0].weight.detach(), te.MXFP8Quantizer(), columnwise=True)
    model[0].weight = nn.Parameter(record, requires_grad=False)  # type: ignore[arg-type]
    run = DistributedDataParallel(model)
    y = run(torch.ones(5, 64))
    y.sum().backward()
    weight: Any = model[0].weight
    made = {"output": y.detach(), "weight": weight.dequantize()}
    return made | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: Results = {"frozen": _frozen()}
    for name in NAMES:
        plain = _fresh()
        found[name] = _trained(plain, plain, cases.MODES[name], average=True)
        for wrapper, wrap in WRAPPERS.items():
            model = copy.deepcopy(_fresh())
            found[f"{name}, {wrapper}"] = _trained(model, wrap(model), cases.MODES[name])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each run gave on both ranks; the processes start once."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_worker, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", NAMES)
def test_b143_steps_are_those_of_the_plain_model(
    ranks: list[Results], name: str, wrapper: str
) -> None:
    """Parameters after three steps, and the states of delayed scaling, on both ranks."""
    for found in ranks:
        made, wanted = found[f"{name}, {wrapper}"], found[name]
        assert made.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(made[key], value, rtol=1e-6, atol=1e-7, msg=key)
    for key, value in ranks[0][name].items():
        assert torch.equal(value, ranks[1][name][key]), key


def test_b143_a_frozen_record_is_one_on_all_ranks(ranks: list[Results]) -> None:
    first, second = (found["frozen"] for found in ranks)
    assert set(first) == {"output", "weight", "0.bias", "2.weight", "2.bias"}
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
