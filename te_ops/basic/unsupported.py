"""Keywords of Transformer Engine's modules that have nothing to do here yet: refused by name, with the way out.

A value that asks for nothing (`tp_size=1`, `sequence_parallel=False`) is what happens anyway, and is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from te_ops.errors import PlanError


class _Refusal(NamedTuple):
    """Why a keyword is refused, unless its value is one of `idle`."""

    idle: tuple[Any, ...]
    why: str


_TENSOR = "tensor parallelism is not supported yet: every process holds whole weights; leave it out"
_CONTEXT = "context parallelism is not supported yet: a sequence stays in one process; leave it out"
_OVERLAP = (
    "communication overlap belongs to tensor parallelism, which is not supported yet; leave it out"
)
_DELAYED = (
    "delayed weight gradients are not supported yet; they arrive in .grad, or are added to main_grad with "
    "fuse_wgrad_accumulation=True"
)
_ORDER = (
    "the parameter is always one [Q | K | V]; te.layers.from_transformer_engine(order=...) reads the other "
    "orders, and separate weights"
)
_WARM = (
    "there is nothing to warm up for one size: plans are made for the shapes of calls; leave it out"
)
_NAMED = "ops are named by their place in the model; leave it out"
_SPLIT = "a Linear has one weight; te.Branch puts several side by side on one input"

_TABLE: dict[str, _Refusal] = {
    **dict.fromkeys(("tp_group", "parallel_mode", "rng_tracker_name"), _Refusal((None,), _TENSOR)),
    **dict.fromkeys(("get_rng_state_tracker",), _Refusal((None,), _TENSOR)),
    **dict.fromkeys(("sequence_parallel", "set_parallel_mode"), _Refusal((False,), _TENSOR)),
    "return_layernorm_output_gathered": _Refusal((False,), _TENSOR),
    "tp_size": _Refusal((1,), _TENSOR),
    **dict.fromkeys(("cp_group", "cp_global_ranks", "cp_stream"), _Refusal((None, []), _CONTEXT)),
    "cp_comm_type": _Refusal(("p2p", None), _CONTEXT),  # read only with a cp_group
    "symmetric_ar_type": _Refusal((None,), _OVERLAP),
    "delay_wgrad_compute": _Refusal((False,), _DELAYED),
    "fuse_qkv_params": _Refusal((True,), _ORDER),
    "qkv_weight_interleaved": _Refusal((False,), _ORDER),
    **dict.fromkeys(("seq_length", "micro_batch_size"), _Refusal((None,), _WARM)),
    **dict.fromkeys(("layer_number", "name", "ub_name"), _Refusal((None,), _NAMED)),
    "parameters_split": _Refusal((None,), _SPLIT),
}


def rest(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of further keywords without those of the table.

    Raises:
        PlanError: one of the table asks for something.
    """
    left = dict(given)
    # Those of the whole layer are on by default there, and say nothing without the switch of all of them.
    idle: tuple[Any, ...] = (False, None)
    idle += (True,) if op == "TransformerLayer" and not given.get("ub_tp_comm_overlap") else ()
    for name, value in given.items():
        refusal = _Refusal(idle, _OVERLAP) if name.startswith("ub_") else None
        refusal = _TABLE.get(name, refusal)
        if refusal is None:
            continue
        # By identity for flags: 1 is not True, and 0 not False.
        if not any(
            value is idle or (type(value) is type(idle) and value == idle) for idle in refusal.idle
        ):
            raise PlanError(f"{op}: {name}={value!r}: {refusal.why}")
        del left[name]
    return left


def refuse_others(op: str, given: Mapping[str, Any]) -> None:
    """Refuse all further keywords but those that ask for nothing.

    Raises:
        PlanError: it is one of Transformer Engine's that is not supported.
        TypeError: it is no keyword of anything.
    """
    unknown = rest(op, given)
    if unknown:
        raise TypeError(
            f"{op}.__init__() got an unexpected keyword argument {next(iter(unknown))!r}"
        )


__all__ = ["refuse_others", "rest"]
