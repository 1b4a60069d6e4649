"""Which blocks of rows of packed sequences a block of threads takes: the text of `persistent`, by a warp of threads."""

from __future__ import annotations

import ast
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from te_ops.backends import flash

LANES = 32


class Warp:
    """Threads that exchange values: what `cute.arch` has for them."""

    def __init__(self) -> None:
        self.gate = threading.Barrier(LANES)
        self.own = threading.local()
        self.values = [0] * LANES

    def lane_idx(self) -> int:
        return int(self.own.lane)

    def _all(self, value: int) -> list[int]:
        self.values[self.lane_idx()] = value
        self.gate.wait()
        found = list(self.values)
        self.gate.wait()
        return found

    def vote_ballot_sync(self, value: bool) -> int:
        return sum(bool(x) << i for i, x in enumerate(self._all(value)))

    def shuffle_sync_bfly(self, value: int, offset: int) -> int:
        return self._all(value)[self.lane_idx() ^ offset]

    def warp_prefix_sum(self, value: int, lane: int) -> int:
        return sum(self._all(value)[: lane + 1])

    @staticmethod
    def popc(x: int) -> int:
        return (x & 0xFFFFFFFF).bit_count()


def text(warp: Warp) -> dict[str, Any]:
    """`_counted` and `_packed`, for such a warp."""
    path = Path(flash.__file__).parent / "persistent.py"
    tree = ast.parse(path.read_text())
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and "PAIRS" in ast.unparse(n)]
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    for function in functions:
        function.decorator_list.clear()
    names: dict[str, Any] = {
        "cute": SimpleNamespace(arch=warp, ceil_div=lambda a, b: -(-a // b)),
        "cutlass": SimpleNamespace(max=max, min=min, range_constexpr=range),
        "utils": warp, "Int32": int, "Any": Any, "Order": Any, "WorkTileInfo": None,
    }  # fmt: skip
    tree = ast.Module([*constants, *functions], [])
    exec(compile(ast.unparse(tree), str(path), "exec"), names)
    return names


@dataclass
class Order:
    lengths: list[int]
    heads: int
    near: int
    group: int = 4
    rows: int = 128

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def by_heads(self) -> int:
        return self.heads

    def blocks(self) -> set[tuple[int, int, int]]:
        """(number, head, sequence) of all."""
        counts = [-(-n * self.group // self.rows) for n in self.lengths]
        return {
            (b, h, e) for e, n in enumerate(counts) for b in range(n) for h in range(self.heads)
        }


def walk(order: Order, processors: int) -> list[list[tuple[int, int, int]]]:
    """What each block of threads takes, one after the other."""
    warp = Warp()
    names = text(warp)

    def thread(lane: int) -> list[list[tuple[int, int, int]]]:
        warp.own.lane = lane
        taken = []
        for own in range(processors):
            count, size, most = names["_counted"](order, 0)
            place, turn, found = (0, size, count, most - 1, 0), 0, []
            while True:
                tile = turn * processors + (processors - 1 - own if turn % 2 else own)
                made = names["_packed"](order, tile, place)
                if not made[7]:
                    break
                place, turn = tuple(made[:5]), turn + 1
                found.append((made[3], made[5], made[6]))
            taken.append(found)
        return taken

    with ThreadPoolExecutor(LANES) as pool:
        results = list(pool.map(thread, range(LANES)))
    assert all(map(operator.eq, results, [results[0]] * LANES)), "lanes differ"
    return results[0]


@pytest.mark.parametrize(
    "order",
    [
        Order([700, 0, 1, 130, 0], 2, 1 << 20),
        Order([0, 0], 2, 1 << 20),
        Order([33] * 40, 1, 1 << 20),
        Order([300, 300, 40, 500, 0, 90], 8, 80),
        Order([20] * 4, 33, 1),
    ],
    ids=["one group", "nothing", "more than a warp", "as the cache takes them", "one by one"],
)
def test_every_block_is_taken_once(order: Order) -> None:
    taken = walk(order, 7)
    every = [block for found in taken for block in found]
    assert len(every) == len(set(every))
    assert set(every) == order.blocks()


def test_work_is_even() -> None:
    """Of causal attention: each block of threads has about as many blocks of keys."""
    order = Order([512] * 8, 2, 1 << 20)
    sums = [sum(b // 4 + 1 for b, _, _ in found) for found in walk(order, 13)]
    assert max(sums) <= 1.08 * sum(sums) / len(sums)
