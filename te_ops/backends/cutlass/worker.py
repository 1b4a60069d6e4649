"""A process that compiles: `python -m te_ops.backends.cutlass.worker`, with the architecture in its environment.

It reads a JSON object a line, {"family": ..., "spec": ..., "arch": ..., "path": ..., "source": ...}, and answers each
with {"error": null} or why it failed. The compiler's libraries read the architecture when they load, print, and are not
thread-safe: hence a process an architecture. It ends with its input, that is with the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from te_ops.backends.cutlass import cache
from te_ops.backends.cutlass.family import FAMILIES
from te_ops.errors import PlanError


def answer(line: str, compiler: Any = None) -> str | None:
    """Do one job, by its family's compiler unless one is given; None, or why it failed."""
    try:
        job = json.loads(line)
        family = FAMILIES[job["family"]]
        spec, path = family.read(job["spec"]), Path(job["path"])
        _check(job)
        (compiler or family.module()).compile_to(spec, job["arch"], path)
        _check(job)
    except Exception as error:  # noqa: BLE001  (the compiler raises anything; the process goes on)
        text = traceback.format_exc(limit=-3)
        return f"{type(error).__name__}: {error}\n{text}"
    return None


def _check(job: dict[str, Any]) -> None:
    """Refuse to make a kernel of another text than its key says: the files may have been edited since."""
    if cache.source_now(job["family"]) != job["source"]:
        raise PlanError(
            "the files of te_ops have changed since the program started; start it again"
        )


def serve(jobs: TextIO, answers: TextIO, compiler: Any = None) -> None:
    """Answer until there are no more jobs."""
    for line in jobs:
        answers.write(json.dumps({"error": answer(line, compiler)}) + "\n")
        answers.flush()


def main() -> None:
    """Answers go where standard output went; what the libraries print goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, own)


if __name__ == "__main__":
    main()
