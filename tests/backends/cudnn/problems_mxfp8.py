"""MXFP8 attention graphs: those that are taken, and what each gate refuses beside what differs little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_ops.backends.cudnn.graphs import E4M3
from te_ops.backends.cudnn.mxfp8 import MxSpec

E5M2 = torch.float8_e5m2


def spec(
    s: tuple[int, int] = (256, 256),
    d: tuple[int, int] = (128, 128),
    h: tuple[int, int] = (4, 2),
    *,
    dtype: torch.dtype = E4M3,
    backward: bool = False,
    **more: Any,
) -> MxSpec:
    """Two entries of a batch that lie as [b, s, h, d]."""
    strides = {}
    for names, (heads, rows, features) in (
        (("q", "dq"), (h[0], s[0], d[0])),
        (("k", "dk"), (h[1], s[1], d[0])),
        (("v", "dv"), (h[1], s[1], d[1])),
        (("o", "do"), (h[0], s[0], d[1])),
    ):
        lies = (rows * heads * features, features, heads * features, 1)
        strides.update(dict.fromkeys(names, lies))
    strides["stats"] = (h[0] * s[0], s[0], 1, 1)
    return MxSpec(
        backward=backward, dtype=dtype, b=2, h_q=h[0], h_kv=h[1], s_q=s[0], s_kv=s[1], d_qk=d[0], d_v=d[1],
        strides=tuple(strides.items()), scale=0.125, **more,
    )  # fmt: skip


BACK = {"backward": True}
TAKEN: dict[str, MxSpec] = {
    "full": spec(),
    "causal": spec(right=0),
    "window": spec(left=31, right=0),
    "last keys": spec((128, 256), right=0, bottom_right=True),
    "lengths": spec(padding=True, right=0),
    "odd": spec((77, 1000)),
    "two head sizes": spec(d=(192, 128), h=(4, 4)),
    "e5m2": spec(dtype=E5M2),
    "fp16": spec(out=torch.float16),
}
PAIRS: dict[str, tuple[MxSpec, MxSpec]] = {
    "codes": (spec(dtype=torch.bfloat16), spec()),
    "results": (spec(out=torch.float32), spec(out=torch.float16)),
    "gradient codes": (spec(dtype=E5M2, **BACK), spec(dtype=E5M2)),
    "features": (spec(d=(256, 256)), spec(d=(128, 128))),
    "whole features": (spec(d=(72, 72)), spec(d=(80, 80))),
    "one row": (spec((1, 256)), spec((2, 256))),
    "extras": (spec(dropout=0.1), spec()),
}
"""Refused, and taken."""


def built() -> dict[str, MxSpec]:
    """What is built where the library is: what its gates refuse, and graphs in both directions. Each takes seconds."""
    both = ("causal", "odd", "two head sizes")
    made = {f"taken {name}": TAKEN[name] for name in ("lengths", "window", "e5m2")}
    made |= {f"taken {name}": TAKEN[name] for name in both}
    made |= {f"taken {name} backward": replace(TAKEN[name], backward=True) for name in both}
    for name in ("results", "gradient codes", "features", "whole features"):
        made[f"refused {name}"] = PAIRS[name][0]
    return made
