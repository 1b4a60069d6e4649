"""Compiled kernels on disk: ahead-of-time folders, which are only read, and the user's cache, where they are made once.

A kernel is two files: `<key>.o`, and `<key>.json`, which says what it is and holds the digest of the first. The key
covers the spec, the architecture, the text of every module of this package that takes part in compiling, and the
versions of the compiler's packages: an edited epilogue operation is another key.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_ops import config
from te_ops.backends.cutlass.family import FAMILIES, Spec
from te_ops.backends.cutlass.versions import target, versions
from te_ops.errors import PlanError
from te_ops.runtime.disk import locked, own_folder, put

FORMAT = 1
COMPILER = "gemm"  # the module that compiles GEMMs; what it imports of this package is in every key
_DIGEST = 20


# -- keys


@functools.cache
def source_hash(family: str = "gemm") -> str:
    """A digest of the modules that decide what is compiled, as they were when it was first asked for."""
    return source_now(family)


def source_now(family: str = "gemm") -> str:
    """The same of the files as they are now."""
    found = FAMILIES[family]
    folder = Path(__file__).parents[1] / found.package.rpartition(".")[2]
    return hash_of(folder, found.compiler, found.package)


def hash_of(folder: Path, start: str = COMPILER, package: str = "") -> str:
    """A digest of a module in a folder and of all modules of its package that it imports, directly or not."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for path in sorted(closure(folder, start, package)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def closure(folder: Path, start: str, package: str = "") -> set[Path]:
    """Files of the modules that a module needs of its package ("": this one), with its own; also imports inside of
    functions."""
    package = f"{package or __package__}."
    todo, found = [start], set()
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path in found or not path.exists():
            continue
        found.add(path)
        for name in _names(ast.parse(path.read_text())):
            if name.startswith(package):
                todo.append(name.removeprefix(package).split(".")[0])
    return found


def _names(tree: ast.AST) -> set[str]:
    """Full names that a module imports, or may import by name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def key_of(spec: Spec, arch: str) -> str:
    """What identifies a compiled kernel."""
    found = versions(FAMILIES[spec.family].packages)
    parts = (spec.key, target(arch), source_hash(spec.family), json.dumps(found, sort_keys=True))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST).hexdigest()


# -- folders


def cache_folder(*, make: bool = True) -> Path | None:
    """The user's own folder for compiled kernels; None if `TE_OPS_CUTLASS_CACHE` is "off".

    Raises:
        PlanError: the folder belongs to somebody else or others may write to it.
    """
    return own_folder("CUTLASS_CACHE", "cutlass", make=make)


def aot_folder() -> Path | None:
    """The folder of kernels compiled ahead of time: `TE_OPS_AOT_DIR`, else the one that `aot` writes by default.

    None if it is not there. It may belong to the system's administrator.

    Raises:
        PlanError: `TE_OPS_AOT_DIR` names no folder, or one that others may write to: its files run as code.
    """
    text = config.text("AOT_DIR", "")
    if not text or text.lower() == "off":
        return own_folder("AOT_DIR", "aot", make=False)
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise PlanError(
            f"TE_OPS_AOT_DIR names {folder}, which is no folder; unset it, or set it to off"
        )
    found = folder.stat()
    if found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PlanError(
            f"TE_OPS_AOT_DIR names {folder}, which others can write to (mode {stat.S_IMODE(found.st_mode):o}, owner "
            f"{found.st_uid}); its files run as code: make it yours or root's, and chmod go-w"
        )
    return folder


# -- objects


def find(spec: Spec, arch: str) -> Path | None:
    """The object of a spec, in the ahead-of-time folder or else in the cache; None if neither has it whole."""
    key = key_of(spec, arch)
    for folder in (aot_folder(), cache_folder(make=False)):
        if folder is not None and (found := whole(folder, key)) is not None:
            return found
    return None


def whole(folder: Path, key: str) -> Path | None:
    """The object of a key in a folder, None if there is none or it is damaged."""
    path = folder / f"{key}.o"
    try:
        info = json.loads(path.with_suffix(".json").read_text())
        same = info["format"] == FORMAT and info["digest"] == _digest(path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if same else None


def make(spec: Spec, arch: str, folder: Path, compile_to: Callable[[Any, Path], None]) -> Path:
    """The object of a spec in a folder; compiled if it is not there whole, by one process of the machine.

    Others wait for that one; if it dies, the next one takes its place (the system gives its lock back).
    """
    key = key_of(spec, arch)
    with locked(folder / f"{key}.lock"):
        found = whole(folder, key)
        if found is not None:
            return found
        path, part = folder / f"{key}.o", folder / f"{key}.{os.getpid()}.part.o"
        began = time.monotonic()
        try:
            compile_to(spec, part)
            data = part.read_bytes()
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        info = path.with_suffix(".json")
        put(info, _info(spec, arch, data, time.monotonic() - began))
        info.chmod(path.stat().st_mode)  # whoever may read one may read both
        return path


def _info(spec: Spec, arch: str, data: bytes, seconds: float) -> bytes:
    found: dict[str, Any] = {
        "format": FORMAT,
        "digest": _digest(data),
        "arch": target(arch),
        "family": spec.family,
        "versions": versions(FAMILIES[spec.family].packages),
        "source": source_hash(spec.family),
        "seconds": round(seconds, 2),
        "spec": spec.to_dict(),
    }
    return json.dumps(found, indent=1).encode()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST).hexdigest()
