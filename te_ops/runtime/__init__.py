"""Running plans: keys and caches, the autograd nodes, quantizer state and its commit."""

from te_ops.context import Region
from te_ops.op import Op, Runtime
from te_ops.runtime.cache import plan_for, run
from te_ops.runtime.checkpoint import checkpoint
from te_ops.runtime.executor import replay_report
from te_ops.runtime.files import load_file, save_file
from te_ops.runtime.frozen import run_microbatch, weights_frozen
from te_ops.runtime.graphs import Graphed, make_graphed, run_graphed
from te_ops.runtime.session import free_workspaces, step, warmup
from te_ops.runtime.state import DelayedState, load_state, prepare, settle

Runtime.run = run
Runtime.plan = plan_for
Runtime.load_state = load_state
Runtime.graphed = run_graphed
Runtime.microbatch = run_microbatch
Region.commit = settle

__all__ = [
    "DelayedState",
    "Graphed",
    "Op",
    "checkpoint",
    "free_workspaces",
    "load_file",
    "make_graphed",
    "plan_for",
    "prepare",
    "replay_report",
    "run",
    "save_file",
    "step",
    "warmup",
    "weights_frozen",
]
