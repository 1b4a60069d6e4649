"""Launches of attention: shapes are prepared once, a call allocates results and passes addresses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops.backends.cudnn import library, plans, sequences
from te_ops.backends.cudnn.gates import refuse
from te_ops.backends.cudnn.graphs import SCALES, GraphSpec
from te_ops.backends.cudnn.library import Built
from te_ops.backends.cudnn.problem import LENGTHS, Problem, gathered, problem_of
from te_ops.backends.cudnn.specs import (
    GRADS,
    OF_KEYS,
    READ,
    TILE,
    contiguous,
    offsets_of,
    power,
    spec_of,
    steps_of,
)
from te_ops.backends.cudnn.specs import (
    facts as facts_of,
)
from te_ops.basic.sequences import known_of
from te_ops.errors import PlanError
from te_ops.quantizers import Record
from te_ops.registry import Call, Launch
from te_ops.runtime.replay import like
from te_ops.runtime.tape import recorder, unwatched
from te_ops.runtime.tune import collecting, offer

_UNKNOWN: tuple[tuple[int | None, int | None], bool] = ((None, None), False)
MAX_SHAPES = 1024  # prepared ones of a launch
STATIC = 8
"""Shapes of a launch that get plans of their own; further ones share plans by size classes."""
_BYTES = 15
_FAR = {torch.bfloat16: -1e30, torch.float16: -65504.0}
"""What hides a score: finite, so that a block of hidden keys has no NaN; next to it, every score counts nothing."""
_CLEANED = {False: ("k", "v"), True: ("q", "k", "v", "do")}
"""What is read with zeros in rows of no sequence: the others work row by row, and those rows are not written."""


class Ready(NamedTuple):
    """A shape that was prepared."""

    problem: Problem
    spec: GraphSpec
    built: Built
    given: dict[str, Tensor]  # lengths and offsets that depend on the shape only
    copied: tuple[str, ...]
    """Operands whose strides the library does not take. With offsets its gradients have those of contiguous results:
    q among packed heads gave a wrong dq from the second sequence on (cuDNN 9.19, H200)."""


class Attention:
    """The launch of an attention call, forward or backward."""

    plain: Any = None  # Plain, which is below
    whole: Any = None  # of launch_whole

    def __init__(self, call: Call) -> None:
        node = call.node
        self.problem = problem_of(call)
        self.names: tuple[str, ...] = node.operands
        self.paged = node.kv_layout == "paged"
        plain = {"q", "k", "v", "o", "lse", "do"}
        self.sized = 3 if plain.issuperset(self.names) else None
        """Operands whose shapes tell those of all."""
        self.varied = self.problem.varied
        self.places = tuple(call.reads.index(v) for v in node.inputs)
        self.read = tuple(name for name in READ[self.problem.backward] if name in self.names)
        self.writes = tuple(v.index for v in call.writes)
        self.device, self.index = call.device, call.device.index or 0
        self.reference: Callable[..., Any] = partial(
            node.prim.reference, live=call.live(node), **node.attrs
        )
        self.run: Callable[..., tuple[Any, ...]] = (
            self._backward if self.problem.backward else self._forward
        )
        self.quantized = any(call.spec(v).kind.name == "record" for v in node.inputs)
        self.opened: Callable[[Record], Tensor] = Record.dequantize
        self.made: dict[Any, Any] = {}  # Ready, or None where the reference runs
        self.recent: tuple[Any, Any] = (None, None)  # the key of the last call, and its entry
        self.classes: set[Any] = set()

    def __call__(self, *reads: Any) -> Any:
        """Over the values that the call reads, each of which comes once."""
        given = xs = [reads[i] for i in self.places]
        if self.quantized:
            xs = [self.opened(x) if isinstance(x, Record) else x for x in given]
        names = self.names
        if self.paged:
            names, xs = self._gathered(xs)
        lying = [x.is_contiguous() or x.stride() for x in xs]
        key = (_deterministic(), *[x.shape for x in xs[: self.sized]], *lying)
        if self.varied:
            key += (self._known(dict(zip(names, xs, strict=True))),)
        last, found = self.recent
        if key != last:
            found = self.made.get(key, self)
        if isinstance(found, Plain):
            made = found.run(xs, given)
            if made is not None:
                return made
            found = found.ready
        by_name = dict(zip(names, xs, strict=True))
        if found is self:
            with unwatched():  # what is made here stays, and is no memory of a plan
                found = self._prepare(key, by_name)
            if isinstance(found, Plain):
                found = found.ready
        made = self.reference(*given) if found is None else self._general(found, by_name, given)
        picked = tuple(made[i] for i in self.writes)
        return picked[0] if len(picked) == 1 else picked

    def _known(self, by_name: dict[str, Any]) -> tuple[tuple[int | None, int | None], bool]:
        """The greatest lengths, and whether all rows have a sequence and a key, as far as the host knows.

        What is captured or recorded serves later sequences too, of which nothing is known.
        """
        lens = [by_name.get(name) for name in ("q_lens", "kv_lens")]
        if recorder() is not None or library.captured_here():
            return _UNKNOWN
        q, kv = (known_of(x) for x in lens)
        form = self.problem.form
        whole = (
            lens[0] is lens[1]
            and (form.layout, form.kv_layout) == ("thd", "thd")
            and q.rows == by_name["q"].shape[0] == by_name["k"].shape[0]
        )
        steps = [None if x.longest is None else power(x.longest, TILE) for x in (q, kv)]
        return (steps[0], steps[1]), whole

    def _gathered(self, xs: list[Any]) -> tuple[tuple[str, ...], list[Any]]:
        """The operands without a page table."""
        made = gathered(dict(zip(self.names, xs, strict=True)))
        return tuple(made), list(made.values())

    def _general(self, ready: Ready, by_name: dict[str, Any], given: list[Any]) -> tuple[Any, ...]:
        for name in ready.copied:
            by_name[name] = by_name[name].contiguous()
        for name in self.read:
            if by_name[name].data_ptr() & _BYTES:
                by_name[name] = moved(by_name[name])
        return self.run(ready, by_name)

    # -- preparing

    def _prepare(self, key: Any, by_name: dict[str, Any]) -> Any:
        longest, whole = key[-1] if self.varied else _UNKNOWN
        if self.varied and key[-1] != _UNKNOWN:
            self._prepare((*key[:-1], _UNKNOWN), by_name)  # what a capture is going to ask for
        problem = self.problem.at(by_name, longest=longest, whole=whole)
        found: Any = None
        if refuse(problem) is None:
            shared = self._shares(problem)
            together = problem.backward and (shared or problem.ragged)
            copied = tuple(
                name
                for name, x in ((name, by_name[name]) for name in self.read)
                if _unfit(x) or (together and not x.is_contiguous())
            )
            lying = {
                name: contiguous(x) if name in copied or self._cleans(problem, name) else x
                for name, x in by_name.items()
            }
            spec = spec_of(problem, lying, shared=shared)
            built = plans.plan(self.index, spec)
            if built is not None:
                given = {
                    **_constants(problem, spec, lying, self.device),
                    **self._own(problem, spec),
                }
                found = Ready(problem, spec, built, given, copied)
                is_whole, make = self.whole
                if self._is_plain(found, lying):
                    found = self.plain(found, self, lying)
                elif is_whole(self, found):
                    found = make(found, self, lying)
            elif problem.form.dropout:
                raise PlanError(
                    f"attention: cuDNN has no plan for {spec.text}, and another kernel would drop other "
                    "probabilities in one direction than in the other; hide the kernels named 'cudnn.'"
                )
        if len(self.made) >= MAX_SHAPES:
            self.made.clear()
        self.made[key] = found
        self.recent = (key, found)
        return found

    def _own(self, problem: Problem, spec: GraphSpec) -> dict[str, Tensor]:
        """Further operands that stay as they are."""
        return {}

    def _is_plain(self, ready: Ready, lying: dict[str, Any]) -> bool:
        """Whether nothing is done but issuing the plan over tensors as they lie."""
        wanted = {"q", "k", "v", *(("o", "lse", "do") if self.problem.backward else ())}
        if set(self.names) != wanted or ready.copied or ready.spec.padding or ready.spec.dropout:
            return False
        return not ready.spec.peak and ("lse" not in lying or lying["lse"].is_contiguous())

    def _cleans(self, problem: Problem, name: str) -> bool:
        hides = problem.varied and not problem.whole
        hides = hides or (name == "do" and "mask" in problem.has)
        return hides and name in _CLEANED[problem.backward]

    def _shares(self, problem: Problem) -> bool:
        """Whether a dense shape runs as sequences of a size class, since many others had plans of their own."""
        form = problem.form
        if problem.varied or problem.bias or "mask" in problem.has or form.dropout or problem.peak:
            return False
        if (form.layout, form.kv_layout) != ("bshd", "bshd"):
            return False
        self.classes.add(problem.sizes)
        return len(self.classes) > STATIC

    # -- running

    def _forward(self, ready: Ready, xs: dict[str, Any]) -> tuple[Any, ...]:
        problem, spec = ready.problem, ready.spec
        scales = {name: xs[name] for name in SCALES if name in xs}
        tensors = {**ready.given, **scales, "q": xs["q"], "k": xs["k"], "v": xs["v"]}
        q, n = xs["q"], problem.sizes
        varied = self._varied(ready, tensors, xs) if problem.varied else None
        make = torch.empty if varied is None else torch.zeros
        o = make((*q.shape[:-1], n.d_v), dtype=q.dtype, device=q.device)
        hidden = self._bias(problem, tensors, xs)
        tensors["o"] = o
        names = ("peak", "total") if spec.peak else ("stats",)
        for name in names:
            tensors[name] = self._statistic(ready, _UNWRITTEN[name])
        self._seed(problem, tensors, xs)
        self._issue(ready, tensors)
        made = [_by_head(tensors[name], ready) for name in names]
        peak = made[0] if spec.peak else None
        lse = made[0] + made[1].log() if spec.peak else made[0]
        empty = hidden if varied is None else varied
        if empty is not None or problem.bias:
            lse, peak = self._filled(problem, o, lse, peak, empty)
        if "sink" in xs:
            lse = self._sink(problem, o, lse, xs["sink"])
        if peak is not None:
            flat = peak if peak.dim() == 2 else peak.transpose(0, 1).flatten(1)
            peak = flat.amax(1)
        return o, lse, peak

    def _backward(self, ready: Ready, xs: dict[str, Any]) -> tuple[Any, ...]:
        problem = ready.problem
        tensors = {**ready.given, **{name: xs[name] for name in READ[True]}}
        make: Callable[..., Tensor] = torch.empty
        if problem.varied and self._varied(ready, tensors, xs) is not None:
            make = torch.zeros
        hidden = self._bias(problem, tensors, xs)
        if hidden is not None:
            tensors["do"] = torch.where(
                _rows(hidden, problem), xs["do"].new_zeros(()), xs["do"].contiguous()
            )
        tensors["stats"] = self._stats(ready, xs["lse"])
        for name in ("q", "k", "v"):
            x = xs[name]
            tensors[GRADS[name]] = make(x.shape, dtype=x.dtype, device=x.device)
        if ready.spec.dbias:
            tensors["dbias"] = torch.empty(
                xs["bias"].shape, dtype=xs["bias"].dtype, device=self.device
            )
        self._seed(problem, tensors, xs)
        self._issue(ready, tensors)
        names = ("q", "k", "v", *(name for name in self.names if name == "bias"))
        return tuple(tensors.get(GRADS[name]) for name in names)

    def _issue(self, ready: Ready, tensors: dict[str, Tensor]) -> None:
        built, index = ready.built, self.index
        space = 0
        if built.workspace:
            memory = torch.empty(built.workspace, dtype=torch.uint8, device=self.device)
            space = memory.data_ptr()
        addresses = [tensors[name].data_ptr() for name in built.operands]
        addresses.append(space)
        if library.current_device() != index:
            with library.entered(index):
                built.run(addresses, library.stream_of(index))
        else:
            built.run(addresses, library.stream_of(index))
        tape = recorder()
        if tape is not None:
            for tensor in ready.given.values():
                tape.keep(tensor)
            tape.launched(built, tuple(addresses))

    # -- what sequences, biases, dropout and sinks need

    def _varied(self, ready: Ready, tensors: dict[str, Any], xs: dict[str, Any]) -> Tensor | None:
        """Put lengths and offsets among the tensors, clean those that are read; which rows are empty, if any may be."""
        problem, form = ready.problem, ready.problem.form
        facts = self.facts(ready, xs)
        tensors |= facts.operands
        for name in _CLEANED[problem.backward] if facts.empty is not None else ():
            keys = name in OF_KEYS
            rows = facts.hidden if keys else facts.empty if name == "do" else facts.outside
            assert rows is not None
            layout = form.kv_layout if keys else form.layout
            tensors[name] = sequences.cleaned(tensors[name], layout, rows)
        return facts.empty

    def facts(self, ready: Ready, xs: dict[str, Any]) -> sequences.Facts:
        """Lengths, offsets and empty rows, which layers share that are given the same sequences."""
        problem, spec = ready.problem, ready.spec

        def make() -> sequences.Facts:
            lying = {
                name: contiguous(x) if self._cleans(problem, name) else x for name, x in xs.items()
            }
            return facts_of(problem, spec, xs, lying)

        first, *others = [xs[name] for name in LENGTHS if name in xs]
        if recorder() is not None or library.captured_here():
            return make()
        strides = tuple(xs[name].stride() for name in self.read)
        key = (spec.b, spec.ragged, problem.band, problem.sizes, problem.whole, strides)
        return sequences.facts_of(first, key, others, make)

    def _bias(self, problem: Problem, tensors: dict[str, Any], xs: dict[str, Any]) -> Tensor | None:
        """Put what is added to scores among the tensors; of a mask, the rows that it hides whole."""
        if "bias" in problem.has:
            given = xs["bias"].contiguous()
            tensors["bias"] = moved(given) if given.data_ptr() & _BYTES else given
        if "mask" not in problem.has:
            return None
        mask = xs["mask"]
        hidden: Tensor = mask.all(-1)
        shown = mask & ~hidden.unsqueeze(-1)
        zeros = torch.zeros(mask.shape, dtype=xs["q"].dtype, device=mask.device)
        assert problem.dtype is not None
        tensors["bias"] = zeros.masked_fill_(shown, _FAR[problem.dtype])
        return hidden

    def _seed(self, problem: Problem, tensors: dict[str, Any], xs: dict[str, Any]) -> None:
        if problem.form.dropout:
            tensors["seed"] = xs["seed"].to(self.device)
            tensors["offset"] = torch.full(
                (1,), problem.form.stream << 32, dtype=torch.int64, device=self.device
            )

    def _statistic(self, ready: Ready, value: float) -> Tensor:
        """Memory for a statistic: [b, h, s], or of ragged sequences [rows, h]."""
        n, spec = ready.problem.sizes, ready.spec
        shape: tuple[int, ...] = (n.b, n.h_q, n.s_q)
        if spec.ragged:
            rows = n.s_q if ready.problem.form.layout == "thd" else n.b * n.s_q
            shape = (rows, n.h_q)
        if ready.problem.varied and not ready.problem.whole:
            return torch.full(shape, value, dtype=torch.float32, device=self.device)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _stats(self, ready: Ready, lse: Tensor) -> Tensor:
        """The statistics as the library reads them."""
        if not ready.spec.ragged:
            return lse.contiguous()
        return lse.t().contiguous() if lse.dim() == 2 else lse.transpose(1, 2).contiguous()

    def _filled(
        self, problem: Problem, o: Tensor, lse: Tensor, peak: Tensor | None, empty: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """0 and +inf for empty rows: those that structure says, and those that the library calls -inf."""
        layout = problem.form.layout
        rows = lse == -math.inf
        if empty is not None:
            rows = rows | (empty if "mask" in problem.has else sequences.by_head(empty, layout))
        if _hides_rows(problem):
            sequences.bytes_of(o).masked_fill_(_turned(rows, layout), 0)
        lse = lse.masked_fill(rows, math.inf)
        return lse, None if peak is None else peak.masked_fill(rows, -math.inf)

    def _sink(self, problem: Problem, o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
        """One more key of this score and value 0: an epilogue on o and the lse."""
        column = sink.float().view(-1, 1)
        empty = lse == math.inf
        weight = _turned(torch.sigmoid(lse - column), problem.form.layout)
        if problem.quantized:
            o.copy_(o.float().mul_(weight))
        else:
            o.mul_(weight)
        joined = torch.logaddexp(lse, column.expand_as(lse))
        return joined.masked_fill_(empty, math.inf)


def _hides_rows(problem: Problem) -> bool:
    """Whether rows may be empty whose results the library has written, whatever they are."""
    band = problem.band
    return not problem.varied or band.left is not None or band.diagonal == "bottom_right"


_UNWRITTEN = {"stats": math.inf, "peak": -math.inf, "total": 1.0}
"""What the library leaves where a sequence has no rows or no keys."""


_deterministic = torch.are_deterministic_algorithms_enabled


class Plain:
    """A prepared shape of q, k and v alone: addresses in, results out, with as little in between as there is."""

    def __init__(self, ready: Ready, launch: Attention, xs: dict[str, Any]) -> None:
        self.ready, self.built, self.index = ready, ready.built, launch.index
        backward = ready.problem.backward
        names = ("q", "k", "v", "o", "lse", "do") if backward else ("q", "k", "v")
        self.order = tuple(launch.names.index(name) for name in names)
        self.writes = launch.writes
        self.device = device = launch.device
        n = ready.problem.sizes
        shapes = [xs[name].shape for name in ("q", "k", "v")]
        dtype = xs["q"].dtype
        if backward:
            self.results = [like(shape, dtype, device) for shape in shapes]
        else:
            statistic = torch.Size((n.b, n.h_q, n.s_q))
            o = torch.Size((*shapes[0][:-1], n.d_v))
            self.results = [like(o, dtype, device), like(statistic, torch.float32, device)]
        self.makers = [library.fresh(x) for x in self.results]
        self.space = like(torch.Size((max(ready.built.workspace, 1),)), torch.uint8, device)

    def run(self, xs: list[Any], given: list[Any]) -> Any:
        """The results that the call writes, from operands as the library reads them and as they came; None where an
        address is not what the library takes."""
        words = [xs[i].data_ptr() for i in self.order]
        off = 0
        for word in words:
            off |= word
        if off & _BYTES:
            return None
        made = self.fresh()
        words += [x.data_ptr() for x in made]
        self.issue(words)
        writes = self.writes
        return made[writes[0]] if len(writes) == 1 else tuple([made[i] for i in writes])

    def fresh(self) -> list[Tensor]:
        """Memory for the results."""
        if recorder() is None and library.current_device() == self.index:
            return [make() for make in self.makers]
        return [torch.empty_like(x) for x in self.results]

    def issue(self, words: list[int]) -> None:
        """Run the plan on these addresses, behind which that of the workspace comes."""
        index, tape = self.index, recorder()
        if library.current_device() == index:
            self._issue(words, tape)
        else:
            with library.entered(index):
                self._issue(words, tape)
        if tape is not None:
            tape.launched(self.built, tuple(words))

    def _issue(self, words: list[int], tape: Any) -> None:
        built, stream = self.built, library.stream_of(self.index)
        if not built.workspace:
            words.append(0)
        elif built.workspace <= library.SCRATCH and tape is None and not library.captured_here():
            words.append(library.scratch(self.device, stream))
        else:  # of the call alone: a tape replays it, and a CUDA graph keeps it
            space = torch.empty_like(self.space)
            words.append(space.data_ptr())
        built.run(words, stream)


Attention.plain = Plain


# -- layouts


def _unfit(x: Tensor) -> bool:
    """Whether the library would read x wrongly: features together, strides of whole 16 bytes, none twice."""
    if x.stride(-1) != 1:
        return True
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return any(n > 1 and (step * x.itemsize & _BYTES or not step) for n, step in pairs)


def moved(x: Tensor) -> Tensor:
    """x with the same strides on an address that the library takes."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.copy_(x)


def _turned(by_head: Tensor, layout: str) -> Tensor:
    """[h, rows] or [b, h, rows] as it broadcasts to o."""
    if layout == "thd":
        return by_head.t().unsqueeze(-1)
    made = by_head.transpose(1, 2) if layout == "bshd" else by_head.permute(2, 0, 1)
    return made.unsqueeze(-1)


def _rows(hidden: Tensor, problem: Problem) -> Tensor:
    """Rows that a mask hides, [.., heads, rows], as they broadcast to o."""
    n = problem.sizes
    full = hidden.view((1,) * (3 - hidden.dim()) + hidden.shape).expand(n.b, n.h_q, n.s_q)
    return _turned(full, problem.form.layout)


def _by_head(statistic: Tensor, ready: Ready) -> Tensor:
    """A statistic as [h, rows] or [b, h, rows]."""
    n = ready.problem.sizes
    if not ready.spec.ragged:
        return statistic
    if ready.problem.form.layout == "thd":
        return statistic.t()
    return statistic.view(n.b, n.s_q, n.h_q).transpose(1, 2)


def refuse_capture(spec: GraphSpec) -> None:
    """What is made for a shape is kept by its launch, so it must not be memory of a CUDA graph.

    Raises:
        PlanError: a graph is being captured.
    """
    if library.capturing():
        raise PlanError(
            f"attention sees {spec.text} for the first time while a CUDA graph is captured; run it once before"
        )


def _constants(
    problem: Problem, spec: GraphSpec, xs: dict[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """Lengths and offsets of a dense shape that runs with a padding mask or as sequences."""
    if not spec.padding or problem.varied:
        return {}
    refuse_capture(spec)
    q, kv = sequences.sides(problem, {"q": torch.empty(0, device=device)})
    made = {"q_lens": sequences.lengths(q, spec.b), "kv_lens": sequences.lengths(kv, spec.b)}
    if spec.ragged:
        made |= offsets_of(spec, (q, kv), steps_of(problem, xs))
    return made


def _planned(problem: Problem) -> GraphSpec:
    """The graph for the sizes that a call was planned for, of tensors that lie together."""
    dtypes = dict(problem.dtypes)
    xs = {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in problem.shapes
    }
    return spec_of(problem.at(xs), xs)


def bind(call: Call) -> Launch:
    """The launch of an attention call.

    Raises:
        PlanError: a gradient of the lse is wanted of an attention with dropout that the library ran forward.
    """
    made = Attention(call)
    if collecting() and refuse(made.problem) is None:
        offer(plans.Trial(made.index, _planned(made.problem)))
    if made.problem.form.dropout and "dlse" in made.names:
        raise PlanError(
            "attention: cuDNN takes no gradient of the lse, and another kernel would drop other probabilities than "
            "cuDNN did forward; detach the lse, or hide the kernels named 'cudnn.'"
        )
    return made
