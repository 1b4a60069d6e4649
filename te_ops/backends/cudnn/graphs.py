"""Attention as graphs of the cuDNN frontend: what a plan is built from, and the builders, forward and backward.

Tensors are [batch, heads, rows, features] with strides, whatever their layout. Ragged ones start, for each sequence,
at an offset in elements that lies in a tensor. Statistics are the natural logarithm of the softmax's sum, FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cudnn import library
from te_ops.backends.cudnn.library import Built
from te_ops.errors import PlanError

UIDS = {
    name: i + 1
    for i, name in enumerate(
        (
            *(
                "q",
                "k",
                "v",
                "o",
                "stats",
                "peak",
                "total",
                "do",
                "dq",
                "dk",
                "dv",
                "bias",
                "dbias",
            ),
            *("q_lens", "kv_lens", "seed", "offset"),
            *(f"{name}_at" for name in ("q", "k", "v", "o", "stats", "do", "dq", "dk", "dv")),
            *("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
        )
    )
}
"""Every operand of a graph, by name; addresses are given in this order."""
SCALES = tuple(name for name in UIDS if "scale_" in name)
"""Of an FP8 graph, in this order."""
E4M3 = torch.float8_e4m3fn

Strides = tuple[int, int, int, int]


@dataclass(frozen=True)
class GraphSpec:
    """An attention graph, exactly: the key of its plan.

    Attributes:
        dtype: of q, k and v; with E4M3 the graph is a forward one in FP8, o included.
        b, h_q, h_kv, s_q, s_kv, d_qk, d_v: sizes; of ragged tensors the most sequences, rows and keys.
        strides: of each 4-D tensor, by name, in the order batch, head, row, feature.
        left, right: sides of the band, inclusive; None is open.
        bottom_right: the diagonal ends at the last key of each sequence.
        padding: sequences have lengths; ragged: and offsets.
        totals: the most rows and keys of all sequences together, of ragged tensors.
        bias: shape of what is added to the scaled scores, in the dtype `bias_dtype`.
        peak: write the largest score and the sum of each row instead of their logarithm.
    """

    backward: bool
    dtype: torch.dtype
    b: int
    h_q: int
    h_kv: int
    s_q: int
    s_kv: int
    d_qk: int
    d_v: int
    strides: tuple[tuple[str, Strides], ...]
    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    padding: bool = False
    ragged: bool = False
    totals: tuple[int, int] | None = None
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: torch.dtype | None = None
    dbias: bool = False
    alibi: bool = False
    dropout: float = 0.0
    peak: bool = False
    deterministic: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it is in FP8."""
        return self.dtype is E4M3

    @property
    def text(self) -> str:
        """One line: what it is called in tables and messages."""
        name = "backward" if self.backward else "forward"
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"b{self.b} h{self.h_q}/{self.h_kv} s{self.s_q}/{self.s_kv} d{self.d_qk}/{self.d_v}"
        diagonal = "bottom_right" if self.bottom_right else "top_left"
        words = [name, dtype, sizes]
        if (self.left, self.right) != (None, None):
            words.append(f"band {self.left},{self.right} {diagonal}")
        flags = ("padding", "ragged", "alibi", "dbias", "peak", "deterministic")
        words += [flag for flag in flags if getattr(self, flag)]
        words += [f"bias {self.bias}"] if self.bias else []
        words += [f"dropout {self.dropout}"] if self.dropout else []
        return " ".join(words)


def describe(graph: Any, spec: GraphSpec) -> dict[str, int]:
    """Add the nodes of a spec to an empty graph; returns the uids of its operands by name."""
    made = Described(graph, spec)
    (made.backward if spec.backward else made.forward)()
    return made.used


class Described:
    """The tensors of a graph that is being described."""

    def __init__(self, graph: Any, spec: GraphSpec) -> None:
        self.graph, self.spec = graph, spec
        self.used: dict[str, int] = {}
        self.offsets: dict[str, Any] = {}
        self.lib = library.library()
        self.types = {
            torch.bfloat16: self.lib.data_type.BFLOAT16,
            torch.float16: self.lib.data_type.HALF,
            E4M3: self.lib.data_type.FP8_E4M3,
            torch.float8_e5m2: self.lib.data_type.FP8_E5M2,
            torch.float32: self.lib.data_type.FLOAT,
            torch.int32: self.lib.data_type.INT32,
            torch.int64: self.lib.data_type.INT64,
        }

    # -- tensors

    def tensor(
        self, name: str, dim: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...]
    ) -> Any:
        """An input."""
        return self.graph.tensor(
            name=name,
            dim=list(dim),
            stride=list(stride),
            data_type=self.types[dtype],
            uid=self.uid(name),
        )

    def uid(self, name: str) -> int:
        """Of an operand, which is then in use."""
        return self.used.setdefault(name, UIDS[name])

    def dim(self, name: str) -> tuple[int, int, int, int]:
        """Of a 4-D tensor."""
        s = self.spec
        if name in ("stats", "peak", "total"):
            return (s.b, s.h_q, s.s_q, 1)
        queries = name in ("q", "o", "do", "dq")
        features = s.d_v if name in ("v", "o", "do", "dv") else s.d_qk
        return (s.b, s.h_q if queries else s.h_kv, s.s_q if queries else s.s_kv, features)

    def stride(self, name: str) -> Strides:
        """Of a 4-D tensor."""
        return dict(self.spec.strides)[name]

    def given(self, name: str) -> Any:
        """An input with the strides of the spec."""
        dtype = torch.float32 if name == "stats" else self.spec.dtype
        made = self.tensor(name, self.dim(name), dtype, self.stride(name))
        self.place(made, name)
        return made

    def place(self, made: Any, name: str) -> None:
        """Where the sequences of a ragged tensor start."""
        if self.spec.ragged:
            made.set_ragged_offset(self.at(f"{name}_at"))

    def at(self, name: str) -> Any:
        """An offset tensor, once."""
        if name not in self.offsets:
            dim = (self.spec.b + 1, 1, 1, 1)
            self.offsets[name] = self.tensor(name, dim, torch.int64, (1, 1, 1, 1))
        return self.offsets[name]

    def out(self, made: Any, name: str) -> None:
        """Mark a result as an output: dimensions and strides both, or stale inferred ones stay."""
        statistic = name in ("stats", "peak", "total")
        made.set_output(True).set_uid(self.uid(name)).set_dim(list(self.dim(name)))
        made.set_stride(list(self.stride("stats" if statistic else name)))
        made.set_data_type(self.types[torch.float32 if statistic else self.spec.dtype])
        if self.spec.ragged:
            made.set_ragged_offset(self.at("stats_at" if statistic else f"{name}_at"))

    # -- what both directions share

    @property
    def bounds(self) -> str:
        """What the names of the band's arguments begin with."""
        return "" if self.spec.quantized else "diagonal_band_"

    def options(self) -> dict[str, Any]:
        """The mask, and what is added to scores, as arguments."""
        s, vector = self.spec, (1, 1, 1, 1)
        given: dict[str, Any] = {"attn_scale": s.scale}
        if s.left is not None or s.right is not None:
            names = self.lib.diagonal_alignment
            given["diagonal_alignment"] = names.BOTTOM_RIGHT if s.bottom_right else names.TOP_LEFT
        if s.left is not None:
            given[f"{self.bounds}left_bound"] = s.left + 1  # the first key that is not seen
        if s.right is not None:
            given[f"{self.bounds}right_bound"] = s.right
        if s.padding:
            given["use_padding_mask"] = True
            for name, argument in (("q_lens", "seq_len_q"), ("kv_lens", "seq_len_kv")):
                given[argument] = self.tensor(name, (s.b, 1, 1, 1), torch.int32, vector)
        if s.alibi:
            given["use_alibi_mask"] = True
        if s.bias is not None:
            assert s.bias_dtype is not None
            given["bias"] = self.tensor("bias", s.bias, s.bias_dtype, contiguous_strides(s.bias))
        if s.dropout:
            numbers = [self.tensor(n, vector, torch.int64, vector) for n in ("seed", "offset")]
            given["dropout"] = (s.dropout, *numbers)
        return given

    def forward(self) -> None:
        """o, and the statistics."""
        options = self.options()
        if self.spec.peak:
            stride = self.stride("stats")
            for name, argument in (("peak", "score_max"), ("total", "score_sum_exp")):
                options[argument] = self.tensor(name, self.dim(name), torch.float32, stride)
        options |= {name: self.given(name) for name in ("q", "k", "v")}
        make = self.graph.sdpa
        if self.spec.quantized:
            one = (1, 1, 1, 1)
            options |= {name: self.tensor(name, one, torch.float32, one) for name in SCALES}
            make = self.graph.sdpa_fp8  # its further results, largest numbers, stay within
        o, stats, *_ = make(name="attention", generate_stats=not self.spec.peak, **options)
        self.out(o, "o")
        if self.spec.peak:
            for name, argument in (("peak", "score_max"), ("total", "score_sum_exp")):
                self.out(options[argument], name)
        else:
            self.out(stats, "stats")

    def backward(self) -> None:
        """dq, dk, dv and the gradient of the bias."""
        s, options = self.spec, self.options()
        if s.dbias:
            assert s.bias is not None
            assert s.bias_dtype is not None
            options["dBias"] = self.tensor(
                "dbias", s.bias, s.bias_dtype, contiguous_strides(s.bias)
            )
        if s.totals is not None:
            names = ("max_total_seq_len_q", "max_total_seq_len_kv")
            options |= dict(zip(names, s.totals, strict=True))
        given = {name: self.given(name) for name in ("q", "k", "v", "o", "stats")}
        given["dO"] = self.given("do")
        made = self.graph.sdpa_backward(
            name="attention_backward",
            use_deterministic_algorithm=s.deterministic,
            **given,
            **options,
        )
        for name, result in zip(("dq", "dk", "dv"), made, strict=True):
            self.out(result, name)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# -- building


class Unsupported(PlanError):
    """cuDNN makes no plan for a graph."""


def build(index: int, spec: GraphSpec, choice: str | None = None) -> Built:
    """The plan of a spec on a device: the one named `choice` if it is there, else the library's favourite.

    Raises:
        Unsupported: the library has none; the message holds its reasons.
    """
    graph, uids = planned(index, spec)
    with library.entered(index):
        return _built(index, spec, graph, uids, choice)


_IO = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "HALF",
    E4M3: "FP8_E4M3",
    torch.float8_e5m2: "FP8_E5M2",
}


def planned(
    index: int, spec: Any, *, describe: Callable[..., dict[str, int]] = describe, **device: Any
) -> tuple[Any, dict[str, int]]:
    """A graph with the list of its plans, none of which is built yet; `describe` adds the nodes of its kind of spec."""
    lib = library.library()
    with library.entered(index):
        if not device:
            device = {"handle": library.handle(index, library.stream_of(index))}
        graph = lib.pygraph(
            io_data_type=getattr(lib.data_type, _IO[spec.dtype]),
            intermediate_data_type=lib.data_type.FLOAT,
            compute_data_type=lib.data_type.FLOAT,
            **device,
        )
        uids = describe(graph, spec)
        _asked(spec, graph.validate)
        _asked(spec, graph.build_operation_graph)
        modes = [lib.heur_mode.A, lib.heur_mode.FALLBACK]
        _asked(spec, lambda: graph.create_execution_plans(modes))
        _asked(spec, graph.check_support)
    return graph, uids


def names(graph: Any) -> list[str]:
    """Of its plans, the library's favourite first."""
    count = int(graph.get_execution_plan_count())
    return [str(graph.get_plan_name_at_index(i)) for i in range(count)]


def _built(
    index: int, spec: GraphSpec, graph: Any, uids: dict[str, int], choice: str | None
) -> Built:
    known = names(graph)
    own = [i for i in range(len(known)) if _of_library(graph, i)]
    order = sorted(own, key=lambda i: known[i] != choice)
    failures = []
    for plan in order:
        try:
            graph.build_plan_at_index(plan)
        except Exception as error:  # noqa: BLE001  (the frontend raises several types for one thing)
            failures.append(reason(error))
            continue
        return Built(index, graph, uids, plan)
    raise Unsupported(f"cuDNN builds no plan for {spec.text}: {'; '.join(failures) or 'none'}")


def _of_library(graph: Any, plan: int) -> bool:
    """Whether a plan is one of cuDNN: the frontend lists engines of its own too, which compile for minutes."""
    plans = getattr(graph, "_plans", None)
    return plans is None or getattr(plans[plan], "cpp_index", plan) is not None


def _asked(spec: GraphSpec, step: Callable[[], Any]) -> None:
    try:
        step()
    except Exception as error:
        raise Unsupported(f"cuDNN has no plan for {spec.text}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The first line of a library's message that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line.partition("Reason:")[2].strip() for line in lines if "Reason:" in line]
    found = [line for line in (*told, *lines) if line]
    return found[0] if found else type(error).__name__
