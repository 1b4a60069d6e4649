"""Running plans: keys and caches, the autograd nodes, quantizer state and its commit."""

from te_ops.context import Region
from te_ops.op import Op, Runtime
from te_ops.runtime.cache import plan_for, run
from te_ops.runtime.checkpoint import checkpoint
from te_ops.runtime.files import load_file, save_file
from te_ops.runtime.state import DelayedState, commit_region, load_state, prepare

Runtime.run = run
Runtime.plan = plan_for
Runtime.load_state = load_state
Region.commit = commit_region

__all__ = [
    "DelayedState",
    "Op",
    "checkpoint",
    "load_file",
    "plan_for",
    "prepare",
    "run",
    "save_file",
]
