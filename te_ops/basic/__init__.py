"""Basic ops: one file per family holds the primitives, their gradients and the Op."""
