"""A stand-in for the cuDNN frontend: it records how graphs are made, and runs them over host memory in FP64.

It behaves as the library was seen to: hidden keys are multiplied by 0 (so NaN there spreads), entries of length 0 are
left unwritten, rows beyond a length are 0 with a statistic of -inf, and rows that a band hides whole are NaN.
"""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import torch

from te_ops.runtime.tape import unwatched

TYPES = {
    "BFLOAT16": torch.bfloat16,
    "HALF": torch.float16,
    "FLOAT": torch.float32,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP8_E4M3": torch.float8_e4m3fn,
    "FP8_E5M2": torch.float8_e5m2,
}


class FakeTensor:
    """A tensor of a graph."""

    def __init__(self, **facts: Any) -> None:
        self.facts = {"is_virtual": True, "at": None, **facts}

    def __getattr__(self, name: str) -> Any:
        if name in (
            "set_ragged_offset",
            "set_output",
            "set_uid",
            "set_dim",
            "set_stride",
            "set_data_type",
        ):

            def put(value: Any) -> FakeTensor:
                key = {"ragged_offset": "at", "data_type": "data_type"}.get(name[4:], name[4:])
                self.facts[key] = value
                return self

            return put
        raise AttributeError(name)

    @property
    def uid(self) -> int:
        return int(self.facts["uid"])


class FakeGraph:
    """A graph: one attention node."""

    def __init__(self, fake: FakeCudnn, **options: Any) -> None:
        self.fake, self.options = fake, options
        self.steps: list[str] = []
        self.tensors: dict[int, FakeTensor] = {}
        self.node: tuple[str, dict[str, Any], tuple[FakeTensor, ...]] | None = None
        self._plans = [
            SimpleNamespace(cpp_index=None if name in fake.foreign else i)
            for i, name in enumerate(fake.plans)
        ]
        self._lowered_graph = SimpleNamespace(_execute_with_raw_ptrs=self._execute)
        self.built: list[int] = []
        self._plan_index = 0
        fake.graphs.append(self)

    def tensor(self, **facts: Any) -> FakeTensor:
        made = FakeTensor(**facts, is_output=False)
        assert facts["uid"] not in self.tensors, "a uid is given twice"
        self.tensors[facts["uid"]] = made
        return made

    def sdpa(self, **given: Any) -> tuple[FakeTensor, FakeTensor]:
        made = (FakeTensor(), FakeTensor())
        self.node = ("forward", given, made)
        return made

    def sdpa_fp8(self, **given: Any) -> tuple[FakeTensor, ...]:
        for side in ("left", "right"):
            if f"{side}_bound" in given:
                given[f"diagonal_band_{side}_bound"] = given.pop(f"{side}_bound")
        made = tuple(FakeTensor() for _ in range(4))
        self.node = ("forward", given, made)
        return made

    def sdpa_backward(self, **given: Any) -> tuple[FakeTensor, ...]:
        made = tuple(FakeTensor() for _ in range(3))
        self.node = ("backward", given, made)
        return made

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.fake.failing == name:
            raise RuntimeError("No engine.\nReason: only supported since later devices")

    def validate(self) -> None:
        self._step("validate")
        assert self.node is not None
        for made in self.node[2]:
            if made.facts.get("uid") is not None:
                self.tensors[made.uid] = made

    def build_operation_graph(self) -> None:
        self._step("build_operation_graph")

    def create_execution_plans(self, modes: Any) -> None:
        self._step("create_execution_plans")

    def check_support(self) -> None:
        self._step("check_support")

    def get_execution_plan_count(self) -> int:
        return len(self.fake.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.fake.plans[index]

    def build_plan_at_index(self, index: int) -> None:
        if self.fake.plans[index] in self.fake.broken:
            raise RuntimeError("does not compile")
        self.built.append(index)
        self._plan_index = index

    def serialize(self, *, as_bytes: bool) -> bytes:
        assert as_bytes
        self.fake.kept[len(self.fake.kept)] = self
        return str(len(self.fake.kept) - 1).encode()

    def deserialize(self, handle: Any, data: bytes) -> None:
        """Takes the place of the graph that was written."""
        self.__dict__ |= self.fake.kept[int(data)].__dict__
        self._plans, self._lowered_graph = [], SimpleNamespace(_execute_with_raw_ptrs=self._execute)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.fake.workspace

    def _variant_pack_uids(self) -> list[int]:
        return sorted(self.tensors)

    # -- running

    def _execute(self, address: int, count: int, space: int, handle: int, plan: int) -> None:
        assert count == len(self.tensors)
        assert plan in self.built or (plan == -1 and not self._plans)
        assert (space != 0) == (self.fake.workspace > 0)
        pointers = (ctypes.c_int64 * count).from_address(address)
        self._run(dict(zip(sorted(self.tensors), pointers, strict=True)), handle)

    def execute(self, given: dict[int, int], space: int, *, handle: Any) -> None:
        """The plan that was loaded."""
        assert not self._plans
        self.execute_plan_at_index(given, space, -1, handle)

    def execute_plan_at_index(
        self, given: dict[int, int], space: int, plan: int, handle: Any
    ) -> None:
        self.fake.public += 1
        self._run(given, handle.backend_handle)

    def _run(self, pointers: dict[int, int], handle: int) -> None:
        assert self.node is not None
        self.fake.calls.append((self, handle))
        assert all(p % 16 == 0 for p in pointers.values()), "an address is not on 16 bytes"
        with unwatched():  # what the library does is no torch call
            _Run(self, pointers).run()


class _Run:
    """One execution."""

    def __init__(self, graph: FakeGraph, pointers: dict[int, int]) -> None:
        assert graph.node is not None
        self.kind, self.given, self.made = graph.node
        self.pointers = pointers
        q, k = self.given["q"].facts["dim"], self.given["k"].facts["dim"]
        self.b, self.h, self.s_q, _ = q
        self.h_kv, self.s_kv = k[1], k[2]
        self.lens = [
            self._ints(self.given.get(n), s)
            for n, s in (("seq_len_q", self.s_q), ("seq_len_kv", self.s_kv))
        ]

    def _ints(self, tensor: FakeTensor | None, default: int) -> list[int]:
        return [default] * self.b if tensor is None else self.flat(tensor, self.b).tolist()

    def flat(self, tensor: FakeTensor, count: int) -> torch.Tensor:
        """So many elements of its memory."""
        dtype = TYPES[tensor.facts["data_type"]]
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.pointers[tensor.uid])
        return torch.frombuffer(memory, dtype=dtype)

    def part(self, tensor: FakeTensor, entry: int, rows: int) -> torch.Tensor:
        """[heads, rows, features] of an entry: a view of its memory."""
        _, heads, _, features = tensor.facts["dim"]
        batch, head, row, feature = tensor.facts["stride"]
        at = tensor.facts["at"]
        start = entry * batch if at is None else int(self.flat(at, self.b + 1)[entry])
        last = start + (heads - 1) * head + max(rows - 1, 0) * row + (features - 1) * feature
        flat = self.flat(tensor, last + 1)
        return flat.as_strided((heads, rows, features), (head, row, feature), start)

    def read_rows(self, tensor: FakeTensor, entry: int, length: int) -> int:
        """Rows that are read, hidden ones too: up to the next sequence."""
        at = tensor.facts["at"]
        if at is None:
            return int(tensor.facts["dim"][2])
        places = self.flat(at, self.b + 1)
        return max(length, int(places[entry + 1] - places[entry]) // tensor.facts["stride"][2])

    def scores(
        self, entry: int, rows: int, keys: int, read: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[heads, rows, read keys], and what is hidden of it."""
        g = self.given
        q = self.part(g["q"], entry, rows).double()
        q = q * self.number("descale_q") * self.number("descale_k")
        k = self.part(g["k"], entry, read).double().repeat_interleave(self.h // self.h_kv, 0)
        s = g["attn_scale"] * q @ k.transpose(1, 2)
        i, j = torch.arange(rows)[:, None], torch.arange(read)[None]
        if g.get("bias") is not None:
            dims = g["bias"].facts["dim"]
            bias = self.flat(g["bias"], math.prod(dims)).view(dims).double()
            s = s + bias[entry if dims[0] > 1 else 0][..., : rows if dims[2] > 1 else 1, :]
        if g.get("use_alibi_mask"):
            slopes = 2.0 ** (-8.0 * torch.arange(1, self.h + 1).double() / self.h)
            s = s - slopes[:, None, None] * (i - j).abs()
        shift = keys - rows if g.get("diagonal_alignment") == "BOTTOM_RIGHT" else 0
        hidden = (j >= keys).expand(rows, read)
        if (left := g.get("diagonal_band_left_bound")) is not None:
            hidden = hidden | (j <= i + shift - left)
        if (right := g.get("diagonal_band_right_bound")) is not None:
            hidden = hidden | (j > i + shift + right)
        return s, hidden

    def number(self, name: str) -> float:
        """A scale of an FP8 graph, 1 for others."""
        tensor = self.given.get(name)
        return 1.0 if tensor is None else float(self.flat(tensor, 1)[0])

    def run(self) -> None:
        for entry in range(self.b):
            rows, keys = self.lens[0][entry], self.lens[1][entry]
            if rows and keys:
                read = self.read_rows(self.given["k"], entry, keys)
                s, hidden = self.scores(entry, rows, keys, read)
                (self.forward if self.kind == "forward" else self.backward)(entry, s, hidden)
            elif self.kind == "backward" and self.made[0].facts["at"] is None:
                self.part(self.made[0], entry, self.s_q).zero_()

    def forward(self, entry: int, s: torch.Tensor, hidden: torch.Tensor) -> None:
        rows, read = s.shape[1:]
        s = s.masked_fill(hidden, -math.inf)
        v = (
            self.part(self.given["v"], entry, read)
            .double()
            .repeat_interleave(self.h // self.h_kv, 0)
        )
        lse = s.logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(hidden.all(-1)[:, None], math.nan)
        p = (s - lse).exp()
        dense = self.given["q"].facts["at"] is None
        if dense:
            self.part(self.made[0], entry, self.s_q).zero_()
        if "scale_s" in self.given:
            top = s.amax(-1, keepdim=True)
            steep = (s - top).exp() * self.number("scale_s")
            rounded = steep.float().to(torch.float8_e4m3fn).double() * self.number("descale_s")
            p = rounded * (top - lse).exp()
            v = v * self.number("descale_v") * self.number("scale_o")
        self.part(self.made[0], entry, rows).copy_(p @ v)
        if self.given["generate_stats"]:
            if dense:
                self.part(self.made[1], entry, self.s_q).fill_(-math.inf)
            self.part(self.made[1], entry, rows).copy_(lse)
        else:
            top = s.amax(-1, keepdim=True)
            self.part(self.given["score_max"], entry, rows).copy_(top)
            self.part(self.given["score_sum_exp"], entry, rows).copy_((lse - top).exp())

    def backward(self, entry: int, s: torch.Tensor, hidden: torch.Tensor) -> None:
        g, (_, rows, read) = self.given, s.shape
        group = self.h // self.h_kv
        dense = g["q"].facts["at"] is None  # hidden rows are multiplied by 0, too
        full = (self.s_q if dense else self.read_rows(g["q"], entry, rows)) - rows
        q, o, do = (self.part(g[n], entry, rows + full).double() for n in ("q", "o", "dO"))
        k, v = (
            self.part(g[n], entry, read).double().repeat_interleave(group, 0) for n in ("k", "v")
        )
        lse = self.part(g["stats"], entry, rows).double()
        p = (s - lse).exp().masked_fill(hidden, 0)
        ds = p * (do[:, :rows] @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True)[:, :rows])
        if g.get("dBias") is not None:
            dims = g["dBias"].facts["dim"]
            dbias = self.flat(g["dBias"], math.prod(dims)).view(dims)
            if dims[0] == 1 and entry == 0:
                dbias.zero_()
            place = dbias[entry if dims[0] > 1 else 0]
            made = ds if dims[1] > 1 else ds.sum(0, keepdim=True)
            place.copy_(made + (place.double() if dims[0] == 1 else 0))
        zeros = torch.zeros(self.h, full, read, dtype=torch.float64)
        p, ds = torch.cat([p, zeros], 1), torch.cat([ds, zeros], 1)
        dq = g["attn_scale"] * (ds @ k)[:, :rows]
        dk = g["attn_scale"] * ds.transpose(1, 2) @ q
        dv = p.transpose(1, 2) @ do
        dk, dv = (x.unflatten(0, (self.h_kv, group)).sum(1) for x in (dk, dv))
        keys = self.lens[1][entry]
        for made, value in zip(self.made, (dq, dk, dv), strict=True):
            own = value[:, :rows] if made is self.made[0] else value[:, :keys]
            if made.facts["at"] is None:
                self.part(made, entry, int(made.facts["dim"][2])).zero_()
            self.part(made, entry, own.shape[1]).copy_(own)


class FakeCudnn:
    """The module."""

    def __init__(self, version: int = 91900) -> None:
        names = {name: name for name in TYPES}
        self.data_type = SimpleNamespace(**names)
        self.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
        self.version = version
        self.plans = ["first", "second"]
        self.broken: set[str] = set()
        self.foreign: set[str] = set()
        self.failing = ""
        self.workspace = 64
        self.graphs: list[FakeGraph] = []
        self.calls: list[tuple[FakeGraph, int]] = []
        self.handles: list[SimpleNamespace] = []
        self.public = 0
        self.kept: dict[int, FakeGraph] = {}

    def backend_version(self) -> int:
        return self.version

    def pygraph(self, **options: Any) -> FakeGraph:
        return FakeGraph(self, **options)

    def create_handle(self) -> SimpleNamespace:
        made = SimpleNamespace(backend_handle=1000 + len(self.handles), stream=0)
        self.handles.append(made)
        return made

    def set_stream(self, handle: SimpleNamespace, stream: int) -> None:
        handle.stream = stream
