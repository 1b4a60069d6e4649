"""Weights of Llama-like checkpoints, in Hugging Face's and in Meta's names, for a `TransformerLayer` or a whole model
(`te.layers.llama_model`), and back.

The two differ in the pairs that RoPE turns, (i, i + dim/2) and (2i, 2i + 1), so the rows of q and k, their
biases and the gammas of their norms are permuted where the layer's `rotary` has the other pairs. Shapes do
not tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from te_ops.basic.rope import RoPE
from te_ops.errors import PlanError
from te_ops.layers.transformer import TransformerLayer
from te_ops.sequential import Sequential

Naming = Literal["hugging_face", "meta"]
# ours -> theirs; several are stacked
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "hugging_face": {
        "self_attention.norm": ("input_layernorm",),
        "self_attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.attention.q_norm": ("self_attn.q_norm",),
        "self_attention.attention.k_norm": ("self_attn.k_norm",),
        "self_attention.proj": ("self_attn.o_proj",),
        "mlp.norm": ("post_attention_layernorm",),
        "mlp.fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.fc2": ("mlp.down_proj",),
    },
    "meta": {
        "self_attention.norm": ("attention_norm",),
        "self_attention.qkv": ("attention.wq", "attention.wk", "attention.wv"),
        "self_attention.attention.q_norm": ("attention.q_norm",),
        "self_attention.attention.k_norm": ("attention.k_norm",),
        "self_attention.proj": ("attention.wo",),
        "mlp.norm": ("ffn_norm",),
        "mlp.fc1": ("feed_forward.w1", "feed_forward.w3"),
        "mlp.fc2": ("feed_forward.w2",),
    },
}
# of a whole model: ours -> theirs, and the prefix of a layer
_WHOLE: dict[str, dict[str, str]] = {
    "hugging_face": {
        "embedding": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "head": "lm_head",
    },
    "meta": {
        "embedding": "tok_embeddings",
        "layers": "layers",
        "norm": "norm",
        "head": "output",
    },
}
_IGNORED = ("inv_freq", "rope.freqs")  # tables that are made anew


def from_llama(
    module: TransformerLayer | Sequential,
    state: Mapping[str, torch.Tensor],
    *,
    naming: Naming = "hugging_face",
    prefix: str = "",
) -> dict[str, torch.Tensor]:
    """A state dict for `module` from a Llama-like checkpoint: of one decoder layer, or of a whole model.

    Args:
        module: a layer made with `rotary`, normalization="RMSNorm", activation="swiglu" and the checkpoint's sizes; or
            a model of such layers as `te.layers.llama_model` makes it.
        state: the checkpoint's names and tensors; each is looked up once, when it is needed.
        naming: "hugging_face" or "meta".
        prefix: of the names of this layer or model, with its dot, such as "model.layers.0.".

    Raises:
        PlanError: a tensor is missing or left over, a layer has no `rotary`, or the checkpoint has a head of its own
            and the model a tied one.
    """
    made: dict[str, torch.Tensor] = {}
    for path, part in parts(module, state, naming=naming, prefix=prefix):
        made |= {f"{path}{name}": x for name, x in part.items()}
    return made


def parts(
    module: TransformerLayer | Sequential,
    state: Mapping[str, torch.Tensor],
    *,
    naming: Naming = "hugging_face",
    prefix: str = "",
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What `from_llama` returns, child by child: the child's path with its dot, and its state dict."""
    if isinstance(module, TransformerLayer):
        yield "", _layer(module, state, naming, prefix)
        return
    whole = {ours: prefix + theirs for ours, theirs in _whole(module, naming).items()}
    layers = {str(i): f"{whole['layers']}.{i}." for i in range(len(module["layers"]))}
    theirs = {ours: f"{whole[ours]}.weight" for ours in ("embedding", "norm", "head")}
    known = (*layers.values(),)
    left = {n for n in state if n.startswith(prefix) and not n.endswith(_IGNORED)}
    left = {n for n in left if not n.startswith(known)} - set(theirs.values())
    if left:
        raise PlanError(f"the checkpoint has also {', '.join(sorted(left)[:5])}")
    yield from _ends(module, state, theirs)
    for i, layer_prefix in layers.items():
        yield f"layers.{i}.", _layer(module["layers"][int(i)], state, naming, layer_prefix)


def _ends(
    model: Sequential, state: Mapping[str, torch.Tensor], theirs: dict[str, str]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Embedding, last norm and head."""
    tied = model["head"].weight is model["embedding"].weight
    for ours in ("embedding", "norm") if tied else ("embedding", "norm", "head"):
        if theirs[ours] not in state:
            hint = "; make the model with tied=True" if ours == "head" else ""
            raise PlanError(f"the checkpoint has no {theirs[ours]}{hint}")
        x = state[theirs[ours]]
        yield f"{ours}.", {"weight": x}
        if tied and ours == "embedding":
            if theirs["head"] in state and not torch.equal(state[theirs["head"]], x):
                raise PlanError(
                    f"the checkpoint's {theirs['head']} is not its embedding; make the model with tied=False"
                )
            yield "head.", {"weight": x}


def _layer(
    layer: TransformerLayer, state: Mapping[str, torch.Tensor], naming: Naming, prefix: str
) -> dict[str, torch.Tensor]:
    """The state dict of one layer."""
    names, moves = _names(naming), _moves(layer, naming)
    left = {
        name.removeprefix(prefix)
        for name in state
        if name.startswith(prefix) and not name.endswith(_IGNORED)
    }
    made: dict[str, torch.Tensor] = {}
    for ours, _ in layer.named_parameters():
        where, _, what = ours.rpartition(".")
        wanted = [f"{name}.{what}" for name in names.get(where, ())]
        missing = [name for name in wanted if name not in left]
        if missing or not wanted:
            raise PlanError(
                f"TransformerLayer: the checkpoint has no {prefix}{(missing or [ours])[0]}"
            )
        left.difference_update(wanted)
        tensors = [state[prefix + name] for name in wanted]
        if moves:
            tensors = _moved(layer, where, tensors, to_halves=naming == "meta")
        made[ours] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if left:
        raise PlanError(f"TransformerLayer: the checkpoint has also {', '.join(sorted(left))}")
    return made


def to_llama(
    module: TransformerLayer | Sequential, *, naming: Naming = "hugging_face", prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Names and tensors of a Llama-like checkpoint; arguments as `from_llama`. A tied head is in Meta's naming only.

    Raises:
        PlanError: a layer has a parameter that such checkpoints do not have, or no `rotary`.
    """
    if isinstance(module, TransformerLayer):
        return _layer_back(module, naming, prefix)
    whole = {ours: prefix + theirs for ours, theirs in _whole(module, naming).items()}
    tied = module["head"].weight is module["embedding"].weight
    ends = ("embedding", "norm", "head") if naming == "meta" or not tied else ("embedding", "norm")
    made = {f"{whole[ours]}.weight": module[ours].weight.detach() for ours in ends}
    for i, layer in enumerate(module["layers"]):
        made |= _layer_back(layer, naming, f"{whole['layers']}.{i}.")
    return made


def _layer_back(layer: TransformerLayer, naming: Naming, prefix: str) -> dict[str, torch.Tensor]:
    names, moves = _names(naming), _moves(layer, naming)
    attention = layer.self_attention.attention
    made: dict[str, torch.Tensor] = {}
    for ours, p in layer.named_parameters():
        where, _, what = ours.rpartition(".")
        theirs = names.get(where)
        if theirs is None:
            raise PlanError(f"TransformerLayer: a Llama-like checkpoint has no place for {ours}")
        heads = (attention.num_heads, *(attention.num_gqa_groups,) * 2)
        rows = {3: [p.shape[0] // sum(heads) * h for h in heads], 2: [p.shape[0] // 2] * 2}
        tensors = list(torch.split(p.detach(), rows.get(len(theirs), [p.shape[0]])))
        if moves:
            tensors = _moved(layer, where, tensors, to_halves=naming != "meta")
        made |= {f"{prefix}{name}.{what}": x for name, x in zip(theirs, tensors, strict=True)}
    return made


def _whole(model: Sequential, naming: str) -> dict[str, str]:
    """The names of a whole model's parts.

    Raises:
        PlanError: it is not made of these parts.
    """
    _names(naming)
    children = set(dict(model.named_children())) - {"loss"}
    if children != set(_WHOLE["meta"]):
        raise PlanError(
            f"a Llama-like checkpoint fits a TransformerLayer, or a model of {', '.join(_WHOLE['meta'])} as "
            f"te.layers.llama_model makes it; this one has {', '.join(sorted(children)) or 'no children'}"
        )
    return _WHOLE[naming]


def _names(naming: str) -> dict[str, tuple[str, ...]]:
    if naming not in _NAMES:
        raise PlanError(f"naming must be one of {', '.join(_NAMES)}, got {naming!r}")
    return _NAMES[naming]


def _moves(layer: TransformerLayer, naming: str) -> bool:
    """Whether the checkpoint's RoPE pairs are not those of the layer."""
    return _rotary(layer).interleaved != (naming == "meta")


def _rotary(layer: TransformerLayer) -> RoPE:
    rotary = layer.self_attention.attention.rotary
    if rotary is None:
        raise PlanError(
            "TransformerLayer: the order of a Llama-like checkpoint's rows depends on RoPE; make the layer "
            "with rotary=te.RoPE(...)"
        )
    return rotary


def _moved(
    layer: TransformerLayer, where: str, tensors: list[torch.Tensor], *, to_halves: bool
) -> list[torch.Tensor]:
    """What RoPE turns, with its pairs in the other order: q and k, and the gammas of their norms."""
    turned = {"self_attention.qkv": 2}.get(where, int(where.endswith(("q_norm", "k_norm"))))
    d, dim = layer.self_attention.attention.kv_channels[0], _rotary(layer).dim
    assert d is not None  # the layer has given it
    order = torch.arange(d)
    pairs = order[:dim].view(-1, 2) if to_halves else order[:dim].view(2, -1)
    order = torch.cat([pairs.t().flatten(), order[dim:]])
    made = [
        x.reshape(-1, d, *x.shape[1:])[:, order.to(x.device)].reshape(x.shape)
        for x in tensors[:turned]
    ]
    return made + tensors[turned:]


__all__ = ["from_llama", "parts", "to_llama"]
