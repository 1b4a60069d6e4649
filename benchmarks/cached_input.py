"""What `cache_quantized_input` does: to a training run, paired by seed, to gradients, and to what an MLP keeps.

    python benchmarks/cached_input.py                            the demo's model on a CPU, 3 seeds
    python benchmarks/cached_input.py --device cuda              91 M parameters, 30 M tokens, 3 seeds; minutes
    python benchmarks/cached_input.py --device cuda --seeds 1 --seconds 40 --json run1.json
    python benchmarks/cached_input.py --merge run0.json run1.json --page docs/performance/index.md

Arms of a seed have equal weights, batches and schedule: "dense" keeps the activations' inputs as they are, "cached" as
FP8, "nudged" is dense again with every weight moved by one part in a million. Two runs that differ in nothing that
matters end up apart too: the nudged arm shows by how much, and a gap is read against that.

Loss is the mean of the last tenth of the steps. Cosines are of gradients at the same weights and on the same held-out
batch, at a tenth, in the middle and at the end of a run, the dense one if it is there: cached with dense, cached with
FP32, dense with FP32, each of the layer where it is least. With --also they are taken at the end for other recipes too,
at those weights.

--seconds shortens the runs, by the time that a step takes, so that everything ends in that time; the report says how
many tokens were seen. Seeds and arms may run one by one, on as many devices as there are, and be merged afterwards.

On a GPU the bytes that an MLP of Llama's sizes keeps are counted first: memory seen by saved-tensor hooks, without
parameters and copies of weights, the same way for Transformer Engine where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.suite import data, measure, pages, peers
from te_ops.basic.activation import Activation
from te_ops.cli import arms as recipes
from te_ops.cli.arms import Arm
from te_ops.cli.train import settings as options
from te_ops.cli.train import text
from te_ops.cli.train.settings import Settings
from te_ops.cli.train.trainer import Trainer

NUDGE = 1e-6
ARMS = ("dense", "cached", "nudged")
GAP, COSINE, KEPT = 1e-3, 0.999, 0.65  # the pass lines

CPU = {"steps": 300, "lr": 1e-3}
GPU = {
    "layers": 12, "dim": 768, "heads": 12, "ffn": 2048, "context": 1024, "batch": 32, "lr": 1e-3,
    "steps": 916,
}  # fmt: skip
"""12 layers, 30 M tokens."""
PIPELINES = {
    "Linear, SwiGLU, Linear": data.swiglu_mlp(4096, 14336)[1:],
    "RMSNorm, Linear, SwiGLU, Linear": data.swiglu_mlp(4096, 14336),
}
"""What keeps bytes, for 8192 tokens."""
KEEPERS = ("dense", "cached", "te-ops", "te-module")
TRAINING, MEMORY = "cached-training", "cached-memory"  # regions of the page


def say(what: object) -> None:
    """A line, now: who watches a long run sees it come."""
    print(what, flush=True)


# -- gradients


class Cosines(NamedTuple):
    """Of the gradients of the worst layer."""

    cached_dense: float
    cached_exact: float
    dense_exact: float

    def __str__(self) -> str:
        return " ".join(f"{cosine:.5f}" for cosine in self)


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
    tokens, targets = trainer.held_out[0].to(trainer.device)
    model = copy.deepcopy(trainer.model)
    with caching(model, on), arm.active(trainer.device):
        kept = model.plan(tokens, targets).saved_bytes
        loss = model(tokens, targets)
    loss.backward()
    found: dict[str, list[torch.Tensor]] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found.setdefault(layer_of(name), []).append(p.grad.flatten().double())
    return {layer: torch.cat(parts) for layer, parts in found.items()}, kept


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: "layers.3" of "layers.3.mlp.fc1.weight"."""
    return ".".join(name.split(".")[:2])


def cosines(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """By layer."""
    return {n: float(torch.nn.functional.cosine_similarity(a[n], b[n], dim=0)) for n in a}


class Compared(NamedTuple):
    """Gradients of the two ways at the same weights: cosines, by layer too, and bytes that cached keeps, of dense."""

    worst: Cosines
    layers: dict[str, float]
    kept: float


def compared(trainer: Trainer, *others: Arm) -> list[Compared]:
    """The two ways at the trainer's weights, with its arm first and then with others."""
    exact, _ = gradients(trainer, trainer.settings.arms[0], False)
    found = []
    for arm in (trainer.arm, *others):
        dense, bytes_dense = gradients(trainer, arm, False)
        cached, bytes_cached = gradients(trainer, arm, True)
        layers = cosines(cached, dense)
        worst = (min(c.values()) for c in (layers, cosines(cached, exact), cosines(dense, exact)))
        found.append(Compared(Cosines(*worst), layers, bytes_cached / bytes_dense))
    return found


# -- training


@dataclass(frozen=True)
class Pair:
    """One seed: the loss of each arm, cosines on the way of the dense one, bytes that cached keeps, of dense.

    `layers` are cosines at the end, by layer; `also` are cosines of other recipes there. `ms` is a step's median time.
    """

    seed: int
    losses: dict[str, float]
    cosines: tuple[Cosines, ...]
    kept: float
    layers: dict[str, float] = field(default_factory=dict)
    also: dict[str, Cosines] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    def gap(self, arm: str) -> float:
        """Loss above the dense arm's, as a share of it."""
        return self.losses[arm] / self.losses["dense"] - 1

    def joined(self, other: Pair) -> Pair:
        """The arms of both, and what was seen in either."""
        return replace(
            other,
            losses={**self.losses, **other.losses},
            cosines=tuple(dict.fromkeys(self.cosines + other.cosines)),
            also={**self.also, **other.also},
            ms={**self.ms, **other.ms},
        )

    def __str__(self) -> str:
        losses = "  ".join(f"{name} {loss:.5f}" for name, loss in self.losses.items())
        lines = [f"seed {self.seed}  {losses}"]
        if ARMS[0] in self.losses:
            others = (name for name in self.losses if name != ARMS[0])
            lines.append(f"gap      {'  '.join(f'{n} {self.gap(n):+.3%}' for n in others)}")
        lines.append(f"cosines  {'; '.join(map(str, self.cosines))}")
        lines += [f"  {name:8} {found}" for name, found in self.also.items()]
        layers = " ".join(f"{name} {cosine:.5f}" for name, cosine in self.layers.items())
        return "\n  ".join([*lines, f"layers   {layers}", f"kept     {self.kept:.3f}"])

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Pair:
        """From JSON."""
        made = {k: entry[k] for k in ("seed", "losses", "kept", "layers", "ms")}
        also = {name: Cosines(*c) for name, c in entry["also"].items()}
        return cls(**made, cosines=tuple(Cosines(*c) for c in entry["cosines"]), also=also)


Look = Callable[[Trainer], None]


def trained(trainer: Trainer, name: str, look: Look | None = None) -> float:
    """Mean loss of the last tenth of the steps; `look` is called on the way."""
    steps = trainer.settings.steps
    with caching(trainer.model, name == "cached"):
        while not trainer.done:
            trainer.advance()
            if look is not None and trainer.step in (steps // 10, steps // 2, steps):
                look(trainer)
    return statistics.fmean(trainer.losses[-max(1, steps // 10) :])


def pair(
    settings: Settings, corpus: text.Text, arms: Sequence[str] = ARMS, also: Sequence[Arm] = ()
) -> Pair:
    """The arms of one seed; cosines are those at the weights of the first."""
    losses: dict[str, float] = {}
    ms: dict[str, float] = {}
    seen: list[Compared] = []
    others: dict[str, Cosines] = {}

    def look(trainer: Trainer) -> None:
        now = also if trainer.done else ()
        mine, *theirs = compared(trainer, *now)
        seen.append(mine)
        others.update((arm.name, c.worst) for arm, c in zip(now, theirs, strict=True))

    for name in arms:
        trainer = Trainer(settings, settings.arms[-1], corpus)
        if name == "nudged":
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.mul_(1 + NUDGE * torch.randn_like(p))
        losses[name] = trained(trainer, name, look if name == arms[0] else None)
        ms[name] = statistics.median(trainer.times) * 1e3
        say(f"  {name}: loss {losses[name]:.5f}, {ms[name]:.1f} ms a step")
    found = tuple(c.worst for c in seen)
    return Pair(settings.seed, losses, found, seen[-1].kept, seen[-1].layers, others, ms)


def affordable(
    settings: Settings, corpus: text.Text, end: float, arms: int, also: Sequence[Arm] = ()
) -> Settings:
    """The same with as many steps, at most, as `arms` runs can make until `end` (`time.monotonic`).

    What a run does once is done here first, so that what is compiled is no part of the rate.
    """
    trainer = Trainer(settings, settings.arms[-1], corpus)
    for on in (True, False):
        with caching(trainer.model, on):
            for _ in range(5):
                trainer.advance()
        say(f"first step {trainer.times[-5]:.1f} s, then {trainer.times[-1] * 1e3:.1f} ms")
    compared(trainer, *also)
    start = time.monotonic()
    compared(trainer, *also)
    now = time.monotonic()
    step = statistics.median(trainer.times[-3:])
    steps = max(20, int((end - now - 3 * (now - start) * arms / 2) / (arms * step)))
    rate = settings.batch * settings.context / step
    say(f"a step takes {step * 1e3:.1f} ms, {rate:.0f} tokens/s; {steps} of {settings.steps} fit")
    return replace(settings, steps=min(settings.steps, steps))


def tokens_of(settings: Settings) -> int:
    """What a run sees."""
    return settings.steps * settings.batch * settings.context


def corpus_of(settings: Settings) -> text.Text:
    """On a GPU all modules of the standard library, which a large model does not know by heart soon."""
    if settings.text or settings.device == "cpu":
        return text.read(settings.text, settings.context)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        f for f in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*f.parts}
    )
    source = f"{len(files)} modules of the Python standard library, packages too"
    return text.split(b"".join(f.read_bytes() for f in files), source, settings.context)


# -- memory


class Kept(NamedTuple):
    """Bytes that backward keeps of a pipeline, by who keeps them."""

    pipeline: str
    recipe: str
    bytes: dict[str, int]

    def ratio(self, who: str) -> float:
        """What the option keeps, of what another keeps."""
        return self.bytes["cached"] / self.bytes[who]

    def __str__(self) -> str:
        listed = ", ".join(f"{who} {b / 2**20:.1f}" for who, b in self.bytes.items())
        ratios = [f"{self.ratio(who):.3f} of {who}" for who in KEEPERS[2:] if who in self.bytes]
        return (
            f"{self.pipeline}, {self.recipe}: MiB {listed}; cached {', '.join(ratios) or 'alone'}"
        )


def kept(
    pipeline: str, layers: tuple[data.Layer, ...], recipe: str, rows: int, device: torch.device
) -> Kept:
    """Counted for te_ops without and with the option, and for the peers that are here."""
    case = data.Case("cached_input", pipeline, rows, layers)
    found: dict[str, int] = {}
    made = {p.name: p.build for p in peers.PROVIDERS}
    for who in KEEPERS:
        drawn = peers.Data.draw(case, device)
        try:
            arm = made["te_ops" if who in ARMS else who](drawn, recipe)
            with caching(arm.keep, True) if who == "cached" else nullcontext():
                arm.step()
                found[who] = measure.saved(arm)
        except Exception as reason:
            if who in ARMS:
                raise
            say(f"  {who}: absent, {type(reason).__name__}: {str(reason)[:200]}")
    return Kept(pipeline, recipe, found)


# -- results


def report(pairs: Sequence[Pair]) -> None:
    """Means over the seeds, with their spread, beside the pass lines."""
    for name in [n for n in pairs[0].losses if n != ARMS[0] and ARMS[0] in pairs[0].losses]:
        gap, spread, error = gap_of(pairs, name)
        say(f"{name:8} gap {gap:+.3%}, spread of the paired gaps {spread:.3%}, error {error:.3%}")
    say(f"pass lines: gap {GAP:.1%}, cosine {COSINE}")
    say(f"worst cosines: cached with dense, cached with FP32, dense with FP32: {worst_of(pairs)}")


def gap_of(pairs: Sequence[Pair], arm: str) -> tuple[float, float, float]:
    """Mean of the paired gaps, their spread (standard deviation), and the standard error of the mean."""
    gaps = [p.gap(arm) for p in pairs]
    spread = statistics.stdev(gaps) if len(gaps) > 1 else float("nan")
    return statistics.fmean(gaps), spread, spread / len(gaps) ** 0.5


def worst_of(pairs: Sequence[Pair]) -> Cosines:
    """The least cosines of any seed, layer and time."""
    seen = [c for p in pairs for c in p.cosines]
    return Cosines(*(min(values) for values in zip(*seen, strict=True)))


class Run(NamedTuple):
    """A pair, and what it was run on: arguments that pairs of a table share."""

    recipe: str
    device: str
    model: str
    tokens: int
    pair: Pair


def merged(paths: Sequence[Path]) -> tuple[dict[tuple[Any, ...], list[Pair]], list[Kept]]:
    """Pairs by what they share, sorted by seed, and bytes kept; of what was run twice, the last.

    Files with different arms of a seed are one pair.
    """
    pairs: dict[tuple[Any, ...], dict[int, Pair]] = {}
    memory: dict[tuple[str, str], Kept] = {}
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        for entry in found["runs"]:
            made = Pair.read(entry["pair"])
            key = tuple(entry[name] for name in Run._fields[:-1])
            seeds = pairs.setdefault(key, {})
            seen = seeds.get(made.seed)
            seeds[made.seed] = made if seen is None else seen.joined(made)
        for entry in found["kept"]:
            memory[entry["pipeline"], entry["recipe"]] = Kept(**entry)
    ordered = {key: [by_seed[s] for s in sorted(by_seed)] for key, by_seed in pairs.items()}
    return ordered, list(memory.values())


def write(path: Path, runs: Sequence[Run], memory: Sequence[Kept]) -> None:
    """As JSON, for `merged`."""
    entries = [{**run._asdict(), "pair": asdict(run.pair)} for run in runs]
    found = {"runs": entries, "kept": [k._asdict() for k in memory]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def tables(runs: dict[tuple[Any, ...], list[Pair]], memory: Sequence[Kept]) -> dict[str, str]:
    """The marked regions of the page."""
    found: dict[str, list[list[str]]] = {}
    if runs:
        found[TRAINING] = [
            ["on", "recipe", "seeds", "gap of cached (error)", "gap of nudged (error)",
             "cosine with dense", "with FP32: dense", "cached", "ms a step: dense", "cached"],
            *(row for key, pairs in runs.items() for row in _rows_of(key, pairs)),
        ]  # fmt: skip
    if memory:
        found[MEMORY] = [
            ["MiB", "recipe", *KEEPERS, *(f"cached / {who}" for who in KEEPERS[2:])],
            *(_counted(k) for k in memory),
        ]
    return {name: _markdown(rows) for name, rows in found.items()}


def _rows_of(key: tuple[Any, ...], pairs: Sequence[Pair]) -> Iterator[list[str]]:
    """A row for the recipe of these pairs, and one for each other that was looked at."""
    recipe, device, model, tokens = key
    gaps = [_gap(pairs, arm) if arm in pairs[0].losses else "" for arm in ARMS[1:]]
    ms = [f"{statistics.fmean(p.ms[arm] for p in pairs):.1f}" for arm in ARMS[:2]]
    count = str(len(pairs))
    where = f"{device}: {model}, {tokens / 1e6:.1f} M tokens"
    yield [where, recipe, count, *gaps, *_cells(worst_of(pairs)), *ms]
    for name in pairs[0].also:
        least = Cosines(*(min(c) for c in zip(*(p.also[name] for p in pairs), strict=True)))
        yield ["the same weights", name, count, "", "", *_cells(least), "", ""]


def _gap(pairs: Sequence[Pair], arm: str) -> str:
    gap, _, error = gap_of(pairs, arm)
    return f"{gap:+.3%} ({error:.3%})" if len(pairs) > 1 else f"{gap:+.3%}"


def _cells(c: Cosines) -> list[str]:
    return [f"{x:.5f}" for x in (c.cached_dense, c.dense_exact, c.cached_exact)]


def _counted(k: Kept) -> list[str]:
    own = [f"{k.bytes[who] / 2**20:.0f}" if who in k.bytes else "" for who in KEEPERS]
    ratios = [f"{k.ratio(who):.3f}" if who in k.bytes else "" for who in KEEPERS[2:]]
    return [k.pipeline, k.recipe, *own, *ratios]


def _markdown(rows: list[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


# -- the command


def arguments() -> argparse.Namespace:
    """As the command line gives them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda or cuda:1")
    add("--recipe", default="delayed", help="of all arms; fp32 or bf16 for none")
    add("--also", nargs="*", default=[], metavar="RECIPE", help="cosines of these at the end")
    add("--seeds", type=int, nargs="*", default=[0, 1, 2])
    add("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="without dense: for --merge")
    add("--steps", type=int, help="300 on a CPU, else 916: 30 M tokens")
    add("--lr", type=float)
    add("--text", help="a file; default: the Python standard library's sources")
    add("--seconds", type=float, help="shorten the training so that all seeds end by then")
    add("--kept", nargs="*", metavar="RECIPE", help="count bytes with these; default: the recipe")
    add("--json", type=Path, help="write the results there")
    add("--merge", type=Path, nargs="*", help="run nothing; report what these files hold")
    add("--page", type=Path, help="fill the marked regions of this page")
    given = parser.parse_args()
    given.arms = [name for name in ARMS if name in given.arms]
    return given


def protocol(given: argparse.Namespace, seed: int) -> Settings:
    """Of a run on this device."""
    chosen: dict[str, Any] = dict(CPU if given.device == "cpu" else GPU)
    wanted = {"steps": given.steps, "lr": given.lr, "text": given.text}
    chosen |= {name: value for name, value in wanted.items() if value is not None}
    names = tuple(dict.fromkeys(("fp32", given.recipe)))
    return options.completed({**chosen, "device": given.device, "recipes": names, "seed": seed})


def run(given: argparse.Namespace, start: float) -> tuple[list[Run], list[Kept]]:
    """Count bytes on a GPU, then train seed by seed; a line for each as it comes."""
    device = torch.device(given.device)
    memory: list[Kept] = []
    counted = [given.recipe] if given.kept is None else given.kept
    if device.type == "cuda" and (counted := [r for r in counted if r in data.NATIVE]):
        peers.preload()
        for recipe in counted:
            memory += [kept(*p, recipe, 8192, device) for p in PIPELINES.items()]
        say("\n".join(map(str, memory)))
    if not given.seeds:
        return [], memory
    settings = protocol(given, given.seeds[0])
    corpus = corpus_of(settings)
    say(
        f"{corpus.source}: {len(corpus.train) / 1e6:.1f} MB; set up after {time.monotonic() - start:.0f} s"
    )
    also = [recipes.arm(r, options.DTYPES[settings.dtype]).sparing("head") for r in given.also]
    if given.seconds is not None:
        trainings = len(given.arms) * len(given.seeds)
        settings = affordable(settings, corpus, start + given.seconds, trainings, also)
    model = f"{settings.layers} layers, dim {settings.dim}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    runs = []
    for seed in given.seeds:
        made = replace(settings, seed=seed)
        found = pair(made, corpus, given.arms, also)
        runs.append(Run(given.recipe, name, model, tokens_of(made), found))
        say(
            f"{found}\n  {tokens_of(made) / 1e6:.1f} M tokens, after {time.monotonic() - start:.0f} s"
        )
        if given.json:
            write(given.json, runs, memory)
    return runs, memory


def main() -> None:
    """Run or merge, print the means, write what was asked for."""
    start = time.monotonic()
    given = arguments()
    if given.merge is not None:
        groups, memory = merged(given.merge)
    else:
        runs, memory = run(given, start)
        groups = {tuple(r[:-1]): [s.pair for s in runs] for r in runs}
        if given.json:
            write(given.json, runs, memory)
    alone = [str(p.seed) for pairs in groups.values() for p in pairs if ARMS[0] not in p.losses]
    if alone and given.page:
        sys.exit(f"no dense run of seed {', '.join(alone)}: --merge the file that has it too")
    for key, pairs in groups.items():
        say(", ".join(map(str, key)))
        report(pairs)
    if given.page:
        made = tables(groups, memory)
        given.page.write_text(
            pages.fill(given.page.read_text(encoding="utf-8"), made), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
