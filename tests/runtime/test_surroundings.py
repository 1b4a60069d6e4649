"""What is around a pipeline: torch.autocast reaches the modules inside that are not ours, torch.compile stays out."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_ops as te
from tests.runtime.cases import RECIPES


class DtypeSeen(nn.Module):
    """Notes whether torch.autocast is on where it runs, and passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return x * 1


def plain(model: te.Sequential) -> nn.Sequential:
    """The same modules in torch's own Sequential, with torch's Linear for ours."""

    def torch_module(module: nn.Module) -> nn.Module:
        if not isinstance(module, te.Linear):
            return module
        made = nn.Linear(module.in_features, module.out_features)
        made.weight, made.bias = module.weight, module.bias
        return made

    return nn.Sequential(*(torch_module(module) for module in model))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("foreign", [nn.Linear, nn.LayerNorm, nn.Softmax])
def test_modules_inside_run_under_the_callers_autocast(
    foreign: type[nn.Module], place: int
) -> None:
    """Their results have the dtypes that autocast gives, which is what the plan must be made for."""
    modules: list[nn.Module] = [te.Linear(8, 8), te.Linear(8, 8)]
    arguments = {nn.Linear: (8, 8), nn.LayerNorm: (8,), nn.Softmax: (-1,)}[foreign]
    modules.insert(place, foreign(*arguments))
    model = te.Sequential(*modules)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), plain(model)(x)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_hooked_ops_run_under_the_callers_autocast(name: str) -> None:
    recipe = RECIPES[name]
    model = te.Sequential(te.Linear(32, 32), te.Linear(32, 32), te.GELU())
    dtypes: list[torch.dtype] = []
    model[1].register_forward_hook(lambda _module, _inputs, y: dtypes.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe is not None, recipe=recipe):
        y = model(torch.randn(32, 32))
    assert y.dtype is torch.bfloat16
    assert dtypes == [torch.bfloat16]


def test_without_autocast_modules_inside_see_none() -> None:
    seen = DtypeSeen()
    model = te.Sequential(te.Linear(8, 8), seen, te.GELU())
    model(torch.randn(2, 8))
    assert not any(seen.seen)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 8))
    assert seen.seen[-1]
    model(torch.randn(2, 8))
    assert not seen.seen[-1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_torch_compile_leaves_pipelines_alone() -> None:
    """One graph break a pipeline: Dynamo traces neither the planner nor the references, which it could round anew."""
    from torch._dynamo.utils import counters

    model = nn.Sequential(nn.Linear(8, 8), te.Sequential(te.Linear(8, 8), te.GELU()), nn.ReLU())
    x = torch.randn(3, 8, requires_grad=True)
    torch._dynamo.reset()
    counters.clear()

    def step(x: Tensor) -> Tensor:
        return model(x)

    y = torch.compile(step, backend="eager")(x)
    assert torch.equal(y, step(x))
    (got,), (expected,) = (
        torch.autograd.grad(f(x).sum(), x) for f in (torch.compile(step, backend="eager"), step)
    )
    assert torch.equal(got, expected)
    assert counters["stats"]["unique_graphs"] <= 2
    assert len(counters["graph_break"]) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("loaded", [False, True])
def test_state_of_an_op_without_tensors_is_where_its_input_is(loaded: bool) -> None:
    """Not on the CPU: there it could not be combined with what a GPU observes."""
    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    model = te.Sequential(te.Quantize(backward=True), te.GELU())
    if loaded:  # a checkpoint is read before anything says where the op will run
        te.prepare(model, recipe)
        assert {b.device.type for b in model.buffers()} == {"cpu"}
    x = torch.empty(3, 8, device="meta", requires_grad=True)
    with te.autocast(recipe=recipe):
        y = model(x)
    y.sum().backward()
    assert {b.device.type for b in model.buffers()} == {"meta"}
    assert len(list(model.buffers())) == 6


def test_plans_keep_no_process_group_alive(tmp_path: Path) -> None:
    """Its threads would run until the interpreter has gone, and abort the process."""
    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.new_group()
        alive = weakref.ref(group)
        model = te.Sequential(te.Linear(8, 8))
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = model(torch.randn(2, 8))
        y.sum().backward()
    finally:
        dist.destroy_process_group()
    del group, model, y
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("planned", [False, True])
def test_layouts_that_are_not_strided_are_refused(planned: bool) -> None:
    """Also where a plan for a dense tensor of that shape is there."""
    model = te.Sequential(te.Linear(8, 8))
    x = torch.randn(3, 8)
    if planned:
        model(x)
    with pytest.raises(te.Error, match="sparse_coo"):
        model(x.to_sparse())
