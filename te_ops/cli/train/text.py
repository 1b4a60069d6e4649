"""Bytes of text: what is trained on, what is validated on, and batches that can be resumed."""

from __future__ import annotations

import sysconfig
from collections import Counter
from dataclasses import dataclass
from math import log
from pathlib import Path

import torch

from te_ops.errors import Error

VALIDATION = 0.05


@dataclass(frozen=True)
class Text:
    """uint8 symbols: the first 95 % for training, the rest for validation."""

    train: torch.Tensor
    validation: torch.Tensor
    source: str

    def unigram_entropy(self) -> float:
        """Nats a byte of a model that knows nothing but how often each byte occurs in training."""
        counts = Counter(self.train.tolist())
        total = self.train.numel()
        return -sum(n / total * log(n / total) for n in counts.values())


def read(path: str, window: int) -> Text:
    """A file, or the top-level modules of this Python's standard library in sorted order.

    Raises:
        Error: the file cannot be read, or a part has fewer than `window` bytes.
    """
    if path:
        try:
            data, source = Path(path).read_bytes(), path
        except OSError as error:
            raise Error(f"--text {path}: {error.strerror}") from error
    else:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)
        source = f"{len(files)} modules of the Python standard library"
    return split(data, source, window)


def split(data: bytes, source: str, window: int) -> Text:
    """Bytes as a text.

    Raises:
        Error: a part has fewer than `window` bytes.
    """
    end = int(len(data) * (1 - VALIDATION))
    if min(end, len(data) - end) < window:
        raise Error(
            f"{source}: {len(data)} bytes are too few; the last 5 % must hold a sequence of "
            f"{window} bytes. Give more text, or a smaller --context"
        )
    symbols = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(symbols[:end], symbols[end:], source)


class Sampler:
    """Random windows of the training text; `position` is all that resuming needs."""

    def __init__(self, text: torch.Tensor, batch: int, context: int, seed: int) -> None:
        self.text = text
        self.batch = batch
        self.context = context
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """int64 [2, batch, context]: symbols and what follows each."""
        last = len(self.text) - self.context
        starts = torch.randint(0, last, (self.batch,), generator=self.generator)
        return windows(self.text, starts, self.context)

    @property
    def position(self) -> torch.Tensor:
        """The state of the generator that chooses windows."""
        return self.generator.get_state()

    @position.setter
    def position(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    """int64 [2, starts, context]: the windows that begin there, and the same one byte later."""
    index = starts[:, None] + torch.arange(context + 1)
    taken = text[index].long()
    return torch.stack([taken[:, :-1], taken[:, 1:]])


def validation_batches(text: torch.Tensor, batch: int, context: int, count: int) -> torch.Tensor:
    """int64 [count, 2, batch, context], evenly spread over the text."""
    last = len(text) - context - 1
    starts = torch.linspace(0, last, batch * count, dtype=torch.float64).long()
    made = windows(text, starts, context)
    return made.view(2, count, batch, context).transpose(0, 1)
