"""te-ops generate: continue a text with a language model that te-ops train made."""

from __future__ import annotations

import argparse
import codecs
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from te_ops.cli.arms import NAMES
from te_ops.cli.decoding import Choice, Decoder, decoding
from te_ops.cli.devices import device_named
from te_ops.cli.models import LanguageModel, find_model, load_model
from te_ops.cli.train.settings import completed
from te_ops.cli.train.text import read
from te_ops.cli.train.trainer import Trainer
from te_ops.errors import Error

STEPS = 150  # of a model that is trained because none was given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "prompt", nargs="?", default="def ", help="text to continue (default 'def ')"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="a run's folder, or a .safetensors in its models/ (default: train a tiny one now)",
    )
    parser.add_argument(
        "--recipe", choices=NAMES, help="which model of a folder, or of the tiny one (default fp32)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="bytes to generate (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw from so many of the likeliest (0: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda if there is one)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the tiny one ({STEPS})")
    parser.add_argument("--text", default="", help="a file that the tiny one learns from")


def run(options: argparse.Namespace) -> int:
    """Load or train a model, print the prompt and what follows, and say how fast."""
    for name in ("tokens", "threads", "steps"):
        if getattr(options, name) < 1:
            raise Error(f"--{name} must be at least 1, got {getattr(options, name)}")
    prompt = options.prompt.encode()
    if not prompt:
        raise Error("the prompt is empty; give at least one character to continue")
    choice = Choice(options.temperature, options.top_k)
    device = device_named(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(options.threads)
    if options.model is None:
        made = _trained(options, device)
    else:
        made = load_model(find_model(options.model, options.recipe), device)
    total = len(prompt) + options.tokens
    if total > made.sizes.context:
        _say(f"{total} bytes are more than the {made.sizes.context} that the model was trained on")
    with decoding(made, total, device) as decoder:
        spent = _written(decoder, prompt, choice, options)
    _say(f"{made.arm.name} on {device}: {spent}")
    return 0


def _trained(options: argparse.Namespace, device: torch.device) -> LanguageModel:
    """A model of the default size after a few steps."""
    given = {"device": str(device), "steps": options.steps, "seed": options.seed}
    given |= {"threads": options.threads, "text": options.text}
    settings = completed({**given, "recipes": ("fp32", options.recipe or "fp32")})
    text = read(settings.text, settings.context + 1)
    trainer = Trainer(settings, settings.arms[-1], text)
    _say(
        f"no --model: training one of {settings.layers} layers for {settings.steps} steps on {text.source}; "
        "it is not kept"
    )
    trainer.run(settings.steps, None, lambda _: None)
    _say(f"validation loss {trainer.validation[-1][1]:.3f} nats a byte")
    return trainer.language_model


@dataclass
class _Times:
    """Seconds: of the prompt's call, of each token (choice and call)."""

    prompt: float = 0.0
    tokens: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        later = self.tokens[1:] or self.tokens  # the first call with one token plans
        each = statistics.median(later)
        return (
            f"prompt {1e3 * self.prompt:.1f} ms, {len(self.tokens)} bytes in {sum(self.tokens):.2f} s; "
            f"median {1e3 * each:.2f} ms a token, {1 / each:.0f} tokens/s"
        )


def _written(
    decoder: Decoder, prompt: bytes, choice: Choice, options: argparse.Namespace
) -> _Times:
    """Print prompt and continuation as it comes."""
    generator = torch.Generator().manual_seed(options.seed)
    decoder_of_bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(decoder_of_bytes.decode(prompt), end="", flush=True)
    times, start = _Times(), time.perf_counter()
    logits = decoder(torch.tensor([list(prompt)]))
    times.prompt = time.perf_counter() - start
    for i in range(options.tokens):
        start = time.perf_counter()
        token = choice(logits[:, -1], generator)
        if i + 1 < options.tokens:
            logits = decoder(token)
        times.tokens.append(time.perf_counter() - start)
        print(decoder_of_bytes.decode(bytes([int(token)])), end="", flush=True)
    print(decoder_of_bytes.decode(b"", final=True))
    return times


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
