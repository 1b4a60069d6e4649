"""A process that compiles: `python -m te_ops.backends.cutlass.worker`, with the architecture in its environment.

It reads a JSON object a line, {"spec": ..., "arch": ..., "path": ..., "source": ...}, and answers each with
{"error": null} or why it failed. The compiler's libraries read the architecture when they load, print, and are not
thread-safe: hence a process an architecture. It ends with its input, that is with the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from te_ops.backends.cutlass import cache
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.errors import PlanError

COMPILER = "te_ops.backends.cutlass.gemm"


def answer(line: str, compiler: Any) -> str | None:
    """Do one job; None, or why it failed."""
    try:
        job = json.loads(line)
        spec, path = GemmSpec.from_dict(job["spec"]), Path(job["path"])
        _check(job["source"])
        compiler.compile_to(spec, job["arch"], path)
        _check(job["source"])
    except Exception as error:  # noqa: BLE001  (the compiler raises anything; the process goes on)
        text = traceback.format_exc(limit=-3)
        return f"{type(error).__name__}: {error}\n{text}"
    return None


def _check(source: str) -> None:
    """Refuse to make a kernel of another text than its key says: the files may have been edited since."""
    if cache.hash_of(Path(cache.__file__).parent) != source:
        raise PlanError(
            "the files of te_ops have changed since the program started; start it again"
        )


def serve(jobs: TextIO, answers: TextIO, compiler: Any) -> None:
    """Answer until there are no more jobs."""
    for line in jobs:
        answers.write(json.dumps({"error": answer(line, compiler)}) + "\n")
        answers.flush()


def main() -> None:
    """Answers go where standard output went; what the libraries print goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, own, importlib.import_module(sys.argv[1] if sys.argv[1:] else COMPILER))


if __name__ == "__main__":
    main()
