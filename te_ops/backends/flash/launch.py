"""Launches of attention kernels: tensors as they lie, memory for results and sums, and what sequences need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops.backends.cuda.block import processors
from te_ops.backends.cuda.launch import zero_word
from te_ops.backends.cudnn import library, sequences
from te_ops.backends.cudnn.problem import LENGTHS
from te_ops.backends.flash import limits
from te_ops.backends.flash.problem import Problem, problem_of
from te_ops.basic.attention_form import Sizes, sizes
from te_ops.basic.sequences import known_of
from te_ops.quantizers import Record
from te_ops.registry import Call, Launch
from te_ops.runtime.replay import like
from te_ops.runtime.tape import recorder, unwatched

Compiled = Callable[..., None]
"""What `runtime.kernel` gives, see `build.load`."""
Make = Callable[[], Tensor]

MAX_SHAPES = 1024  # prepared ones of a launch
_BYTES = 15
_deterministic = torch.are_deterministic_algorithms_enabled
_READ = {False: ("q", "k", "v"), True: ("q", "k", "v", "o", "do")}
_CLEANED = {False: ("k", "v"), True: ("q", "k", "v", "do")}
_NOWHERE = (None,) * 4


class Places(NamedTuple):
    """Of packed sequences: int32 starts with the end, and lengths, as the kernels read them.

    `outside` and `hidden` are rows of queries and of keys that no sequence has, None where there are none.
    """

    operands: tuple[Tensor, ...]
    outside: Tensor | None
    hidden: Tensor | None


class Shape(NamedTuple):
    """What is prepared for operands that lie as those of a call.

    Attributes:
        results: stand for what a call makes, o and lse or dq, dk and dv.
        rows, sums: stand for memory of a gradient, see `build.load`.
        makers: make memory like all these.
        copied: operands that the kernel would read wrongly.
        numbers: sizes, strides, scale and window, as the kernel takes them.
        hides_rows: a row may see no key.
    """

    results: tuple[Tensor, ...]
    rows: Tensor
    sums: Tensor | None
    makers: tuple[Make, ...]
    copied: tuple[int, ...]
    numbers: tuple[Any, ...]
    hides_rows: bool


@dataclass(frozen=True)
class Issue:
    """A call of a kernel without its addresses, for the recorder of `te_ops.runtime.tape`."""

    run: Compiled
    present: tuple[bool, ...]  # which addresses there are
    numbers: tuple[Any, ...]
    clears: bool = False

    def prepare(self, words: memoryview, address: int) -> Callable[[int], None]:
        """See `te_ops.runtime.tape.Issue`."""
        run, numbers, present = self.run, self.numbers, self.present

        def issue(stream: int) -> None:
            given = iter(words)
            run(*[next(given) if there else None for there in present], *numbers, stream)

        return issue


class Attention:
    """The launch of a call: shapes are prepared once; sizes that the kernel does not take go to the reference."""

    def __init__(self, call: Call, run: Compiled) -> None:
        node = call.node
        self.problem: Problem = problem_of(call)
        self.run = run
        self.form, self.backward = self.problem.form, self.problem.backward
        self.names: tuple[str, ...] = node.operands
        self.places = tuple(call.reads.index(v) for v in node.inputs)
        self.read = tuple(self.names.index(name) for name in _READ[self.backward])
        self.lse = self.names.index("lse") if self.backward else -1
        score = self.form.score
        self.captures = [self.names.index(x) for x in (() if score is None else score.captured)]
        self.sink = self.names.index("sink") if "sink" in self.names else None
        self.writes = tuple(v.index for v in call.writes)
        self.device, self.index = call.device, call.device.index or 0
        self.quantized = any(call.spec(v).kind.name == "record" for v in node.inputs)
        self.reference: Callable[..., Any] = partial(
            node.prim.reference, live=call.live(node), **node.attrs
        )
        self.made: dict[Any, Shape | None] = {}
        self.recent: tuple[Any, Any] = (None, None)  # the key of the last call, and its shape

    def __call__(self, *reads: Any) -> Any:
        """Over the values that the call reads, each of which comes once."""
        given = xs = [reads[i] for i in self.places]
        if self.quantized:
            xs = [x.dequantize() if isinstance(x, Record) else x for x in given]
        whole = not self.problem.packed or (not self.problem.padded and self._whole(xs))
        strides = [xs[i].stride() for i in self.read]
        key = (_deterministic(), whole, *[x.shape for x in xs], *strides)
        last, shape = self.recent
        if key != last:
            shape = self._shape(key, xs)
        if shape is None:
            made = self.reference(*given)
        elif self._here():
            made = self._launch(shape, xs, whole)
        else:
            with torch.cuda.device(self.device):
                made = self._launch(shape, xs, whole)
        picked = tuple([made[i] for i in self.writes])
        return picked[0] if len(picked) == 1 else picked

    def _here(self) -> bool:
        """Whether the device is the current one."""
        return self.device.type != "cuda" or self.index == library.current_device()

    def _takes(self, n: Sizes) -> bool:
        """Whether these sizes run on the kernel of those that were planned for."""
        if 0 in n or (self.backward and _deterministic()):
            return False
        band = self.form.band
        anywhere = band.diagonal == "bottom_right" or (band.left is None and band.right is None)
        return anywhere or self.form.layout == "thd" or n.s_q == n.s_kv

    # -- preparing

    def _shape(self, key: Any, xs: list[Any]) -> Shape | None:
        """What is prepared for operands that lie like these, None where the reference runs."""
        if key not in self.made:
            if len(self.made) >= MAX_SHAPES:
                self.made.clear()
            n = sizes(self.form, dict(zip(self.names, xs, strict=True)))
            with unwatched():  # what is made here stays
                self.made[key] = self._prepared(n, xs, key[1]) if self._takes(n) else None
        self.recent = (key, self.made[key])
        return self.made[key]

    def _prepared(self, n: Sizes, xs: list[Any], whole: bool) -> Shape:
        packed, hides = self.problem.packed, self._hides_rows(n)
        n = _flat(n) if self.problem.padded else n
        q, k, v = (xs[i] for i in self.read[:3])
        statistic = (n.h_q, n.s_q) if packed else (n.b, n.h_q, n.s_q)
        made: list[tuple[tuple[int, ...], torch.dtype]]
        made = [((*q.shape[:-1], n.d_v), q.dtype), (statistic, torch.float32)]
        if self.backward:
            made = [(tuple(x.shape), x.dtype) for x in (q, k, v)]
        results = tuple(like(torch.Size(s), dtype, self.device) for s, dtype in made)
        of_q, of_kv = _sums(n, packed)
        memory = [like(torch.Size((size,)), torch.float32, self.device) for size in (of_q, of_kv)]
        shared = n.h_q != n.h_kv
        copied = tuple(i for i in self.read if not _fits(xs[i], together=self.problem.padded))
        made_anew = list(copied)
        if not whole:
            made_anew += [self.names.index(name) for name in _CLEANED[self.backward]]
        return Shape(
            results=results,
            rows=memory[0],
            sums=memory[1] if shared else None,
            makers=tuple(library.fresh(x) for x in (*results, *memory)),
            copied=copied,
            numbers=self._numbers(n, xs, frozenset(made_anew), results),
            hides_rows=hides,
        )

    def _numbers(
        self, n: Sizes, xs: list[Any], made_anew: frozenset[int], results: tuple[Tensor, ...]
    ) -> tuple[Any, ...]:
        """Sizes, strides, scale and window of a call whose operands `made_anew` are contiguous by then."""
        lie = {
            self.names[i]: _contiguous(xs[i].shape) if i in made_anew else xs[i].stride()
            for i in self.read
        }
        own = ("dq", "dk", "dv") if self.backward else ("o",)
        lie |= {name: _contiguous(x.shape) for name, x in zip(own, results, strict=False)}
        layouts = dict.fromkeys(("k", "v", "dk", "dv"), self.form.kv_layout)
        strides: list[int] = []
        for name in limits.TENSORS[self.backward]:
            steps = _steps(lie[name], layouts.get(name, self.form.layout))
            strides += (0, *steps[1:]) if self.problem.padded else steps
        band = self.form.band
        window = band.left is not None or band.right not in (None, 0)
        far = n.s_q + n.s_kv  # the kernels count in 32 bits, and a side this wide hides nothing
        sides = (band.left, band.right) if window else (None, None)
        ends = [side if side is None else min(side, far) for side in sides]
        return ((*n, processors(self.device)), tuple(strides), self.form.scale, *ends)

    def _hides_rows(self, n: Sizes) -> bool:
        """Whether a row of a sequence may see no key."""
        if self.form.score is not None:
            return True
        if self.problem.packed:
            return not self.problem.own
        return self.form.band.rows(n.s_q, n.s_kv) != (0, n.s_q)

    # -- running

    def _launch(self, shape: Shape, xs: list[Any], whole: bool) -> tuple[Any, ...]:
        places = self._sequences(xs, whole) if self.problem.packed else None
        for i in shape.copied:
            xs[i] = torch.empty(xs[i].shape, dtype=xs[i].dtype, device=xs[i].device).copy_(xs[i])
        if places is not None and places.outside is not None:
            for name in _CLEANED[self.backward]:
                rows = places.hidden if name in ("k", "v") else places.outside
                assert rows is not None
                i = self.names.index(name)
                xs[i] = sequences.cleaned(xs[i], self.form.layout, rows)
        for i in self.read:
            if xs[i].data_ptr() & _BYTES:
                xs[i] = moved(xs[i])
        return (self._backward if self.backward else self._forward)(shape, xs, places)

    def _forward(self, shape: Shape, xs: list[Any], places: Places | None) -> tuple[Any, ...]:
        gaps = places is not None and places.outside is not None
        o, lse = _fresh(shape, 0, shape.results)
        if gaps:
            o.zero_()
            lse.fill_(math.inf)
        sink = None if self.sink is None else xs[self.sink].float().contiguous()
        tensors = [*[xs[i] for i in self.read], o, lse, sink, self._captured_values(xs)]
        self._issue(tensors, shape, places)
        if shape.hides_rows or gaps:
            lse.masked_fill_(lse == -math.inf, math.inf)
        if self.problem.padded:
            lse = lse.view(lse.shape[0], *o.shape[:2]).transpose(0, 1).contiguous()
        return o, lse, None

    def _backward(self, shape: Shape, xs: list[Any], places: Places | None) -> tuple[Any, ...]:
        grads = _fresh(shape, 0, shape.results)
        if places is not None and places.outside is not None:
            for x in grads:
                x.zero_()
        lse = xs[self.lse]
        lse = lse.transpose(0, 1) if self.problem.padded else lse
        lse = lse if lse.is_contiguous() else lse.contiguous()
        (rows,), sums = _fresh(shape, 3, (shape.rows,)), None
        if shape.sums is not None:
            (sums,) = _fresh(shape, 4, (shape.sums,))
            clear(sums)
        tensors = [*[xs[i] for i in self.read], lse, *grads, rows, sums, self._captured_values(xs)]
        self._issue(tensors, shape, places)
        return tuple(grads)

    def _captured_values(self, xs: list[Any]) -> Tensor | None:
        """FP32 [values, heads] of what a modifier reads; a run-time number lives on the host."""
        if not self.captures:
            return None
        heads = self.problem.sizes.h_q
        with torch.no_grad():
            each = [
                x.float().expand(heads)
                if x.device == self.device
                else torch.full((heads,), float(x), device=self.device)
                for x in (xs[i] for i in self.captures)
            ]
            return torch.stack(each)

    def _issue(self, tensors: list[Tensor | None], shape: Shape, places: Places | None) -> None:
        """Run the kernel on memory, on the current stream."""
        tensors += _NOWHERE if places is None else places.operands
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        self.run(*addresses, *shape.numbers, stream_of(self.device, self.index))
        tape = recorder()
        if tape is not None:
            present = tuple([x is not None for x in addresses])
            issue = Issue(self.run, present, shape.numbers)
            tape.launched(issue, tuple([x for x in addresses if x is not None]))

    # -- sequences

    def _sequences(self, given: list[Any], whole: bool) -> Places:
        """Where sequences are, which layers share that are given the same ones."""
        xs = dict(zip(self.names, given, strict=True))
        first, *others = [xs[name] for name in LENGTHS if name in xs]

        def make() -> Places:
            return _places(self.problem, xs, whole)

        if recorder() is not None or self._captured():
            return make()
        key = ("flash", xs["q"].shape[0], xs["k"].shape[0], whole)
        found: Any = sequences.facts_of(first, key, others, make)  # type: ignore[arg-type]
        return found  # type: ignore[no-any-return]

    def _captured(self) -> bool:
        """Whether the launch goes into a CUDA graph."""
        return self.device.type == "cuda" and library.captured_here()

    def _whole(self, given: list[Any]) -> bool:
        """Whether every row has a sequence, as far as the host knows.

        What is captured or recorded serves later sequences too, of which nothing is known.
        """
        if recorder() is not None or self._captured():
            return False
        xs = dict(zip(self.names, given, strict=True))
        sides = (("q", "q_lens"), ("k", "kv_lens"))
        return all(known_of(xs[lens]).rows == xs[name].shape[0] for name, lens in sides)


def _places(problem: Problem, xs: dict[str, Any], whole: bool) -> Places:
    sides = sequences.sides(problem, xs)
    starts = [_ended(side) for side in sides]
    lens = [side.lens.to(torch.int32) for side in sides]
    operands = (*starts, *lens)
    if whole:
        return Places(operands, None, None)
    outside, hidden = (~side.places()[2] for side in sides)
    return Places(operands, outside, hidden)


def _ended(side: sequences.Side) -> Tensor:
    """int32 starts among all rows, and the end."""
    starts, rows = side.starts, side.size
    if side.layout != "thd":
        count = starts.shape[0]
        starts, rows = starts + torch.arange(count, device=starts.device) * rows, count * rows
    return torch.nn.functional.pad(starts, (0, 1), value=rows).to(torch.int32)


def _flat(n: Sizes) -> Sizes:
    """A batch as packed tokens: its rows are those of all entries."""
    return n._replace(s_q=n.b * n.s_q, s_kv=n.b * n.s_kv)


# -- memory


def _fresh(shape: Shape, first: int, likes: tuple[Tensor, ...]) -> list[Tensor]:
    """Memory like what stands for it, whose makers begin at `first`."""
    if recorder() is None:
        return [make() for make in shape.makers[first : first + len(likes)]]
    return [torch.empty_like(x) for x in likes]


def _sums(n: Sizes, packed: bool) -> tuple[int, int]:
    """FP32 numbers of the sums of a gradient, beside queries and beside keys; see `build.load`."""
    batch, count = (1, n.b) if packed else (n.b, 1)
    of_q = batch * n.h_q * limits.padded(n.s_q, count) * (2 + limits.wide(n.d_qk))
    features = limits.wide(n.d_qk) + limits.wide(n.d_v)
    return of_q, batch * n.h_kv * limits.padded(n.s_kv, count) * features


def clear(x: Tensor) -> None:
    """Zeros for an FP32 tensor, as an operation that is recorded."""
    if x.device.type == "cuda":
        zero_word(x, x.numel())
    else:
        x.zero_()


def stream_of(device: torch.device, index: int) -> int:
    """Handle of torch's current stream."""
    return library.stream_of(index) if device.type == "cuda" else 0


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _steps(strides: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """Elements from an entry of the batch to the next, from a row, from a head."""
    if layout == "thd":
        return 0, strides[0], strides[1]
    batch, row = (1, 0) if layout == "sbhd" else (0, 1)
    return strides[batch], strides[row], strides[2]


def _fits(x: Tensor, *, together: bool = False) -> bool:
    """Whether the kernels read x as it lies: features together, strides of whole 16 bytes, none twice.

    `together`: rows of the next entry of a batch lie behind those of the last.
    """
    step = 16 // x.itemsize
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    if together and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        return False
    return x.stride(-1) == 1 and all(s % step == 0 and (s or size == 1) for size, s in pairs)


def moved(x: Tensor) -> Tensor:
    """x with the same strides on an address of whole 16 bytes."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.copy_(x)


def bind(call: Call, run: Compiled) -> Launch:
    """The launch of an attention call by a kernel."""
    return Attention(call, run)
