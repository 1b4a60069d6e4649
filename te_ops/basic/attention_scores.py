"""From products to scores and back, a tile at a time: bias, modifier, ALiBi, masks and dropout.

Order (the conventions' one): s = scale * (q.k + pre-bias); modifier; + bias; - slope * distance;
band and mask; dropout acts on the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.basic.attention_form import Form, Sizes, check, learned
from te_ops.basic.tiles import Tile
from te_ops.pointwise import evaluate
from te_ops.quantizers.philox import philox_u32_at, to_uniform

_SQUARE = ("mask", "pre_bias", "bias")


class Scores:
    """The scores of one call, and the gradients of what they are made of.

    Args:
        form: attributes of the node.
        by_name: its operands; all but q, k and v are read here.
        n: sizes.
        factor: the scale, a number or a 0-dim tensor.
        like: a tensor with dtype (FP32 or FP64) and device of the computation.
        wanted: the operands whose gradients are collected.

    Raises:
        ShapeError: an operand does not fit, now that sizes are known.
    """

    def __init__(
        self,
        form: Form,
        by_name: dict[str, Any],
        n: Sizes,
        *,
        factor: Any,
        like: torch.Tensor,
        wanted: Sequence[str] = (),
    ) -> None:
        check(form, by_name, n)
        self.form, self.n, self.factor, self.dtype = form, n, factor, like.dtype
        self.device = like.device
        self.seed = by_name.get("seed")
        kept = [name for name in (*_SQUARE, *learned(form.operands)) if name in by_name]
        self.operands = {name: self._view(name, by_name[name]) for name in kept}
        self.grads = {
            name: torch.zeros(by_name[name].shape, dtype=like.dtype, device=like.device)
            for name in wanted
        }
        self.sums = {name: self._view(name, grad) for name, grad in self.grads.items()}
        self.plain = not self.operands and form.score is None
        # Without these every row that is walked has a key.
        self.may_hide_rows = bool(self.operands) or form.score is not None

    @property
    def apart(self) -> bool:
        """Whether batch entries must be walked one by one."""
        return not self.plain or bool(self.form.dropout)

    def _view(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x as [b, h_kv, g, s_q, s_kv], with size 1 where it is the same for all."""
        n = self.n
        if name in _SQUARE:
            x = x.view((1,) * (4 - x.dim()) + x.shape)
        elif name == "slopes":
            x = x.view(*((1,) if x.dim() == 1 else ()), *x.shape, 1, 1)
        else:
            x = x.view(1, -1, 1, 1)
        heads = (1, 1) if x.shape[1] == 1 else (n.h_kv, n.h_q // n.h_kv)
        return x.unflatten(1, heads)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def _part(x: torch.Tensor, tile: Tile) -> torch.Tensor:
        """What of x [b, h_kv, g, s_q, s_kv] a tile meets: [n', g', rows, keys], or 1 for a size."""
        entry = 0 if x.shape[0] == 1 else tile.entry
        places = (tile.kv_heads, tile.group, tile.rows, tile.keys)
        whole = slice(None)
        picked = (
            whole if size == 1 else place for size, place in zip(x.shape[1:], places, strict=True)
        )
        return x[(entry, *picked)]

    # -- scores

    def __call__(
        self, tile: Tile, rows: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The final scores of scaled queries [n', rows, d] and keys [n', keys, d], -inf where
        hidden, and what the modifier read (None without one)."""
        scores = torch.bmm(rows, keys.transpose(1, 2))
        if self.plain:
            return tile.hide(scores), None
        grid = tile.grid(scores)
        raw = None
        if "pre_bias" in self.operands:
            grid.add_(self._part(self.operands["pre_bias"], tile).to(self.dtype) * self.factor)
        if self.form.score is not None:
            raw = grid
            grid = evaluate(self.form.score.fn, *self._inputs(tile, raw), dtype=self.dtype)
        if "bias" in self.operands:
            grid.add_(self._part(self.operands["bias"], tile))
        if "slopes" in self.operands:
            slopes = self._part(self.operands["slopes"], tile).to(self.dtype)
            grid.sub_(slopes * self._distance(tile))
        scores = tile.hide(grid.reshape(scores.shape))
        if "mask" in self.operands:
            hidden = self._part(self.operands["mask"], tile)
            tile.grid(scores).masked_fill_(hidden, -math.inf)
        return scores, raw

    def _numbers(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows [rows, 1] and the keys [keys], within their sequences."""
        (i, j), device = tile.first, self.device
        rows = torch.arange(i, i + tile.rows.stop - tile.rows.start, device=device)
        keys = torch.arange(j, j + tile.keys.stop - tile.keys.start, device=device)
        return rows[:, None], keys

    def _heads(self, tile: Tile) -> torch.Tensor:
        """The number of each query head: [n', g', 1, 1]."""
        group = self.n.h_q // self.n.h_kv
        first = torch.arange(tile.kv_heads.start, tile.kv_heads.stop, device=self.device) * group
        member = torch.arange(tile.group.start, tile.group.stop, device=self.device)
        return (first[:, None] + member)[:, :, None, None]

    def _distance(self, tile: Tile) -> torch.Tensor:
        """|j - i - shift| [rows, keys]."""
        rows, keys = self._numbers(tile)
        shift = tile.shift if self.form.slope_diagonal == "bottom_right" else 0
        return (keys - rows - shift).abs().to(self.dtype)

    def _inputs(self, tile: Tile, raw: torch.Tensor) -> list[torch.Tensor | None]:
        """What the modifier's expression reads."""
        assert self.form.score is not None
        made: list[torch.Tensor | None] = []
        for name in self.form.score.inputs:
            if name == "s":
                made.append(raw)
            elif name in self.operands:
                made.append(self._part(self.operands[name], tile).to(self.dtype))
            elif name in ("i", "j"):
                made.append(self._numbers(tile)[name == "j"].to(raw))
            elif name == "head":
                made.append(self._heads(tile).to(raw))
            else:
                made.append(torch.full_like(raw[:1, :1, :1, :1], float(tile.entry or 0)))
        return made

    # -- their gradients

    def backward(self, tile: Tile, ds: torch.Tensor, raw: torch.Tensor | None) -> torch.Tensor:
        """The gradient of scaled products from that of final scores [n', rows, keys]; adds to the
        gradients that are wanted."""
        if self.plain:
            return ds
        grid = tile.grid(ds)
        self._add("bias", tile, grid)
        if "slopes" in self.sums:
            self._add("slopes", tile, -grid * self._distance(tile))
        if self.form.score is not None:
            assert raw is not None
            grid = self._through_modifier(tile, grid, raw)
        if "pre_bias" in self.sums:
            self._add("pre_bias", tile, grid * self.factor)
        return grid.reshape(ds.shape)

    def _through_modifier(self, tile: Tile, ds: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        score = self.form.score
        assert score is not None
        inputs = self._inputs(tile, raw)

        def gradient(index: int) -> torch.Tensor:
            made = evaluate(score.fn.grad(index), *inputs, ds, dtype=self.dtype)
            return made.expand(ds.shape).masked_fill(ds == 0, 0.0)  # 0 wins over Inf of hidden ones

        for index, name in enumerate(score.inputs):
            if name in self.sums:
                self._add(name, tile, gradient(index))
        return gradient(score.inputs.index("s"))

    def _add(self, name: str, tile: Tile, ds: torch.Tensor) -> None:
        if name in self.sums:
            place = self._part(self.sums[name], tile)
            place.add_(ds.sum_to_size(place.shape))

    # -- dropout

    def keep(self, tile: Tile) -> torch.Tensor:
        """True where a probability [n', rows, keys] is kept: a function of seed, stream, place."""
        assert self.seed is not None
        form, n, device = self.form, self.n, self.device
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)[:, None]
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device)
        entry = 0 if form.layout == "thd" else (tile.entry or 0)
        heads = self._heads(tile) + entry * n.h_q
        index = (heads * n.s_q + rows) * n.s_kv + keys
        kept = to_uniform(philox_u32_at(index, self.seed, form.stream)) >= form.dropout
        return kept.flatten(1, 2)

    @property
    def rescale(self) -> float:
        """1 / (1 - dropout)."""
        return 0.0 if self.form.dropout >= 1.0 else 1.0 / (1.0 - self.form.dropout)


__all__ = ["Scores"]
