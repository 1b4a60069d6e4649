"""Builds real plans of MXFP8 attention for sm_100, as `builds` does for Hopper.

Prints the version of the library, then a line of JSON per graph: [name, plan or null, reason].
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from te_ops.backends.cudnn import graphs, library, mxfp8
from te_ops.backends.cudnn.graphs import Unsupported
from tests.backends.cudnn import problems_mxfp8
from tests.backends.cudnn.builds import H200

B200 = {
    **H200, "deviceName": "NVIDIA B200", "deviceVer": 1000, "multiProcessorCount": 148, "l2CacheSize": 132644864,
    "memoryBusWidth": 8192,
}  # fmt: skip


def main() -> None:
    """Build all."""
    lib = library.library()
    sys.stdout.write(f"{json.dumps(int(lib.backend_version()))}\n")
    if lib.backend_version() < mxfp8.OLDEST:
        return
    device: Any = lib.create_device_properties(json.dumps(B200))
    library.entered = lambda index: contextlib.nullcontext()
    for name, spec in problems_mxfp8.built().items():
        try:
            graph, uids = mxfp8.planned(0, spec, device_property=device, sm_version=100)
            found = (name, graphs._built(0, spec, graph, uids, None).name, "")
        except Unsupported as why:
            found = (name, None, str(why))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
