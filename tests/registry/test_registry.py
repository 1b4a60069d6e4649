"""Rules and kernels by name, arch ranges, layouts, what a Call tells (contracts 9, 14, 25)."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.errors import PlanError
from te_ops.registry import (
    REGISTRY,
    ArchRange,
    Call,
    Kernel,
    OperandLayouts,
    Registry,
    Rule,
    load_plugins,
)


def bind(call: Call) -> Any:
    return lambda *xs: xs[0]


# -- rules


def test_chain_elements() -> None:
    rule = Rule("r", ("gemm", "pointwise*", "sum|reduce?", "quantize"))
    assert [(sorted(e.names), e.optional, e.repeat) for e in rule.elements] == [
        (["gemm"], False, False),
        (["pointwise"], True, True),
        (["reduce", "sum"], True, False),
        (["quantize"], False, False),
    ]


@pytest.mark.parametrize("chain", [(), ("a?",), ("a*", "b?")])
def test_a_chain_needs_something(chain: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="no required primitive"):
        Rule("r", chain)


def test_wrong_words_of_a_rule_together() -> None:
    with pytest.raises(
        PlanError, match=r"rule r: follow= is a tuple of primitives, got 'quantize'"
    ):
        Rule("r", ("a",), together=True, follow="quantize")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"rule r: beside= is a tuple of primitives, got 'gemm'"):
        Rule("r", ("a",), follow=("quantize",), beside="gemm")  # type: ignore[arg-type]
    for wrong in ({"together": True, "follow": ("quantize",)}, {}):
        with pytest.raises(PlanError, match="beside= is for chains with follow="):
            Rule("r", ("a", "b"), beside=("pointwise",), **wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"rule r: key= is a function of \(graph, node\), got 3"):
        Rule("r", ("a", "a"), together=True, key=3)  # type: ignore[arg-type]


def test_an_error_in_a_key_names_the_rule() -> None:
    def key(g: Any, node: Any) -> Any:
        raise ValueError("boom")

    with REGISTRY.temporary():
        REGISTRY.add(Rule("keyed", ("gemm", "gemm"), together=True, key=key))
        with pytest.raises(
            PlanError, match=r"rule keyed: key= raised ValueError for gemm \(boom\)"
        ):
            te.Linear(8, 8)(torch.randn(2, 8))
    te.Linear(8, 8)(torch.randn(2, 8))


def test_built_in_rules_name_primitives_that_exist() -> None:
    for rule in te.fused.RULES:
        for element in rule.elements:
            for name in element.names:
                assert name in te.graph.PRIMS, f"{rule.name}: {name}"


def test_registering_built_ins_again_changes_no_rule() -> None:
    before = REGISTRY.rules("phase")
    te.fused.register()
    assert REGISTRY.rules("phase") == before


# -- arch ranges


@pytest.mark.parametrize(
    ("text", "takes", "refuses"),
    [
        ("any", ["cpu", "sm_80", "sm_120"], []),
        ("cpu", ["cpu"], ["sm_90"]),
        ("cuda", ["sm_80", "sm_120"], ["cpu"]),
        ("sm_90", ["sm_90"], ["sm_80", "sm_100", "cpu"]),
        ("sm_90+", ["sm_90", "sm_103", "sm_120"], ["sm_89", "cpu"]),
        ("sm_80..sm_90", ["sm_80", "sm_89", "sm_90"], ["sm_75", "sm_100", "cpu"]),
    ],
)
def test_arch_ranges(text: str, takes: list[str], refuses: list[str]) -> None:
    range_ = ArchRange(text)
    assert [range_.refuse(a) for a in takes] == [None] * len(takes)
    for arch in refuses:
        reason = range_.refuse(arch)
        assert reason is not None
        assert text in reason
        assert arch in reason


@pytest.mark.parametrize("text", ["", "gpu", "sm_", "sm_9x", "sm_90..", "sm_90..sm_80", "sm90"])
def test_wrong_arch_ranges_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="arch"):
        ArchRange(text)


# -- the registry


def test_names_are_taken_once() -> None:
    registry = Registry()
    registry.add(Rule("r", ("gemm",)), Kernel("r", "k", bind))
    with pytest.raises(PlanError, match="'r' is registered already"):
        registry.add(Rule("r", ("sum",)))
    with pytest.raises(PlanError, match="'k' is registered already"):
        registry.add(Kernel("other", "k", bind))
    registry.add(Rule("r", ("sum",)), replace=True)
    assert registry.find("r") == Rule("r", ("sum",))
    with pytest.raises(PlanError, match="'x'"):
        registry.find("x")
    with pytest.raises(PlanError, match="'x'"):
        registry.remove("x")


def test_a_failed_add_registers_nothing() -> None:
    registry = Registry()
    registry.add(Kernel("r", "k", bind))
    version = registry.version
    with pytest.raises(PlanError):
        registry.add(Rule("new", ("gemm",)), Kernel("r", "k", bind))
    assert registry.rules("phase") == []
    assert registry.version == version


def test_kernels_by_priority_then_order() -> None:
    registry = Registry()
    registry.add(
        *(
            Kernel("r", name, bind, priority=p)
            for name, p in (("a", 1), ("b", 5), ("c", 5), ("d", 9))
        )
    )
    assert [k.name for k in registry.kernels("r")] == ["d", "b", "c", "a"]
    assert registry.kernels("other") == []


def test_every_change_moves_the_version() -> None:
    registry = Registry()
    versions = [registry.version]
    registry.add(Kernel("r", "k", bind))
    versions.append(registry.version)
    with registry.temporary(Kernel("r", "t", bind)):
        versions.append(registry.version)
        assert len(registry.kernels("r")) == 2
    versions.append(registry.version)
    with registry.only():
        versions.append(registry.version)
    versions.append(registry.version)
    registry.remove("k")
    versions.append(registry.version)
    assert versions == sorted(set(versions))
    assert list(registry.all()) == []


def test_temporary_restores_what_it_replaced() -> None:
    registry = Registry()
    kept = Kernel("r", "k", bind, priority=1)
    registry.add(kept)
    with pytest.raises(KeyError), registry.temporary(Kernel("r", "k", bind, priority=2)):
        raise KeyError
    assert registry.find("k").priority == 1  # type: ignore[union-attr]


def test_only() -> None:
    registry = Registry()
    registry.add(Rule("a", ("gemm",)), Rule("b", ("gemm",)))
    with registry.only("b"):
        assert [r.name for r in registry.rules("phase")] == ["b"]
        with registry.only():
            assert registry.rules("phase") == []
        assert [r.name for r in registry.rules("phase")] == ["b"]
    assert [r.name for r in registry.rules("phase")] == ["a", "b"]


def test_a_reason_is_arch_then_availability_then_the_call() -> None:
    kernel = Kernel(
        "r",
        "k",
        bind,
        arch=ArchRange("cpu"),
        available=lambda: "not installed",
        refuse=lambda call: "no",
    )
    call = Call((), (), (), {}, torch.device("cpu"), "sm_90", 1)
    assert "needs cpu" in str(kernel.reason(call))
    here = Call((), (), (), {}, torch.device("cpu"), "cpu", 1)
    assert kernel.reason(here) == "not installed"
    assert Kernel("r", "k", bind, refuse=lambda call: "no").reason(here) == "no"
    assert Kernel("r", "k", bind).reason(here) is None


def test_decorator() -> None:
    with REGISTRY.temporary():

        @te.registry.kernel(
            "gemm",
            name="test.decorated",
            arch="cpu",
            priority=3,
            layouts=OperandLayouts(((0, "plain"),)),
        )
        def made(call: Call) -> Any:
            return bind(call)

        assert isinstance(made, Kernel)
        assert REGISTRY.find("test.decorated") is made
    with pytest.raises(PlanError):
        REGISTRY.find("test.decorated")


# -- what a kernel is told


def seen(model: te.Op, x: torch.Tensor, kind: str, rule: Rule | None = None) -> list[Call]:
    calls: list[Call] = []

    def refuse(call: Call) -> str | None:
        calls.append(call)
        return "only looking"

    with REGISTRY.temporary(
        *([rule] if rule else []), Kernel(kind, "test.look", bind, refuse=refuse, priority=99)
    ):
        model.plan(x)
    return calls


@pytest.mark.parametrize(("rows", "align"), [(0, 0), (1, 1), (6, 2), (24, 8), (64, 64), (384, 128)])
def test_alignment_of_the_rows(rows: int, align: int) -> None:
    (call, *_) = seen(te.Linear(8, 8, bias=False), torch.empty(rows, 8), "gemm")
    assert call.align == align
    assert (call.arch, call.device) == ("cpu", torch.device("cpu"))


def test_reads_writes_and_liveness() -> None:
    calls = seen(te.RMSNorm(8), torch.randn(4, 8, requires_grad=True), "rmsnorm")
    assert [c.live(c.node) for c in calls] == [(True, True)]
    with torch.no_grad():
        calls = seen(te.RMSNorm(8), torch.randn(4, 8), "rmsnorm")
    assert [c.live(c.node) for c in calls] == [(True, False)]
    (call,) = calls
    assert len(call.writes) == 1
    assert [call.spec(v).shape for v in call.reads] == [(4, 8), (8,)]
    assert [s.shape for s in call.specs_of(call.node)] == [(4, 8), (4,)]


def test_commutative_operands_come_chain_first() -> None:
    rule = Rule("test.add", ("gemm", "sum"), commutes=("sum",))

    class Sum(te.Op):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first
            self.linear = te.Linear(8, 8, bias=False)

        def emit(self, g: te.graph.Graph, x: te.graph.Value) -> te.graph.Value:
            y = self.linear.emit(g, x)
            order = (y, x) if self.first else (x, y)
            return g.call(te.basic.pointwise.SUM, *order, dtype=torch.float32)

    for first in (True, False):
        with torch.no_grad():
            (call,) = seen(Sum(first), torch.randn(4, 8), "test.add", rule)
        assert call.inputs(call.nodes[1])[0].node == call.nodes[0].id


# -- plug-ins


class Entry:
    def __init__(self, name: str, action: Any) -> None:
        self.name, self.action = name, action

    def load(self) -> Any:
        return self.action()


def test_plugins_load_and_fail_softly(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    entries = [
        Entry("good", lambda: lambda: done.append("good")),
        Entry("module", lambda: importlib.metadata),
        Entry("bad", lambda: 1 / 0),
        Entry("late", lambda: lambda: done.append("late")),
    ]
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: entries if group == "te_ops.plugins" else [],
    )
    with pytest.warns(RuntimeWarning, match="'bad' failed to load"):
        result = load_plugins()
    assert done == ["good", "late"]
    assert result == {
        "good": None,
        "module": None,
        "bad": "ZeroDivisionError: division by zero",
        "late": None,
    }


def test_kernels_wait_for_their_device_and_outlive_a_temporary() -> None:
    registry = Registry()
    mine = Kernel("gemm", "late.gemm", lambda call: lambda *xs: xs[0])
    loads: list[str] = []

    def load() -> None:
        loads.append("cuda")
        registry.add(mine)

    registry.when("cuda", load)
    registry.prepare("cpu")
    assert registry.kernels("gemm") == []
    with registry.temporary():
        registry.prepare("cuda")
    assert registry.kernels("gemm") == [mine]
    registry.prepare("cuda")
    assert loads == ["cuda"]
    with registry.without("late."):
        assert registry.kernels("gemm") == []
    assert registry.find("late.gemm") is mine


def test_a_kernel_that_is_wrong_is_named() -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("boom")

    def made(name: str, refuse: Any, bind: Any) -> Kernel:
        return te.registry.kernel(
            "gemm", name=name, arch="cpu", priority=500, refuse=refuse, recorded=True
        )(bind)

    x, model = torch.randn(2, 8), te.Sequential(te.Linear(8, 8))
    with REGISTRY.temporary():
        assert made("says.no", lambda _: False, bind).recorded
        with pytest.raises(
            PlanError, match=r"kernel says\.no: refuse\(call\) gives None or .* got False"
        ):
            model(x)
    with REGISTRY.temporary():
        made("binds.not", lambda _: None, broken)
        with pytest.raises(ValueError, match="boom") as caught:
            model(x)
        assert caught.value.__notes__ == ["te_ops bound the kernel binds.not"]
    with REGISTRY.temporary():
        made("runs.not", lambda _: None, lambda _: broken)
        with pytest.raises(ValueError, match="boom") as caught:
            model(x)
        assert caught.value.__notes__ == ["te_ops ran Sequential.0"]


def test_backends_take_part_in_step_boundaries() -> None:
    made, seen = Registry(), []

    def hook(together: bool) -> int:
        seen.append(together)
        return 2 if together else 0

    made.on_boundary("one", hook)
    assert made.boundary() == 0
    assert made.version == 0
    assert made.boundary(together=True) == 2
    assert made.version == 1, "plans are made anew once"
    assert seen == [False, True]


def test_every_backend_settles() -> None:
    made, asked = Registry(), []

    def hook(name: str, again: bool) -> bool:
        asked.append(name)
        return again

    assert not made.settle()
    made.on_settle("a", lambda: hook("a", True))
    made.on_settle("b", lambda: hook("b", False))
    assert made.settle()
    assert asked == ["a", "b"]
