"""MXFP8 attention as graphs of the cuDNN frontend for sm_100: E8M0 scales of 32 elements along a contraction.

Forward contracts the features of q and k, and the keys of v: so q and k are quantized along features, v along keys.
Backward contracts queries and keys too, and reads q, k and the output's gradient quantized a second time along their
rows. Scales lie in pieces of 128 x 4 (`te_ops.backends.cuda.swizzle`), a matrix for each head. Graphs are built and
were not run: no plan asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cudnn import graphs
from te_ops.backends.cudnn.graphs import E4M3, GraphSpec

BLOCK = 32
ROWS, BLOCKS = 128, 4
"""Of a piece of scales."""
CODES = (E4M3, torch.float8_e5m2)
HALF = (torch.bfloat16, torch.float16)
ARCHES = ("sm_100", "sm_103")
OLDEST = 92100
"""Of cuDNN."""
MAX_FEATURES = 128

_FORWARD = ("q", "k", "v")
_BACKWARD = ("q", "q_t", "k", "k_t", "v", "do", "do_t")
_ALONG_ROWS = {False: ("v",), True: ("q_t", "k_t", "do_t")}
"""Operands with blocks of rows, forward and backward; others have blocks of features."""
_NAMES = ("o", "stats", "dq", "dk", "dv", "do16", "q_lens", "kv_lens")
_AMAX = {"o": "amax_o", "dq": "amax_dq", "dk": "amax_dk", "dv": "amax_dv"}
UIDS = {
    name: i + 1
    for i, name in enumerate(
        (*_BACKWARD, *_NAMES, *(f"sf_{name}" for name in _BACKWARD), *_AMAX.values())
    )
}
"""Every operand of a graph, by name."""


@dataclass(frozen=True)
class MxSpec(GraphSpec):
    """An attention graph over MXFP8 operands; `dtype` is that of their codes.

    Attributes:
        out: of the output and the gradients, BF16 or FP16; that of the 16-bit output and its gradient in backward.
    """

    out: torch.dtype = torch.bfloat16

    @property
    def text(self) -> str:
        """One line: what it is called in messages."""
        return f"mxfp8 {super().text}"

    def along_rows(self, name: str) -> bool:
        """Whether an operand has blocks of rows instead of blocks of features."""
        return name in _ALONG_ROWS[self.backward]

    def scales(self, name: str) -> tuple[int, int, int, int]:
        """Shape of an operand's scales as the library counts them, filled up to whole pieces."""
        base = name.removesuffix("_t")
        queries = base in ("q", "do")
        rows, heads = (self.s_q, self.h_q) if queries else (self.s_kv, self.h_kv)
        features = self.d_v if base in ("v", "do") else self.d_qk
        if self.along_rows(name):
            return (self.b, heads, _up(-(-rows // BLOCK), BLOCKS), _up(features, ROWS))
        return (self.b, heads, _up(rows, ROWS), _up(-(-features // BLOCK), BLOCKS))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# -- what is not asked for


@dataclass(frozen=True)
class Gate:
    """Graphs that are refused, and the reason; `library`: which a build shows."""

    name: str
    refuses: Callable[[MxSpec], bool]
    reason: str
    library: bool = False


def _features(s: MxSpec) -> bool:
    return max(s.d_qk, s.d_v) > MAX_FEATURES and (s.d_qk, s.d_v) != (192, 128)


def _extras(s: MxSpec) -> bool:
    return s.bias is not None or s.dbias or s.alibi or s.dropout > 0 or s.peak or s.ragged


GATES: tuple[Gate, ...] = (
    Gate(
        "codes",
        lambda s: s.dtype not in CODES,
        "codes are E4M3 or E5M2",
    ),
    Gate(
        "results",
        lambda s: s.out not in HALF,
        "outputs and gradients are BF16 or FP16",
        library=True,
    ),
    Gate(
        "gradient codes",
        lambda s: s.backward and s.dtype is not E4M3,
        "backward reads E4M3 alone",
        library=True,
    ),
    Gate(
        "features",
        _features,
        f"heads have at most {MAX_FEATURES} features, or 192 with values of 128",
        library=True,
    ),
    Gate(
        "whole features",
        lambda s: s.d_qk % 16 != 0 or s.d_v % 16 != 0,
        "the features of a head must divide by 16",
        library=True,
    ),
    Gate(
        "one row",
        lambda s: min(s.s_q, s.s_kv) == 1,
        "a graph of one query or key ends the process that builds it (cuDNN 9.28)",
    ),
    Gate(
        "extras",
        _extras,
        "graphs have no bias, ALiBi, dropout, largest scores or offsets",
    ),
)
"""Over exact graphs, as of cuDNN 9.28; rows marked `library` say what a build shows."""


def refuse(spec: MxSpec, arch: str, version: int) -> str | None:
    """None if a graph is made for a spec on an architecture ("sm_100") by a version of cuDNN (92100), else why not."""
    if arch not in ARCHES:
        listed = " or ".join(ARCHES)
        return f"MXFP8 attention needs tensor cores that multiply with scales of blocks: {listed}, not {arch}"
    if version < OLDEST:
        return (
            f"MXFP8 attention needs cuDNN 9.21, this is {version // 10000}.{version // 100 % 100}"
        )
    return next((gate.reason for gate in GATES if gate.refuses(spec)), None)


# -- the graph


def describe(graph: Any, spec: MxSpec) -> dict[str, int]:
    """Add the nodes of a spec to an empty graph; returns the uids of its operands by name."""
    made = _Graph(graph, spec)
    (made.backward if spec.backward else made.forward)()
    return made.used


def planned(index: int, spec: MxSpec, **device: Any) -> tuple[Any, dict[str, int]]:
    """As `graphs.planned`."""
    return graphs.planned(index, spec, describe=describe, **device)


class _Graph(graphs.Described):
    """The tensors of a graph that is being described."""

    spec: MxSpec

    def uid(self, name: str) -> int:
        """Of an operand, which is then in use."""
        return self.used.setdefault(name, UIDS[name])

    @property
    def bounds(self) -> str:
        """What the names of the band's arguments begin with."""
        return "" if self.spec.backward else "diagonal_band_"

    def codes(self, name: str) -> dict[str, Any]:
        """An operand and its scales, by the names of the node's arguments."""
        base = name.removesuffix("_t")
        argument = {"do": "dO"}.get(base, base) + ("_T" if base != name else "")
        dims = self.spec.scales(name)
        scales = self.graph.tensor(
            name=f"sf_{name}",
            dim=list(dims),
            stride=list(graphs.contiguous_strides(dims)),
            data_type=self.lib.data_type.FP8_E8M0,
            reordering_type=self.lib.tensor_reordering.F8_128x4,
            uid=self.uid(f"sf_{name}"),
        )
        made = self.tensor(name, self.dim(base), self.spec.dtype, self.stride(base))
        return {argument: made, f"descale_{argument}": scales}

    def result(self, made: Any, name: str) -> None:
        """Mark a result of 16 bits as an output, with the largest of its magnitudes beside it."""
        self.out(made, name)
        made.set_data_type(self.types[self.spec.out])

    def largest(self, made: Any, name: str) -> None:
        """Mark the largest magnitude of a result as an output."""
        made.set_output(True).set_uid(self.uid(_AMAX[name])).set_dim([1, 1, 1, 1])
        made.set_stride([1, 1, 1, 1]).set_data_type(self.types[torch.float32])

    def forward(self) -> None:
        """o, the statistics, and the largest |o|."""
        options = self.options()
        for name in _FORWARD:
            options |= self.codes(name)
        o, stats, amax = self.graph.sdpa_mxfp8(name="attention", generate_stats=True, **options)
        self.result(o, "o")
        self.out(stats, "stats")
        self.largest(amax, "o")

    def backward(self) -> None:
        """dq, dk, dv, and the largest magnitude of each."""
        s, options = self.spec, self.options()
        for name in _BACKWARD:
            options |= self.codes(name)
        for name, argument in (("o", "o_f16"), ("do16", "dO_f16")):
            options[argument] = self.tensor(name, self.dim("o"), s.out, self.stride("o"))
        options["stats"] = self.tensor(
            "stats", self.dim("stats"), torch.float32, self.stride("stats")
        )
        made = self.graph.sdpa_mxfp8_backward(
            name="attention_backward", use_deterministic_algorithm=s.deterministic, **options
        )
        for i, name in enumerate(("dq", "dk", "dv")):
            self.result(made[i], name)
            self.largest(made[i + 3], name)
