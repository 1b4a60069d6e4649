"""The matcher: what fuses, what backs off, what would close a cycle; every fused plan is run
against the unfused one.
"""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops.backends.reference.kernels import bind_composed, composed
from te_ops.basic.gemm import GEMM
from te_ops.basic.norm import RMSNORM
from te_ops.basic.pointwise import SUM, pointwise, reduce
from te_ops.basic.quantize import QUANTIZE
from te_ops.compiler.fuse import fuse, select, toposort
from te_ops.compiler.work import Group, Request, Work
from te_ops.errors import NoKernelError, PlanError
from te_ops.graph import Graph, Node, Phase, Prim, Spec, Value
from te_ops.pointwise import activations
from te_ops.registry import REGISTRY, Call, Kernel, Rule
from tests.compiler.isolation import only

N = 16
EPILOGUE = Rule(
    "epilogue", ("gemm", "pointwise*", "sum?", "quantize?"), commutes=("sum", "pointwise")
)
MXFP8 = te.MXFP8Quantizer()
CYCLE = "fusing it would close a cycle with its other readers"


class Builder:
    """A graph over [N, N] FP32 values, by name of what makes them."""

    def __init__(self) -> None:
        self.g = Graph()
        self.count = 0

    def input(self) -> Value:
        self.count += 1
        return self.g.input(self.count - 1, Spec((N, N), torch.float32))

    def gemm(self, a: Value, b: Value, layout: str = "nt") -> Value:
        return self.g.call(GEMM, a, b, layout=layout, dtype=torch.float32)

    def fn(self, name: str, *xs: Value) -> Value:
        return pointwise(self.g, activations[name](), *xs)

    def sum(self, *xs: Value) -> Value:
        return self.g.call(SUM, *xs, dtype=torch.float32)

    def quantize(self, x: Value) -> tuple[Value, ...]:
        return self.g.calls(QUANTIZE, x, quantizer=MXFP8)

    def norm(self, x: Value, gamma: Value) -> tuple[Value, ...]:
        return self.g.calls(RMSNORM, x, gamma, eps=1e-5, zero_centered=False)

    def work(self, *outputs: Value) -> Work:
        specs = (Spec((N, N), torch.float32),) * self.count
        request = Request(te.Identity(), specs, (), False, torch.device("cpu"), "cpu", 16)
        return Work(request, self.g, outputs)


def match(work: Work, *made: Rule | Kernel) -> list[str]:
    """Members of each fused group; checks that the steps give what the unfused nodes give."""
    with only(*made):
        fuse(work)
        select(work)
    alive = work.g.live(work.roots())
    nodes = [n for n in work.g.nodes if alive[n.id] and n.prim.name != "input"]
    steps = [n.id for group in (*work.forward, *work.backward) for n in group.nodes]
    assert sorted(steps) == [n.id for n in nodes], "each node is in one step"
    for value, result in run(work).items():
        torch.testing.assert_close(result, reference(work)[value])
    return [" + ".join(label(n) for n in group.nodes) for group in work.groups]


def label(node: Node) -> str:
    return str(node.attrs["fn"].name) if "fn" in node.attrs else node.prim.name


def inputs(work: Work) -> dict[Value, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        n.out: torch.randn(N, N, generator=generator)
        for n in work.g.nodes
        if n.prim.name == "input"
    }


def dense(values: dict[Value, object]) -> dict[Value, torch.Tensor]:
    return {
        v: x.dequantize(torch.float32) if not isinstance(x, torch.Tensor) else x  # type: ignore[attr-defined]
        for v, x in values.items()
    }


def run(work: Work) -> dict[Value, torch.Tensor]:
    """Outputs by the steps in order; a step that reads what is not there yet is a KeyError."""
    values: dict[Value, object] = dict(inputs(work))
    for group in (*work.forward, *work.backward):
        assert group.call is not None
        results = group.kernel.bind(group.call)(*(values[v] for v in group.reads))
        results = (results,) if len(group.writes) == 1 else results
        values.update(zip(group.writes, results, strict=True))
    return dense({v: values[v] for v in work.outputs})


def reference(work: Work) -> dict[Value, torch.Tensor]:
    values: dict[Value, object] = dict(inputs(work))
    for node in work.g.nodes:
        if node.prim.name != "input":
            extra = {"live": (True, True, True)} if node.prim.selective else {}
            results = node.prim.reference(*(values[v] for v in node.inputs), **node.attrs, **extra)
            results = results if isinstance(results, tuple) else (results,)
            values.update({Value(node.id, i): r for i, r in enumerate(results)})
    return dense({v: values[v] for v in work.outputs})


def reasons(work: Work) -> list[tuple[str, str, str]]:
    return [(n.rule, n.kernel, n.reason) for n in work.notes]


# -- one chain


def test_an_inner_value_with_an_early_reader_is_written_and_read_after_the_group() -> None:
    b = Builder()
    x, w = b.input(), b.input()
    y = b.gemm(x, w)
    early = b.fn("relu", y)  # comes before gelu in the graph, but must run after the group
    z = b.fn("gelu", y)
    out = b.fn("mul", z, x)
    work = b.work(early, out)
    rule = Rule("r", ("gemm", "pointwise", "pointwise"))
    assert match(work, rule, composed(rule)) == ["gemm + gelu + mul"]
    assert set(work.groups[0].writes) == {y, out}
    assert [label(group.nodes[-1]) for group in work.forward] == ["mul", "relu"]


def test_a_diamond_backs_off_to_the_part_without_a_cycle() -> None:
    b = Builder()
    a = b.gemm(b.input(), b.input())
    out = b.fn("add", b.fn("gelu", a), b.fn("relu", a))
    work = b.work(out)
    assert match(work, EPILOGUE, composed(EPILOGUE)) == ["gemm + gelu"]
    assert ("epilogue", "", CYCLE) in reasons(work)


def test_groups_that_are_convex_alone_but_cyclic_together_are_refused() -> None:
    b = Builder()
    x = b.input()
    p, q = b.fn("relu", x), b.fn("gelu", x)
    work = b.work(b.fn("add", p, q), b.fn("mul", q, p))
    rule = Rule("pair", ("pointwise", "pointwise"))
    groups = match(work, rule, composed(rule))
    assert groups == ["relu + add"]  # gelu + mul would need relu before and give add its gelu
    assert ("pair", "", CYCLE) in reasons(work)


def test_a_cycle_through_later_single_steps_is_seen() -> None:
    """{m2, m1} is a group; {a, b} reads it by b and feeds it by a -> r1 -> r2, after b."""
    b = Builder()
    x, w = b.input(), b.input()
    m2 = b.gemm(x, w)
    a = b.fn("relu", x)
    product = b.fn("mul", a, m2)
    r2 = b.gemm(b.gemm(a, w), w)
    work = b.work(product, b.sum(m2, r2))
    rules = Rule("sums", ("gemm", "sum")), Rule("pair", ("pointwise", "pointwise"))
    assert match(work, *rules, *map(composed, rules)) == ["gemm + sum"]
    assert reasons(work) == [("pair", "", CYCLE)]


def test_a_refused_match_backs_off_to_a_shorter_one_and_keeps_the_reason() -> None:
    b = Builder()
    row, *_ = b.quantize(b.fn("gelu", b.gemm(b.input(), b.input())))
    work = b.work(row)

    def refuse(call: Call) -> str | None:
        return "writes no records" if any(n.prim is QUANTIZE for n in call.nodes) else None

    kernel = Kernel("epilogue", "picky", bind_composed, refuse=refuse)
    assert match(work, EPILOGUE, kernel) == ["gemm + gelu"]
    (note,) = work.notes
    assert (note.kernel, note.reason) == ("picky", "writes no records")
    assert note.at.startswith("gemm_nt + gelu + quantize(")


def test_a_kernel_of_lower_priority_takes_what_the_first_refuses() -> None:
    b = Builder()
    work = b.work(b.fn("gelu", b.gemm(b.input(), b.input())))
    picky = Kernel("epilogue", "picky", bind_composed, priority=20, refuse=lambda _: "never")
    assert match(work, EPILOGUE, picky, composed(EPILOGUE)) == ["gemm + gelu"]
    assert work.groups[0].kernel.name == "reference.composed.epilogue"
    assert reasons(work) == [("epilogue", "picky", "never")]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["sum", "add"])
def test_an_addition_matches_along_either_operand(swapped: bool, kind: str) -> None:
    b = Builder()
    x, w = b.input(), b.input()
    y = b.gemm(x, w)
    operands = (x, y) if swapped else (y, x)
    out = b.sum(*operands) if kind == "sum" else b.fn("add", *operands)
    work = b.work(out)
    assert match(work, EPILOGUE, composed(EPILOGUE)) == [f"gemm + {kind}"]
    call = work.groups[0].call
    assert call is not None
    assert call.inputs(call.nodes[-1]) == (y, x)  # the chain operand is shown first


def test_a_chain_follows_every_output() -> None:
    halves = Prim("halves", lambda x: (x * 0.5, x * 0.25), lambda x: (x, x), n_out=2)
    b = Builder()
    low, high = b.g.calls(halves, b.input())
    work = b.work(low, b.fn("gelu", high))
    rule = Rule("r", ("halves", "pointwise"))
    assert match(work, rule, composed(rule)) == ["halves + gelu"]
    assert work.groups[0].writes[0] == low


def test_norm_quantize_stays_when_one_of_q_k_v_is_unquantized() -> None:
    b = Builder()
    x, weights = b.input(), [b.input() for _ in range(3)]
    gamma = b.g.input(b.count, Spec((N,), torch.float32))
    y, _ = b.norm(x, gamma)
    row, _, _ = b.quantize(y)
    q, k, v = (b.gemm(operand, w) for operand, w in zip((row, row, y), weights, strict=True))
    work = b.work(q, k, v)
    rule = Rule("norm_quantize", ("rmsnorm", "quantize"))
    with only(rule, composed(rule)):
        fuse(work)
        select(work)
    (group,) = work.groups
    assert [n.prim.name for n in group.nodes] == ["rmsnorm", "quantize"]
    assert group.writes == (y, row)


def test_a_sum_of_three_gemms_is_the_epilogue_of_one() -> None:
    b = Builder()
    three = [b.gemm(b.input(), b.input(), "nn") for _ in range(3)]
    work = b.work(b.sum(*three))
    assert match(work, EPILOGUE, composed(EPILOGUE)) == ["gemm + sum"]
    assert set(work.groups[0].reads) >= set(three[1:])
    assert len(work.forward) == 3


def test_the_longest_match_wins_over_the_rule_declared_first() -> None:
    b = Builder()
    work = b.work(
        reduce(b.g, b.fn("gelu", b.gemm(b.input(), b.input())), over="rows", dtype=torch.float32)
    )
    short, long = (
        Rule("short", ("gemm", "pointwise")),
        Rule("long", ("gemm", "pointwise", "reduce")),
    )
    assert match(work, short, long, composed(short), composed(long)) == ["gemm + gelu + reduce"]


def test_of_equal_matches_the_rule_declared_first_wins() -> None:
    b = Builder()
    work = b.work(b.fn("gelu", b.gemm(b.input(), b.input())))
    first, second = Rule("first", ("gemm", "pointwise")), Rule("second", ("gemm", "pointwise"))
    match(work, first, second, composed(second), composed(first))
    assert work.groups[0].rule is first


# -- phases and recompute scopes


@pytest.mark.parametrize(
    ("one", "two", "fuses"),
    [
        (Phase.FORWARD, Phase.FORWARD, True),
        (Phase.DGRAD, Phase.WGRAD, True),
        (Phase.RECOMPUTE, Phase.RECOMPUTE, True),
        (Phase.FORWARD, Phase.DGRAD, False),
        (Phase.FORWARD, Phase.RECOMPUTE, False),
        (Phase.RECOMPUTE, Phase.DGRAD, True),
    ],
)
def test_groups_stay_within_a_phase(one: Phase, two: Phase, fuses: bool) -> None:
    b = Builder()
    x, w = b.input(), b.input()
    b.g.phase = one
    y = b.gemm(x, w)
    b.g.phase = two
    work = b.work(b.fn("gelu", y))
    assert bool(match(work, EPILOGUE, composed(EPILOGUE))) is fuses


def test_groups_stay_within_a_recompute_scope() -> None:
    b = Builder()
    y = b.gemm(b.input(), b.input())
    with b.g.recompute():
        z = b.fn("gelu", y)
    assert match(b.work(z), EPILOGUE, composed(EPILOGUE)) == []


# -- nodes that share an input


def test_gemms_of_one_input_go_together() -> None:
    b = Builder()
    x = b.input()
    q, k, v = (b.gemm(x, b.input()) for _ in range(3))
    rule = Rule("together", ("gemm", "gemm"), together=True)
    assert match(b.work(q, k, v), rule, composed(rule)) == ["gemm + gemm + gemm"]


def test_a_refused_set_backs_off_to_smaller_ones() -> None:
    b = Builder()
    dy, x, w = b.input(), b.input(), b.input()
    dx, dw = b.gemm(dy, w, "nn"), b.gemm(dy, x, "tn")
    db = reduce(b.g, dy, over="rows", dtype=torch.float32)
    rule = Rule("wgrad_dbias", ("gemm", "reduce"), together=True)

    def refuse(call: Call) -> str | None:
        wgrad = all(n.prim is not GEMM or n.layout == "tn" for n in call.nodes)
        return None if wgrad else "takes wgrad only"

    work = b.work(dx, dw, db)
    assert match(work, rule, Kernel("wgrad_dbias", "wgrad", bind_composed, refuse=refuse)) == [
        "gemm + reduce"
    ]
    assert work.groups[0].nodes[0].layout == "tn"


def test_siblings_where_one_needs_the_other_are_refused() -> None:
    b = Builder()
    x, w = b.input(), b.input()
    first = b.gemm(x, w)
    second = b.gemm(x, b.fn("relu", first))
    work = b.work(second)
    rule = Rule("together", ("gemm", "gemm"), together=True)
    assert match(work, rule, composed(rule)) == []
    assert reasons(work) == [("together", "", CYCLE)]


def test_groups_that_need_each_other_are_an_error() -> None:
    b = Builder()
    x = b.input()
    p, q = b.fn("relu", x), b.fn("gelu", x)
    work = b.work(b.fn("add", p, q), b.fn("mul", q, p))
    with only():
        select(work)
    one, two, add, mul = (group.nodes[0] for group in work.forward)
    kernel = work.forward[0].kernel
    with pytest.raises(PlanError, match=r"gelu \+ mul .*need each other"):
        toposort([Group((one, add), kernel, reads=(x, q)), Group((two, mul), kernel, reads=(x, p))])


# -- kernels


def test_a_rule_without_a_kernel_is_noted_once_for_its_longest_match() -> None:
    b = Builder()
    work = b.work(b.sum(b.fn("gelu", b.gemm(b.input(), b.input())), b.input()))
    assert match(work, EPILOGUE) == []
    (note,) = work.notes
    assert (note.at, note.reason) == (
        "gemm_nt + gelu + sum",
        "no kernel for it is registered (cpu)",
    )


def test_a_node_that_no_kernel_takes_is_an_error_that_lists_the_reasons() -> None:
    b = Builder()
    work = b.work(b.gemm(b.input(), b.input()))
    with only(Kernel("gemm", "picky", bind_composed, refuse=lambda _: "N = 16 is too small")):
        REGISTRY.remove("reference")
        fuse(work)
        with pytest.raises(
            NoKernelError, match=r"no kernel takes gemm_nt \(picky: N = 16 is too small\)"
        ):
            select(work)


# -- nodes with what follows them, and nodes with a key


BESIDE = Rule("beside", ("pointwise",), together=True, follow=("quantize", "reduce"))


def test_values_of_one_operand_go_with_what_reads_them() -> None:
    """GELU and its neighbour, the copies of one and the sum of the other: one step."""
    b = Builder()
    x = b.input()
    y, z = b.fn("gelu", x), b.fn("silu", x)
    row, *_ = b.quantize(y)
    work = b.work(row, z, reduce(b.g, z, over="rows", dtype=torch.float32))
    assert match(work, BESIDE, composed(BESIDE)) == ["gelu + silu + quantize + reduce"]


def test_one_value_with_what_reads_it() -> None:
    b = Builder()
    y = b.fn("gelu", b.input())
    row, *_ = b.quantize(y)
    work = b.work(row, reduce(b.g, y, over="rows", dtype=torch.float32))
    assert match(work, BESIDE, composed(BESIDE)) == ["gelu + quantize + reduce"]


def test_a_value_alone_is_no_group() -> None:
    b = Builder()
    work = b.work(b.fn("gelu", b.input()), b.fn("silu", b.input()))
    assert match(work, BESIDE, composed(BESIDE)) == []


def test_a_follower_of_two_values_closes_no_cycle() -> None:
    """The second value is made from the first one's copy: they cannot be one step."""
    b = Builder()
    x, w = b.input(), b.input()
    row, *_ = b.quantize(b.fn("gelu", x))
    z = b.fn("mul", x, b.gemm(row, w))
    work = b.work(z, b.quantize(z)[0])
    groups = match(work, BESIDE, composed(BESIDE))
    assert groups == ["gelu + quantize", "mul + quantize"]


def keyed(g: Graph, node: Node) -> int | None:
    """Quantize nodes of the first three inputs."""
    index = g.node(node.inputs[0]).attrs.get("index", 9)
    return 1 if index < 3 else None


def test_nodes_with_one_key_share_nothing() -> None:
    rule = Rule("keyed", ("quantize", "quantize"), together=True, key=keyed)
    b = Builder()
    rows = [b.quantize(b.input())[0] for _ in range(4)]
    work = b.work(*rows, b.quantize(b.fn("gelu", b.input()))[0])
    assert match(work, rule, composed(rule)) == ["quantize + quantize + quantize"]


def test_a_key_groups_at_most_sixteen() -> None:
    rule = Rule("keyed", ("quantize", "quantize"), together=True, key=lambda g, node: 0)
    b = Builder()
    work = b.work(*(b.quantize(b.input())[0] for _ in range(19)))
    assert [name.count("quantize") for name in match(work, rule, composed(rule))] == [16, 3]


def test_key_is_for_together() -> None:
    with pytest.raises(PlanError, match="together=True"):
        Rule("chain", ("gemm", "pointwise"), key=keyed)


@pytest.mark.parametrize("most", ["reduce + quantize", "quantize", "reduce", None])
def test_readers_of_a_chains_last_node_come_along(most: str | None) -> None:
    """All of them, or those of one kind if a kernel takes no more."""
    rule = Rule("beside", ("gemm", "pointwise*"), follow=("quantize", "reduce"))
    b = Builder()
    y = b.fn("gelu", b.gemm(b.input(), b.input()))
    total = reduce(b.g, y, over="rows", dtype=torch.float32)
    work = b.work(y, total, b.quantize(y)[0])

    def refuse(call: Call) -> str | None:
        kinds = {n.prim.name for n in call.nodes[2:]}
        return None if most is not None and kinds == set(most.split(" + ")) else "other readers"

    kernel = Kernel("beside", "beside", bind_composed, refuse=refuse)
    found = match(work, rule, kernel)
    assert found == ([] if most is None else [f"gemm + gelu + {most}"])


TWICE = Rule("twice", ("gemm", "pointwise*"), follow=("quantize",), beside=("pointwise",))


def gradient_and_value(b: Builder) -> list[Value]:
    """A product's gradient of an activation, and the activation again, each with its copies."""
    x = b.input()
    y = b.fn("mul", x, b.gemm(b.input(), b.input()))
    return [b.quantize(y)[0], b.quantize(b.fn("gelu", x))[0]]


@pytest.mark.parametrize("takes_both", [True, False])
def test_a_value_of_the_chains_operands_comes_along(takes_both: bool) -> None:
    b = Builder()
    work = b.work(*gradient_and_value(b))

    def refuse(call: Call) -> str | None:
        return None if takes_both or len(call.nodes) == 3 else "one copy is enough"

    kernel = Kernel("twice", "twice", bind_composed, refuse=refuse)
    more = " + gelu + quantize" if takes_both else ""
    assert match(work, TWICE, kernel) == [f"gemm + mul + quantize{more}"]


def test_what_nobody_quantizes_or_what_reads_the_chain_is_not_beside_it() -> None:
    b = Builder()
    x = b.input()
    product = b.gemm(b.input(), b.input())
    y = b.fn("mul", x, product)
    alone, behind = b.fn("gelu", x), b.fn("add", x, y)
    work = b.work(b.quantize(y)[0], alone, b.quantize(behind)[0])
    assert match(work, TWICE, composed(TWICE)) == ["gemm + mul + add + quantize"]


def test_a_chain_that_reads_the_products_operand_again_has_each_node_once() -> None:
    b = Builder()
    x = b.input()
    y = b.fn("mul", b.fn("gelu", b.gemm(x, b.input())), x)
    work = b.work(b.quantize(y)[0])
    assert match(work, TWICE, composed(TWICE)) == ["gemm + gelu + mul + quantize"]


def test_values_of_what_any_node_of_the_chain_reads_come_along() -> None:
    b = Builder()
    x, common = b.input(), b.input()
    y = b.fn("mul", x, b.fn("add", common, b.gemm(b.input(), b.input())))
    others = [b.quantize(b.fn(name, v))[0] for name, v in (("gelu", common), ("silu", x))]
    work = b.work(b.quantize(y)[0], *others)
    more = "gelu + quantize + silu + quantize"
    assert match(work, TWICE, composed(TWICE)) == [f"gemm + add + mul + quantize + {more}"]


def test_a_chain_without_a_reader_is_none_of_a_rule_with_follow() -> None:
    rule = Rule("beside", ("gemm", "pointwise*"), follow=("quantize", "reduce"))
    b = Builder()
    work = b.work(b.fn("gelu", b.gemm(b.input(), b.input())))
    assert match(work, rule, composed(rule)) == []
