from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from te_ops.cli.train.checks import Check, Run, checks, lagging_loss
from te_ops.cli.train.metrics import Metrics, OperandName, Rounding


def _run(name: str, curve: dict[int, float], **changed: Any) -> Run:
    trainer = SimpleNamespace(
        arm=SimpleNamespace(name=name),
        validation=list(curve.items()),
        step=max(curve),
        settings=SimpleNamespace(steps=max(curve), sizes=SimpleNamespace(vocab=256)),
    )
    fine = Rounding(OperandName("fc1", "input"), 31.0, 24.6, 0.001, 0.002, 0)
    values = {
        "errors": (fine,),
        "cosine": 0.999,
        "cosine_worst": 0.99,
        "worst_parameter": "fc1.weight",
        "cosine_floor": 0.9,
        "saved_bytes": 90,
        "ms": 1.0,
        "first_ms": 2.0,
    }
    return Run(trainer, Metrics(**{**values, **changed}))  # type: ignore[arg-type]


CURVE = {50: 3.0, 80: 2.5, 100: 2.4}
BASE = _run("fp32", CURVE, errors=(), saved_bytes=100)


def _failed(run: Run, entropy: float = 3.0) -> list[str]:
    return [c.what for c in checks([BASE, run], entropy) if not c.ok]


def test_a_good_run_passes_every_kind_of_check() -> None:
    made = checks([BASE, _run("mxfp8", CURVE)], 3.0)
    assert all(c.ok for c in made)
    assert [c.what for c in made] == [
        "val loss",
        "SQNR input",
        "underflow input",
        "grad cosine",
        "loss gap",
        "kept bytes",
    ]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"errors": (Rounding(OperandName("a", "weight"), 20.0, 24.6, 0, 0, 0),)}, "SQNR weight"),
        (
            {"errors": (Rounding(OperandName("a", "input"), 31.0, 24.6, 0.2, 0.1, 0),)},
            "underflow input",
        ),
        ({"cosine_worst": 0.5}, "grad cosine"),
        ({"cosine_worst": math.nan}, "grad cosine"),
        ({"saved_bytes": 101}, "kept bytes"),
    ],
)
def test_each_check_can_fail(changed: dict[str, Any], what: str) -> None:
    assert _failed(_run("bad", CURVE, **changed)) == [what]


def test_the_gap_may_be_what_fp32_gained_in_its_last_fifth() -> None:
    assert lagging_loss(BASE, 0.2) == pytest.approx(0.1)
    assert _failed(_run("slow", {100: 2.4 + 0.1 + 0.04})) == []
    assert _failed(_run("slow", {100: 2.4 + 0.1 + 0.06})) == ["loss gap"]
    coarse = (Rounding(OperandName("a", "input"), 18.0, 13.98, 0, 0, 0),)
    assert _failed(_run("nvfp4", {100: 2.4 + 0.6}, errors=coarse)) == []
    assert _failed(_run("nan", {100: math.nan})) == ["loss gap"]


def test_fp32_must_know_more_than_byte_frequencies_once_it_had_time() -> None:
    assert _failed(_run("x", CURVE), entropy=2.3) == ["val loss"]
    short = _run("fp32", {20: 5.0}, errors=())
    assert checks([short], 2.3)[0].ok
    assert not checks([_run("fp32", {20: 5.6}, errors=())], 2.3)[0].ok


def test_rounded_weights_may_be_kept_on_top_of_what_fp32_keeps() -> None:
    weight = (Rounding(OperandName("a", "weight"), 31.0, 24.6, 0, 0, 7),)
    assert _failed(_run("tiny", CURVE, errors=weight, saved_bytes=107)) == []
    assert _failed(_run("tiny", CURVE, errors=weight, saved_bytes=108)) == ["kept bytes"]


def test_a_check_is_plain() -> None:
    assert Check("a", "b", "", 1.0, 1.0, True, "", "").ok
    assert Check("a", "b", "", 1.0, 1.0, False, "", "").ok
    assert not Check("a", "b", "", 0.9, 1.0, True, "", "").ok
