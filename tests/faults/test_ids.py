"""Which test stands for which reported fault: the one that names it. Faults of what this version has not got say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import te_ops as te

TESTS = Path(__file__).parents[1]
IDS = {
    "K01": "B001 B003 B005 B007", "K02": "B009 B011 B013", "K03": "B015 B017 B019", "K04": "B021 B023 B025",
    "K05": "B027 B029 B031", "K06": "B033 B035 B037", "K07": "B039 B041 B043 B045", "K08": "B047 B049 B051",
    "K09": "B053 B055", "K10": "B057 B059", "K11": "B061 B063", "K12": "B065 B067 B069", "K13": "B070 B072 B074",
    "K14": "B075 B077 B079", "K15": "B081 B083 B085 B087", "K16": "B088 B090 B092", "K17": "B094 B096 B098",
    "K18": "B100 B102 B104", "K19": "B105 B107", "K20": "B109 B111 B113", "K21": "B114 B116 B118",
    "K22": "B120 B122", "K23": "B124", "K24": "B126 B128", "K25": "B130 B132", "K26": "B134 B136 B138",
    "K27": "B139 B141", "K28": "B143 B145", "K29": "B147", "K30": "B149 B151", "K31": "B153 B155",
    "K32": "B161 B163", "K33": "B157 B159",
}  # fmt: skip
"""The reported faults by kind."""


def _has(*words: str) -> Callable[[], bool]:
    """Whether a public name, or a part of the package, holds one of these words."""

    def found() -> bool:
        package = Path(te.__file__).parent
        files = [path.stem for path in package.rglob("*.py")] + [p.name for p in package.iterdir()]
        names = [*vars(te), *vars(te.layers), *files]
        return any(word in name.lower() for word in words for name in names)

    return found


NOT_HERE: dict[str, tuple[Callable[[], bool], str]] = {
    "B013": (
        _has("parallel"),
        "a shard of an aligned length that is not aligned: no op shards rows. A rank may have any number (K02), "
        "and ranks with different numbers train together (K28).",
    ),
    "B104": (
        _has("context_parallel", "parallel"),
        "partition of padded sequences over ranks: nothing is parallel in context. Gaps and empty ones: B100, B102.",
    ),
    "B116": (
        _has("router", "topk", "moe"),
        "scores of a router: there is none.",
    ),
    "B145": (
        _has("adam", "optimizer"),
        "step counts of a fused optimizer: there is none. Ranks on which an op did not run: tests/multi.",
    ),
}
"""Fault -> (whether its subject has come, why there is no test). When it comes, the fault needs one."""


def _named() -> dict[str, set[str]]:
    """Faults by the files of tests that name them."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__):
            for number in re.findall(r"(?<![a-z0-9])b(\d{3})(?![0-9])", path.read_text().lower()):
                found.setdefault(f"B{number}", set()).add(path.name)
    return found


@pytest.mark.parametrize("kind", IDS)
def test_every_fault_is_named_by_a_test_or_not_here(kind: str) -> None:
    named = _named()
    for fault in IDS[kind].split():
        assert (fault in named) != (fault in NOT_HERE), fault


@pytest.mark.parametrize("fault", NOT_HERE)
def test_what_is_not_here_has_not_come(fault: str) -> None:
    come, why = NOT_HERE[fault]
    assert not come(), f"{fault} wants a test now: {why}"
