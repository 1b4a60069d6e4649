"""A registry that holds only what a test names, so that results do not depend on installed backends
and plugins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from te_ops.backends.reference import composed
from te_ops.fused import RULES
from te_ops.registry import REGISTRY, Kernel, Rule


@contextlib.contextmanager
def only(*made: Rule | Kernel) -> Iterator[None]:
    """Within, the registry has the reference kernel of single primitives and these."""
    with REGISTRY.temporary():
        for item in list(REGISTRY.all()):
            if item.name != "reference":
                REGISTRY.remove(item.name)
        REGISTRY.add(*made)
        yield


@contextlib.contextmanager
def package_rules(*, taken: bool) -> Iterator[None]:
    """Within, exactly the package's fusion rules, all taken by composed kernels or none by any
    kernel.
    """
    kernels = [composed(rule) for rule in RULES if rule.stage == "phase"] if taken else []
    with only(*RULES, *kernels):
        yield
