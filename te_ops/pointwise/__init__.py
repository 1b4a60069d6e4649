"""Pointwise maths, written once: interned expressions, their derivatives, their lowerings.

A function of tensors is an `Fn`, whose output is an expression. `Fn.grad` derives its gradient,
`compose` puts one function into another, `evaluate` runs it in torch (the reference) and `lower`
writes it as CUDA C++ or CuTe DSL text. The operators, with their lowerings, derivatives and special
values, are one table: `table`.

    >>> from te_ops.pointwise import elementwise, evaluate
    >>> import torch, te_ops.math as tm
    >>> softcap = elementwise("softcap", lambda x: 30.0 * tm.tanh(x / 30.0), "value")
    >>> evaluate(softcap, torch.tensor([0.0, 300.0]))
    tensor([ 0., 30.])
    >>> softcap.grad(0).used
    (True, True)
"""

from __future__ import annotations

# `simplify` installs the builder that operators and functions call, so it comes with the package.
from te_ops.pointwise import simplify as _simplify  # noqa: F401
from te_ops.pointwise.activations import activations
from te_ops.pointwise.expr import Const, Expr, Input
from te_ops.pointwise.function import Fn, InputKind, Pair, compose, elementwise, merge_inputs
from te_ops.pointwise.text_lowering import lower, parameters, prelude, symbol
from te_ops.pointwise.torch_lowering import evaluate

__all__ = [
    "Const",
    "Expr",
    "Fn",
    "Input",
    "InputKind",
    "Pair",
    "activations",
    "compose",
    "elementwise",
    "evaluate",
    "lower",
    "merge_inputs",
    "parameters",
    "prelude",
    "symbol",
]
