"""One recipe's training: a step, validation, and checkpoints that resume exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from te_ops.cli.arms import Arm
from te_ops.cli.blocks import language_model
from te_ops.cli.models import LanguageModel, model_path, save_model
from te_ops.cli.train.settings import Settings
from te_ops.cli.train.text import Sampler, Text, validation_batches
from te_ops.errors import Error

FORMAT = 2  # 1 had other names of parameters
EVALUATIONS = 10  # over a run
CHECKPOINTS = "checkpoints"  # folder
BATCHES = 12  # always the same ones, so that losses compare


class Trainer:
    """A model, its optimizer and its batches, at `step` of `settings.steps`.

    Trainers of the same settings start from equal weights and see equal batches, whatever the arm.
    """

    def __init__(self, settings: Settings, arm: Arm, text: Text) -> None:
        s = settings
        self.settings, self.arm = s, arm
        self.device = torch.device(s.device)
        torch.manual_seed(s.seed)
        self.model = language_model(s.sizes, tied=not s.untied).to(self.device)
        self.optimizer = _optimizer(self.model, s)
        self.sampler = Sampler(text.train, s.batch, s.context, s.seed)
        self.held_out = validation_batches(text.validation, s.batch, s.context, BATCHES)
        self.step = 0
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.times: list[float] = []  # seconds a step, of this process

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.settings.steps

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        s = self.settings
        if self.step < s.warmup:
            return s.lr * (self.step + 1) / s.warmup
        progress = (self.step - s.warmup) / max(1, s.steps - s.warmup)
        return s.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def advance(self) -> float:
        """One step; returns its loss."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        tokens, targets = self.sampler.next().to(self.device)
        with self.arm.active(self.device):
            loss = self.model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.losses.append(loss.item())
        self.times.append(time.perf_counter() - start)
        return self.losses[-1]

    def evaluate(self) -> float:
        """Mean loss over held-out batches, computed as in training."""
        total = 0.0
        with torch.no_grad(), self.arm.active(self.device):
            for tokens, targets in self.held_out.to(self.device):
                total += self.model(tokens, targets).item()
        return total / BATCHES

    def run(self, until: int, out: Path | None, tell: Callable[[Trainer], None]) -> None:
        """Advance to step `until`, validating on the way, with checkpoints if `out` is given."""
        s = self.settings
        every = max(1, s.steps // EVALUATIONS)
        while self.step < min(until, s.steps):
            self.advance()
            if self.done or self.step % every == 0:
                self.validation.append((self.step, self.evaluate()))
            due = s.checkpoint_every and self.step % s.checkpoint_every == 0
            if out is not None and (due or self.step == until):
                self.save(out)
            tell(self)

    # -- files

    @property
    def language_model(self) -> LanguageModel:
        """What was trained, as `te-ops generate` takes it."""
        return LanguageModel(self.model, self.settings.sizes, self.arm)

    def export(self, out: Path) -> Path:
        """Write the model for `te-ops generate`; returns the file.

        Raises:
            Error: safetensors is not installed.
        """
        path = model_path(out, self.arm.name)
        save_model(self.language_model, path)
        return path

    def save(self, out: Path) -> None:
        """Write everything that the next step depends on, atomically."""
        path = checkpoint_path(out, self.arm)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "format": FORMAT,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.sampler.position,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if _cuda(self.device) else None,
            "losses": self.losses,
            "validation": self.validation,
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, out: Path) -> bool:
        """Continue from the checkpoint, if there is one.

        Raises:
            Error: the checkpoint cannot be read.
        """
        path = checkpoint_path(out, self.arm)
        if not path.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise Error(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
        if state.get("format") != FORMAT:
            raise Error(f"{path} has format {state.get('format')}, this te_ops reads {FORMAT}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.position = state["data"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.step = state["step"]
        self.losses = list(state["losses"])
        self.validation = [(int(step), loss) for step, loss in state["validation"]]
        return True


def checkpoint_path(out: Path, arm: Arm) -> Path:
    """Where the checkpoint of an arm lies."""
    return out / CHECKPOINTS / f"{arm.name}.pt"


def affordable_steps(settings: Settings, text: Text) -> int:
    """Steps of every arm that fit into `settings.seconds`, by timing a few of each."""
    probe, a_step = 5, 0.0
    for arm in settings.arms:
        trainer = Trainer(replace(settings, steps=1_000_000), arm, text)
        for _ in range(probe):
            trainer.advance()
        a_step += sorted(trainer.times)[probe // 2]
    return max(10, int(settings.seconds / a_step))


def _optimizer(model: torch.nn.Module, s: Settings) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.95), weight_decay=s.weight_decay)


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda"
