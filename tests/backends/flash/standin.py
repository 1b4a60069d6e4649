"""What a compiled attention kernel does, in FP64 on the CPU, by the schema of `build.load`: addresses and numbers."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from te_ops.backends.flash import limits
from te_ops.backends.flash.spec import FlashSpec
from te_ops.basic.score import Score
from te_ops.pointwise import evaluate
from te_ops.runtime.tape import unwatched

CALLS: list[FlashSpec] = []
"""What was run."""
HUGE = 1 << 10  # of numbers that lie in memory which nobody wrote


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _view(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor at an address."""
    count = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(shape, strides)


def _flat(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return _view(address, (size,), (1,), dtype)


class _Given:
    """Tensors of a call."""

    def __init__(self, spec: FlashSpec, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.spec, self.sizes, self.strides = spec, sizes, strides
        assert all(step % 8 == 0 for step in strides)
        assert len(strides) == 3 * len(limits.TENSORS[spec.backward])

    def tensor(self, name: str, address: int) -> torch.Tensor:
        """[batch, rows, heads, features], or packed."""
        assert address % 16 == 0
        b, s_q, s_kv, h_q, h_kv, d_qk, d_v, _ = self.sizes
        features = d_v if name in ("v", "o", "do", "dv") else d_qk
        shape = (b, *((s_kv, h_kv) if name in ("k", "v", "dk", "dv") else (s_q, h_q)), features)
        place = 3 * limits.TENSORS[self.spec.backward].index(name)
        strides = (*self.strides[place : place + 3], 1)
        if self.spec.packed:
            shape, strides = shape[1:], strides[1:]
        return _view(address, shape, strides, DTYPES[self.spec.dtype])

    def statistic(self, address: int) -> torch.Tensor:
        """[batch, heads, rows], or packed."""
        b, s_q, _, h_q, *_ = self.sizes
        count = b * h_q * s_q if not self.spec.packed else h_q * s_q
        shape = (h_q, s_q) if self.spec.packed else (b, h_q, s_q)
        return _flat(address, count, torch.float32).view(shape)

    def places(self, addresses: tuple[int | None, ...]) -> list[torch.Tensor | None]:
        """Starts and lengths."""
        assert all((x is not None) is self.spec.packed for x in addresses)
        b = self.sizes[0]
        return [
            None if x is None else _flat(x, n, torch.int32)
            for x, n in zip(addresses, (b + 1, b + 1, b, b), strict=True)
        ]

    def sums(self, address: int | None) -> None:
        """That what is added to is 0, also behind the last key."""
        assert (address is not None) == (self.spec.group > 1)
        b, _, s_kv, _, h_kv, d_qk, d_v, _ = self.sizes
        if address is not None:
            batch = 1 if self.spec.packed else b
            found = _flat(address, batch * h_kv * (s_kv + 127) * (d_qk + d_v), torch.float32)
            assert not found.any()
            found.fill_(HUGE)


def kernel(spec: FlashSpec, score: Score | None = None) -> Any:
    """A stand-in for `runtime.kernel`: it checks what it is given as a kernel would have to."""
    ours = limits.TENSORS[spec.backward]

    def run(*given: Any) -> None:
        *addresses, sizes, strides, scale, left, right, stream = given
        assert stream == 0
        assert [x is not None for x in (left, right)] == [spec.left, spec.right]
        assert all(x is None or abs(x) < 2**31 for x in (left, right))
        known = _Given(spec, sizes, strides)
        places = known.places(tuple(addresses[-4:]))
        order = list(ours)
        order.insert(5 if spec.backward else 4, "lse")
        sink = None if spec.backward else addresses.pop(5)
        assert (sink is not None) is spec.sink
        values = _captured(spec, addresses.pop(-5), sizes[3])
        tensors = [
            known.statistic(x) if name == "lse" else known.tensor(name, x)
            for name, x in zip(order, addresses, strict=False)
        ]
        with unwatched():  # a kernel is no call of torch
            if spec.backward:
                known.sums(addresses[-5])
                backward(*tensors, values, scale, *places, left, right)
            else:
                forward(*tensors, values, scale, *places, left, right)
                if sink is not None:
                    o, lse = tensors[3:]
                    _add_sink(o, lse, _flat(sink, lse.shape[-2], torch.float32))

    def forward(*given: Any) -> None:
        CALLS.append(spec)
        q, k, v, o, lse, values, scale, *rest = given
        for (rows, keys), places, parts in _walk(spec, q, k, v, rest):
            s = _scores(spec, (score, values), parts, places, (scale, *rest))
            top = s.logsumexp(-1)
            p = (s - top.masked_fill(top == -math.inf, 0.0).unsqueeze(-1)).exp()
            rows(o).copy_(torch.einsum("hnm,mhd->nhd", p, _spread(keys(v), spec)))
            _of(spec, lse, rows).copy_(top)

    def backward(*given: Any) -> None:
        CALLS.append(spec)
        q, k, v, o, do, lse, dq, dk, dv, values, scale, *rest = given
        for (rows, keys), places, parts in _walk(spec, q, k, v, rest):
            leaves = [x.detach().requires_grad_() for x in parts]
            with torch.enable_grad():
                s = _scores(spec, (score, values), leaves, places, (scale, *rest))
                p = (s - _of(spec, lse, rows).double().unsqueeze(-1)).exp()
                delta = (rows(o).double() * rows(do).double()).sum(-1).t().unsqueeze(-1)
                dp = torch.einsum("nhd,mhd->hnm", rows(do).double(), _spread(leaves[2], spec))
                ds = (p * (dp - delta)).masked_fill(s == -math.inf, 0.0).detach()
                out = torch.einsum("hnm,mhd->nhd", p.detach(), _spread(leaves[2], spec))
                finite = s.masked_fill(s == -math.inf, 0.0)
                total = (finite * ds).sum() + (out * rows(do).double()).sum()
                found = torch.autograd.grad(total, leaves)
            for place, x in ((rows(dq), found[0]), (keys(dk), found[1]), (keys(dv), found[2])):
                place.copy_(x)

    return run


def _add_sink(o: Any, lse: Any, sink: Any) -> None:
    """One more key of value 0."""
    weight = torch.sigmoid(lse - sink[:, None]).transpose(-1, -2)
    o.mul_(weight.unsqueeze(-1).nan_to_num(0.0))
    seen = lse != -math.inf
    lse.copy_(torch.where(seen, torch.logaddexp(lse, sink[:, None]), lse))


def _captured(spec: FlashSpec, address: int | None, heads: int) -> dict[str, torch.Tensor]:
    """What a modifier reads beside the score and its place, by name."""
    assert (address is not None) is bool(spec.captured)
    if address is None:
        return {}
    held = _flat(address, len(spec.captured) * heads, torch.float32).view(-1, heads)
    return {n: x.double()[:, None, None] for n, x in zip(spec.captured, held, strict=True)}


def _walk(spec: FlashSpec, q: Any, k: Any, v: Any, rest: Any) -> Any:
    """For each sequence: views of its rows and keys, their numbers, and its q, k and v in FP64."""
    q_starts, kv_starts, q_lens, kv_lens, *_ = rest
    count = len(q_lens) if spec.packed else q.shape[0]
    for e in range(count):

        def part(x: Any, starts: Any, lens: Any, e: int = e) -> Any:
            if not spec.packed:
                return x[e]
            return x[int(starts[e]) : int(starts[e]) + int(lens[e])]

        def rows(x: Any, e: int = e) -> Any:
            return part(x, q_starts, q_lens, e)

        def keys(x: Any, e: int = e) -> Any:
            return part(x, kv_starts, kv_lens, e)

        parts = [rows(q).double(), keys(k).double(), keys(v).double()]
        places = (torch.arange(len(parts[0])), torch.arange(len(parts[1])))
        if len(parts[0]) and len(parts[1]):
            yield (rows, keys), (places, e), parts


def _of(spec: FlashSpec, lse: Any, rows: Any) -> Any:
    """The statistics of a sequence, [heads, rows]."""
    return rows(lse.t()).t() if spec.packed else rows(lse)


def _spread(x: Any, spec: FlashSpec) -> Any:
    return x.double().repeat_interleave(spec.group, 1)


def _scores(spec: FlashSpec, score: Any, parts: Any, places: Any, rest: Any) -> Any:
    (i, j), e = places
    scale, rest = rest[0], rest[1:]
    s = scale * torch.einsum("nhd,mhd->hnm", parts[0], _spread(parts[1], spec))
    score, values = score
    if score is not None:
        heads = torch.arange(s.shape[0])[:, None, None].double()
        known = {"s": s, "i": i[:, None].double(), "j": j.double(), "head": heads}
        known["batch"] = torch.full((1, 1, 1), float(e), dtype=torch.float64)
        known |= values
        s = evaluate(score.fn, *[known[name] for name in score.inputs], dtype=torch.float64)
    middle = i[:, None] + len(j) - len(i)
    left, right = rest[4:]
    if spec.mask == "causal":
        right = 0
    hidden = torch.zeros(len(i), len(j), dtype=torch.bool)
    if left is not None:
        hidden |= j < middle - left
    if right is not None:
        hidden |= j > middle + right
    return s.masked_fill(hidden, -math.inf)
