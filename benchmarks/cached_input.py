"""What `cache_quantized_input` does to a training run on the CPU: the demo's language model, paired by seed.

    python benchmarks/cached_input.py [--recipe delayed] [--steps 300] [--seeds 3] [--lr 1e-3]

Three arms a seed, with equal weights, batches and schedule: "dense" keeps the activations' inputs as they are, "cached"
as FP8, "nudged" is dense again with every weight moved by one part in a million. Two runs that differ in nothing that
matters end up apart too: the nudged arm shows by how much, and a gap is read against that.

Loss is the mean of the last tenth of the steps. Cosines are of gradients at the same weights and on the same batch, at
a tenth, in the middle and at the end of the dense run: cached with dense, cached with FP32, dense with FP32, each of
the layer where it is least. The one-H200 protocol (91 M parameters, 30 M tokens) is the same comparison at another
size; this one says nothing about it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_ops.basic.activation import Activation
from te_ops.cli.arms import Arm
from te_ops.cli.train import settings as options
from te_ops.cli.train import text
from te_ops.cli.train.settings import Settings
from te_ops.cli.train.trainer import Trainer

NUDGE = 1e-6
ARMS = ("dense", "cached", "nudged")
GAP, COSINE = 1e-3, 0.999  # the pass lines


class Cosines(NamedTuple):
    """Of the gradients of the worst layer."""

    cached_dense: float
    cached_exact: float
    dense_exact: float

    def __str__(self) -> str:
        return " ".join(f"{cosine:.5f}" for cosine in self)


@dataclass(frozen=True)
class Pair:
    """One seed: the loss of each arm, cosines on the way of the dense one, bytes that cached keeps, of dense."""

    seed: int
    losses: dict[str, float]
    cosines: tuple[Cosines, ...]
    kept: float

    def gap(self, arm: str) -> float:
        """Loss above the dense arm's, as a share of it."""
        return self.losses[arm] / self.losses["dense"] - 1

    def __str__(self) -> str:
        losses = "  ".join(f"{name} {loss:.4f}" for name, loss in self.losses.items())
        gaps = "  ".join(f"{name} {self.gap(name):+.3%}" for name in ARMS[1:])
        cosines = "; ".join(map(str, self.cosines))
        return f"seed {self.seed}  {losses}\n  gap      {gaps}\n  cosines  {cosines}\n  kept     {self.kept:.3f}"


@contextmanager
def caching(model: torch.nn.Module, on: bool) -> Iterator[None]:
    """All activations of a model keep their inputs this way."""
    ops = [m for m in model.modules() if isinstance(m, Activation)]
    before = [op.cache_quantized_input for op in ops]
    for op in ops:
        op.cache_quantized_input = on
    try:
        yield
    finally:
        for op, was in zip(ops, before, strict=True):
            op.cache_quantized_input = was


def gradients(trainer: Trainer, arm: Arm, on: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a held-out batch at the trainer's weights and scales, by layer, and bytes kept for them."""
    tokens, targets = trainer.held_out.to(trainer.device)[0]
    model = copy.deepcopy(trainer.model)
    with caching(model, on), arm.active(trainer.device):
        kept = model.plan(tokens, targets).saved_bytes
        loss = model(tokens, targets)
    loss.backward()
    found: dict[str, list[torch.Tensor]] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found.setdefault(".".join(name.split(".")[:2]), []).append(p.grad.flatten().double())
    return {layer: torch.cat(parts) for layer, parts in found.items()}, kept


def cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of the layer where it is least."""
    return min(float(torch.nn.functional.cosine_similarity(a[n], b[n], dim=0)) for n in a)


def compared(trainer: Trainer) -> tuple[Cosines, float]:
    """Cosines at the trainer's weights, and bytes that the cached way keeps, of dense."""
    exact, _ = gradients(trainer, trainer.settings.arms[0], False)
    dense, bytes_dense = gradients(trainer, trainer.arm, False)
    cached, bytes_cached = gradients(trainer, trainer.arm, True)
    found = Cosines(cosine(cached, dense), cosine(cached, exact), cosine(dense, exact))
    return found, bytes_cached / bytes_dense


def trained(trainer: Trainer, name: str) -> tuple[float, list[tuple[Cosines, float]]]:
    """Mean loss of the last tenth of the steps, and what is compared on the way of the dense arm."""
    steps = trainer.settings.steps
    found = []
    with caching(trainer.model, name == "cached"):
        while not trainer.done:
            trainer.advance()
            if name == "dense" and trainer.step in (steps // 10, steps // 2, steps):
                found.append(compared(trainer))
    return statistics.fmean(trainer.losses[-max(1, steps // 10) :]), found


def pair(settings: Settings, corpus: text.Text) -> Pair:
    """All arms of one seed."""
    losses, found = {}, []
    for name in ARMS:
        trainer = Trainer(settings, settings.arms[-1], corpus)
        if name == "nudged":
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.mul_(1 + NUDGE * torch.randn_like(p))
        losses[name], seen = trained(trainer, name)
        found += seen
    return Pair(settings.seed, losses, tuple(c for c, _ in found), found[-1][1])


def report(pairs: list[Pair]) -> None:
    """Means over the seeds, with their spread, beside the pass lines."""
    for name in ARMS[1:]:
        gaps = [p.gap(name) for p in pairs]
        spread = statistics.stdev(gaps) if len(gaps) > 1 else float("nan")
        print(f"{name:8} gap {statistics.fmean(gaps):+.3%}, spread of the paired gaps {spread:.3%}")
    print(f"pass lines: gap {GAP:.1%}, cosine {COSINE}")
    worst = [min(values) for values in zip(*(c for p in pairs for c in p.cosines), strict=True)]
    print(f"worst cosines: cached with dense, cached with FP32, dense with FP32: {Cosines(*worst)}")


def main() -> None:
    """Train, print a line a seed, and the means."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="delayed", help="of both arms; fp32 for none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()
    recipes = tuple(dict.fromkeys(("fp32", given.recipe)))
    pairs = []
    for seed in range(given.seeds):
        settings = options.completed(
            {
                "device": "cpu",
                "recipes": recipes,
                "steps": given.steps,
                "seed": seed,
                "lr": given.lr,
            }
        )
        corpus = text.read(settings.text, settings.context)
        pairs.append(pair(settings, corpus))
        print(pairs[-1], flush=True)
    report(pairs)


if __name__ == "__main__":
    main()
