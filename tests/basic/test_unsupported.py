"""Keywords of Transformer Engine that are not supported yet: asked for, one clear error; idle, accepted."""

from __future__ import annotations

from typing import Any

import pytest

import te_ops as te
from te_ops import layers
from te_ops.basic.unsupported import rest
from te_ops.errors import PlanError

MAKERS: dict[str, Any] = {
    "Linear": lambda **k: te.Linear(8, 8, **k),
    "LayerNormLinear": lambda **k: layers.LayerNormLinear(8, 8, **k),
    "LayerNormMLP": lambda **k: layers.LayerNormMLP(8, 8, **k),
    "DotProductAttention": lambda **k: layers.DotProductAttention(4, **k),
    "MultiheadAttention": lambda **k: layers.MultiheadAttention(8, 4, **k),
    "TransformerLayer": lambda **k: layers.TransformerLayer(8, 8, 4, **k),
}
LAYERS_OF_QKV = ("MultiheadAttention", "TransformerLayer")
IDLE = {
    "tp_size": 1, "tp_group": None, "sequence_parallel": False, "set_parallel_mode": False, "parallel_mode": None,
    "cp_group": None, "cp_comm_type": "p2p", "ub_overlap_ag": False, "ub_name": None, "symmetric_ar_type": None,
    "delay_wgrad_compute": False, "fuse_qkv_params": True, "qkv_weight_interleaved": False, "layer_number": None,
    "seq_length": None, "name": None, "get_rng_state_tracker": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_what_asks_for_nothing_is_accepted(kind: str) -> None:
    plain = MAKERS[kind]()
    made = MAKERS[kind](**IDLE)
    assert made.state_dict().keys() == plain.state_dict().keys()
    assert not set(IDLE) & set(vars(made))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("keyword", "value", "said"),
    [
        ("tp_size", 2, "tensor parallelism is not supported yet"),
        ("tp_size", True, "tensor parallelism is not supported yet"),
        ("sequence_parallel", True, "tensor parallelism is not supported yet"),
        ("sequence_parallel", 0, "tensor parallelism is not supported yet"),
        ("cp_group", object(), "context parallelism is not supported yet"),
        ("cp_comm_type", "a2a", "context parallelism is not supported yet"),
        ("ub_tp_comm_overlap", True, "communication overlap"),
        ("delay_wgrad_compute", True, "delayed weight gradients are not supported yet"),
        ("layer_number", 3, "named by their place"),
        ("parameters_split", ("a", "b"), "te.Branch"),
    ],
)
def test_what_asks_for_something_is_refused(kind: str, keyword: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        MAKERS[kind](**{keyword: value})
    assert str(caught.value).startswith(f"{kind}: {keyword}=")


@pytest.mark.parametrize("kind", [name for name in MAKERS if name not in LAYERS_OF_QKV])
@pytest.mark.parametrize(
    ("keyword", "value"), [("fuse_qkv_params", False), ("qkv_weight_interleaved", True)]
)
def test_orders_of_rows_belong_to_layers_with_queries(kind: str, keyword: str, value: bool) -> None:
    with pytest.raises(PlanError, match="from_transformer_engine"):
        MAKERS[kind](**{keyword: value})


OVERLAPS = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")


@pytest.mark.parametrize("keyword", OVERLAPS)
def test_overlaps_that_a_layer_has_by_default_there_need_their_switch(keyword: str) -> None:
    MAKERS["TransformerLayer"](**{keyword: True}, ub_tp_comm_overlap=False)
    with pytest.raises(PlanError, match="communication overlap"):
        MAKERS["TransformerLayer"](**{keyword: True}, ub_tp_comm_overlap=True)
    for kind in ("Linear", "MultiheadAttention"):
        with pytest.raises(PlanError, match="communication overlap"):
            MAKERS[kind](**{keyword: True})


@pytest.mark.parametrize("kind", MAKERS)
def test_what_nobody_knows_is_a_type_error(kind: str) -> None:
    with pytest.raises(TypeError, match="tp_sise"):
        MAKERS[kind](tp_sise=1)


def test_the_rest_is_passed_on() -> None:
    given = {"tp_size": 1, "window_size": (3, 0), "cp_group": []}
    assert rest("op", given) == {"window_size": (3, 0)}
    assert given["tp_size"] == 1
