"""Rules around pointwise nodes: with the reduction of a broadcast gradient, with quantize, and several over the same
operands in one pass; quantize nodes of parameters."""

from collections.abc import Hashable

from te_ops.graph import PARAM, Graph, Node
from te_ops.registry import Rule


def _parameters(g: Graph, node: Node) -> Hashable | None:
    """Quantize nodes of parameters go together, one format and dtype at a time."""
    source = node.inputs[0]
    if g.node(source).prim is not PARAM:
        return None
    return node.phase, node.attrs["quantizer"], g.spec(source).dtype


_BESIDE = ("quantize", "reduce")

RULES = (
    Rule("pointwise_quantize", ("pointwise*", "pointwise", "quantize")),
    # Current scaling reads its values again, as they were written: rounded. Blocks keep theirs that way too.
    Rule("pointwise_quantize_rounded", ("pointwise", "quantize"), exact=True),
    Rule("pointwise_reduce", ("pointwise", "reduce")),
    Rule("pointwise_together", ("pointwise",), together=True, follow=_BESIDE),
    Rule("pointwise_together_rounded", ("pointwise",), together=True, follow=_BESIDE, exact=True),
    Rule("reduce_quantize", ("reduce", "quantize"), together=True),
    Rule("quantize_together", ("quantize", "quantize"), together=True, key=_parameters),
)
