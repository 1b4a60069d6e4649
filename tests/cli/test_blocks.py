from __future__ import annotations

import math

import pytest
import torch

from te_ops.cli.blocks import BLOCKS, ModelSizes, build, language_model
from te_ops.errors import Error

SMALL = ModelSizes(layers=2, dim=16, heads=2, ffn=24, context=8, batch=2, vocab=32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_runs_forward_and_backward(name: str) -> None:
    model, inputs = build(name, SMALL, CPU)
    y = model(*inputs)
    assert len(model.plan(*inputs).segments) == 1
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_language_model_starts_near_a_uniform_guess_and_is_causal() -> None:
    model = language_model(SMALL)
    tokens, targets = torch.randint(0, 32, (2, 2, 8)).unbind()
    assert abs(model(tokens, targets).item() - math.log(32)) < 0.1
    before = model[:-1](tokens)
    tokens[:, -1] = (tokens[:, -1] + 1) % 32
    after = model[:-1](tokens)
    torch.testing.assert_close(after[:, :-1], before[:, :-1], rtol=0, atol=0)
    assert not torch.equal(after[:, -1], before[:, -1])


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = language_model(SMALL), language_model(SMALL, tied=False)
    assert tied["head"].weight is tied["embedding"].weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 18, "heads": 4}, "multiple of 2 x heads"),
        ({"batch": 0}, "batch must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(Error, match=message):
        ModelSizes(**wrong)
