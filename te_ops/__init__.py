"""te_ops: an operator-fusion op graph for Transformers on NVIDIA GPUs, exact on any CPU."""

__version__ = "0.1.0"
