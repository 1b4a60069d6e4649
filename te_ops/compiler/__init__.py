"""From an op and input specs to a plan: an ordered list of passes with named slots."""

from te_ops.compiler.passes import SLOTS, Passes, passes
from te_ops.compiler.plan import Plan, Saved, Segment, Step
from te_ops.compiler.work import Note, Request, Work

__all__ = [
    "SLOTS",
    "Note",
    "Passes",
    "Plan",
    "Request",
    "Saved",
    "Segment",
    "Step",
    "Work",
    "passes",
]
