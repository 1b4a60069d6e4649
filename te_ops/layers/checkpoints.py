"""Weights of Transformer Engine's modules, by name and order, for the layers here and back.

A fused QKV weight has equal shapes in all orders: `[Q | K | V]` here, per group (its query heads, k, v)
there by default (`qkv_weight_interleaved=True`), or three weights of their own (`fuse_qkv_params=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from te_ops.basic.norm import LayerNorm
from te_ops.errors import PlanError
from te_ops.layers.attention import DotProductAttention, MultiheadAttention, Order
from te_ops.layers.linear import LayerNormLinear, LayerNormMLP
from te_ops.layers.transformer import TransformerLayer

_ORDERS = ("interleaved", "stacked", "separate")
_PARTS = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}


class _Pair(NamedTuple):
    """A tensor here and there; `heads` are those of the parts of a fused projection, `order` that of its rows there
    if the layer says."""

    ours: str
    theirs: str
    parts: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    per_head: bool = False
    order: Order | None = None


def from_transformer_engine(
    layer: nn.Module,
    state: Mapping[str, torch.Tensor],
    *,
    order: Order | None = None,
    prefix: str = "",
) -> dict[str, torch.Tensor]:
    """A state dict of parameters for `layer` from that of Transformer Engine's module of the same kind.

    Args:
        layer: a layer, or any module with layers in it under the names that they have there; parameters of other
            modules (norms, embeddings, those of torch) keep their names.
        state: names and tensors there; extra states are ignored.
        order: of fused projections there, "interleaved" or "stacked"; if None what a layer was made with
            (`qkv_weight_interleaved`), else "interleaved", the default there. Weights that are separate there are
            found by name.
        prefix: of the names in `state`, with its dot.

    Raises:
        PlanError: a tensor is missing or left over, or is fused where the layer says that there are three.
    """
    _check_order(order, ("interleaved", "stacked"))
    left = {
        name.removeprefix(prefix): x
        for name, x in state.items()
        if name.startswith(prefix) and not name.endswith("_extra_state")
    }
    made: dict[str, torch.Tensor] = {}
    for pair in _pairs(layer):
        separate = [pair.theirs.replace("*", f"{part}_") for part in pair.parts]
        fused = pair.theirs.replace("*", "")
        if fused in left:
            x = left.pop(fused)
            made[pair.ours] = _stacked(x, pair) if _is_interleaved(pair, order) else x
        elif separate and all(name in left for name in separate):
            made[pair.ours] = torch.cat([left.pop(name) for name in separate])
        else:
            raise PlanError(f"{type(layer).__name__}: the checkpoint has no {prefix}{fused}")
        if pair.per_head:
            made[pair.ours] = made[pair.ours].flatten()
    if left:
        raise PlanError(
            f"{type(layer).__name__}: the checkpoint has also {', '.join(sorted(left))}"
        )
    return made


def to_transformer_engine(
    layer: nn.Module, *, order: Order | None = None, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Names and tensors of `layer`'s parameters as Transformer Engine has them.

    Args:
        layer: as for `from_transformer_engine`.
        order: of fused projections; "separate" for `fuse_qkv_params=False`. If None what a layer was made with
            (`fuse_qkv_params`, `qkv_weight_interleaved`), else "interleaved".
        prefix: put before every name.

    Raises:
        PlanError: the order is unknown.
    """
    _check_order(order, _ORDERS)
    ours = {name: p.detach() for name, p in layer.named_parameters(remove_duplicate=False)}
    made: dict[str, torch.Tensor] = {}
    for pair in _pairs(layer):
        x = ours[pair.ours]
        if pair.parts and (order or pair.order) == "separate":
            rows = [x.shape[0] // sum(pair.heads) * h for h in pair.heads]
            names = (pair.theirs.replace("*", f"{part}_") for part in pair.parts)
            made |= {prefix + n: y for n, y in zip(names, torch.split(x, rows), strict=True)}
            continue
        if pair.per_head:
            x = x.view(1, -1, 1, 1)
        name = prefix + pair.theirs.replace("*", "")
        made[name] = _interleaved(x, pair) if _is_interleaved(pair, order) else x
    return made


def _is_interleaved(pair: _Pair, order: Order | None) -> bool:
    """Whether the rows of a fused tensor are, there."""
    said = order or pair.order or "interleaved"
    if pair.parts and said == "separate":
        raise PlanError(
            f"the checkpoint has one {pair.theirs.replace('*', '')} for a layer that was made with "
            "fuse_qkv_params=False; say which order its rows have, by order="
        )
    return bool(pair.parts) and said == "interleaved"


def _check_order(order: str | None, known: tuple[str, ...]) -> None:
    if order is not None and order not in known:
        raise PlanError(f"order must be one of {', '.join(known)}, got {order!r}")


def _interleaved(x: torch.Tensor, pair: _Pair) -> torch.Tensor:
    """[Q | K | V] rows -> for each group its query heads, k and v."""
    groups = pair.heads[-1]
    parts = torch.split(_cut(x, sum(pair.heads)), list(pair.heads))
    return torch.cat([_cut(part, groups) for part in parts], 1).flatten(0, 2)


def _stacked(x: torch.Tensor, pair: _Pair) -> torch.Tensor:
    """The inverse of `_interleaved`."""
    groups = pair.heads[-1]
    each = [h // groups for h in pair.heads]
    parts = torch.split(_cut(_cut(x, groups * sum(each)), groups), each, 1)
    return torch.cat([part.flatten(0, 2) for part in parts])


def _cut(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first dimension in so many equal pieces."""
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


# -- names


def _pairs(layer: nn.Module) -> Iterator[_Pair]:
    """Every parameter of a layer, here and there."""
    have = {name for name, _ in layer.named_parameters(remove_duplicate=False)}
    return (pair for pair in _all_pairs(layer) if pair.ours in have)


def _all_pairs(layer: nn.Module) -> Iterator[_Pair]:
    """By the table of layers; other modules have one name, here and there."""
    named = next((make for kind, make in _NAMES.items() if isinstance(layer, kind)), _same)
    return named(layer)


def _same(module: nn.Module) -> Iterator[_Pair]:
    for name in module._parameters:
        yield _Pair(name, name, per_head=name == "softmax_offset")
    for name, child in module._modules.items():
        if child is not None:
            yield from _inside(child, name, name)


def _linear_pairs(_: nn.Module) -> Iterator[_Pair]:
    yield from _norm_pairs("", "norm")
    yield from (_Pair(f"linear.{what}", what) for what in ("weight", "bias"))


def _mlp_pairs(_: nn.Module) -> Iterator[_Pair]:
    yield from _norm_pairs("", "norm")
    for fc in ("fc1", "fc2"):
        yield from (_Pair(f"{fc}.{what}", f"{fc}_{what}") for what in ("weight", "bias"))


def _core_pairs(layer: DotProductAttention) -> Iterator[_Pair]:
    return (pair._replace(ours=f"attention.{pair.ours}") for pair in _same(layer.attention))


def _layer_pairs(layer: TransformerLayer) -> Iterator[_Pair]:
    children = {"self_attention": "self_attention", "inter_attention": "inter_attention"}
    for ours, theirs in {**children, "mlp": "layernorm_mlp"}.items():
        child = getattr(layer, ours, None)
        if isinstance(child, nn.Module):
            yield from _inside(child, ours, theirs)
    yield from (_Pair(f"layernorm.{what}", f"layernorm.{what}") for what in ("weight", "bias"))


def _inside(child: nn.Module, ours: str, theirs: str) -> Iterator[_Pair]:
    """The pairs of a child, under its names here and there."""
    for pair in _all_pairs(child):
        yield pair._replace(ours=f"{ours}.{pair.ours}", theirs=f"{theirs}.{pair.theirs}")


def _norm_pairs(path: str, name: str) -> Iterator[_Pair]:
    return (_Pair(f"{name}.{what}", f"{path}layer_norm_{what}") for what in ("weight", "bias"))


def _attention_pairs(layer: MultiheadAttention) -> Iterator[_Pair]:
    attention, order = layer.attention, layer.checkpoint_order
    heads = (attention.num_heads, attention.num_gqa_groups, attention.num_gqa_groups)
    kind = "query" if layer.cross else "qkv"
    first = (
        f"layernorm_{kind}" if layer.input_layernorm else {"query": "query_layer"}.get(kind, kind)
    )
    yield from _norm_pairs(f"{first}.", "norm")
    for what in ("weight", "bias"):
        if layer.cross:
            yield _Pair(f"query.{what}", f"{first}.*{what}", ("query",), heads[:1], order=order)
            yield _Pair(
                f"key_value.{what}", f"key_value.*{what}", _PARTS["kv"], heads[1:], order=order
            )
        else:
            yield _Pair(f"qkv.{what}", f"{first}.*{what}", _PARTS["qkv"], heads, order=order)
        yield _Pair(f"proj.{what}", f"proj.{what}")
        for norm in ("q_norm", "k_norm"):
            if not isinstance(getattr(attention, norm), LayerNorm) and what == "bias":
                continue
            yield _Pair(f"attention.{norm}.{what}", f"{norm}.{what}")
    yield _Pair("attention.softmax_offset", "core_attention.softmax_offset", per_head=True)


_NAMES: dict[type[nn.Module], Callable[[Any], Iterator[_Pair]]] = {
    MultiheadAttention: _attention_pairs,
    LayerNormLinear: _linear_pairs,
    LayerNormMLP: _mlp_pairs,
    TransformerLayer: _layer_pairs,
    DotProductAttention: _core_pairs,
}

__all__ = ["from_transformer_engine", "to_transformer_engine"]
