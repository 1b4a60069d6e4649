"""Built plans on disk: another process loads one in milliseconds where building it takes a second.

A file holds one plan, under the exact graph, the device, the versions of both libraries and the plan that was asked
for. They are kept where `TE_OPS_PLAN_CACHE` names a folder of the user's own. What cannot be read is built anew.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from te_ops import config
from te_ops.backends.cudnn import library
from te_ops.backends.cudnn.graphs import UIDS, GraphSpec
from te_ops.backends.cudnn.library import Built
from te_ops.errors import PlanError
from te_ops.runtime.disk import own_folder, put

FORMAT = 1
_SUFFIX = ".plan"


def key_of(spec: GraphSpec, place: str, choice: str | None) -> str:
    """Everything that a plan depends on, as text; `place` is the device and cuDNN's version."""
    return f"{FORMAT} | {place} | frontend {_frontend()} | {choice} | {spec!r}"


def _frontend() -> str:
    try:
        return importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _path(key: str, *, make: bool) -> Path | None:
    if not config.text("PLAN_CACHE", ""):
        return None
    try:
        folder = own_folder("PLAN_CACHE", "plans", make=make)
    except (OSError, PlanError):  # a folder of somebody else, or none at all
        return None
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return None if folder is None else folder / f"{name}{_SUFFIX}"


def save(key: str, built: Built) -> None:
    """Keep a plan that was just built; where that fails nothing is lost."""
    path = _path(key, make=True)
    chosen = getattr(built.graph, "_plan_index", None)  # what the frontend would write
    if path is None or chosen != built.plan:
        return
    try:
        data = built.graph.serialize(as_bytes=True)
        facts = {
            "key": key,
            "name": built.name,
            "workspace": built.workspace,
            "operands": built.operands,
        }
        put(path, json.dumps(facts).encode() + b"\n" + bytes(data))
    except Exception:  # noqa: BLE001  (a full disk, a frontend that cannot write this plan)
        return


def load(key: str, index: int) -> Built | None:
    """The plan that was kept under this key, None if there is none or it cannot be read. The device is current."""
    path = _path(key, make=False)
    if path is None:
        return None
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        facts: dict[str, Any] = json.loads(head)
        if facts["key"] != key:
            return None
        handle = library.handle(index, library.stream_of(index))
        graph = library.library().pygraph(handle=handle)
        graph.deserialize(handle, data)
        uids = {name: UIDS[name] for name in facts["operands"]}
        return Built(index, graph, uids, stored=(str(facts["name"]), int(facts["workspace"])))
    except Exception:  # noqa: BLE001  (no file, a torn one, one that this library does not read)
        return None


__all__ = ["key_of", "load", "save"]
